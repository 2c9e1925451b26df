"""Chooses among the implementations of a product that give the same bits: the fastest one on this
processor for each class of row counts (choices.h).

It is measured once (``probe``) and kept next to the compiled library, under the processor's
identity. Neither the level nor any bit of a result depends on it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

CLASS_ROWS = (1, 8, 32, None)
"""Most rows of each class (choices.h, kClassRows); the last class has no limit."""
_IDENTITY = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")


class Chooser(Protocol):
    """The part of ``library.Kernels`` that a choice needs."""

    implementations: dict[str, list[str]]
    linear: Callable[[int], None]
    linear_int8: Callable[[int], None]

    def choose(self, product: str, size_class: int, implementation: int) -> None: ...


@dataclass(slots=True, frozen=True)
class TunedProduct:
    """The implementation of one product for the rows of one class."""

    product: str
    """"bf16" or "int8"."""
    most_rows: int | None
    """Most rows of the class; None: no limit."""
    name: str
    """The implementation."""
    others: dict[str, float | None]
    """The other implementations -> their times as multiples of this one's; None for one that gives
    other bits here. Empty if there was no time to measure them."""


def implementations(text: str) -> dict[str, list[str]]:
    """Product -> names, from the text of ``setpoint_implementations``."""
    products = (entry.split("=") for entry in text.split(";"))
    return {product: names.split(",") for product, names in products}


def choose(
    kernels: Chooser, library: Path, measure: Callable[[Chooser], tuple[TunedProduct, ...]]
) -> tuple[TunedProduct, ...]:
    """Choose for every product that has several implementations, by earlier measurements for this
    library on this processor, or else by measuring now."""
    several = {name: found for name, found in kernels.implementations.items() if len(found) > 1}
    if not several:
        return ()
    kept = library.with_name(f"{library.stem}-{_identity()}.json")
    choices = _read(kept, several)
    if choices is None:
        choices = measure(kernels)
        if all(choice.others for choice in choices):  # else the next start tries again
            _write(kept, choices)
    for choice in choices:
        kernels.choose(
            choice.product,
            CLASS_ROWS.index(choice.most_rows),
            several[choice.product].index(choice.name),
        )
    return choices


def summary(choices: tuple[TunedProduct, ...]) -> str:
    """The choices and their reasons in words: "int8 products on vectors up to 8 rows (on matrix
    tiles they take 1.20 to 1.60 times as long), on matrix tiles above (…)". Empty if there was no
    choice."""
    return "; ".join(
        f"{product} products "
        + ", ".join(_runs([choice for choice in choices if choice.product == product]))
        for product in dict.fromkeys(choice.product for choice in choices)
    )


def _runs(choices: list[TunedProduct]) -> Iterator[str]:
    """A part of the sentence for each run of classes with the same implementation."""
    alike = itertools.groupby(choices, key=lambda choice: (choice.name, bool(choice.others)))
    for (name, _), group in alike:
        run = list(group)
        rows = "" if len(run) == len(choices) else _rows(run[-1].most_rows)
        yield f"on {name}{rows} ({_why(run)})"


def _rows(most: int | None) -> str:
    if most is None:
        return " above"
    return " with 1 row" if most == 1 else f" up to {most} rows"


def _why(run: list[TunedProduct]) -> str:
    """The reason for the choice. Either all of these classes were measured or none."""
    return (
        ", ".join(
            f"on {name} they {_times([choice.others[name] for choice in run])}"
            for name in run[0].others
        )
        or "not measured"
    )


def _times(times: list[float | None]) -> str:
    known = [f"{each:.2f}" for each in times if each is not None]
    if len(known) < len(times):
        return "have other bits on this processor"
    return f"take {' to '.join(dict.fromkeys((min(known), max(known))))} times as long"


def _identity() -> str:
    """A digest of this processor and of the probe: of the processor's properties that do not change
    with its load, and of the probe's source."""
    text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    lines = [line for line in text.splitlines() if line.partition("\t")[0].strip() in _IDENTITY]
    probe = Path(__file__).with_name("probe.py").read_bytes()
    return hashlib.sha256("\n".join(lines).encode() + probe).hexdigest()[:16]


def _read(path: Path, several: dict[str, list[str]]) -> tuple[TunedProduct, ...] | None:
    """The choices in the file; None if it does not have them for these products."""
    try:
        choices = tuple(TunedProduct(**entry) for entry in json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    complete = [(choice.most_rows, choice.product) for choice in choices] == [
        (rows, product) for rows in CLASS_ROWS for product in several
    ]
    return choices if complete and all(c.name in several[c.product] for c in choices) else None


def _write(path: Path, choices: tuple[TunedProduct, ...]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # a cache that cannot be written costs the next start 50 ms
        partial.write_text(json.dumps([asdict(choice) for choice in choices], indent=1))
        partial.replace(path)
