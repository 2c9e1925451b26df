"""Compares two results: which is better, which differences are within the noise, and which options
differ."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from setpoint.config.bench import RESULTS, TARGET, ServingOptions
from setpoint.config.groups.declare import Option, declared
from setpoint.core.errors import ConfigError
from setpoint.core.plain_file import read_plain

RESULTS_MIB = 1024
"""Most MiB of a file of results; a line takes some kB."""
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
"""Key of a result -> its name in a comparison, and whether more is better."""
_NOT_TRAFFIC = {
    field.name
    for field in declared(ServingOptions, Option)
    if field.about.group in (TARGET, RESULTS) and field.name != "backend"
}
"""Options that may differ between two results that are compared."""


class Comparison:
    """Compares this run with results of other runs."""

    def __init__(self, path: str) -> None:
        """Read the other results. Raises ConfigError."""
        self._path = path
        self._others = _read(path, flag="--compare")
        if not self._others:
            raise ConfigError(
                f"--compare {path} holds no results; name a file written by setpoint bench."
            )

    def table(self, result: Mapping[str, Any], output_file: str | None) -> str:
        """The table in Markdown. Our side is this run, with all runs in ``output_file`` if there is
        one."""
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
        return "\n".join([*lines, *_traffic_note(result, self._others[-1])])


STEP_RATIOS = f"   {'speed-up: prefill':>19} {'decode':>7}"
"""Heading of the columns that ``step_ratios`` writes."""


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
        raise ConfigError(
            f"--compare {path} holds no results; name a file written by setpoint bench one-batch."
        )
    return found


def step_ratios(result: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """How many times as fast prefill and decode are as the median of the other results, which have
    the same shape."""
    if not others:
        return f"   {'not in the file':>19}"
    prefill, decode = (
        statistics.median(other[name] for other in others) / result[name]
        for name in ("prefill_latency", "median_decode_latency")
    )
    return f"   {prefill:>17.2f} × {decode:>5.2f} ×"


def _traffic_note(result: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """A line that names the options in which the two sides differ; "" if there are none."""
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
    """The ratio of the medians. It names a winner only if both sides have several runs and their
    ranges do not touch."""
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
    """Read a JSON object, or one per line."""
    try:
        text = read_plain(path, RESULTS_MIB)
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
