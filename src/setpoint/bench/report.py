"""Results for people and for files: SGLang's printed labels, JSON lines, a plot of the terminal,
and two results side by side."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from setpoint.config.bench import RESULTS, TARGET, ServingOptions
from setpoint.config.declare import Option, declared
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

COMPARED = {
    "output_throughput": ("output, tok/s", True),
    "total_throughput": ("input and output, tok/s", True),
    "request_throughput": ("requests/s", True),
    "median_ttft_ms": ("TTFT, median, ms", False),
    "p99_ttft_ms": ("TTFT, P99, ms", False),
    "median_tpot_ms": ("TPOT, median, ms", False),
    "p99_tpot_ms": ("TPOT, P99, ms", False),
    "median_itl_ms": ("ITL, median, ms", False),
    "median_e2e_latency_ms": ("E2E, median, ms", False),
    "p99_e2e_latency_ms": ("E2E, P99, ms", False),
    "duration": ("duration, s", False),
    "total_latency": ("duration, s", False),
}
"""Key of a result -> what it is called in a comparison, and whether more is better."""


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
            "WARNING: this client was busy most of the time; the server may be faster than these"
            " figures."
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
    """One line of bars; neighbours are averaged where there are more values than columns."""
    per_column = -(-len(values) // PLOT_COLUMNS) or 1
    columns = [
        statistics.fmean(values[at : at + per_column]) for at in range(0, len(values), per_column)
    ]
    top = max(columns, default=0.0) or 1.0
    bars = "".join(BARS[round(value / top * (len(BARS) - 1))] for value in columns)
    return [f"{title} (highest: {top:.0f}; {per_column} s per column)", bars]


def check_writable(path: str | None, *, flag: str = "--output-file") -> None:
    """Before the work, not after it. Raises ConfigError."""
    if path is not None:
        _write(path, b"", "ab", flag)


def append(path: str, result: Mapping[str, Any]) -> None:
    """One more line. Raises ConfigError."""
    _write(path, msgspec.json.encode(result) + b"\n", "ab", "--output-file")


def write_plot(path: str, picture: str) -> None:
    """Raises ConfigError."""
    _write(path, picture.encode(), "wb", "--plot")


def _write(path: str, content: bytes, mode: str, flag: str) -> None:
    try:
        with open(path, mode) as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}.") from None


_NOT_TRAFFIC = {
    field.name
    for field in declared(ServingOptions, Option)
    if field.about.group in (TARGET, RESULTS) and field.name != "backend"
}
"""Options that may differ between two results that are compared."""


class Comparison:
    """Results of other runs, to compare these with."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError."""
        self._path = path
        self._others = _read(path, flag="--compare")
        if not self._others:
            raise ConfigError(f"--compare {path} holds no result.")

    def table(self, result: Mapping[str, Any], output_file: str | None) -> str:
        """Markdown. Ours is this run, with all that stand in ``output_file`` if there is one."""
        ours = [result] if output_file is None else _read(output_file, flag="--output-file")
        lines = [
            f"| | this, {len(ours)} runs | {self._path}, {len(self._others)} runs | this is |",
            "|---|---|---|---|",
        ]
        for key, (name, more_is_better) in COMPARED.items():
            mine, theirs = (
                [float(one[key]) for one in results if one.get(key)]
                for results in (ours, self._others)
            )
            if mine and theirs:
                lines.append(
                    f"| {name} | {_range(mine)} | {_range(theirs)} |"
                    f" {verdict(mine, theirs, more_is_better)} |"
                )
        return "\n".join([*lines, *_unlike(result, self._others[-1])])


STEP_RATIOS = f"   {'speed-up: prefill':>19} {'decode':>7}"
"""Heading of what ``step_ratios`` writes."""


def by_shape(path: str) -> dict[tuple[int, int, int], list[dict[str, Any]]]:
    """The results of ``bench one-batch`` in a file, by batch size and lengths. Raises ConfigError
    for a file that holds none."""
    found: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    try:
        for one in _read(path, flag="--compare"):
            found.setdefault((one["batch_size"], one["input_len"], one["output_len"]), []).append(
                one
            )
    except KeyError as error:
        raise ConfigError(
            f"--compare {path} holds no results of 'setpoint bench one-batch': the key {error} is"
            " missing."
        ) from None
    if not found:
        raise ConfigError(f"--compare {path} holds no result.")
    return found


def step_ratios(result: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """How many times as fast prefill and decode are as in the median of the others, which are of
    the same shape."""
    if not others:
        return f"   {'not in the file':>19}"
    prefill, decode = (
        statistics.median(other[name] for other in others) / result[name]
        for name in ("prefill_latency", "median_decode_latency")
    )
    return f"   {prefill:>17.2f} × {decode:>5.2f} ×"


def _unlike(result: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """One line that names the options in which the two differ, if any."""
    ours, theirs = result["options"], other.get("options", {})
    names = [
        name
        for name in ours
        if name not in _NOT_TRAFFIC and name in theirs and ours[name] != theirs[name]
    ]
    differences = ", ".join(
        f"{name} {ours[name]} (the other run: {theirs[name]})" for name in names
    )
    return [f"NOTE: The traffic differs: {differences}."] if names else []


def verdict(ours: Sequence[float], theirs: Sequence[float], more_is_better: bool) -> str:
    """The ratio of the medians; a winner only where both have several runs and the ranges do not
    touch."""
    ratio = statistics.median(ours) / statistics.median(theirs)
    words = f"{ratio:.2f} ×"
    if min(len(ours), len(theirs)) < 2:
        return f"{words} (only one run, so the noise is unknown)"
    if min(ours) <= max(theirs) and min(theirs) <= max(ours):
        return f"{words} (within the noise)"
    return f"{words}, {'better' if (ratio > 1) == more_is_better else 'worse'}"


def _range(values: Sequence[float]) -> str:
    middle = f"{statistics.median(values):,.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):,.2f} – {max(values):,.2f})"


def _read(path: str, *, flag: str) -> list[dict[str, Any]]:
    """A JSON object, or one per line."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}.") from None
    try:
        return [msgspec.json.decode(text, type=dict[str, Any])]
    except msgspec.DecodeError:
        pass  # several lines
    try:
        return [
            msgspec.json.decode(line, type=dict[str, Any])
            for line in text.splitlines()
            if line.strip()
        ]
    except msgspec.DecodeError as error:
        raise ConfigError(f"{flag} {path} holds no results: {error}.") from None
