"""One step as the scheduler hands it to the engine: which rows, how many tokens, which pages. It
has no tensors and no phases.

Contract between the planes:

* A *slot* is a permanent row of the runner's tables. ``Admit`` fills it. From then on the runner
  knows the slot's tokens, its length and its sampling state, and appends the tokens it samples. A
  later ``Admit`` of the same slot overwrites everything.
* The *length* of a slot is the number of its known tokens: ``len(Admit.ids)`` at admission, one
  more per sampled token, whether or not the scheduler has seen that token yet. A row computes the
  known positions start .. start + count - 1. It may sample only if start + count is the length.
* A sampling row brings back 0 to ``samples`` tokens (``StepResult.offsets``). They take the
  positions from the length on and lengthen the slot by their number. To bring back more than one,
  the runner may compute up to ``samples`` - 1 guessed tokens after the known ones: positions up to
  start + count + samples - 2 have pages. A guess that was not confirmed has written at or after the
  last known token's position, where the slot's next row writes before anything is read.
* A row may contain *forced* tokens, which the plan gives (``StepPlan.forced_ids``) and nobody
  samples. They become known tokens of the slot before anything is computed, the row computes them
  after the last token known before, and its result brings them back before the sampled ones;
  ``samples`` counts them. A row with a grammar mask brings back exactly ``samples`` tokens.
* OWN_LENGTH stands for start = length - count: the last known token and the row's forced tokens are
  computed and the next ones are sampled. A row is planned while the results of earlier rows are
  still on their way, and those rows may bring back fewer tokens than they could, so only the runner
  knows the position by then. The pages suffice for the case that every row brings back the most it
  can.
* Steps execute in the order of submission. Within a step every layer writes the KV of all rows
  before attention reads any, so a row may read pages that another row of the same step fills.
* Page 0 is the dummy page: never allocated, never read; padding may write to it. In a page row, 0
  means that the group keeps nothing there. Pages that lie before a group's window for every token
  still to be computed may belong to another sequence in the next plan: no kernel reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from setpoint.core.request import Ids, RequestOptions
from setpoint.core.sampling import SamplingParams

OWN_LENGTH = -1
"""``Rows.starts`` value for "the slot's length - the row's count": compute the last known token,
whose id and position the runner knows, and the row's forced tokens."""


@dataclass(slots=True, frozen=True)
class Admit:
    """A sequence takes a slot. Sent once per admission (and again after a retraction, with the
    outputs so far)."""

    slot: int
    seq_id: int
    ids: Ids
    """Prompt followed by the outputs that already exist."""
    num_prompt: int
    """How many of ``ids`` are prompt tokens; the rest are outputs (they count for penalties and the
    RNG position)."""
    sampling: SamplingParams
    seed: int
    """Non-negative 63-bit seed of the counter-based generator; the token at position p uses (seed,
    p)."""
    stop_ids: tuple[int, ...] = ()
    """Token ids (EOS and stop_token_ids) that are masked until ``min_new_tokens`` outputs exist;
    empty when that is 0."""
    options: RequestOptions = field(default_factory=RequestOptions)
    """What the client asked for. With ``pooling``, the step that computes the last of ``ids``
    brings back the sequence's embedding; for "mean", rows of this admission must compute every one
    of ``ids``."""
    logprob_start: int = -1
    """First prompt position whose logprob is still wanted (at least 1 in effect: position 0 has
    none); -1: none is."""


@dataclass(slots=True, frozen=True)
class Rows:
    """The rows of a step as parallel arrays: a step of 256 rows must cost microseconds, which rules
    out an object per row."""

    slots: Ids
    seq_ids: npt.NDArray[np.int64]
    starts: Ids
    """Position of the row's first token, or OWN_LENGTH."""
    counts: Ids
    """Tokens computed for this row in this step, >= 1."""
    samples: Ids
    """Most tokens that the row's result may bring back, forced ones included; 0 if the row does not
    compute the last known token, so that nothing is sampled."""

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def sampling(self) -> npt.NDArray[np.bool_]:
        """[rows]: True for the rows that sample."""
        return self.samples > 0

    @property
    def num_forced(self) -> Ids:
        """[rows]: how many forced tokens each row computes and brings back."""
        return np.where(self.starts == OWN_LENGTH, self.counts - 1, 0)


