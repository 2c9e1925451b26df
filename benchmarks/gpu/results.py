"""What the parts of a measurement on a GPU have found: a JSON file for each, and a table of all.

Every file is replaced as a whole whenever something is added, so it is valid whenever it is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = "results.md"
AIMS = {
    "Llama-3.1-8B bf16, 1 row at 1,024": ("ms", 4.6, 4.1),
    "Llama-3.1-8B bf16, 64 rows at 1,536": ("ms", 6.5 / 0.70, 6.5 / 0.80),
    "Llama-3.1-8B bf16, 256 rows at 1,536": ("ms", 15.5 / 0.75, 15.5 / 0.85),
    "Llama-3.1-8B bf16, prefill of 8,192": ("ms", 320.0, 275.0),
    "Llama-3.1-8B bf16, host not hidden at 64 rows": ("%", 5.0, 5.0),
    "Llama-3.1-8B bf16, graphs beyond the estimate": ("%", 15.0, 15.0),
    "Llama-3.1-8B fp8, 1,024 requests of 1,000 in and out": ("tok/s", 11_000.0, 15_000.0),
    "Qwen3-0.6B bf16, 256 requests": ("tok/s", 18_000.0, 24_000.0),
    "Llama-3.1-8B bf16, 256 requests": ("tok/s", 7_500.0, 9_500.0),
    "gpt-oss-20b bf16, 1 row at 1,536": ("ms", 2 * 0.86, 1.5 * 0.86),
    "gpt-oss-20b bf16, 256 rows at 1,536": ("ms", 2 * 5.4, 1.5 * 5.4),
    "DeepSeek-V2-Lite bf16, 1 row at 1,536": ("ms", 2 * 1.02, 1.5 * 1.02),
    "DeepSeek-V2-Lite bf16, 256 rows at 1,536": ("ms", 2 * 10.0, 1.5 * 10.0),
}
"""Name of a result -> (unit, first aim, good one), on one H200. Shares of a floor are written as
the time that they allow."""


def write(path: Path, text: str) -> None:
    """Replace a file as a whole. One process at a time writes to it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


@dataclass(slots=True, frozen=True)
class Part:
    """What a part has found so far, as its file has it."""

    name: str
    found: dict[str, Any]

    @property
    def is_done(self) -> bool:
        return bool(self.found["state"] == "done")


class Results:
    """The file of one part, ``FOLDER/NAME.json``, while that part runs."""

    def __init__(self, folder: Path, name: str, *, rehearsal: bool) -> None:
        self.folder = folder
        self.rehearsal = rehearsal
        self._path = folder / f"{name}.json"
        self._found: dict[str, Any] = {"state": "running", "rehearsal": rehearsal, "results": []}
        self._save()

    def add(
        self,
        name: str,
        value: float | str,
        unit: str = "",
        *,
        predicted: float | None = None,
        **more: Any,
    ) -> None:
        """Add a result, or replace that of the same name. predicted: in the same unit; it is of
        the real sizes, so a rehearsal has none."""
        entry = {"name": name, "value": value, "unit": unit, **more}
        if predicted is not None and not self.rehearsal:
            entry["predicted"] = predicted
        others = [each for each in self._found["results"] if each["name"] != name]
        self._found["results"] = [*others, entry]
        self._save()

    def attempt(self, name: str, measure: Callable[[], None]) -> None:
        """Measure; what is raised is the result, and the part goes on."""
        try:
            measure()
        except Exception as error:
            self.add(name, f"failed: {type(error).__name__}: {str(error)[:300]}")

    def end(self, state: str = "done", **more: Any) -> None:
        self._found |= {"state": state, **more}
        self._save()

    def _save(self) -> None:
        write(self._path, json.dumps(self._found, indent=1))


def read(folder: Path, name: str) -> Part | None:
    """What a part has found; None if it never began."""
    path = folder / f"{name}.json"
    return Part(name, json.loads(path.read_text())) if path.exists() else None


def end_of(folder: Path, name: str, state: str, **more: Any) -> None:
    """Note how a part has ended, with what it had found until then. It may never have begun."""
    part = read(folder, name)
    found = {"results": []} if part is None else part.found
    write(folder / f"{name}.json", json.dumps(found | {"state": state, **more}, indent=1))


def verdict(name: str, value: float, unit: str) -> str:
    """Which of its aims a result reaches."""
    aim_unit, first, good = AIMS[name]
    assert unit == aim_unit, name
    sign = 1 if unit == "tok/s" else -1
    if sign * value >= sign * good:
        return "good"
    return "first" if sign * value >= sign * first else "missed"


def table(parts: list[Part]) -> str:
    """All results, in Markdown."""
    lines = ["# Measured on a GPU", ""]
    if any(part.found.get("rehearsal") for part in parts):
        lines = ["# A rehearsal: nothing here says how fast anything is", ""]
    for part in parts:
        facts = [part.found["state"]]
        if "seconds" in part.found:
            facts.append(f"{part.found['seconds']:.0f} s")
        if "compiled" in part.found:
            facts.append(f"kernels compiled: {part.found['compiled']}")
        if "cache_hits" in part.found:
            facts.append(f"found in Triton's cache: {part.found['cache_hits']}")
        lines += [
            f"## {part.name} ({', '.join(facts)})",
            "",
            "| what | value | predicted | first aim | good | reached |",
            "|---|---|---|---|---|---|",
            *(_row(each, rehearsal=part.found["rehearsal"]) for each in part.found["results"]),
            "",
        ]
    return "\n".join(lines)


def _row(entry: dict[str, Any], *, rehearsal: bool) -> str:
    value, unit, name = entry["value"], entry["unit"], entry["name"]
    shown = _number(value, unit)
    if "microseconds" in entry:
        shown += f" ({entry['microseconds']:,.1f} µs)"
    cells = [name, shown, _number(entry.get("predicted"), unit), "", "", ""]
    if name in AIMS and not rehearsal and isinstance(value, float):
        _, first, good = AIMS[name]
        cells[3:] = [_number(first, unit), _number(good, unit), verdict(name, value, unit)]
    return "| " + " | ".join(cells) + " |"


def _number(value: float | str | None, unit: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value.replace("|", "/").replace("\n", " ")
    if isinstance(value, int):
        return f"{value:,}"
    digits = max(0, 2 - int(math.log10(abs(value)))) if abs(value) >= 1e-2 else 4
    return f"{value:,.{digits}f} {unit}".rstrip()
