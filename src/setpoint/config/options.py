"""Every option of a server and its engine, declared once: name, type, default, help, choices,
bounds, tuning range.

Names, meanings and defaults are SGLang 0.5.23's. The parser, ``docs/flags.md``, ``/server_info``
and the checks are generated from here. This module does not know what "auto" becomes: that is
``resolve``.

Each group of options has a file of its own, whose struct extends the one before:
``service_options``, ``queue_options``, ``scheduling_options``, ``execution_options``,
``observability_options``, and the rest here.
"""

from __future__ import annotations

import shlex
from collections.abc import Set
from typing import Annotated, Any

from setpoint.config.declare import Option, declared, shown
from setpoint.config.observability_options import ObservabilityOptions

PARALLEL = "Parallelism"
COMPATIBILITY = "Accepted without effect"


class Options(ObservabilityOptions, frozen=True, kw_only=True):
    """The user's wishes about how the engine works, added to what it serves. None and "auto" mean
    "choose for me" until ``resolve`` has chosen."""

    # -- Parallelism
    tp_size: Annotated[
        int, Option(PARALLEL, "Tensor parallel ranks; only 1 so far.", choices=(1,))
    ] = 1
    dp_size: Annotated[
        int, Option(PARALLEL, "Data parallel replicas; only 1 so far.", choices=(1,))
    ] = 1
    pp_size: Annotated[int, Option(PARALLEL, "Pipeline stages; only 1 so far.", choices=(1,))] = 1
    ep_size: Annotated[
        int, Option(PARALLEL, "Expert parallel ranks; only 1 so far.", choices=(1,))
    ] = 1

    # -- Accepted without effect: in SGLang's tuning guides, so that their commands start
    cuda_graph_max_bs_decode: Annotated[
        int | None,
        Option(
            COMPATIBILITY,
            "Maximum requests of a decode step that is replayed from a graph.",
            low=0,
            no_effect="on a CPU every step of up to 512 tokens is replayed, on a GPU none is yet",
        ),
    ] = None
    cuda_graph_backend_prefill: Annotated[
        str | None,
        Option(
            COMPATIBILITY,
            "How steps that read prompts are replayed from a graph; only disabled.",
            choices=("disabled",),
            no_effect="no step is replayed from a graph on a GPU yet",
        ),
    ] = None
    tokenizer_worker_num: Annotated[
        int,
        Option(
            COMPATIBILITY,
            "Processes that tokenize.",
            low=1,
            no_effect="the frontend tokenizes in one process, long prompts in a thread of it",
        ),
    ] = 1
    enable_overlap_scheduler: Annotated[
        bool,
        Option(
            COMPATIBILITY,
            "Plan the next step while the device computes this one (of older guides).",
            no_effect="that is the default where the device allows it",
        ),
    ] = False
    enable_dp_attention: Annotated[
        bool,
        Option(
            COMPATIBILITY,
            "Data parallel attention of --dp-size ranks.",
            no_effect="there is one rank",
        ),
    ] = False
    enable_hierarchical_cache: Annotated[
        bool,
        Option(
            COMPATIBILITY,
            "Keep a larger second KV cache in host memory. Refused on a GPU.",
            no_effect=(
                "on a CPU the KV pool is in host memory already, and --max-total-tokens sets its"
                " size"
            ),
        ),
    ] = False
    hicache_ratio: Annotated[
        float | None,
        Option(
            COMPATIBILITY,
            "Size of that second cache, as a multiple of the first.",
            low=0,
            no_effect="there is no second cache",
        ),
    ] = None
    enable_metrics_for_all_schedulers: Annotated[
        bool,
        Option(
            COMPATIBILITY,
            "Count metrics in every scheduler instead of only the first.",
            no_effect="there is one scheduler",
        ),
    ] = False
    collect_tokens_histogram: Annotated[
        bool,
        Option(
            COMPATIBILITY,
            "Collect histograms of prompt and output tokens (in older guides).",
            no_effect="--enable-metrics always collects them",
        ),
    ] = False
    enable_response_store: Annotated[
        bool,
        Option(
            COMPATIBILITY,
            "Store the responses of /v1/responses for previous_response_id.",
            no_effect="responses are always stored, within limits (docs/responses.md)",
        ),
    ] = False
    trust_remote_code: Annotated[
        bool,
        Option(
            COMPATIBILITY,
            "Run Python code that comes with a checkpoint.",
            no_effect="Setpoint never runs such code",
        ),
    ] = False


OPTION_FIELDS = declared(Options, Option)


def server_args(options: Options) -> dict[str, Any]:
    """The options as ``/server_info`` shows them: every value, secrets masked."""
    return {field.name: shown(field, getattr(options, field.name)) for field in OPTION_FIELDS}


def launch_command(options: Options, given: Set[str]) -> str:
    """A command that starts a server with the options that were given; secrets are masked."""
    words = ["setpoint", "serve"]
    for field in OPTION_FIELDS:
        value = getattr(options, field.name)
        if field.name in given and field.kind is not bool:
            values = value if field.is_list else [value]
            words += [field.flag, *(str(shown(field, each)) for each in values)]
        elif field.name in given and value:
            words.append(field.flag)
    return shlex.join(words)
