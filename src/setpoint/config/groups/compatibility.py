"""The group of options "Accepted without effect"."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.groups.declare import Option

GROUP = "Accepted without effect"


class CompatibilityOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of SGLang's tuning guides that are accepted so that the guides' commands start."""

    tokenizer_worker_num: Annotated[
        int,
        Option(
            GROUP,
            "Number of processes that tokenize.",
            low=1,
            no_effect="the frontend tokenizes in one process, long prompts in a thread of it",
        ),
    ] = 1
    enable_overlap_scheduler: Annotated[
        bool,
        Option(
            GROUP,
            "Plan the next step while the device computes this one (in older guides).",
            no_effect="that is the default where the device allows it",
        ),
    ] = False
    disable_chunked_prefix_cache: Annotated[
        bool,
        Option(
            GROUP,
            "Compute the attention of a latent model's prompt over a cached prefix in one piece.",
            no_effect="latent attention reads the cache as it is, whatever the prefix is",
        ),
    ] = False
    enable_metrics_for_all_schedulers: Annotated[
        bool,
        Option(
            GROUP,
            "Count metrics in every scheduler, not only in the first.",
            no_effect="every engine of --dp-size is counted, with a label of its own",
        ),
    ] = False
    collect_tokens_histogram: Annotated[
        bool,
        Option(
            GROUP,
            "Collect histograms of prompt and output tokens (in older guides).",
            no_effect="--enable-metrics always collects them",
        ),
    ] = False
    enable_response_store: Annotated[
        bool,
        Option(
            GROUP,
            "Store the responses of /v1/responses for previous_response_id.",
            no_effect="responses are always stored, within limits (docs/responses.md)",
        ),
    ] = False
    trust_remote_code: Annotated[
        bool,
        Option(
            GROUP,
            "Run Python code that comes with a checkpoint.",
            no_effect="Setpoint never runs such code",
        ),
    ] = False
