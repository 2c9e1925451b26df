"""The near-tie rule for greedy ids in fp32: two orders of summation may part ways only where the
reference hardly preferred its token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

NEAR_TIE = 1e-3
"""A gap between the best two logits of the reference below which their order may change. Orders of
summation change a logit of the default model by up to 6e-5."""


@dataclass(slots=True, frozen=True)
class Greedy:
    """A reference's greedy outputs, and at each position the gap between its two best logits."""

    ids: list[int]
    gaps: list[float]

    @classmethod
    def of_top(cls, ids: Sequence[int], top_logprobs: Iterable[Sequence[float]]) -> Greedy:
        """The tokens and gaps of an answer with logprobs. top_logprobs: the two best logprobs of
        each position; their difference is that of the logits."""
        return cls(list(ids), [float(top[0] - top[1]) for top in top_logprobs])


@dataclass(slots=True)
class Tally:
    """Counts comparisons; ``str`` is the line to print."""

    num_sequences: int = 0
    num_tokens: int = 0
    divergences: list[tuple[str, int, float]] = field(default_factory=list)
    """(name, position, the reference's gap) of each sequence that diverged at a near tie."""

    def check(self, name: str, ids: Sequence[int], reference: Greedy) -> None:
        """Count a sequence. Raises AssertionError if ``ids`` diverge from the reference anywhere but
        at a near tie, or differ only in length."""
        assert len(reference.ids) == len(reference.gaps)
        self.num_sequences += 1
        parted = next(
            (
                at
                for at, (one, other) in enumerate(zip(ids, reference.ids, strict=False))
                if one != other
            ),
            None,
        )
        if parted is None:
            assert len(ids) == len(reference.ids), (
                f"{name}: {len(ids)} tokens, {len(reference.ids)} wanted"
            )
            self.num_tokens += len(ids)
            return
        self.num_tokens += parted
        gap = reference.gaps[parted]
        assert gap < NEAR_TIE, (
            f"{name}: token {parted} is {ids[parted]}, not {reference.ids[parted]}, and the gap"
            f" there is {gap:.2g}"
        )
        self.divergences.append((name, parted, gap))

    def __str__(self) -> str:
        where = ", ".join(
            f"{name} at {position} (gap {gap:.1e})" for name, position, gap in self.divergences
        )
        return (
            f"{self.num_sequences} sequences, {self.num_tokens} equal tokens,"
            f" {len(self.divergences)} near-tie divergences: {where or '-'}"
        )
