"""What ``--enable-deterministic-inference`` promises on a GPU, interpreted: the bits of a row do not
depend on its batch, nor those of a token on its chunk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from setpoint.checkpoint.spec import read_spec
from setpoint.core.plan import OWN_LENGTH
from setpoint.engine.attention import attention_backend
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.kernels import kernel_registry
from setpoint.engine.quant import grouped, heads, linear_method, rounded
from setpoint.engine.quant.heads import StackedHeads
from setpoint.engine.quant.linear_method import InvariantProduct
from setpoint.engine.quant.plain import PlainWeight
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint_testing import interpreted_triton as interpreted_triton
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.fp8_blocks import in_blocks
from setpoint_testing.graph_steps import FAMILIES
from setpoint_testing.operation_cases import BF16, FP32
from setpoint_testing.plans import Driver, allocate_rows

FP16 = torch.float16
ROWS = 257
"""Rows of the largest batch: more than four tiles of them."""
KINDS = {
    "bf16": (BF16, PlainWeight),
    "fp16": (FP16, PlainWeight),
    "fp32": (FP32, PlainWeight),
    "fp8": (BF16, lambda w, b: rounded.create_fp8(BF16).pack(w, b)),
    "fp8 by 128": (BF16, lambda w, b: in_blocks(w.float(), b)),
    "int8": (BF16, lambda w, b: rounded.create_int8(BF16).pack(w, b)),
}
SHAPES = [(130, 320), (48, 128), (16, 100), (1, 256)]
"""Outputs and inputs: not multiples of a tile, or few."""


def check_rows(multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Compare rows of x in batches of every size, beginning anywhere, and beside NaN, with those of
    the largest batch, which are returned."""
    together = multiply(x)
    for rows, begin in ((1, 0), (1, 77), (2, 0), (7, 0), (7, 60), (64, 3)):
        some = multiply(x[begin : begin + rows])
        assert torch.equal(some, together[begin : begin + rows]), (rows, begin)
    padded = x.clone()
    padded[11:] = torch.nan
    assert torch.equal(multiply(padded)[:11], together[:11])
    return together


