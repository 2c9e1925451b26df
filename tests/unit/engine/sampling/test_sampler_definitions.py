"""The batched sampler against plain one-row definitions in numpy, and against transformers where it
defines the same thing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from setpoint.core.plan import Admit, TokenMasks
from setpoint.core.request import LogprobOptions, RequestOptions
from setpoint.core.result import one_each
from setpoint.core.sampling import SamplingParams
from setpoint.engine.kernels.ref import RefOps
from setpoint.engine.runner.rows import SlotTable
from setpoint.engine.sampling import distribution
from setpoint.engine.sampling.random import uniform
from setpoint.engine.sampling.sampler import Sampled, concatenate, sample

VOCAB = 97
GREEDY = SamplingParams(temperature=0.0)
CPU = torch.device("cpu")
RNG = np.random.default_rng(3)
MIXED = [
    GREEDY,
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(top_p=0.6),
    SamplingParams(top_k=20, top_p=0.8, temperature=2.0),
    SamplingParams(min_p=0.2),
    SamplingParams(top_k=30, top_p=0.7, min_p=0.05),
    SamplingParams(temperature=0.0, frequency_penalty=1.5),
    SamplingParams(presence_penalty=-1.0, repetition_penalty=1.7, top_k=1),
    SamplingParams(logit_bias=((4, 100.0), (9, -5.0)), temperature=0.5),
    SamplingParams(temperature=0.0, min_new_tokens=9),
    SamplingParams(repetition_penalty=0.5, top_p=0.9, min_new_tokens=2),
]
HISTORY = [RNG.integers(0, 40, RNG.integers(3, 30)).tolist() for _ in MIXED]


def table_of(params: list[SamplingParams], histories: list[list[int]], **more: object) -> SlotTable:
    """Slot i: history i, of which the first two thirds are prompt, seed 1000 + i; ids 0, 1 and 2
    stop."""
    table = SlotTable(context_len=512, page_size=1, max_slots=4096, device=CPU)
    table.admit(
        [
            Admit(
                slot,
                slot,
                np.array(ids, np.int32),
                2 * len(ids) // 3,
                each,
                1000 + slot,
                stop_ids=(0, 1, 2),
                **more,
            )  # type: ignore[arg-type]
            for slot, (each, ids) in enumerate(zip(params, histories, strict=True))
        ]
    )
    return table


def run(
    logits: torch.Tensor,
    table: SlotTable,
    slots: list[int],
    masks: TokenMasks | None = None,
    *,
    peek: bool = True,
    knows_best: bool = False,
) -> Sampled:
    rows = table.sampling_rows(np.array(slots, np.int32))
    best = RefOps().best_tokens(logits) if knows_best else None
    return sample(logits, rows, masks, RefOps(), peek=peek, best=best)


def edited(logits: np.ndarray, params: SamplingParams, ids: list[int]) -> np.ndarray:
    """One row, as docs/sglang/sampling.md words it."""
    logits = logits.astype(np.float64)
    outputs = ids[2 * len(ids) // 3 :]
    for token in range(VOCAB):
        count = outputs.count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if len(outputs) < params.min_new_tokens:
        logits[[0, 1, 2]] = -np.inf
    for token in set(ids):
        logits[token] = (
            logits[token] / params.repetition_penalty
            if logits[token] > 0
            else logits[token] * params.repetition_penalty
        )
    for token, bias in params.logit_bias:
        logits[token] += bias
    return logits


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def kept(probs: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The tokens that truncation leaves; jointly, or one after the other when min-p is set."""
    order = np.argsort(-probs, kind="stable")
    ranked = probs[order].copy()
    k = VOCAB if params.top_k < 0 else params.top_k
    inside_k = np.arange(VOCAB) < k
    if params.min_p > 0:
        ranked = np.where(inside_k, ranked, 0) / ranked[inside_k].sum()
    inside_p = np.cumsum(ranked) - ranked < params.top_p
    inside = inside_k & inside_p & (ranked >= params.min_p * ranked[0])
    mask = np.zeros(VOCAB, bool)
    mask[order[inside]] = True
    return mask


