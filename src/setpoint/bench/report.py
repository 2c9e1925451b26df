"""Writes results: with SGLang's printed labels, as JSON lines, and as a plot in the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from setpoint.config.bench import ServingOptions
from setpoint.core.errors import ConfigError

WIDTH = 50
BARS = " ▁▂▃▄▅▆▇█"
PLOT_COLUMNS = 100

_LABELS = {
    "total_input_tokens": "Total input tokens:",
    "total_input_text_tokens": "Total input text tokens:",
    "total_output_tokens": "Total generated tokens:",
    "total_output_tokens_retokenized": "Total generated tokens (retokenized):",
    "request_throughput": "Request throughput (req/s):",
    "input_throughput": "Input token throughput (tok/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "max_concurrent_requests": "Peak concurrent requests:",
    "total_throughput": "Total token throughput (tok/s):",
    "concurrency": "Concurrency:",
}
_SERIES = {
    "e2e_latency": ("End-to-End Latency", "E2E Latency"),
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-Token Latency", "ITL"),
}
_SPREAD = {"mean": "Mean", "median": "Median", "p90": "P90", "p95": "P95", "p99": "P99"}


def print_serving(result: Mapping[str, Any], own: ServingOptions) -> None:
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [
        _line("Backend:", result["backend"]),
        _line("Traffic request rate:", result["request_rate"]),
    ]
    lines.append(_line("Max request concurrency:", result["max_concurrency"] or "not set"))
    lines.append(_line("Successful requests:", result["completed"]))
    if result["failed"]:
        lines.append(_line("Failed requests:", result["failed"]))
    lines.append(_line("Benchmark duration (s):", result["duration"]))
    lines += [_line(label, result[key]) for key, label in _LABELS.items()]
    if result["accept_length"] is not None:
        lines.append(_line("Accept length:", result["accept_length"]))
    for name, (title, short) in _SERIES.items():
        lines.append(f"{title:-^{WIDTH}}")
        lines += [
            _line(f"{words} {short} (ms):", result[f"{which}_{name}_ms"])
            for which, words in _SPREAD.items()
        ]
    lines.append(_line("Max ITL (ms):", result["max_itl_ms"]))
    if own.cache_report:
        lines.append(f"{'Prefix cache':-^{WIDTH}}")
        lines.append(_line("Cached prompt tokens:", result["total_cached_tokens"]))
        lines.append(_line("Cache hit rate (%):", result["cache_hit_rate_pct"]))
    if result["goodput"] is not None:
        lines.append(_line("Request goodput (req/s):", result["goodput"]["request_goodput"]))
    if result["steady_state"] is not None:
        lines += _steady(result["steady_state"])
    lines.append(_line("Client's CPU (share of a core):", result["client_cpu_share"]))
    lines.append("=" * WIDTH)
    if own.plot_throughput:
        lines += plot("Output tokens per second", result["output_tokens_by_second"])
        lines += plot("Concurrency", result["concurrency_by_second"])
    lines += [f"failed, {count} x: {reason}" for reason, count in result["failures"].items()]
    if result["client_is_bottleneck"]:
        lines.append(
            "WARNING: This client was busy most of the time; the server may be faster than these"
            " figures say."
        )
    print("\n".join(lines))


def print_offline(result: Mapping[str, Any]) -> None:
    lines = [
        f"{' Offline Throughput Benchmark Result ':=^{WIDTH}}",
        _line("Backend:", result["backend"]),
        _line("Successful requests:", result["successful_requests"]),
        *([_line("Failed requests:", result["failed"])] if result["failed"] else []),
        _line("Benchmark duration (s):", result["total_latency"]),
        _line("Total input tokens:", result["total_input_tokens"]),
        _line("Total generated tokens:", result["total_output_tokens"]),
        _line("Last generation throughput (tok/s):", result["last_gen_throughput"]),
        _line("Request throughput (req/s):", result["request_throughput"]),
        _line("Input token throughput (tok/s):", result["input_throughput"]),
        _line("Output token throughput (tok/s):", result["output_throughput"]),
        _line("Total token throughput (tok/s):", result["total_throughput"]),
        "=" * WIDTH,
        *(f"failed, {count} x: {reason}" for reason, count in result["failures"].items()),
    ]
    print("\n".join(lines))


def _steady(steady: Mapping[str, float]) -> list[str]:
    begin = steady["steady_begin"]
    return [
        f"{'Steady state':-^{WIDTH}}",
        _line("From - to (s):", f"{begin:.2f} - {begin + steady['steady_duration']:.2f}"),
        _line("Concurrency:", steady["steady_concurrency"]),
        _line("Output token throughput (tok/s):", steady["steady_output_throughput"]),
        _line("Request throughput (req/s):", steady["steady_request_throughput"]),
    ]


def _line(label: str, value: Any) -> str:
    return (
        f"{label:<40} {value:<10.2f}".rstrip()
        if isinstance(value, float)
        else f"{label:<40} {value:<10}".rstrip()
    )


def plot(title: str, values: Sequence[float]) -> list[str]:
    """A heading and a line of bars. If there are more values than columns, neighbouring values are
    averaged."""
    per_column = -(-len(values) // PLOT_COLUMNS) or 1
    columns = [
        statistics.fmean(values[at : at + per_column]) for at in range(0, len(values), per_column)
    ]
    top = max(columns, default=0.0) or 1.0
    bars = "".join(BARS[round(value / top * (len(BARS) - 1))] for value in columns)
    return [f"{title} (highest: {top:.0f}; {per_column} s per column)", bars]


def check_writable(path: str | None, *, flag: str = "--output-file") -> None:
    """Check before the work that the file can be written. Raises ConfigError."""
    if path is not None:
        _write(path, b"", "ab", flag)


def append(path: str, result: Mapping[str, Any]) -> None:
    """Append one line. Raises ConfigError."""
    _write(path, msgspec.json.encode(result) + b"\n", "ab", "--output-file")


def write_plot(path: str, picture: str) -> None:
    """Write the charts to a file. Raises ConfigError."""
    _write(path, picture.encode(), "wb", "--plot")


def _write(path: str, content: bytes, mode: str, flag: str) -> None:
    try:
        with open(path, mode) as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}.") from None
