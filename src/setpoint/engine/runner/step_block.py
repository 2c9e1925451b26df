"""What the host knows of a step, packed into one block and copied to the device at once.

A device that is not the host gets a step's rows, the entries of the slot table that the step
changes, and the places and parameters of the tokens that it will sample in one copy from pinned
memory. The host writes into a ring of such blocks, so that it can pack the next step while the
device still copies this one. The rows are at fixed addresses, so that a captured graph reads those
of every step.

On the CPU there is nothing to copy, and no block: the slot table is written where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from setpoint.core.request import Ids
from setpoint.engine.kernels.device import Mark, marker, pinned, to_device, wait
from setpoint.engine.kernels.device_sampling import DeviceRows, TokenEntries
from setpoint.engine.runner.batch import ForwardBatch
from setpoint.engine.sampling.columns import NUM_WORDS, SamplingRows
from setpoint.engine.sampling.device_sampler import entry_numbers

RING = 2
"""Blocks of the host: one that the device may still copy, and one that is being written."""

ARRAYS = 5
"""Arrays of ``StepRows``."""

MAX_ENTRIES = 1 << 16
"""Entries of tables that fit into a block. A step that changes more, because a longer prompt is
admitted, takes another copy for each so many."""


@dataclass(slots=True, frozen=True)
class Entries:
    """Values for some entries of a table."""

    table: torch.Tensor
    """[rows, columns] int32, contiguous."""
    places: npt.NDArray[np.int64]
    """[E]: row · columns + column of each, all different."""
    values: Ids
    """[E]."""


class StepRows:
    """The rows of a step, each array at a fixed place of a block."""

    def __init__(self, block: torch.Tensor, num_rows: int) -> None:
        slots, ends, *others = block[: _size(num_rows)].chunk(ARRAYS)
        self.cu_q = ends[: num_rows + 1]
        self.slots, self.kv_lens, self.sample_index, self.next_place = (
            array[:num_rows] for array in (slots, *others)
        )
        """The arrays of ``ForwardBatch``; next_place [S]: where in the flat table of ids the token
        of each sampling row will be."""


class StepBlock:
    """Contract: for each step, ``put`` what changes in the tables, then ``send``."""

    def __init__(self, device: torch.device, num_rows: int, max_entries: int = MAX_ENTRIES) -> None:
        """num_rows: most rows of a step. max_entries: see MAX_ENTRIES."""
        self._num_rows = num_rows
        self._max_entries = max_entries
        self._first = _size(num_rows)
        size = self._first + NUM_WORDS * num_rows + 3 * max_entries
        self._hosts = [pinned(torch.zeros(size, dtype=torch.int32), device) for _ in range(RING)]
        self._copied: list[Mark | None] = [None] * RING
        """When the device has copied each of the host's blocks."""
        self._turn = 0
        self._mark = marker(device)
        self._block = torch.zeros(size, dtype=torch.int32, device=device)
        self.rows = StepRows(self._block, num_rows)
        """The rows of the step that was sent last, on the device."""
        self._puts: list[Entries] = []
        self.sampling: DeviceRows
        """The sampling rows of the step that was sent last."""

    def put(
        self,
        table: torch.Tensor,
        rows: npt.NDArray[np.integer],
        columns: npt.NDArray[np.integer],
        values: npt.NDArray[np.integer],
    ) -> None:
        """Let ``table[rows[i], columns[i]]`` be ``values[i]`` from the next step on. An entry is
        put at most once for each step."""
        places = np.asarray(rows, np.int64) * table.shape[1] + columns
        self._puts.append(Entries(table, places, np.asarray(values, np.int32)))

    def send(
        self, batch: ForwardBatch, sampling: SamplingRows, *, num_rows: int, padding_slot: int
    ) -> None:
        """Copy the batch, its sampling rows, and what was put, to the device. num_rows: how many
        rows the step will have; those after the batch's have ``padding_slot`` and length 0, and
        their sample is that of the first token."""
        first, width = self._first, sampling.history.shape[1]
        begin = first + NUM_WORDS * len(sampling.slots)
        lists = entry_numbers(sampling)
        for group in self._groups():
            host, turn = self._next_host(), self._turn
            _write_rows(StepRows(host, self._num_rows), batch, width, num_rows, padding_slot)
            host[first:begin].numpy()[:] = sampling.columns.view(np.int32)
            end, written = _write_entries(host, begin, group)
            last = end + len(lists) if end + len(lists) <= len(host) else end
            host[end:last].numpy()[:] = lists[: last - end]
            self._block[:last].copy_(host[:last], non_blocking=True)
            self._copied[turn] = self._mark()
            for table, places, values in written:
                index = self._block[places].view(torch.int64)
                table.view(-1).index_put_((index,), self._block[values])
        # Lists that do not fit take a copy of their own.
        fit = last - end == len(lists)
        sent = self._block[end:last] if fit else to_device(lists, self._block.device)
        self._know(sampling, self._block[first:begin], sent)

    def send_sampling(self, sampling: SamplingRows) -> None:
        """Send the sampling rows of the step that was sent last once more, with other
        parameters."""
        parts = sampling.columns.view(np.int32), entry_numbers(sampling)
        self._know(sampling, *(to_device(part, self._block.device) for part in parts))

    def _know(self, sampling: SamplingRows, words: torch.Tensor, lists: torch.Tensor) -> None:
        num_rows = len(sampling.slots)
        num_ends = 2 * num_rows + 1
        middle = (num_ends + len(lists)) // 2
        self.sampling = DeviceRows(
            words.view(num_rows, NUM_WORDS),
            self.rows.next_place[:num_rows],
            sampling.history,
            TokenEntries(
                lists[:num_ends], lists[num_ends:middle], lists[middle:].view(torch.float32)
            )
            if len(lists)
            else None,
        )

    def append(self, ids: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write the sampled ``tokens`` [S], negative ones as 0, to the places in the table ``ids``
        that follow the known tokens of the sampling rows sent last."""
        places = self.rows.next_place[: len(tokens)].long()
        ids.view(-1).index_put_((places,), tokens.clamp(min=0).to(ids.dtype))

    def _groups(self) -> Iterator[list[Entries]]:
        """What was put, in groups that each fit into a block; one empty group for nothing."""
        puts, self._puts = self._puts, []
        group: list[Entries] = []
        free = self._max_entries - len(puts)  # each may take one number more, to end at 8 bytes
        left = free
        for put in puts:
            places, values = put.places, put.values
            while len(places):
                if not left:
                    yield group
                    group, left = [], free
                now = min(left, len(places))
                group.append(Entries(put.table, places[:now], values[:now]))
                places, values, left = places[now:], values[now:], left - now
        yield group

    def _next_host(self) -> torch.Tensor:
        self._turn = (self._turn + 1) % RING
        copied = self._copied[self._turn]
        if copied is not None:
            wait(copied)
        return self._hosts[self._turn]


def _size(num_rows: int) -> int:
    """Numbers of ``StepRows``. Each array begins at a multiple of 16 bytes, because Triton compiles
    other kernels for addresses that do not."""
    return ARRAYS * (num_rows // 4 + 1) * 4


def _write_entries(
    host: torch.Tensor, begin: int, group: list[Entries]
) -> tuple[int, list[tuple[torch.Tensor, slice, slice]]]:
    """Write the entries from ``begin`` on. Returns where they end, and for each the table and where
    its places and values are."""
    end, written = begin, []
    for part in group:
        count = len(part.places)
        middle, begin, end = end + 2 * count, end, end + 3 * count + count % 2
        host[begin:middle].view(torch.int64).numpy()[:] = part.places
        host[middle : middle + count].numpy()[:] = part.values
        written.append((part.table, slice(begin, middle), slice(middle, middle + count)))
    return end, written


def _write_rows(
    rows: StepRows, batch: ForwardBatch, width: int, num_rows: int, padding_slot: int
) -> None:
    """width: columns of the table of ids."""
    n, samples = len(batch.slots), len(batch.sample_slots)
    for array, values, rest in (
        (rows.slots, batch.slots, padding_slot),
        (rows.cu_q, batch.cu_q, batch.num_tokens),
        (rows.kv_lens, batch.kv_lens, 0),
        (rows.sample_index, batch.sample_index, 0),
    ):
        numbers = array.numpy()
        numbers[: len(values)] = values
        numbers[len(values) : num_rows + 1] = rest
    ends = batch.kv_lens[np.searchsorted(batch.cu_q[1:], batch.sample_index, side="right")]
    rows.next_place.numpy()[:samples] = batch.sample_slots * width + ends
    assert n <= num_rows <= len(rows.slots)
