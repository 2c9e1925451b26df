"""Labels of the strangers' logs: causes, right changes, and changes that would make it worse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from strangers_paper import Paper

Change = tuple[str, str]
CONS, CAP, MEM = "--schedule-conservativeness", "--max-running-requests", "--mem-fraction-static"
CHUNK, PREFILL, GRAPH = "--chunked-prefill-size", "--max-prefill-tokens", "--cuda-graph-max-bs"
UP, DOWN = "increase", "decrease"


@dataclass(frozen=True, slots=True)
class Written:
    cause: str
    variant: str
    text: bytes
    why: str
    actions: tuple[Change, ...] = ()
    forbidden: tuple[Change, ...] = ()
    acceptable: tuple[str, ...] = ()
    era: str = ""


Painter = Callable[[Random], Written]


def done(
    sheet: Paper,
    cause: str,
    variant: str,
    why: str,
    actions: tuple[Change, ...] = (),
    forbidden: tuple[Change, ...] = (),
    acceptable: tuple[str, ...] = (),
) -> Written:
    return Written(cause, variant, sheet.text(), why, actions, forbidden, acceptable, sheet.era)


CLIENT_WRONG = ((CONS, UP), (CONS, DOWN), (MEM, UP), (MEM, DOWN), (CAP, DOWN), (CHUNK, DOWN))
CAP_WRONG = ((CONS, DOWN), (CONS, UP), (CAP, DOWN), (MEM, DOWN))
CONS_WRONG = ((CONS, UP), (CAP, DOWN), (MEM, DOWN), (CHUNK, DOWN))
OPT_WRONG = ((CONS, DOWN), (CAP, UP), (MEM, DOWN))
FULL_WRONG = ((CONS, DOWN), (CAP, UP), (MEM, DOWN))
BUDGET_WRONG = ((CONS, DOWN), (CONS, UP), (CHUNK, DOWN), (PREFILL, DOWN), (CAP, UP), (CAP, DOWN))
BLOCK_WRONG = ((CONS, DOWN), (CONS, UP), (CAP, UP), (CAP, DOWN))
QUEUE_WRONG = ((CONS, DOWN), (CAP, DOWN), (MEM, DOWN), (CHUNK, DOWN))
GRAPH_WRONG = ((GRAPH, DOWN), (CONS, DOWN), (CONS, UP), (MEM, UP), (CAP, DOWN))
UNDER_WRONG = ((MEM, DOWN), (CONS, DOWN), (CAP, UP), (CAP, DOWN))
HEAD_WRONG = ((MEM, UP), (CHUNK, UP), (CAP, UP))
PREFIX_WRONG = ((CONS, UP), (CONS, DOWN), (CAP, DOWN))
DECODE_WRONG = ((CAP, UP), (MEM, UP), (CHUNK, UP))
LEAK_WRONG = ((MEM, UP), (MEM, DOWN), (CONS, UP), (CONS, DOWN), (CAP, UP))
DEAD_WRONG = ((MEM, UP), (CONS, UP), (CONS, DOWN))
WELL_WRONG = (
    (CONS, DOWN),
    (CONS, UP),
    (CAP, DOWN),
    (MEM, DOWN),
    (MEM, UP),
    (CHUNK, DOWN),
    (GRAPH, DOWN),
)
LITTLE_WRONG = (
    (CONS, DOWN),
    (CONS, UP),
    (CAP, DOWN),
    (CAP, UP),
    (MEM, DOWN),
    (MEM, UP),
    (CHUNK, DOWN),
    (CHUNK, UP),
)
