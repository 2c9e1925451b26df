"""The block of a step, on CPU tensors: what a device finds in it is what the host would have written."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from setpoint.engine.kernels.device_sampling import DeviceRows
from setpoint.engine.runner import step_block
from setpoint.engine.runner.batch import ForwardBatch
from setpoint.engine.runner.forward_pass import ForwardPass
from setpoint.engine.runner.step_block import StepBlock
from setpoint.engine.sampling.columns import NUM_WORDS, SLOT_DTYPE, SamplingRows, TokenLists

CPU = torch.device("cpu")
NONE = np.zeros(0, np.int64)
WIDTH, SLOTS = 12, 6


def batch_of(rng: np.random.Generator) -> ForwardBatch:
    n = int(rng.integers(0, SLOTS + 1))
    slots = rng.permutation(SLOTS)[:n].astype(np.int32)
    counts = rng.integers(1, 4, n)
    kv_lens = (counts + rng.integers(0, 5, n)).astype(np.int32)
    cu_q = np.append(0, counts.cumsum()).astype(np.int32)
    sampling = rng.random(n) < 0.6
    return ForwardBatch(
        num_tokens=int(cu_q[-1]),
        slots=slots,
        cu_q=cu_q,
        kv_lens=kv_lens,
        starts=(kv_lens - counts).astype(np.int32),
        sample_slots=slots[sampling],
        sample_index=(cu_q[1:] - 1)[sampling],
    )


def sampling_rows(
    rng: np.random.Generator, batch: ForwardBatch, table: torch.Tensor
) -> SamplingRows:
    """Some are below their minimum length, or have biases, or both."""
    samples = len(batch.sample_slots)
    columns = np.zeros(samples, SLOT_DTYPE)
    columns["seed"] = rng.integers(0, 1 << 62, samples)
    columns["top_p"] = rng.random(samples)
    columns["biased"], columns["min_new"] = rng.random((2, samples)) < 0.3
    lists = {
        slot: TokenLists(
            rng.integers(0, 100, rng.integers(1, 4)),
            ids := rng.integers(0, 100, rng.integers(1, 4)),
            rng.random(len(ids)).astype(np.float32),
            np.zeros(0, np.int64),
            (),
        )
        for slot in batch.sample_slots.tolist()
    }
    for slot, biased in zip(lists, columns["biased"], strict=True):
        if not biased:
            lists[slot] = replace(lists[slot], bias_ids=NONE, bias=NONE.astype(np.float32))
    return SamplingRows(columns, batch.sample_slots, table, lists)


def check_sampling(sent: DeviceRows, rows: SamplingRows) -> None:
    """Whether the device knows the parameters and lists of the rows."""
    assert sent.known is rows.history
    assert (sent.parameters.numpy() == rows.columns.view(np.int32).reshape(-1, NUM_WORDS)).all()
    wanted = []
    for slot, column in zip(rows.slots.tolist(), rows.columns, strict=True):
        lists = rows.lists[slot]
        stops = lists.stop_ids.tolist() if column["min_new"] else []
        wanted += [stops, list(zip(lists.bias_ids.tolist(), lists.bias.tolist(), strict=True))]
    if sent.entries is None:
        assert not any(wanted)
        return
    ends, tokens, values = (
        tensor.tolist() for tensor in (sent.entries.ends, sent.entries.tokens, sent.entries.values)
    )
    found = [
        [*zip(tokens[begin:end], values[begin:end], strict=True)]
        if number % 2
        else tokens[begin:end]
        for number, (begin, end) in enumerate(pairwise(ends))
    ]
    assert found == wanted


@pytest.mark.parametrize("max_entries", [5, 64])
def test_a_device_finds_what_the_host_put(max_entries: int) -> None:
    rng = np.random.default_rng(max_entries)
    block = StepBlock(CPU, SLOTS, max_entries)
    tables = [torch.zeros(SLOTS + 1, WIDTH, dtype=torch.int32) for _ in range(2)]
    wanted = [table.clone().numpy() for table in tables]
    for _ in range(60):
        for table, copy in zip(tables, wanted, strict=True):
            places = rng.permutation(SLOTS * WIDTH)[: rng.integers(0, 20)]
            rows, columns = places // WIDTH, places % WIDTH
            values = rng.integers(0, 1000, len(places))
            for part in np.array_split(np.arange(len(places)), 2):
                block.put(table, rows[part], columns[part], values[part])
            copy[rows, columns] = values
        batch = batch_of(rng)
        n, samples = len(batch.slots), len(batch.sample_slots)
        padded = int(rng.integers(n, SLOTS + 1))
        rows = sampling_rows(rng, batch, tables[0])
        block.send(batch, rows, num_rows=padded, padding_slot=SLOTS)
        for table, copy in zip(tables, wanted, strict=True):
            assert (table.numpy() == copy).all()
        rows_sent = block.rows
        assert rows_sent.slots[:padded].tolist() == [*batch.slots, *[SLOTS] * (padded - n)]
        assert rows_sent.kv_lens[:padded].tolist() == [*batch.kv_lens, *[0] * (padded - n)]
        cu_q = [*batch.cu_q, *[batch.num_tokens] * (padded - n)]
        assert rows_sent.cu_q[: padded + 1].tolist() == cu_q
        index = [*batch.sample_index, *[0] * (padded - samples)]
        assert rows_sent.sample_index[:padded].tolist() == index

        check_sampling(block.sampling, rows)
        rows.columns["seed"] += 1
        block.send_sampling(rows)
        check_sampling(block.sampling, rows)
        assert block.sampling.places.tolist() == rows_sent.next_place[:samples].tolist()

        tokens = torch.from_numpy(rng.integers(-1, 500, samples))
        block.append(tables[0], tokens)
        lengths = dict(zip(batch.slots.tolist(), batch.kv_lens.tolist(), strict=True))
        for slot, token in zip(batch.sample_slots.tolist(), tokens.tolist(), strict=True):
            wanted[0][slot, lengths[slot]] = max(token, 0)
        assert (tables[0].numpy() == wanted[0]).all()


def test_the_host_waits_until_a_block_has_been_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that copies late: a block of the ring is written again only after the device has
    read it."""
    late: list[tuple[torch.Tensor, torch.Tensor]] = []

    class LateTensor:
        """The device's block: copies to it are made when somebody waits for them."""

        def __init__(self, block: torch.Tensor) -> None:
            self.block = block

        def __getitem__(self, part: slice) -> LateTensor:
            return LateTensor(self.block[part])

        def __len__(self) -> int:
            return len(self.block)

        def view(self, *shape: int) -> LateTensor:
            return self

        def copy_(self, source: torch.Tensor, *, non_blocking: bool) -> None:
            assert non_blocking
            late.append((self.block, source))

    marks: list[int] = []

    def wait(mark: int) -> None:
        while late and len(marks) - len(late) <= mark:
            block, source = late.pop(0)
            block.copy_(source)
            seen.append(block[:SLOTS].tolist())

    seen: list[list[int]] = []
    monkeypatch.setattr(
        step_block, "marker", lambda device: lambda: marks.append(0) or len(marks) - 1
    )
    monkeypatch.setattr(step_block, "wait", wait)
    block = StepBlock(CPU, SLOTS, 8)
    block._block = LateTensor(block._block)  # type: ignore[assignment]
    table = torch.zeros(SLOTS + 1, WIDTH, dtype=torch.int32)
    sent = []
    for slot in range(SLOTS):
        one = np.array([slot], np.int32)
        batch = ForwardBatch(1, one, np.array([0, 1], np.int32), one + 1, one, one[:0], one[:0])
        rows = SamplingRows(np.zeros(0, SLOT_DTYPE), one[:0], table)
        block.send(batch, rows, num_rows=SLOTS, padding_slot=SLOTS)
        sent.append([slot, *[SLOTS] * (SLOTS - 1)])
    wait(len(marks))
    assert seen == sent


def test_on_the_cpu_rows_that_may_not_be_written_are_copied() -> None:
    """A rank reads the rows of another's plan from bytes. Torch warns of views of such arrays."""
    batch = batch_of(np.random.default_rng(3))
    fixed = replace(
        batch,
        slots=np.frombuffer(batch.slots.tobytes(), np.int32),
        sample_index=np.frombuffer(batch.sample_index.tobytes(), np.int32),
    )
    no_tokens = torch.empty(0, 1)
    step = ForwardPass(None, None, None, (), 1, no_tokens, CPU)  # type: ignore[arg-type]
    assert step.inputs(fixed).slots.tolist() == batch.slots.tolist()
    assert step.sample_index(fixed).tolist() == batch.sample_index.tolist()


@pytest.mark.parametrize("num_rows", range(1, 9))
def test_addresses_do_not_depend_on_the_number_of_slots(num_rows: int) -> None:
    """Triton compiles other kernels for addresses that are no multiples of 16 bytes."""
    block = StepBlock(CPU, num_rows)
    rows = block.rows
    for array in (rows.slots, rows.cu_q, rows.kv_lens, rows.sample_index, rows.next_place):
        assert array.data_ptr() % 16 == 0
        assert len(array) == num_rows + (array is rows.cu_q)
