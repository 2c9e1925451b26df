"""Sampling in Triton, interpreted, against the sampler of the CPU. What a device is told goes through
the block of a step, on CPU tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from setpoint.checkpoint.spec import read_spec
from setpoint.core.plan import OWN_LENGTH, Admit, TokenMasks
from setpoint.core.request import SAMPLING_MASK, LogprobOptions, RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.kernels.ref import RefOps
from setpoint.engine.runner import model_runner
from setpoint.engine.runner.batch import ForwardBatch
from setpoint.engine.runner.rows import SlotTable
from setpoint.engine.runner.step_block import StepBlock
from setpoint.engine.sampling import device_sampler, logprobs, sampler
from setpoint.engine.sampling.columns import SLOT_DTYPE, Columns, SamplingRows
from setpoint.engine.sampling.distribution import distribution
from setpoint.engine.sampling.edits import edit_logits
from setpoint.engine.sampling.random import uniform
from setpoint.planning import memory
from setpoint_testing import interpreted_triton as interpreted_triton
from setpoint_testing.live_bytes import LiveBytes
from setpoint_testing.plans import Driver
from setpoint_testing.specs import tiny_spec
from setpoint_testing.tiny_models import write_tiny_llama

# isort: split
from setpoint.engine.kernels.device_sampling import Draws
from setpoint.engine.kernels.triton import sampling

CPU, CONTEXT, STOPS = torch.device("cpu"), 3000, (1, 2, 1600)
GREEDY = SamplingParams(temperature=0.0)
DRAWN = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=5, temperature=1.3),
    SamplingParams(top_p=0.6),
    SamplingParams(top_p=0.9, top_k=40),
    SamplingParams(min_p=0.2),
    SamplingParams(top_k=30, top_p=0.7, min_p=0.05),
    SamplingParams(top_p=0.5, min_p=0.01, temperature=2.0),
    SamplingParams(top_k=7, min_p=0.01),
    SamplingParams(top_p=0.999999, temperature=3.0),
]
EDITED = [
    SamplingParams(temperature=0.0, frequency_penalty=1.5),
    SamplingParams(presence_penalty=-1.0, repetition_penalty=1.7, top_k=2),
    SamplingParams(logit_bias=((4, 100.0), (9, -5.0), (1599, 3.0)), temperature=0.5),
    SamplingParams(temperature=0.0, min_new_tokens=9000, max_new_tokens=None),
    SamplingParams(
        repetition_penalty=0.5,
        presence_penalty=0.3,
        top_p=0.9,
        min_new_tokens=2000,
        max_new_tokens=None,
        logit_bias=((1, 3.0), (2, 4.0)),
    ),
    GREEDY,
    SamplingParams(),
]


class Ops(RefOps):
    """The reference, with kernels that sample."""

    sampling = sampling


def rows_of(
    params: list[SamplingParams], vocabulary: int, seed: int, options: RequestOptions | None = None
) -> SamplingRows:
    """Rows with histories of 3 to 2,000 tokens, as a device knows them."""
    rng, n = np.random.default_rng(seed), len(params)
    table = SlotTable(context_len=CONTEXT, page_size=1, max_slots=n + 2, device=CPU)
    slots = rng.permutation(n + 2)[:n].astype(np.int32)
    admits = []
    for slot, each in zip(slots.tolist(), params, strict=True):
        ids = rng.integers(0, vocabulary, rng.integers(3, 2000)).astype(np.int32)
        ids[len(ids) // 2 :] %= 50  # some occur often
        seq_seed = int(rng.integers(0, 1 << 62))
        more = {} if options is None else {"options": options}
        stop_ids = tuple(token for token in STOPS if token < vocabulary)
        admits.append(
            Admit(slot, slot, ids, 2 * len(ids) // 3, each, seq_seed, stop_ids=stop_ids, **more)
        )
    table.admit(admits)
    return on_device(table.sampling_rows(slots))


def on_device(rows: SamplingRows) -> SamplingRows:
    block, n = StepBlock(CPU, len(rows.slots)), len(rows.slots)
    lengths, counts = rows.columns["length"], np.arange(n + 1, dtype=np.int32)
    batch = ForwardBatch(n, rows.slots, counts, lengths, lengths - 1, rows.slots, counts[:n])
    block.send(batch, rows, num_rows=n, padding_slot=n)
    return replace(rows, on_device=block.sampling)


def only(rows: SamplingRows, which: slice) -> SamplingRows:
    """Some of the rows, as if there were no others."""
    part = SamplingRows(rows.columns[which], rows.slots[which], rows.history, rows.lists)
    return on_device(part)


def masks_of(rows: SamplingRows, vocabulary: int, which: list[int]) -> TokenMasks:
    rng = np.random.default_rng(vocabulary)
    words = rng.integers(-(2**31), 2**31, (len(which), -(-vocabulary // 32))).astype(np.int32)
    return TokenMasks(rows.slots[which], words)


def chosen(
    logits: torch.Tensor, rows: SamplingRows, masks: TokenMasks | None = None
) -> torch.Tensor:
    """The device's tokens, which are in the table of ids too."""
    sampled = device_sampler.sample_on_device(logits.clone(), rows, masks, Ops())
    ids = sampled.ids.tensor
    written = rows.history[rows.slots, rows.columns["length"]]
    assert torch.equal(written, ids.clamp(min=0).int())
    return ids


