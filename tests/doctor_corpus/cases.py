"""What a case of the corpus is: a label, and how its log is made."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments import Deployment
from generations import Generation, Style, Writer
from simulate import Line, Truth, simulate
from startup import start_up

from setpoint_testing.traffic import Arrivals, Load

FOLDER = Path(__file__).parent
HELD_OUT_SHARE = 0.3
HELD_OUT_SEED = 20261122
MAX_LINES = 590

Change = tuple[str, str]
"""(flag, direction)."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Label:
    cause: str
    why: str
    """Why this is the verdict, from the way the case is made."""
    action: Change | None = None
    other_actions: tuple[Change, ...] = ()
    """Changes that are as good."""
    forbidden: tuple[Change, ...] = ()
    """Changes that would make it worse."""
    acceptable: tuple[str, ...] = ()
    """Other verdicts that an expert would accept."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Written:
    """A case with its text."""

    name: str
    label: Label
    generation: str
    text: bytes
    made_by: str
    source: str
    compress: bool = False


@dataclass(slots=True, frozen=True, kw_only=True)
class Simulated:
    """A case that the simulated engine makes."""

    name: str
    label: Label
    generation: Generation
    deployment: Deployment
    load: Load
    arrivals: Arrivals
    words: str
    """What the clients do, for the label."""
    seconds: float = 240.0
    max_lines: int = 480
    style: Style = field(default_factory=Style)
    with_start: bool = True
    ranks: tuple[Arrivals, ...] = ()
    """The arrivals of further data-parallel ranks, which serve the same load."""
    skip: int = 0
    """The log begins after so many batch lines."""

    def write(self, seed: int) -> tuple[Written, Truth]:
        deployment, style = self.deployment, self.style
        lines, truth = self._simulated(seed)
        writer = Writer(self.generation, style, seed)
        text = list(start_up(deployment, self.generation, style, writer)) if self.with_start else []
        text += list(writer.lines(lines[self.skip :]))[: MAX_LINES - len(text)]
        given = ", ".join(f"{name}={value}" for name, value in deployment.options.items())
        hardware = deployment.hardware
        made_by = (
            f"The real scheduler over a simulated engine: {hardware.model} on {hardware.device},"
            f" pool {deployment.max_total_num_tokens} tokens, {given or 'default options'};"
            f" {self.words}; seed {seed}. {truth.words()} {self.label.why}"
        )
        return Written(
            name=self.name,
            label=self.label,
            generation=self.generation,
            text=("\n".join(text) + "\n").encode(),
            made_by=made_by,
            source="simulated",
            compress=True,
        ), truth

    def _simulated(self, seed: int) -> tuple[list[Line], Truth]:
        engine, is_cpu = self.deployment.engine(), self.deployment.hardware.is_cpu
        kinds = (self.arrivals, *self.ranks)
        found = []
        for number, arrivals in enumerate(kinds):
            lines, truth = simulate(
                engine,
                self.load,
                arrivals,
                seed=seed + number,
                seconds=self.seconds,
                max_lines=self.max_lines // len(kinds),
                is_cpu=is_cpu,
                rank=f"DP{number} TP0" if self.ranks else "",
            )
            found.append((lines, truth))
        end = min((lines[-1].at for lines, _ in found if lines), default=0.0)
        merged = sorted(
            (line for lines, _ in found for line in lines if len(kinds) == 1 or line.at <= end),
            key=lambda line: line.at,
        )
        return merged, found[0][1]


def is_held_out(name: str) -> bool:
    """Chosen by the name alone, before there was a doctor."""
    return random.Random(f"{HELD_OUT_SEED}:{name}").random() < HELD_OUT_SHARE


def save(case: Written) -> None:
    folder = FOLDER / ("held_out" if is_held_out(case.name) else "cases")
    folder.mkdir(exist_ok=True)
    if case.compress:
        packed = gzip.compress(case.text, 9, mtime=0)
        (folder / f"{case.name}.log.gz").write_bytes(packed)
    else:
        (folder / f"{case.name}.log").write_bytes(case.text)
    label = case.label
    (folder / f"{case.name}.json").write_text(
        json.dumps(
            {
                "cause": label.cause,
                "acceptable": list(label.acceptable),
                "action": _change(label.action),
                "other_actions": [_change(each) for each in label.other_actions],
                "forbidden": [_change(each) for each in label.forbidden],
                "generation": case.generation,
                "made_by": case.made_by,
                "source": case.source,
            },
            indent=1,
            ensure_ascii=False,
        )
        + "\n"
    )


def _change(change: Change | None) -> dict[str, Any] | None:
    return None if change is None else {"flag": change[0], "direction": change[1]}
