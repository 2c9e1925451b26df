"""There is one order of tokens: by logit, and among equal logits by id. The greedy token is the first
in this order and the top logprobs are its beginning, whichever kernels compute them.

In bf16, logits of real models are often equal.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from setpoint.checkpoint.spec import read_spec
from setpoint.core.plan import Admit, TokenMasks
from setpoint.core.request import LogprobOptions, RequestOptions
from setpoint.core.result import PositionLogprobs
from setpoint.core.sampling import SamplingParams
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.kernels import kernel_registry as registry
from setpoint.engine.kernels.cpu import ops as cpu_ops
from setpoint.engine.kernels.ops import Ops
from setpoint.engine.kernels.ref import RefOps
from setpoint.engine.quant import linear_method as quant
from setpoint.engine.runner.rows import SlotTable
from setpoint.engine.sampling.logprobs import Logprobs
from setpoint.engine.sampling.sampler import sample
from setpoint_testing.cpu_levels import OTHERS, QUICK
from setpoint_testing.plans import Driver
from setpoint_testing.tiny_models import write_tiny_llama

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
IMPLEMENTATIONS = [
    *((level, dtype) for level in QUICK for dtype in (BF16, FP32)),
    *(("reference", dtype) for dtype in (BF16, FP32, FP64)),
    *(
        pytest.param(level, dtype, marks=pytest.mark.full)
        for level in OTHERS
        for dtype in (BF16, FP32)
    ),
]
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.7, top_k=1),
    SamplingParams(temperature=0.0, logit_bias=((5, 0.5), (0, -1.0))),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.25),
    SamplingParams(temperature=0.0, min_new_tokens=9),
    SamplingParams(temperature=0.8, top_p=0.9),
]
COUNTS = [1, 2, 3, 8, 20, 1000]
"""Top logprobs that the rows ask for; more than some of the vocabularies have."""


def make_ops(level: str, dtype: torch.dtype) -> Ops:
    return RefOps() if level == "reference" else cpu_ops.create(dtype, level=level)


def tied(draw: np.random.Generator, num_rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits of few different values, zeros of both signs among them."""
    values = draw.integers(0, draw.integers(2, 9), (num_rows, vocab)) - 4.0
    return torch.tensor(values * draw.choice([1.0, -1.0], values.shape)).to(dtype)


def in_order(logits: torch.Tensor) -> list[list[int]]:
    """The definition: tokens by falling logit, equal ones by rising id."""
    values = logits.double().numpy() + 0.0
    return [np.lexsort((np.arange(len(row)), -row)).tolist() for row in values]


