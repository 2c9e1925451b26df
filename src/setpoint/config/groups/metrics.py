"""The group of options "Metrics"."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import msgspec

from setpoint.config.groups.declare import Option
from setpoint.core.errors import ConfigError
from setpoint.core.jsonfile import parse_json

GROUP = "Metrics"
MAX_BUCKETS = 200
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_TAKEN = frozenset(
    (
        *("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "is_streaming", "le"),
        *("cache_source", "stage", "mode", "category", "phase", "reason", "how", "part"),
    )
)
"""Labels that the series already have."""


class MetricOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options about metrics."""

    export_metrics_to_file: Annotated[
        bool,
        Option(
            GROUP,
            "For every request that ends, append a line of JSON, without the request's content,"
            " to sglang-request-metrics-DATE_HOUR.log in --export-metrics-to-file-dir.",
            server_only=True,
        ),
    ] = False
    export_metrics_to_file_dir: Annotated[
        str | None,
        Option(
            GROUP,
            "Folder for the files of --export-metrics-to-file.",
            metavar="FOLDER",
            server_only=True,
        ),
    ] = None
    enable_metrics: Annotated[
        bool,
        Option(
            GROUP,
            "Count requests and steps, serve /metrics for Prometheus (docs/metrics.md), and put"
            " timings into meta_info.",
            server_only=True,
        ),
    ] = False
    enable_mfu_metrics: Annotated[
        bool,
        Option(
            GROUP,
            "Estimate the floating-point operations and the memory traffic of each step, and"
            " show them in /metrics and in the log lines about batches (docs/metrics.md). Needs"
            " --enable-metrics.",
            server_only=True,
        ),
    ] = False
    extra_metric_labels: Annotated[
        str,
        Option(
            GROUP,
            "JSON object with labels to add to every series about the scheduler and about"
            " requests.",
            metavar="JSON",
            server_only=True,
        ),
    ] = "{}"
    tokenizer_metrics_allowed_custom_labels: Annotated[
        tuple[str, ...],
        Option(
            GROUP,
            "Labels that a client may set for its requests. At most 200 combinations of values"
            " are counted separately.",
            metavar="NAME",
            server_only=True,
        ),
    ] = ()
    tokenizer_metrics_custom_labels_header: Annotated[
        str,
        Option(
            GROUP,
            "HTTP header in which clients send these labels as a JSON object.",
            server_only=True,
        ),
    ] = "x-custom-labels"
    bucket_time_to_first_token: Annotated[
        tuple[float, ...],
        Option(
            GROUP,
            "Upper bounds of the buckets of time_to_first_token_seconds. If not given, SGLang's.",
            metavar="SECONDS",
            low=0,
            server_only=True,
        ),
    ] = ()
    bucket_inter_token_latency: Annotated[
        tuple[float, ...],
        Option(
            GROUP,
            "Upper bounds of the buckets of inter_token_latency_seconds. If not given, SGLang's.",
            metavar="SECONDS",
            low=0,
            server_only=True,
        ),
    ] = ()
    bucket_e2e_request_latency: Annotated[
        tuple[float, ...],
        Option(
            GROUP,
            "Upper bounds of the buckets of e2e_request_latency_seconds. If not given, SGLang's.",
            metavar="SECONDS",
            low=0,
            server_only=True,
        ),
    ] = ()
    prompt_tokens_buckets: Annotated[
        tuple[str, ...],
        Option(
            GROUP,
            "Upper bounds of the buckets of both histograms of prompt tokens: 'default'; 'tse"
            " MIDDLE BASE COUNT', whose distances from the middle grow on both sides as powers"
            " of the base; or 'custom' followed by the bounds.",
            metavar="RULE",
            server_only=True,
        ),
    ] = ("default",)
    generation_tokens_buckets: Annotated[
        tuple[str, ...],
        Option(
            GROUP,
            "Upper bounds of the buckets of generation_tokens_histogram, in the same form.",
            metavar="RULE",
            server_only=True,
        ),
    ] = ("default",)