def is_near(logits: torch.Tensor, columns: Columns, token: int, expected: int) -> bool:
    """Whether rounding can make this row's token another one: its number falls close to the border
    between them, or a token at a threshold is left or not."""
    probs = distribution(logits.double().unsqueeze(0), columns, False)[0]
    ends = probs.cumsum(0) / probs.sum()
    number = uniform(
        torch.from_numpy(columns["seed"].copy()), torch.from_numpy(columns["length"].astype(int))
    )
    before = ends[token] - probs[token] / probs.sum()
    return bool(probs[token] > 0 and before - 2e-5 <= number <= ends[token] + 2e-5)


def compare(params: list[SamplingParams], vocabulary: int, seed: int, spread: float = 3.0) -> None:
    """Compare with the CPU, and each row with the row alone."""
    rows = rows_of(params, vocabulary, seed)
    torch.manual_seed(seed)
    logits = torch.randn(len(params), vocabulary) * spread
    expected = sampler.sample(logits.clone(), rows, None, RefOps(), peek=True).ids.tensor
    found = chosen(logits, rows)
    different = (found != expected).nonzero().flatten().tolist()
    assert len(different) <= 1
    edited = edit_logits(logits, rows, None, RefOps())
    for row in different:
        columns = rows.columns[row : row + 1]
        assert is_near(edited[row], columns, int(found[row]), int(expected[row])), params[row]
    for row in range(0, len(params), 3):
        one = slice(row, row + 1)
        assert chosen(logits[one], only(rows, one)).tolist() == found[one].tolist()


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.full) for s in (1, 2, 3))])
def test_draws_are_those_of_the_cpu(seed: int) -> None:
    compare([*DRAWN, GREEDY], 1500 + 611 * seed, seed, spread=1.0 + seed)


@pytest.mark.parametrize("vocabulary", [3, 31, 1024, 1025])
def test_vocabularies_of_few_tiles(vocabulary: int) -> None:
    compare(DRAWN[1:7:2], vocabulary, vocabulary)


@pytest.mark.full
@pytest.mark.parametrize(("vocabulary", "spread"), [(151_936, 2.5), (151_936, 5.0), (262_208, 5.0)])
def test_draws_from_large_vocabularies(vocabulary: int, spread: float) -> None:
    compare([*DRAWN, GREEDY], vocabulary, 7, spread)