@pytest.mark.parametrize(("level", "dtype"), IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_top_tokens_are_the_beginning_of_the_order(
    level: str, dtype: torch.dtype, seed: int
) -> None:
    ops, draw = make_ops(level, dtype), np.random.default_rng(seed)
    for vocab in (1, 5, 16, 67, 131, 4099):
        logits = tied(draw, 7, vocab, dtype)
        logits[1] = -torch.inf
        logits[2, : vocab // 2] = -torch.inf
        logits[3] = 1.0
        logits[4] = torch.arange(vocab).to(dtype)  # the best come last
        logits[5, vocab // 2] = torch.inf
        wanted = in_order(logits)
        for count in {1, 2, min(9, vocab), min(500, vocab), vocab}:
            if count <= vocab:
                ids = ops.top_tokens(logits, count)
                assert ids.dtype == torch.int64
                assert ids.tolist() == [row[:count] for row in wanted]
        best = ops.best_tokens(logits)
        assert torch.equal(best[best >= 0], ops.top_tokens(logits, 1)[best >= 0, 0])


@pytest.mark.parametrize(("level", "dtype"), IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("peek", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_greedy_token_is_the_first_of_its_top_logprobs(
    level: str, dtype: torch.dtype, peek: bool, seed: int
) -> None:
    ops, draw = make_ops(level, dtype), np.random.default_rng(seed)
    for vocab in (97, 2048):
        for known in (True, False):
            logits = tied(draw, len(PARAMS), vocab, dtype)
            table = SlotTable(context_len=64, page_size=1, max_slots=8, device=torch.device("cpu"))
            table.admit(
                [
                    Admit(slot, slot, draw.integers(3, vocab, 12).astype(np.int32), 6, each, slot,
                          stop_ids=(0, 1, 2), options=RequestOptions(logprobs=LogprobOptions(top=count)))
                    for slot, (each, count) in enumerate(zip(PARAMS, COUNTS, strict=True))
                ]
            )  # fmt: skip
            bits = draw.random((len(PARAMS), -(-vocab // 32) * 32)) < 0.6
            words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
            masks = TokenMasks(np.array([1, 3], np.int32), words[[1, 3]])
            rows = table.sampling_rows(np.arange(len(PARAMS), dtype=np.int32))
            best = ops.best_tokens(logits) if known else None
            sampled = sample(logits, rows, masks, ops, peek=peek, best=best)
            assert sampled.logprobs is not None
            check_order(sampled.logprobs, COUNTS)
            first = sampled.logprobs.top_ids[:, 0].tolist()
            greedy = [each.is_greedy for each in PARAMS]
            for row, token in enumerate(sampled.ids.tensor.tolist()):
                assert not greedy[row] or first[row] == token
            # A row's list does not depend on how many tokens another row asks for.
            alone = sample(
                logits[:1], table.sampling_rows(np.zeros(1, np.int32)), None, ops, peek=peek
            )
            assert alone.logprobs is not None
            assert alone.logprobs.top_ids[0, 0] == first[0]


def check_order(logprobs: Logprobs | PositionLogprobs, counts: list[int]) -> None:
    for row, count in enumerate(counts):
        values = np.asarray(logprobs.top_values[row][:count]).tolist()
        ids = np.asarray(logprobs.top_ids[row][:count]).tolist()
        assert values == sorted(values, reverse=True)
        assert len(set(ids)) == len(ids)


def write_with_tied_tokens(folder: Path) -> Path:
    """A model in which every 37th token has the same logit."""
    write_tiny_llama(folder)
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    weights["lm_head.weight"] = head[np.arange(len(head)) % 37]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(("level", "dtype"), IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("capture", [True, False])
def test_a_model_with_tied_tokens(
    level: str, dtype: torch.dtype, capture: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampled tokens and the top logprobs of prompt and output, of steps that are replayed and
    not."""
    folder = write_with_tied_tokens(tmp_path)
    options = {"dtype": str(dtype).removeprefix("torch."), "capture": capture}
    if level == "reference":
        monkeypatch.setitem(registry.PREFERENCE, "cpu", ("ref",))
        monkeypatch.setitem(quant.PREFERENCE, ("cpu", "unquant"), ("plain",))
    else:
        monkeypatch.setenv("SETPOINT_CPU_ISA", level)
    runner = build_runner(EngineConfig(str(folder), read_spec(folder), page_size=4, **options))
    runner.allocate(num_pages=64, max_slots=2, context_len=64)
    driver = Driver(InprocExecutor(runner), 4, 16)
    prompt = np.random.default_rng(4).integers(3, 131, 20).tolist()
    plan = driver.plan()
    wants = RequestOptions(logprobs=LogprobOptions(top=6))
    driver.admit(plan, 0, prompt, options=wants, logprob_start=0)
    plan.add_row(0, 0, 0, len(prompt), 1)
    first = driver.run(plan)
    results = [first, *driver.decode([0], 12)]
    for logprobs in (first.prompt_logprobs[0], *(each.output_logprobs[0] for each in results)):
        check_order(logprobs, [6] * len(logprobs.ids))
        if level == "reference" and dtype is not BF16:
            # torch rounds by the column's place: the last bit may tell tokens of a kind apart.
            continue
        for ids in logprobs.top_ids.tolist():
            # 131 tokens of 37 kinds: of each kind the lowest ids come first.
            for kind in {token % 37 for token in ids}:
                found = [token for token in ids if token % 37 == kind]
                assert found == list(range(kind, 131, 37))[: len(found)]
    for result in results:
        assert result.output_logprobs[0].top_ids[0, 0] == result.token_ids[0]