@dataclass(slots=True, frozen=True)
class PageDeltas:
    """Writes to the runner's page tables, one per cache group, applied before the forward pass:
    ``table[group][slots[i], indices[i]] = pages[i, group]``."""

    slots: Ids
    indices: Ids
    pages: npt.NDArray[np.int32]
    """[writes, groups]: page rows (``core.pagerows``)."""


@dataclass(slots=True, frozen=True)
class StepPlan:
    """One forward pass (SGLang: ScheduleBatch). A plan without rows is valid: it only delivers
    admissions and releases."""

    step_id: int
    admits: tuple[Admit, ...]
    rows: Rows
    pages: PageDeltas
    releases: tuple[int, ...] = ()
    """Slots whose sequence has ended; the runner may drop their state. Releases apply before
    ``admits``, which may name the same slots."""
    forced_ids: Ids = field(default_factory=lambda: np.zeros(0, np.int32))
    """The forced tokens of all rows, in row order (``Rows.num_forced``)."""


@dataclass(slots=True, frozen=True)
class TokenMasks:
    """Grammar masks for the sampling rows of a step: ``words[i]`` allows token t for ``slots[i]``
    iff bit t is set."""

    slots: Ids
    words: npt.NDArray[np.int32]
    """[num_masked_rows, ceil(vocab / 32)] packed little-endian bits, the layout of llguidance and
    xgrammar."""


def forbid(words: Ids, tokens: Iterable[int]) -> None:
    """Clear the bits of these tokens in one row of ``TokenMasks.words``."""
    unsigned = words.view(np.uint32)
    for token in tokens:
        unsigned[token // 32] &= ~np.uint32(1 << token % 32)


@dataclass(slots=True)
class PlanBuilder:
    """Collects a plan row by row and freezes it; the scheduler owns it during one
    ``schedule()``."""

    step_id: int
    num_groups: int = 1
    """Number of the model's cache groups, which is the number of pages in a page row."""
    admits: list[Admit] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    seq_ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    page_slots: list[Ids] = field(default_factory=list)
    page_indices: list[Ids] = field(default_factory=list)
    page_numbers: list[Ids] = field(default_factory=list)
    forced_ids: list[int] = field(default_factory=list)

    def add_row(
        self,
        slot: int,
        seq_id: int,
        start: int,
        count: int,
        samples: int,
        forced: Sequence[int] = (),
    ) -> None:
        """``forced``: the row's forced tokens, which ``count`` and ``samples`` include; only with
        OWN_LENGTH."""
        self.slots.append(slot)
        self.seq_ids.append(seq_id)
        self.starts.append(start)
        self.counts.append(count)
        self.samples.append(samples)
        if forced:
            self.forced_ids += forced

    def map_pages(self, slot: int, first_index: int, pages: Ids) -> None:
        """Write these page rows, one flat array, to ``table[slot, first_index :]``."""
        num_rows = len(pages) // self.num_groups
        if num_rows:
            self.page_slots.append(np.full(num_rows, slot, np.int32))
            self.page_indices.append(np.arange(first_index, first_index + num_rows, dtype=np.int32))
            self.page_numbers.append(pages)

    def map_own_rows(self, slot: int, num_rows: int, *, first: int = 0) -> None:
        """Give the slot the page rows [first, first + num_rows) of a pool whose page rows are
        consecutive; for tools that plan without a scheduler."""
        numbers = np.arange(num_rows * self.num_groups, dtype=np.int32)
        self.map_pages(slot, 0, numbers + 1 + first * self.num_groups)

    def map_each(self, slots: list[int], indices: list[int], pages: Ids) -> None:
        """Write the i-th of these page rows, one flat array, to ``table[slots[i], indices[i]]``:
        the growth of a decode batch."""
        if slots:
            self.page_slots.append(np.array(slots, np.int32))
            self.page_indices.append(np.array(indices, np.int32))
            self.page_numbers.append(pages)

    def build(self, releases: tuple[int, ...] = ()) -> StepPlan:
        rows = Rows(
            slots=np.array(self.slots, np.int32),
            seq_ids=np.array(self.seq_ids, np.int64),
            starts=np.array(self.starts, np.int32),
            counts=np.array(self.counts, np.int32),
            samples=np.array(self.samples, np.int32),
        )
        deltas = PageDeltas(
            _join(self.page_slots),
            _join(self.page_indices),
            _join(self.page_numbers).reshape(-1, self.num_groups),
        )
        forced_ids = np.array(self.forced_ids, np.int32)
        return StepPlan(self.step_id, tuple(self.admits), rows, deltas, releases, forced_ids)


def _join(parts: list[Ids]) -> Ids:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