def check_metrics(options: MetricOptions) -> None:
    """Raise ConfigError if an option about metrics cannot be honoured."""
    if options.export_metrics_to_file and options.export_metrics_to_file_dir is None:
        raise ConfigError("--export-metrics-to-file needs --export-metrics-to-file-dir FOLDER.")
    if options.enable_mfu_metrics and not options.enable_metrics:
        raise ConfigError("--enable-mfu-metrics needs --enable-metrics.")
    buckets_of(options)
    extra, custom = extra_labels(options), options.tokenizer_metrics_allowed_custom_labels
    for flag, names in (
        ("--extra-metric-labels", tuple(extra)),
        ("--tokenizer-metrics-allowed-custom-labels", custom),
    ):
        for name in names:
            if not _LABEL.fullmatch(name) or name.startswith("__"):
                raise ConfigError(
                    f"{flag}: {name!r} cannot be the name of a label. Use letters, digits and"
                    " underscores; a name may not begin with a digit or two underscores."
                )
            if name in _TAKEN:
                raise ConfigError(
                    f"{flag}: the label {name!r} is already in use; choose another name."
                )
    if len({*extra, *custom}) < len(extra) + len(custom):
        raise ConfigError(
            "--extra-metric-labels and --tokenizer-metrics-allowed-custom-labels name the same"
            " label; rename one of the two."
        )


def extra_labels(options: MetricOptions) -> dict[str, str]:
    """``--extra-metric-labels`` as a dict. Raises ConfigError."""
    flag = "--extra-metric-labels"
    try:
        found = parse_json(options.extra_metric_labels)
    except ValueError as error:
        raise ConfigError(f"{flag} is not valid JSON: {error}.") from None
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise ConfigError(
            f"""{flag} must be a JSON object whose values are text, e.g. '{{"site": "a"}}'."""
        )
    return found


def buckets_of(options: MetricOptions) -> dict[str, tuple[float, ...]]:
    """Name of a histogram -> its upper bounds, for each histogram whose bounds differ from
    SGLang's. Raises ConfigError."""
    prompt = _by_rule("--prompt-tokens-buckets", options.prompt_tokens_buckets)
    found = {
        "sglang:time_to_first_token_seconds": _ascending(
            "--bucket-time-to-first-token", options.bucket_time_to_first_token
        ),
        "sglang:inter_token_latency_seconds": _ascending(
            "--bucket-inter-token-latency", options.bucket_inter_token_latency
        ),
        "sglang:e2e_request_latency_seconds": _ascending(
            "--bucket-e2e-request-latency", options.bucket_e2e_request_latency
        ),
        "sglang:prompt_tokens_histogram": prompt,
        "sglang:uncached_prompt_tokens_histogram": prompt,
        "sglang:generation_tokens_histogram": _by_rule(
            "--generation-tokens-buckets", options.generation_tokens_buckets
        ),
    }
    return {name: bounds for name, bounds in found.items() if bounds}


def _ascending(flag: str, bounds: Sequence[float]) -> tuple[float, ...]:
    if len(bounds) > MAX_BUCKETS:
        raise ConfigError(f"{flag} has {len(bounds)} bounds; at most {MAX_BUCKETS} are allowed.")
    if not all(map(math.isfinite, bounds)):
        raise ConfigError(f"{flag}: every bound must be a finite number.")
    if any(before >= after for before, after in pairwise(bounds)):
        raise ConfigError(f"{flag}: every bound must be larger than the one before.")
    return tuple(bounds)


def _by_rule(flag: str, words: Sequence[str]) -> tuple[float, ...]:
    """The bounds of a rule; an empty tuple for the rule "default"."""
    rule, *rest = words
    try:
        numbers = [float(word) for word in rest]
    except ValueError:
        raise ConfigError(f"{flag}: {' '.join(rest)!r} must be a list of numbers.") from None
    if rule == "default" and not numbers:
        return ()
    if rule == "custom" and numbers:
        return _ascending(flag, numbers)
    if rule == "tse" and len(numbers) == 3:
        middle, base, count = numbers
        if not 0 <= middle < math.inf or not 1 < base <= 1000 or not 1 <= count <= MAX_BUCKETS:
            raise ConfigError(
                f"{flag} tse needs a middle of at least 0, a base above 1 and up to 1,000, and a"
                f" count from 1 to {MAX_BUCKETS}."
            )
        distances = [base**power for power in range(1, -(-int(count) // 2) + 1)]
        both = {middle, *(middle + each for each in distances)}
        return tuple(sorted(both | {max(0.0, middle - each) for each in distances}))
    raise ConfigError(
        f"{flag} must be 'default', 'tse MIDDLE BASE COUNT' or 'custom' with numbers; got"
        f" {' '.join(words)!r}."
    )