@pytest.mark.cases(8)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_a_product_has_the_same_bits_in_every_batch(
    kind: str, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    (columns, depth), (dtype, pack) = shape, KINDS[kind]
    depth -= depth % 32 if kind == "fp8 by 128" else 0
    weight, bias = torch.randn(columns, depth).to(dtype), torch.randn(columns).to(dtype)
    packed: InvariantProduct = pack(weight, bias)
    x = torch.randn(ROWS, depth).to(dtype)
    found = check_rows(packed.invariant, x).double()
    exact = x.double() @ weight.double().T + bias.double()
    assert (found - exact).norm() <= (0.05 if "8" in kind else 0.004) * exact.norm()


@pytest.mark.cases(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_experts_has_the_same_bits_in_every_batch(kind: str) -> None:
    torch.manual_seed(1)
    dtype, pack = KINDS[kind]
    weights = [pack(torch.randn(40, 192).to(dtype), torch.randn(40).to(dtype)) for _ in range(5)]
    together = grouped.TritonExperts(weights)
    x, ids = torch.randn(ROWS, 192).to(dtype), torch.randint(0, 5, (ROWS, 2), dtype=torch.int32)
    found = together.invariant(x, ids).view(ROWS, 2, -1)
    for rows in (1, 2, 7, 64):
        some = together.invariant(x[:rows], ids[:rows])
        assert torch.equal(some.view(rows, 2, -1), found[:rows]), rows
    order = torch.randperm(ROWS)
    assert torch.equal(together.invariant(x[order], ids[order]).view(ROWS, 2, -1), found[order])
    close = together(x, ids).view(ROWS, 2, -1)
    assert torch.allclose(found.float(), close.float(), rtol=2**-7, atol=0.05)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_row_of_heads_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    """Its parts are strided, as a latent attention's are."""
    torch.manual_seed(2)
    weights = torch.randn(3, 40, 96).to(dtype)
    multiply = StackedHeads([PlainWeight(weight, None) for weight in weights]).invariant
    x = torch.randn(ROWS, 3, 128).to(dtype)[..., :96]
    found = check_rows(multiply, x).double()
    exact = torch.einsum("thk,hnk->thn", x.double(), weights.double())
    assert (found - exact).norm() <= 0.004 * exact.norm()


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are computed with as a GPU's."""
    monkeypatch.setitem(kernel_registry.PREFERENCE, "cpu", ("triton",))
    monkeypatch.setitem(attention_backend.PREFERENCE, "cpu", ("triton",))
    monkeypatch.setitem(linear_method.PREFERENCE, ("cpu", "unquant"), ("plain",))
    monkeypatch.setitem(grouped.PLAIN, "cpu", grouped.TritonExperts)
    monkeypatch.setitem(heads.PLAIN, "cpu", StackedHeads)


PAGE, CONTEXT = 16, 80
PROMPT, DECODED = 67, 2
"""More tokens than a tile of positions."""


def runner_of(folder: Path, dtype: str, *, invariant: bool = True) -> tuple[ModelRunner, Driver]:
    config = EngineConfig(
        str(folder), read_spec(folder), dtype=dtype, kv_dtype=dtype, page_size=PAGE,
        capture=False, invariant=invariant,
    )  # fmt: skip
    runner = build_runner(config)
    pages = CONTEXT // PAGE
    groups = allocate_rows(runner, num_rows=4 * pages, max_slots=4, context_len=CONTEXT)
    return runner, Driver(InprocExecutor(runner), PAGE, pages, groups)


def run(
    runner: ModelRunner,
    driver: Driver,
    ids: list[int],
    chunks: list[int],
    others: dict[int, list[int]],
    share: int = 0,
) -> tuple[list[torch.Tensor], list[int]]:
    """The logits and tokens of slot 0 after the prompt ``ids``, which it computes in such chunks,
    beside chunks of others, and after each of DECODED tokens. share: pages that slot 0 has in common
    with slot 3, which computes them before."""
    logits, tokens, done = [], [], share * PAGE
    if share:
        plan = driver.plan()
        driver.admit(plan, 3, ids[:done])
        plan.add_row(3, 3, 0, done, 0)
        driver.run(plan)
    for step, count in enumerate(chunks + [1] * DECODED):
        plan = driver.plan()
        if step == 0:
            driver.admit(plan, 0, ids, share=(3, share))
        for slot, prompt in others.items():
            if step == 0:
                driver.admit(plan, slot, prompt)
            size = len(prompt) // (len(chunks) + DECODED)
            plan.add_row(slot, slot, step * size, size, 0)
        plan.add_row(
            0, 0, OWN_LENGTH if step >= len(chunks) else done, count, done + count >= len(ids)
        )
        done += count
        forward = runner.forward(plan.build())
        if done >= len(ids):
            logits.append(forward.logits.clone())
            tokens += runner.sample(forward, None).ids.tensor[:1].tolist()
    return logits, tokens


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v2", "qwen3_moe"])
def test_a_tokens_bits_depend_on_the_tokens_before_it_alone(
    family: str, dtype: str, tmp_path: Path, on_triton: None
) -> None:
    """Alone or beside others, prompted at once or in chunks of which some have one token, on a
    cached prefix, and prompted with what was generated."""
    folder = write_tiny(tmp_path, FAMILIES[family].config)
    rng = np.random.default_rng(3)
    ids = rng.integers(3, 100, PROMPT).tolist()
    others = {1: rng.integers(3, 100, 24).tolist(), 2: rng.integers(3, 100, 6).tolist()}
    runner, driver = runner_of(folder, dtype)
    assert runner.report.linear == "plain, invariant"
    expected, tokens = run(runner, driver, ids, [PROMPT], {})
    chunked, _ = run(*runner_of(folder, dtype), ids, [1, 37, 28, 1], others)
    cached, _ = run(*runner_of(folder, dtype), ids, [PROMPT - 64], {}, share=4)
    for number, logits in enumerate(expected):
        assert torch.equal(chunked[number], logits), number
        assert torch.equal(cached[number], logits), number
    at_once, _ = run(*runner_of(folder, dtype), ids + tokens[:1], [PROMPT + 1], {})
    assert torch.equal(at_once[0], expected[1])
