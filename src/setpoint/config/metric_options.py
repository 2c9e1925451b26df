"""Reads the options of metrics and traces that have a syntax of their own."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from urllib.parse import urlsplit, urlunsplit

from setpoint.config.observability_options import ObservabilityOptions
from setpoint.core.errors import ConfigError
from setpoint.core.jsonfile import parse_json

MAX_BUCKETS = 200
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_TAKEN = frozenset(
    (
        *("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "is_streaming", "le"),
        *("cache_source", "stage", "mode", "category", "phase", "reason", "how", "part"),
    )
)
"""Labels that series have already."""


def check_metrics(options: ObservabilityOptions) -> None:
    """Raise ConfigError if an option of the metrics cannot be honoured."""
    if options.export_metrics_to_file and options.export_metrics_to_file_dir is None:
        raise ConfigError("--export-metrics-to-file needs --export-metrics-to-file-dir FOLDER.")
    buckets_of(options)
    extra, custom = extra_labels(options), options.tokenizer_metrics_allowed_custom_labels
    for flag, names in (
        ("--extra-metric-labels", tuple(extra)),
        ("--tokenizer-metrics-allowed-custom-labels", custom),
    ):
        for name in names:
            if not _LABEL.fullmatch(name) or name.startswith("__"):
                raise ConfigError(
                    f"{flag}: {name!r} cannot be the name of a label; use letters, digits and"
                    " underscores, with"
                    " no digit and no double underscore at the beginning."
                )
            if name in _TAKEN:
                raise ConfigError(
                    f"{flag}: the label {name!r} is already in use; choose another name."
                )
    if len({*extra, *custom}) < len(extra) + len(custom):
        raise ConfigError(
            "--extra-metric-labels and --tokenizer-metrics-allowed-custom-labels name the same"
            " label twice; each needs its own name."
        )


def extra_labels(options: ObservabilityOptions) -> dict[str, str]:
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


def buckets_of(options: ObservabilityOptions) -> dict[str, tuple[float, ...]]:
    """Name of a histogram -> its upper bounds, for those that have other than SGLang's. Raises
    ConfigError."""
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
    """The bounds of a rule; none of the rule "default"."""
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


def otlp_url(address: str) -> str:
    """``--otlp-traces-endpoint`` as a URL. Raises ConfigError."""
    flag = "--otlp-traces-endpoint"
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ConfigError(f"{flag} must be HOST:PORT or a URL with http or https, got {address!r}.")
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") or "/v1/traces"))
