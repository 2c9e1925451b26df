"""The permanent row of each slot: token ids and page table on the device, everything else on the
host.

Works on admissions, page deltas and appended tokens; knows nothing of models or batches. On the CPU
the tables start small and double when a higher slot is used, so that a limit of thousands of slots
costs nothing until that many are in use. On other devices they have all slots from the start,
because captured graphs hold their addresses, and are written by a ``runner.step_block``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from setpoint.core.failures import log_failure
from setpoint.core.plan import Admit, PageDeltas
from setpoint.core.request import Ids
from setpoint.core.sampling import SamplingParams
from setpoint.engine.kernels.device import SharedTensor
from setpoint.engine.runner.step_block import StepBlock
from setpoint.engine.sampling.columns import (
    SLOT_DTYPE,
    SamplingRows,
    TokenLists,
    slot_values,
    token_lists,
    wants_best,
    with_default_sampling,
)

FIRST_SLOTS = 16


class SlotTable:
    def __init__(
        self,
        *,
        context_len: int,
        page_size: int,
        max_slots: int,
        device: torch.device,
        num_groups: int = 1,
        block: StepBlock | None = None,
    ) -> None:
        """num_groups: number of the model's cache groups, each of which has a page table. block:
        writes the tables; None on the CPU."""
        self._num_groups = num_groups
        self.max_slots = max_slots
        self.context_len = context_len
        self._block = block
        size = max_slots if block else min(FIRST_SLOTS, max_slots)
        self.ids = SharedTensor(
            torch.zeros(size + 1, context_len + 1, dtype=torch.int32, device=device)
        )
        """[slots + 1, context + 1]: token ids; undefined beyond a slot's length. Written by admit
        (host) and append (device)."""
        self.pages = SharedTensor(
            torch.zeros(
                num_groups * (size + 1),
                -(-context_len // page_size),
                dtype=torch.int32,
                device=device,
            )
        )
        """[groups * (slots + 1), W]: page numbers, with the tables of the groups one below the
        other; undefined beyond a slot's pages and before its windows. Written by map_pages."""
        self.columns = np.zeros(size, SLOT_DTYPE)
        self.lists: dict[int, TokenLists] = {}
        self._special: set[int] = set()
        """Written by admit and release; see ``any_special``."""

    @property
    def padding_slot(self) -> int:
        """The row after the slots, always zero, for rows that only fill a batch up to a fixed size
        (``runner.way``) and write to the dummy page."""
        return len(self.columns)

    def tables(self) -> tuple[torch.Tensor, ...]:
        """The page table of each group, [slots + 1, W]."""
        return self.pages.tensor.chunk(self._num_groups)

    @property
    def num_bytes(self) -> int:
        """Device memory of the tables at present, in bytes."""
        return self.ids.tensor.nbytes + self.pages.tensor.nbytes

    def admit(self, admits: Sequence[Admit]) -> dict[int, str]:
        """Overwrite the admitted slots, with one write to the device for all of them.

        Returns seq_id -> reason for those whose parameters cannot be used; they are admitted with
        the same tokens and default parameters.
        """
        failures: dict[int, str] = {}
        if not admits:
            return failures
        self._grow(max(admit.slot for admit in admits) + 1)
        for admit in admits:
            assert len(admit.ids) <= self.context_len, "a sequence longer than the context"
            try:
                self._take(admit)
            except Exception as error:
                failures[admit.seq_id] = log_failure("reading its sampling parameters", error)
                self._take(with_default_sampling(admit))
        counts = [len(admit.ids) for admit in admits]
        slots = np.repeat([admit.slot for admit in admits], counts)
        indices = np.concatenate([np.arange(count) for count in counts])
        ids = np.concatenate([admit.ids for admit in admits])
        self._put(self.ids, slots, indices, ids)
        return failures

    def reset_sampling(self, slot: int) -> None:
        """Let the slot's sequence continue greedily, without logprobs, because sampling with its
        own parameters raises."""
        kept = {name: self.columns[name][slot] for name in ("length", "num_prompt")}
        empty = Admit(slot, -1, np.zeros(0, np.int32), 0, SamplingParams(), 0)
        self._take(with_default_sampling(empty))
        for name, value in kept.items():
            self.columns[name][slot] = value

    def _take(self, admit: Admit) -> None:
        self.columns[admit.slot] = slot_values(admit)
        self.release((admit.slot,))
        lists = token_lists(admit)
        if lists is not None:
            self.lists[admit.slot] = lists
        if not wants_best(admit):
            self._special.add(admit.slot)

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.lists.pop(slot, None)
            self._special.discard(slot)

    def map_pages(self, deltas: PageDeltas) -> None:
        if not len(deltas.slots):
            return
        if self._num_groups == 1:
            self._put(self.pages, deltas.slots, deltas.indices, deltas.pages[:, 0])
            return
        tables = np.arange(self._num_groups, dtype=np.int32) * (len(self.columns) + 1)
        self._put(
            self.pages,
            (deltas.slots[:, None] + tables).ravel(),
            np.repeat(deltas.indices, self._num_groups),
            deltas.pages.ravel(),
        )

    def sampling_rows(self, slots: Ids) -> SamplingRows:
        return SamplingRows(self.columns[slots], slots, self.ids.tensor, self.lists)

    def any_special(self, slots: Ids) -> bool:
        """Whether any of these slots ever needs more than the best token (``wants_best``)."""
        return bool(self._special) and not self._special.isdisjoint(slots.tolist())

    def logprob_widths(self, slot: int) -> tuple[int, int]:
        """(number of top logprobs, number of named tokens) that the slot's request wants per
        position."""
        lists = self.lists.get(slot)
        return int(self.columns["num_top"][slot]), 0 if lists is None else len(lists.picked)

    def append_known(self, slots: Ids, counts: Ids, ids: Ids) -> None:
        """Append the next ``counts[i]`` of these tokens, which the host knows, to each of
        ``slots``."""
        lengths = self.columns["length"]
        begins = lengths[slots] - np.cumsum(counts) + counts
        positions = np.arange(len(ids)) + np.repeat(begins, counts)
        self._put(self.ids, np.repeat(slots, counts), positions, ids)
        lengths[slots] += counts

    def append(self, slots: Ids, ids: SharedTensor, offsets: Ids) -> None:
        """Append the sampled tokens ``ids[offsets[i] : offsets[i + 1]]`` to each of ``slots`` [S];
        ``ids`` [>= offsets[S]] are on the CPU. On another device they are in the table already, one
        of each slot.

        A failed row's id (-1) is stored as token 0: the sequence will be aborted, but steps with it
        may already be planned.
        """
        lengths = self.columns["length"]
        counts = np.diff(offsets)
        known = lengths[slots]
        if self._block is not None:
            assert (counts == 1).all(), "several tokens of a row"
        else:
            positions = np.arange(offsets[-1]) + np.repeat(known - offsets[:-1], counts)
            self.ids.put_tokens(np.repeat(slots, counts), positions, ids)
        lengths[slots] = known + counts

    def _put(
        self,
        table: SharedTensor,
        rows: npt.NDArray[np.integer],
        columns: npt.NDArray[np.integer],
        values: Ids,
    ) -> None:
        if self._block is not None:
            self._block.put(table.tensor, rows, columns, values)
        else:
            table.put(rows, columns, values)

    def _grow(self, num_slots: int) -> None:
        size = len(self.columns)
        if num_slots <= size:
            return
        assert num_slots <= self.max_slots, "a slot beyond the limit"
        while size < num_slots:
            size = min(2 * size, self.max_slots)
        for name, num_tables in (("ids", 1), ("pages", self._num_groups)):
            old = getattr(self, name).tensor.view(num_tables, len(self.columns) + 1, -1)
            new = old.new_zeros(num_tables, size + 1, old.shape[2])
            new[:, : len(self.columns)] = old[:, :-1]
            setattr(self, name, SharedTensor(new.flatten(0, 1)))
        self.columns = np.concatenate(
            (self.columns, np.zeros(size - len(self.columns), SLOT_DTYPE))
        )