def defined_token(logits: np.ndarray, params: SamplingParams, ids: list[int], seed: int) -> int:
    logits = edited(logits, params, ids)
    if params.is_greedy:
        return int(logits.argmax())
    probs = softmax(logits / params.temperature)
    probs = np.where(kept(probs, params), probs, 0)
    number = float(uniform(torch.tensor([seed]), torch.tensor([len(ids)])))
    return int(np.searchsorted(np.cumsum(probs), number * probs.sum(), side="right"))


@pytest.mark.parametrize("peek", [True, False])
@pytest.mark.parametrize("head", [4, 1024])
@pytest.mark.parametrize("trial", range(4))
def test_mixed_batch_equals_one_row_definition(
    monkeypatch: pytest.MonkeyPatch, peek: bool, head: int, trial: int
) -> None:
    monkeypatch.setattr(distribution, "HEAD", head)
    logits = torch.tensor(np.random.default_rng(trial).normal(0, 3, (len(MIXED), VOCAB)))
    table = table_of(MIXED, HISTORY)
    wanted = [
        defined_token(logits[slot].numpy(), MIXED[slot], HISTORY[slot], 1000 + slot)
        for slot in range(len(MIXED))
    ]
    assert (
        run(logits.clone(), table, list(range(len(MIXED))), peek=peek).ids.tensor.tolist() == wanted
    )
    # Any order and any company: the same token per slot.
    order = np.random.default_rng(trial).permutation(len(MIXED)).tolist()
    assert run(logits[order], table, order, peek=peek).ids.tensor.tolist() == [
        wanted[slot] for slot in order
    ]
    for slot in range(len(MIXED)):
        assert run(logits[slot : slot + 1], table, [slot], peek=peek).ids.tensor.tolist() == [
            wanted[slot]
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_do_not_depend_on_the_company_in_lower_precision(dtype: torch.dtype) -> None:
    logits = torch.tensor(RNG.normal(0, 3, (len(MIXED), VOCAB))).to(dtype)
    table = table_of(MIXED, HISTORY)
    together = run(logits, table, list(range(len(MIXED)))).ids.tensor.tolist()
    assert together == [
        int(run(logits[slot : slot + 1], table, [slot]).ids.tensor) for slot in range(len(MIXED))
    ]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_k=7, temperature=1.5),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.1),
    ],
)
def test_frequencies_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square over 20,000 draws: different seeds at one position, then one seed over consecutive
    positions."""
    num_draws = 20_000
    row = np.random.default_rng(8).normal(0, 1.5, VOCAB)
    probs = softmax(row / params.temperature)
    probs = np.where(kept(probs, params), probs, 0) / probs[kept(probs, params)].sum()
    table = table_of([params], [[5]])
    rows = table.sampling_rows(np.zeros(num_draws, np.int32))
    logits = torch.tensor(row, dtype=torch.float32).expand(num_draws, -1)
    for vary in ("seed", "length"):
        rows.columns["seed"], rows.columns["length"] = 42, 17
        rows.columns[vary] = np.arange(num_draws)
        counts = np.bincount(
            sample(logits, rows, None, RefOps(), peek=True).ids.tensor.numpy(), minlength=VOCAB
        )
        assert counts[probs == 0].sum() == 0
        common = probs * num_draws >= 5
        expected = np.append(probs[common], probs[~common].sum()) * num_draws
        found = np.append(counts[common], counts[~common].sum())
        chi_square = float(((found - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
        degrees = common.sum()
        assert chi_square < degrees + 4 * (2 * degrees) ** 0.5


def test_uniform_is_flat_and_uncorrelated() -> None:
    count = 1 << 16
    for seeds, positions in (
        (torch.arange(count), torch.full((count,), 9)),
        (torch.full((count,), (1 << 63) - 1), torch.arange(count)),
        (torch.arange(count), torch.arange(count)),
    ):
        numbers = uniform(seeds, positions).numpy()
        assert 0 <= numbers.min() <= numbers.max() < 1
        bins = np.bincount((numbers * 256).astype(int), minlength=256)
        assert ((bins - 256) ** 2 / 256).sum() < 255 + 4 * (2 * 255) ** 0.5
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / count**0.5


def test_uniform_numbers_never_change() -> None:
    """A recorded conversation must replay under later versions."""
    numbers = uniform(torch.tensor([0, 1, 42, (1 << 63) - 1]), torch.tensor([0, 0, 1000, 7]))
    assert numbers.tolist() == [
        0.28176129772258496,
        0.8628561488610587,
        0.09832583850150012,
        0.9058234958246422,
    ]


def test_penalties_equal_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    ids = [5, 5, 9, 30, 9, 5]
    table = table_of(
        [SamplingParams(temperature=0.0, repetition_penalty=1.8)],
        [ids],
        options=RequestOptions(logprobs=LogprobOptions(top=VOCAB)),
    )
    logits = torch.tensor(RNG.normal(0, 2, (1, VOCAB)), dtype=torch.float32)
    wanted = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([ids]), logits.clone()).log_softmax(
        -1
    )
    logprobs = run(logits, table, [0]).logprobs
    assert logprobs is not None
    torch.testing.assert_close(logprobs.top_values, wanted.gather(1, logprobs.top_ids.long()))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_output_logprobs_are_after_edits_and_temperature_before_truncation(
    temperature: float,
) -> None:
    params = SamplingParams(
        temperature=temperature, top_k=3, frequency_penalty=0.7, logit_bias=((11, 2.0),)
    )
    table = table_of([SamplingParams(), params], [[4], HISTORY[0]])
    wants = RequestOptions(logprobs=LogprobOptions(top=5, ids=(3, 90)))
    history = np.array(HISTORY[0], np.int32)
    table.admit([Admit(1, 1, history, 2 * len(history) // 3, params, 7, options=wants)])
    logits = torch.tensor(RNG.normal(0, 2, (2, VOCAB)))
    sampled = run(logits.clone(), table, [0, 1])
    wanted = np.log(softmax(edited(logits[1].numpy(), params, HISTORY[0]) / (temperature or 1.0)))
    logprobs = sampled.logprobs
    assert logprobs is not None
    assert logprobs.ids.tolist() == [int(sampled.ids.tensor[1])]
    np.testing.assert_allclose(logprobs.values, wanted[logprobs.ids], rtol=1e-5)
    np.testing.assert_allclose(logprobs.top_values[0], np.sort(wanted)[::-1][:5], rtol=1e-5)
    np.testing.assert_allclose(logprobs.picked[0], wanted[[3, 90]], rtol=1e-5)


def test_grammar_masks_forbid_tokens() -> None:
    params = [
        GREEDY,
        SamplingParams(temperature=5.0),
        SamplingParams(temperature=0.0, logit_bias=((96, 50.0),)),
    ]
    table = table_of(params, HISTORY[:3])
    allowed = {2: [0, 33, 95], 1: [96]}
    words = np.zeros((2, 4), np.uint32)
    for row, tokens in enumerate(allowed.values()):
        for token in tokens:
            words[row, token // 32] |= np.uint32(1 << token % 32)
    logits = torch.tensor(RNG.normal(0, 2, (3, VOCAB)), dtype=torch.float32)
    masks = TokenMasks(np.array(list(allowed), np.int32), words.view(np.int32))
    ids = run(logits.clone(), table, [0, 1, 2], masks).ids.tensor.tolist()
    best = max(allowed[2], key=lambda token: float(logits[2, token]))
    assert ids == [int(logits[0].argmax()), 96, best]


@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
@pytest.mark.parametrize("return_logprob", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_masks_mean_the_same_if_the_best_tokens_are_known(
    share: float, return_logprob: bool, seed: int
) -> None:
    """A mask that allows the best token of a greedy row is not applied, and nobody can tell."""
    draw = np.random.default_rng(seed)
    params = [
        *[GREEDY] * 3,
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0, logit_bias=((7, 9.0),)),
        SamplingParams(temperature=0, frequency_penalty=1.5),
        SamplingParams(temperature=0, min_new_tokens=200, max_new_tokens=400),
        SamplingParams(temperature=0.7, top_p=0.5),
    ]
    if seed % 2:
        params = [*params[:4], *[GREEDY] * 3, params[-1]]  # no edits but the masks
    wants = RequestOptions(logprobs=LogprobOptions() if return_logprob else None)
    table = table_of(params, HISTORY[:8], options=wants)
    bits = draw.random((6, 128)) < share
    bits[:, 40] = True
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    masks = TokenMasks(np.array([7, 0, 3, 4, 5, 1], np.int32), words)
    logits = torch.tensor(draw.normal(0, 2, (8, VOCAB)), dtype=torch.float32)
    logits[1, 3] = torch.nan
    outcomes = [
        run(logits.clone(), table, list(range(8)), masks, knows_best=known)
        for known in (False, True)
    ]
    assert outcomes[0].ids.tensor.tolist() == outcomes[1].ids.tensor.tolist()
    if return_logprob:
        values = [each.logprobs.values for each in outcomes if each.logprobs is not None]
        np.testing.assert_array_equal(*values)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.3),
    ],
)
def test_rows_with_logits_that_are_not_finite_yield_minus_one(params: SamplingParams) -> None:
    logits = torch.tensor(RNG.normal(0, 2, (5, VOCAB)), dtype=torch.float32)
    healthy = run(
        logits, table := table_of([params] * 5, HISTORY[:5]), [0, 1, 2, 3, 4]
    ).ids.tensor.tolist()
    logits[0, 50] = torch.nan
    logits[1] = -torch.inf
    logits[2, 3] = torch.inf
    ids = run(logits, table, [0, 1, 2, 3, 4]).ids
    assert ids.tensor.tolist() == [-1, -1, -1, *healthy[3:]]
    table.append(np.arange(5, dtype=np.int32), ids, one_each(5))
    assert (table.ids.tensor >= 0).all()


def test_ties_go_to_the_lowest_id_for_greedy() -> None:
    logits = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
    logits[0, [20, 60, 80]] = 3
    assert run(logits, table_of([GREEDY], [[1]]), [0]).ids.tensor.tolist() == [20]


@pytest.mark.parametrize("peek", [True, False])
def test_a_sampling_mask_has_the_tokens_that_are_left(peek: bool) -> None:
    params = [
        SamplingParams(temperature=0.7, top_k=9),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.3, top_k=40, top_p=0.6, frequency_penalty=0.5),
        SamplingParams(top_k=20, min_p=0.1),
    ]
    wants = RequestOptions(token_facts=("sampling_mask",))
    table = table_of(params, HISTORY[:4], options=wants)
    logits = torch.tensor(RNG.normal(0, 3, (4, VOCAB)))
    sampled = run(logits.clone(), table, [0, 1, 2, 3], peek=peek)
    (fact,) = sampled.facts
    assert (fact.name, fact.rows.tolist()) == ("sampling_mask", [0, 1, 2, 3])
    for row, numbers in enumerate(fact.numbers.tolist()):
        token, mask = int(sampled.ids.tensor[row]), [each for each in numbers if each >= 0]
        assert token in mask
        if params[row].is_greedy:
            assert mask == [token]
            continue
        own = edited(logits[row].numpy(), params[row], HISTORY[row]) / params[row].temperature
        probs = softmax(own)
        assert mask == sorted(np.flatnonzero(kept(probs, params[row])), key=lambda t: -probs[t])


def test_facts_of_several_blocks_keep_their_rows() -> None:
    wants = RequestOptions(token_facts=("sampling_mask",))
    table = table_of([GREEDY] * 2, HISTORY[:2], options=wants)
    logits = torch.tensor(RNG.normal(0, 3, (2, VOCAB)))
    blocks = [run(logits[[row]].clone(), table, [row]) for row in (0, 1)]
    assert [fact.rows.tolist() for fact in concatenate(blocks).facts] == [[0], [1]]
