"""How long the matrix products of a step take, from the measured times of products in the model's
kinds of weights.

Pure arithmetic. It knows nothing of attention, and measures nothing: ``engine.executor`` times a
product, and ``bench.engines.model_pace`` adds what a step does besides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from setpoint.core.model import Mixture

Curve = Mapping[int, float]
"""Rows of a product -> seconds for each parameter of the weight."""


@dataclass(slots=True, frozen=True)
class Stored:
    """The matrices of a model whose weights are of one kind, counted in parameters."""

    kind: str
    """A kind of block, "int8", or a dtype."""
    layers: int = 0
    """Parameters of the layers, without experts."""
    experts: int = 0
    """Parameters of all experts."""
    head: int = 0


def rising(curve: Curve) -> Curve:
    """The curve without times that are longer than those of more rows: more rows never take less
    time, so other programs have stretched such a time."""
    found: dict[int, float] = {}
    shortest = math.inf
    for rows in sorted(curve, reverse=True):
        found[rows] = shortest = min(shortest, curve[rows])
    return found


def seconds_of(curve: Curve, rows: float) -> float:
    """Seconds for each parameter of a product of so many rows: between two measured numbers of rows
    a straight line, and beyond the last one proportional to the rows."""
    measured = sorted(curve.items())
    for (few, fast), (many, slow) in pairwise(measured):
        if rows <= many:
            return fast + (slow - fast) * max(rows - few, 0.0) / (many - few)
    most, slowest = measured[-1]
    return slowest * max(rows / most, 1.0)


def products_s(
    stored: Sequence[Stored],
    times: Mapping[str, Curve],
    mixture: Mixture | None,
    *,
    num_tokens: int,
    num_sampled: int,
) -> float:
    """Seconds of the products of a step with ``num_tokens`` tokens, of which ``num_sampled`` need
    logits. Of a mixture's experts a step reads those that its tokens use, if all are equally
    likely (``Mixture.used``); each gets its share of the tokens as rows."""
    share, rows = 1.0, float(num_tokens)
    if mixture is not None:
        share = mixture.used(num_tokens)
        rows = num_tokens * mixture.num_chosen / (mixture.num_experts * share)
    return sum(
        each.layers * seconds_of(times[each.kind], num_tokens)
        + each.experts * share * seconds_of(times[each.kind], rows)
        + each.head * seconds_of(times[each.kind], num_sampled)
        for each in stored
    )