def test_draws_of_whole_rows_and_best_tokens_of_a_large_vocabulary() -> None:
    compare([SamplingParams(), GREEDY, SamplingParams(top_k=20)], 151_936, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_changes_of_logits_are_those_of_the_cpu(masked: bool, dtype: torch.dtype) -> None:
    """Bit for bit."""
    vocabulary = 5003
    rows = rows_of(EDITED, vocabulary, 5)
    logits = (torch.randn(len(EDITED), vocabulary + 5) * 3).to(dtype)[:, :vocabulary]
    masks = masks_of(rows, vocabulary, [4, 0, 6]) if masked else None
    sent = None if masks is None else device_sampler._sent(masks, rows, CPU)
    expected = edit_logits(logits.clone(), rows, masks, RefOps())
    before = logits.clone()
    found = sampling.edit(logits, rows.on_device, sent, in_place=False)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert torch.equal(logits, before)
    part = slice(3, 5)
    alone = sampling.edit(logits[part], rows.on_device.rows(part), None, in_place=False)
    assert masked or torch.equal(alone, expected[part])
    assert (chosen(logits, rows, masks) >= 0).all()


def test_masks_alone_are_applied_in_place() -> None:
    vocabulary = 4500
    rows = rows_of([GREEDY] * 3, vocabulary, 6)
    logits = torch.randn(3, vocabulary + 4).bfloat16()[:, :vocabulary]
    masks = masks_of(rows, vocabulary, [2, 1])
    expected = edit_logits(logits.contiguous().clone(), rows, masks, RefOps())
    sent = device_sampler._sent(masks, rows, CPU)
    assert sampling.edit(logits, rows.on_device, sent, in_place=True) is logits
    assert torch.equal(logits, expected)
    best = RefOps().best_tokens(expected)
    assert chosen(logits, rows, masks).tolist() == best.tolist()


def test_rows_with_logits_that_are_not_finite_yield_minus_one() -> None:
    params = [SamplingParams(), GREEDY, SamplingParams(top_p=0.5)] * 4
    rows = rows_of(params, 2100, 8)
    logits = torch.randn(12, 2100)
    logits[9:, :1100] = -torch.inf
    expected = chosen(logits, rows)
    assert (expected[9:] >= 1100).all()
    expected[:9] = -1
    logits[:3, 1500], logits[3:6, 0], logits[6:9] = torch.nan, torch.inf, -torch.inf
    assert torch.equal(chosen(logits, rows), expected)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_a_nan_fails_its_row_alone_in_every_kind_of_sampling(bad: float, masked: bool) -> None:
    """It fails its row as on the CPU, wherever it is, unless a mask or a minimum length forbids its
    token. The other rows keep their tokens, logprobs and token facts."""
    kinds = [*DRAWN, *EDITED, GREEDY]
    vocabulary = 2100
    wants = RequestOptions(logprobs=LogprobOptions(top=3), token_facts=(SAMPLING_MASK,))
    rows = rows_of([each for each in kinds for _ in "12"], vocabulary, 16, wants)
    masks = masks_of(rows, vocabulary, list(range(len(rows.slots)))) if masked else None
    logits = torch.randn(len(rows.slots), vocabulary) * 2
    broken = logits.clone()
    places = [0, 1, 1023, 1024, 1600, vocabulary - 1]
    for number, row in enumerate(range(0, len(broken), 2)):
        broken[row, places[number % len(places)]] = bad
    expected = sampler.sample(broken.clone(), rows, masks, RefOps(), peek=True)
    healthy = device_sampler.sample_on_device(logits.clone(), rows, masks, Ops())
    found = device_sampler.sample_on_device(broken.clone(), rows, masks, Ops())
    fails = expected.ids.tensor == -1
    assert fails[::2].any()
    assert masked or bool(fails[::2].sum() > len(kinds) - 2), "all but those of a minimum length"
    assert not fails[1::2].any()
    assert torch.equal(found.ids.tensor == -1, fails)
    others = slice(1, None, 2)
    assert torch.equal(found.ids.tensor[others], healthy.ids.tensor[others])
    for name in ("values", "ids", "top_values", "top_ids"):
        one, other = (getattr(each.logprobs, name)[others] for each in (found, healthy))
        assert torch.equal(one, other), name
    (one,), (other,) = found.facts, healthy.facts
    assert torch.equal(one.numbers[others], other.numbers[others])


def test_memory_that_nothing_was_written_to_decides_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A number of candidates begins at 0, whatever was there before, and the list has no gaps."""
    rows = rows_of(DRAWN, 2500, 17)
    logits = torch.randn(len(DRAWN), 2500)
    expected = chosen(logits, rows)
    empty = torch.empty

    def full_of_the_best(*size: object, **how: object) -> torch.Tensor:
        return empty(*size, **how).fill_(1)  # as a weight, that of the likeliest token

    monkeypatch.setattr(torch, "empty", full_of_the_best)
    assert torch.equal(chosen(logits, rows), expected)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("params", "left"),
    [
        (SamplingParams(top_k=2), 8),
        (SamplingParams(top_k=9), 12),
        (SamplingParams(top_p=0.01), 8),
        (SamplingParams(top_p=0.79), 8),
        (SamplingParams(top_p=0.81), 12),
        (SamplingParams(min_p=0.99), 8),
        (SamplingParams(top_k=9, top_p=0.87, min_p=0.1), 8),
        (SamplingParams(top_k=9, top_p=0.9, min_p=0.1), 12),
    ],
)
def test_tokens_that_tie_at_a_threshold_stay(params: SamplingParams, left: int) -> None:
    """Eight tokens have twice the probability of four, all others none."""
    tokens = np.arange(100, 1900, 150)
    is_small = np.isin(tokens, tokens[[0, 5, 6, 11]])
    logits = torch.full((4, 2000), -torch.inf)
    logits[:, tokens] = torch.from_numpy(np.where(is_small, 2 - np.log(2), 2)).float()
    rows = rows_of([params] * 4, 2000, 9)
    weights = np.where(is_small, left > 8, 2.0)
    ends = weights.cumsum() / weights.sum()
    columns = rows.columns
    for row in range(4):  # numbers that do not fall close to the border between two tokens
        number = float(ends[3 * row + 1]) - 0.05
        columns["seed"][row] = next(
            seed
            for seed in range(10_000)
            if abs(number_of(seed, columns["length"][row]) - number) < 0.02
        )
    assert chosen(logits, on_device(rows)).tolist() == tokens[1::3].tolist()


def test_with_min_p_top_p_is_a_share_of_all_that_top_k_leaves() -> None:
    """Also of tokens that are then below min-p, and of the last that top-k leaves."""
    weights = torch.zeros(2, 2000)
    weights[0, 500], weights[0, 1500], weights[0, 600:700] = 1.0, 0.5, 0.1
    weights[1, 500], weights[1, 1500], weights[1, 600:700] = 1.0, 0.9, 0.8
    params = [SamplingParams(top_k=k, top_p=p, min_p=0.3) for k, p in ((150, 0.5), (2, 0.6))]
    rows = rows_of(params, 2000, 14)
    for row, length in enumerate(rows.columns["length"].tolist()):
        rows.columns["seed"][row] = next(
            seed for seed in range(99) if 0.7 < number_of(seed, length) < 0.95
        )
    assert chosen(weights.log(), on_device(rows)).tolist() == [1500, 1500]


def test_tokens_below_the_average_are_candidates_too() -> None:
    weights = torch.ones(1, 2000)
    weights[0, 1::2] = 0.5
    rows = rows_of([SamplingParams(top_p=0.9)], 2000, 15)
    ends, length = weights[0].double().cumsum(0) / 1500, rows.columns["length"][0]
    for seed in range(99):
        token = int((ends <= number_of(seed, length)).sum())
        if token % 2:
            break
    rows.columns["seed"] = seed
    assert chosen(weights.log(), on_device(rows)).tolist() == [token]


def number_of(seed: int, position: int) -> float:
    return float(uniform(torch.tensor([seed]), torch.tensor([int(position)])))


def test_a_row_of_too_many_candidates_is_read_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [DRAWN[4], DRAWN[6]]
    rows = rows_of(params, 2500, 11)
    logits = torch.randn(len(params), 2500)
    expected = chosen(logits, rows)
    monkeypatch.setattr(sampling, "CAPACITY", 4)
    assert torch.equal(chosen(logits, rows), expected)


@triton.jit
def store_uniform(parameters, out):
    row = tl.program_id(0)
    tl.store(out + row, sampling._uniform(parameters + row * sampling.WORDS))


def test_the_numbers_are_those_of_the_cpu() -> None:
    columns = np.zeros(64, SLOT_DTYPE)
    rng = np.random.default_rng(1)
    columns["seed"] = rng.integers(0, 1 << 63, 64, dtype=np.uint64).astype(np.int64)
    columns["length"] = rng.integers(0, 1 << 20, 64)
    words, out = torch.from_numpy(columns.view(np.int32)), torch.zeros(64, dtype=torch.float64)
    store_uniform[(64,)](words, out)
    positions = torch.from_numpy(columns["length"].astype(np.int64))
    assert torch.equal(out, uniform(torch.from_numpy(columns["seed"].copy()), positions))


def test_kernels_know_where_each_parameter_is() -> None:
    names = (
        "length num_prompt seed temperature top_k top_p min_p frequency presence repetition min_new"
    )
    for name in names.removesuffix(" min_new").split():
        assert getattr(sampling, name.upper()).value * 4 == SLOT_DTYPE.fields[name][1], name
    for name in ("greedy", "truncated", "penalised"):
        bit = sampling.FLAGS.value * 32 + getattr(sampling, name.upper()).value
        assert bit == SLOT_DTYPE.fields[name][1] * 8, name
    assert sampling.WORDS.value * 4 == SLOT_DTYPE.itemsize


def test_known_best_tokens_are_only_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of([GREEDY] * 3, 100, 12)
    logits, best = torch.randn(3, 100), torch.tensor([4, -1, 9])
    monkeypatch.setattr(sampling, "choose", None)
    sampled = device_sampler.sample_on_device(logits, rows, None, Ops(), best=best)
    assert sampled.ids.tensor is best
    assert rows.history[rows.slots, rows.columns["length"]].tolist() == [4, 0, 9]


def test_what_a_batch_needs_is_known_on_the_host() -> None:
    rows = rows_of([GREEDY, SamplingParams(), SamplingParams(top_k=3)], 100, 13)
    for count, draws in zip((1, 2, 3), Draws, strict=True):
        assert device_sampler._draws(rows.columns[:count]) is draws


@pytest.mark.parametrize("reports", ["none", "logprobs", "facts"])
def test_the_memory_plan_knows_what_sampling_needs(
    reports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that need everything: edits, masks, candidates, and a report of each."""
    vocabulary, n = 8192, 12
    spec = tiny_spec(vocab_size=vocabulary)
    monkeypatch.setattr(logprobs, "REPORT_BYTES", 2 * 4 * vocabulary)
    monkeypatch.setattr(memory, "REPORT_BYTES", 2 * 4 * vocabulary)
    options = {
        "none": None,
        "logprobs": RequestOptions(logprobs=LogprobOptions(top=3)),
        "facts": RequestOptions(token_facts=("sampling_mask",)),
    }[reports]
    rows = rows_of([EDITED[4]] * n, vocabulary, 14, options)
    logits = torch.randn(n, vocabulary, dtype=torch.float32).bfloat16()
    masks = masks_of(rows, vocabulary, list(range(n)))
    with torch.inference_mode(), LiveBytes() as live:
        device_sampler.sample_on_device(logits, rows, masks, Ops())
    assert memory.CANDIDATE_BYTES == 8 * sampling.CAPACITY
    planned = memory.sampling_bytes(spec, num_sampling=n, dtype_bytes=2, by_kernels=True)
    found = logits.nbytes + live.peak
    assert 0.5 * planned < found < planned, (found, planned)
    assert found > logits.nbytes + 4 * n * vocabulary, "the copy that is edited was counted"


WARM = SamplingParams(temperature=0.8)


def run(
    folder: Path, second: SamplingParams = WARM, *, fails: bool = False
) -> tuple[list[list[int]], list[float]]:
    """The tokens of each step, and logprobs. fails: whether the second row's logits are NaN in the
    second step."""
    config = EngineConfig(str(folder), read_spec(folder), dtype="float32", kv_dtype="float32")
    runner = build_runner(config)
    runner.backends = replace(runner.backends, ops=Ops())
    runner.allocate(num_pages=200, max_slots=8, context_len=32)
    driver = Driver(InprocExecutor(runner), 1, 32)
    samplings = [
        GREEDY,
        second,
        SamplingParams(top_p=0.7, frequency_penalty=0.4),
        SamplingParams(temperature=0.0, min_new_tokens=3, logit_bias=((5, 2.0),)),
    ]
    tokens, values, compute = [], [], runner.model.logits

    def broken(*args: object) -> torch.Tensor:
        logits = compute(*args)
        logits[1, 6] = torch.nan if len(tokens) == 1 else logits[1, 6]
        return logits

    runner.model.logits = broken if fails else compute
    for number in range(3):
        plan = driver.plan()
        for slot, each in enumerate(samplings):
            if number:
                plan.add_row(slot, slot, OWN_LENGTH, 1, 1)
                continue
            wants = LogprobOptions(top=1) if slot == 2 else None
            options = RequestOptions(logprobs=wants)
            driver.admit(
                plan,
                slot,
                [3 + slot, 9, 11],
                sampling=each,
                seed=slot,
                stop_ids=(2,),
                options=options,
            )
            plan.add_row(slot, slot, 0, 3, 1)
        words = np.full((1, 16), 0x55555555, np.int32)
        done = driver.run(plan, TokenMasks(np.array([1], np.int32), words) if number == 1 else None)
        tokens.append(done.token_ids.tolist())
        values += done.output_logprobs[2].values.tolist()
    return tokens, values


@pytest.mark.parametrize("block", [2, 256])
def test_steps_have_the_tokens_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    folder = write_tiny_llama(tmp_path)
    expected, wanted = run(folder)
    monkeypatch.setattr(model_runner, "reading_is_free", lambda device: False)
    monkeypatch.setattr(model_runner, "logits_rows", lambda device: block)
    found, values = run(folder)
    assert found == expected
    np.testing.assert_allclose(values, wanted, atol=1e-5)


@pytest.mark.parametrize(
    "params",
    [GREEDY, WARM, SamplingParams(top_k=9, top_p=0.9, min_p=0.01), EDITED[1]],
    ids=["greedy", "whole", "cut", "penalties"],
)
def test_a_row_with_nan_is_told_to_the_scheduler_and_harms_no_other(
    params: SamplingParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has been planned for the next step already, in which it goes on from the token 0."""
    monkeypatch.setattr(model_runner, "reading_is_free", lambda device: False)
    folder = write_tiny_llama(tmp_path)
    expected, wanted = run(folder, params)
    found, values = run(folder, params, fails=True)
    assert found[1][1] == -1
    assert found[2][1] >= 0
    expected[1][1], expected[2][1] = -1, found[2][1]
    assert found == expected
    assert values == wanted


def test_a_row_that_cannot_be_sampled_continues_with_other_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on the device, which is told its new parameters."""
    folder = write_tiny_llama(tmp_path)
    (expected, *_), _ = run(folder, GREEDY)
    assert expected[1] != run(folder)[0][0][1]
    monkeypatch.setattr(model_runner, "reading_is_free", lambda device: False)
    reports = device_sampler.with_reports

    def fails(logits, ids, rows, ops, *, peek):
        if (rows.columns["temperature"] == np.float32(0.8)).any():
            raise ValueError("no")
        return reports(logits, ids, rows, ops, peek=peek)

    monkeypatch.setattr(device_sampler, "with_reports", fails)
    (found, *_), _ = run(folder)
    assert found == expected
