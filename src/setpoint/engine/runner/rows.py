"""The permanent row of each slot: token ids and page table on the device, everything else on the host.

Works on admissions, page deltas and appended tokens; knows nothing of models or batches. The table starts small and doubles
when a higher slot is used, so that a limit of thousands of slots costs nothing until they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from setpoint.core.plan import Admit, PageDeltas
from setpoint.core.request import Ids
from setpoint.engine.kernels.device import to_device
from setpoint.engine.sampling.columns import SLOT_DTYPE, SamplingRows, TokenLists, slot_values, token_lists

FIRST_SLOTS = 16


class SlotTable:
    def __init__(self, *, context_len: int, page_size: int, max_slots: int, device: torch.device) -> None:
        self.max_slots = max_slots
        self.context_len = context_len
        self.device = device
        size = min(FIRST_SLOTS, max_slots)
        self.ids = torch.zeros(size, context_len + 1, dtype=torch.int32, device=device)
        """[slots, context + 1]: known tokens; junk past a slot's length. Written by admit (host) and append (device)."""
        self.pages = torch.zeros(size, -(-context_len // page_size), dtype=torch.int32, device=device)
        """[slots, W]: page numbers; junk past a slot's pages. Written by map_pages."""
        self.columns = np.zeros(size, SLOT_DTYPE)
        self.lists: dict[int, TokenLists] = {}

    @property
    def num_bytes(self) -> int:
        """Device bytes held now."""
        return self.ids.nbytes + self.pages.nbytes

    def admit(self, admits: Sequence[Admit]) -> None:
        """Overwrite the admitted slots; one write to the device for all of them."""
        if not admits:
            return
        self._grow(max(admit.slot for admit in admits) + 1)
        for admit in admits:
            assert len(admit.ids) < self.ids.shape[1], "a sequence longer than the context"
            self.columns[admit.slot] = slot_values(admit)
            self.release((admit.slot,))
            lists = token_lists(admit)
            if lists is not None:
                self.lists[admit.slot] = lists
        counts = [len(admit.ids) for admit in admits]
        slots = np.repeat([admit.slot for admit in admits], counts)
        indices = np.concatenate([np.arange(count) for count in counts])
        ids = np.concatenate([admit.ids for admit in admits])
        self.ids[to_device(slots, self.device), to_device(indices, self.device)] = to_device(ids, self.device)

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.lists.pop(slot, None)

    def map_pages(self, deltas: PageDeltas) -> None:
        if len(deltas.slots):
            slots, indices, pages = (to_device(array, self.device) for array in (deltas.slots, deltas.indices, deltas.pages))
            self.pages[slots, indices] = pages

    def sampling_rows(self, slots: Ids) -> SamplingRows:
        return SamplingRows(self.columns[slots], slots, self.ids, self.lists)

    def logprob_widths(self, slot: int) -> tuple[int, int]:
        """How many top logprobs and how many named tokens the slot's request wants per position."""
        lists = self.lists.get(slot)
        return int(self.columns["num_top"][slot]), 0 if lists is None else len(lists.picked)

    def append(self, slots: Ids, ids: torch.Tensor) -> None:
        """Append one sampled token per slot; ids [S] stays on the device. A failed row (-1) gets token 0: it is aborted anyway,
        but rows of it may already be planned."""
        lengths = self.columns["length"][slots]
        self.ids[to_device(slots, self.device), to_device(lengths, self.device)] = ids.clamp(min=0).int()
        self.columns["length"][slots] += 1

    def _grow(self, num_slots: int) -> None:
        size = len(self.columns)
        if num_slots <= size:
            return
        assert num_slots <= self.max_slots, "a slot beyond the limit"
        while size < num_slots:
            size = min(2 * size, self.max_slots)
        for name in ("ids", "pages"):
            old = getattr(self, name)
            new = old.new_zeros(size, old.shape[1])
            new[: len(old)] = old
            setattr(self, name, new)
        self.columns = np.concatenate((self.columns, np.zeros(size - len(self.columns), SLOT_DTYPE)))
