"""Weights kept in a GGUF's blocks give every bit that they give in bf16, at every level and for any
number of rows and threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from setpoint.checkpoint.folder.safetensors_file import read_header
from setpoint.checkpoint.gguf.convert import _round_bf16
from setpoint.checkpoint.spec import read_spec
from setpoint.core import blocksfile
from setpoint.core.blocksfile import (
    BLOCKS_FILE,
    read_blocks_table,
    write_blocks_table,
)
from setpoint.core.errors import CheckpointError
from setpoint.core.model import BLOCK_KINDS, ModelSpec
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.kernels.cpu import ops as cpu_ops
from setpoint.engine.kernels.ops import GELU_TANH, SILU, GateActivation
from setpoint.engine.models import blocks_source
from setpoint.engine.quant import blocks as block_linear
from setpoint.engine.quant import cpu_linear as panel_linear
from setpoint.engine.quant.blocks import KINDS
from setpoint.engine.quant.dequantised import VALUES, dequantised
from setpoint.engine.quant.linear_method import GgufWeight
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint_testing import tiny_gguf
from setpoint_testing.conversion import converted_under
from setpoint_testing.cpu_levels import each_level
from setpoint_testing.plans import Driver

BF16 = torch.bfloat16
CLAMPED = GateActivation("clamped_swiglu_mul", (1.702, 1.5))
OF_FOLDERS = ("INT4Z", "INT8Z", "FP8")
ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 24, 25, 48, 49, 64, 123)


def row_of(kind: str, num_blocks: int) -> int:
    """Values in a row of ``num_blocks`` times 32, or of that many blocks if a block has more."""
    return num_blocks * BLOCK_KINDS[kind].num_values


def quantised(
    kind: str, columns: int, k: int, seed: int = 0, size: float = 0.1
) -> tuple[GgufWeight, torch.Tensor]:
    """Random blocks (all codes, scales of both signs, zero and subnormal), and what the conversion
    makes of them."""
    rng, block = np.random.default_rng(seed), BLOCK_KINDS[kind]
    num_blocks, rest = divmod(k, block.num_values)
    assert not rest
    if kind in OF_FOLDERS:
        return of_folder(kind, rng, (columns, num_blocks), size)
    scales = rng.normal(0, size, (2, columns, num_blocks)).astype(np.float16)
    scales[:, ::7] *= np.float16(1e-4)
    scales[0, ::5] = 0
    raw = rng.integers(0, 256, (columns, num_blocks, block.num_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = rng.choice([0, 1, 2, 100, 126, 127, 130], (columns, num_blocks))
    for at, values in zip(block.scales, scales, strict=False):
        raw[..., at : at + 2] = values[..., None].view(np.uint8)
    rows = raw.reshape(columns, -1)
    bits = _round_bf16(gguf.dequantize(rows, Kind[kind]))
    return GgufWeight(kind, torch.from_numpy(rows)), torch.from_numpy(bits.view(np.int16)).view(
        BF16
    )


def of_folder(
    kind: str, rng: np.random.Generator, shape: tuple[int, int], size: float
) -> tuple[GgufWeight, torch.Tensor]:
    """The same for the kinds that are made of a quantised folder's tensors: scale · (code - zero),
    in fp32."""
    scales = rng.normal(0, size, (*shape, 1)).astype(np.float16 if kind == "INT4Z" else np.float32)
    scales[:, ::7] *= scales.dtype.type(1e-4)
    scales[0, ::5] = 0
    zeros = rng.integers(*((0, 16) if kind == "INT4Z" else (-128, 128)), (*shape, 1))
    codes = rng.integers(0, 256, (*shape, 16 if kind == "INT4Z" else 32), dtype=np.uint8)
    if kind == "FP8":
        codes[codes & 0x7F == 0x7F] = 0
        plain = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    else:
        halves = np.concatenate((codes & 15, codes >> 4), axis=2)
        whole = halves if kind == "INT4Z" else codes.view(np.int8).astype(np.int64)
        plain = (whole - zeros).astype(np.float32)
    parts = [scales.view(np.uint8).reshape(*shape, -1), zeros.astype(np.uint8), codes]
    rows = np.concatenate([parts[0], *parts[1 + (kind == "FP8") :]], axis=2).reshape(shape[0], -1)
    bits = _round_bf16((plain * scales.astype(np.float32)).reshape(shape[0], -1))
    return GgufWeight(kind, torch.from_numpy(rows)), torch.from_numpy(bits.view(np.int16)).view(
        BF16
    )


@each_level
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "num_blocks"), [(1, 1), (33, 2), (70, 3), (96, 19)])
def test_a_product_on_blocks_is_that_on_bf16(
    columns: int, num_blocks: int, kind: str, level: str
) -> None:
    torch.manual_seed(columns)
    k = row_of(kind, num_blocks)
    blocks, weight = quantised(kind, columns, k)
    x, bias = torch.randn(max(ROWS), k).to(BF16), torch.randn(columns).to(BF16)
    for b in (None, bias):
        ours, panels = (
            block_linear.create(BF16, level=level).pack(blocks, b),
            panel_linear.create(BF16, level=level).pack(weight, b),
        )
        for rows in ROWS:
            assert torch.equal(ours(x[-rows:]), panels(x[-rows:])), rows
    held = num_blocks * BLOCK_KINDS[kind].held_bytes
    assert ours.num_bytes == -(-columns // 32) * 32 * held + bias.nbytes


@each_level
@pytest.mark.parametrize("heights", [(64, 32, 32), (1, 33, 7), (5, 70)])
def test_a_stack_of_several_kinds_is_the_stack_in_bf16(
    heights: tuple[int, ...], level: str
) -> None:
    torch.manual_seed(len(heights))
    k = 768
    parts = [quantised(kind, rows, k) for kind, rows in zip(KINDS, heights, strict=False)]
    weight = torch.cat([values for _, values in parts])
    x, bias = torch.randn(max(ROWS), k).to(BF16), torch.randn(sum(heights)).to(BF16)
    for b in (None, bias):
        stack = block_linear.create(BF16, level=level).pack_stack([each for each, _ in parts], b)
        panels = panel_linear.create(BF16, level=level).pack(weight, b)
        for rows in ROWS:
            assert torch.equal(stack(x[-rows:]), panels(x[-rows:])), rows


@each_level
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [16, 35])
def test_a_gated_product_on_blocks_is_that_on_bf16(size: int, kind: str, level: str) -> None:
    torch.manual_seed(size)
    k = row_of(kind, 3)
    blocks, weight = quantised(kind, 2 * size, k)
    x, bias = torch.randn(60, k).to(BF16), torch.randn(2 * size).to(BF16)
    for b, gate in ((None, SILU), (bias, GELU_TANH), (bias, CLAMPED)):
        ours = block_linear.create(BF16, level=level).pack_gated(blocks, b, gate)
        panels = panel_linear.create(BF16, level=level).pack_gated(weight, b, gate)
        for rows in (1, 3, 8, 9, 60):
            assert torch.equal(ours(x[-rows:]), panels(x[-rows:])), rows


@each_level
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_dequantised_weight(kind: str, level: str) -> None:
    blocks, weight = quantised(kind, 70, row_of(kind, 3))
    ids = torch.randint(0, 70, (200,), dtype=torch.int32)
    packed = block_linear.create(BF16, level=level).pack(blocks, None)
    # As integers, so that zeros have their signs, too.
    assert torch.equal(packed.rows(ids, 1.0).view(torch.int16), weight[ids].view(torch.int16))
    scaled = cpu_ops.create(BF16, level=level).embedding(ids, weight, 73.3)
    assert torch.equal(packed.rows(ids, 73.3), scaled)


@each_level
@pytest.mark.parametrize("kind", [kind for kind in KINDS if BLOCK_KINDS[kind].num_values == 256])
def test_every_scale_of_a_k_quant_meets_its_codes(kind: str, level: str) -> None:
    """Values that differ from block to block and from code to code, so that none can be exchanged
    for another unnoticed; the oracle is the gguf package. Products with the unit matrix are the
    values that are multiplied."""
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (64, BLOCK_KINDS[kind].num_bytes), dtype=np.uint8)
    for at in BLOCK_KINDS[kind].scales:
        raw[:, at : at + 2] = rng.uniform(0.5, 1, 64).astype(np.float16)[:, None].view(np.uint8)
    expected = _round_bf16(gguf.dequantize(raw, Kind[kind]))
    packed = block_linear.create(BF16, level=level).pack(
        GgufWeight(kind, torch.from_numpy(raw)), None
    )
    rows = packed.rows(torch.arange(64, dtype=torch.int32), 1.0).view(torch.int16).numpy()
    np.testing.assert_array_equal(rows.view(np.uint16), expected)
    unit, weight = torch.eye(256).to(BF16), torch.from_numpy(expected.view(np.int16)).view(BF16)
    for num_rows in (1, 8, 256):
        for first in range(0, 256, num_rows):
            rows = unit[first : first + num_rows]
            assert torch.equal(packed(rows), weight[:, first : first + num_rows].T)
    assert len(np.unique(expected[0])) > 50


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "Q2_K", "IQ4_XS"])
@pytest.mark.parametrize("num_rows", [3, 60])
def test_number_of_threads_does_not_change_a_product_on_blocks(
    threads, num_rows: int, kind: str
) -> None:
    k = row_of(kind, 6)
    blocks, _ = quantised(kind, 576, k)
    x, results = torch.randn(num_rows, k).to(BF16), []
    for count in (1, 2, 5):
        threads(count)
        results.append(block_linear.create(BF16).pack(blocks, None)(x))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def convert(tmp_path: Path, **how: object) -> Path:
    """A tiny random model in Q4_1, but for what ``how`` changes, converted under ``tmp_path``."""
    model = how.pop("model", None) or tiny_gguf.TinyLlama(tie=bool(how.pop("tie", True)))
    tensors = tiny_gguf.gguf_tensors(model, model.weights())
    raw = {
        name: (gguf.quantize(tensors[name], kind), kind)
        for name, kind in how.pop("kinds", {}).items()
    } | how.pop("raw", {})
    path = tiny_gguf.write(
        tmp_path / "m.gguf", tensors, tiny_gguf.metadata(model), kind=Kind.Q4_1, raw=raw
    )
    return converted_under(tmp_path, path)


def runner_of(
    folder: Path,
    quantization: str | None = None,
    *,
    dtype: str = "bfloat16",
    spec: ModelSpec | None = None,
    model_impl: str = "auto",
) -> ModelRunner:
    spec = spec or read_spec(folder)
    config = EngineConfig(
        str(folder),
        spec,
        dtype=dtype,
        kv_dtype=dtype,
        page_size=4,
        num_threads=2,
        quantization=quantization,
        model_impl=model_impl,
    )
    runner = build_runner(config)
    runner.allocate(num_pages=64, max_slots=4, context_len=64)
    return runner


def logits_of(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    driver = Driver(InprocExecutor(runner), 4, 16)
    plan = driver.plan()
    driver.admit(plan, 0, ids)
    plan.add_row(0, 0, 0, len(ids), 1)
    return runner.forward(plan.build()).logits


def kinds_kept(runner: ModelRunner) -> Counter[str]:
    return Counter(
        module.blocks for module in runner.model.modules() if hasattr(module, "keep_blocks")
    )


@pytest.mark.parametrize("tie", [True, False])
def test_a_model_on_blocks_is_the_model_in_bf16(tmp_path: Path, tie: bool) -> None:
    folder = convert(tmp_path, tie=tie, kinds={"token_embd.weight": Kind.Q8_0})
    kept, wide = runner_of(folder), runner_of(folder, "unquant")
    ids = np.random.default_rng(0).integers(3, 300, 33).tolist()
    assert torch.equal(logits_of(kept, ids), logits_of(wide, ids))
    assert kinds_kept(kept) == {"Q4_1": 8 + (not tie), "Q8_0": 1}
    assert kinds_kept(wide) == {"": 9 + (not tie)}
    assert kept.report.weight_bytes < 0.5 * wide.report.weight_bytes
    assert "Q4_1" in kept.report.weights
    assert not kept.why_eager


@pytest.mark.parametrize("tie", [True, False])
def test_a_file_of_k_quants_is_multiplied_as_it_is(tmp_path: Path, tie: bool) -> None:
    """Q4_K and Q6_K mixed as llama.cpp's Q4_K_M mixes them: the embedding, the values and the down
    projections of some layers have 6 bits."""
    model = tiny_gguf.TinyLlama(hidden_size=256, intermediate_size=512, tie=tie)
    six = ("token_embd.weight", "blk.0.attn_v.weight", "blk.0.ffn_down.weight")
    raw = {}
    for name, tensor in tiny_gguf.gguf_tensors(model, model.weights()).items():
        if tensor.ndim == 2:
            kind = Kind.Q6_K if name in six else Kind.Q4_K
            raw[name] = (quantised(kind.name, *tensor.shape, size=1e-3)[0].rows.numpy(), kind)
    folder = convert(tmp_path, model=model, raw=raw)
    kept, wide = runner_of(folder), runner_of(folder, "unquant")
    ids = np.random.default_rng(0).integers(3, 300, 33).tolist()
    for count in (1, 33):
        logits = logits_of(kept, ids[:count])
        assert torch.equal(logits, logits_of(wide, ids[:count]))
        assert logits.isfinite().all()
    # q, k and v of the first layer are one stack of two kinds.
    assert kinds_kept(kept) == {"Q4_K": 6 + (not tie), "Q6_K": 2, "Q4_K+Q6_K": 1}
    assert kept.report.weight_bytes < 0.5 * wide.report.weight_bytes
    blocks = read_spec(folder).blocks
    assert blocks.kinds == ("Q4_K", "Q6_K")
    assert blocks.num_bytes < blocks.held_bytes < 1.03 * blocks.num_bytes
    assert blocks.embedding_bytes == 320 * 210


def test_what_has_no_kernel_is_bf16_as_before(tmp_path: Path) -> None:
    kinds = {
        "token_embd.weight": Kind.F16,
        "blk.0.attn_k.weight": Kind.Q8_0,
        "blk.0.ffn_gate.weight": Kind.Q8_0,
        "blk.1.ffn_down.weight": Kind.BF16,
    }
    folder = convert(tmp_path, kinds=kinds)
    kept, wide = runner_of(folder), runner_of(folder, "unquant")
    # The embedding, one down projection, and a gate beside another kind of up are not kept.
    assert kinds_kept(kept) == {"Q4_1": 5, "": 3, "Q4_1+Q8_0+Q4_1": 1}
    ids = list(range(3, 30))
    assert torch.equal(logits_of(kept, ids), logits_of(wide, ids))


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0])
def test_fp32_multiplies_the_exact_values(tmp_path: Path, kind: Kind, model_impl: str) -> None:
    """They are those of a file that has them in F32."""
    model = tiny_gguf.TinyLlama()
    tensors = {
        name: torch.from_numpy(tensor).bfloat16().float().numpy()  # as norms are in trained models
        for name, tensor in tiny_gguf.gguf_tensors(model, model.weights()).items()
    }
    exact = {
        name: gguf.dequantize(gguf.quantize(tensor, kind), kind) if tensor.ndim == 2 else tensor
        for name, tensor in tensors.items()
    }
    ids, found = list(range(3, 30)), []
    for name, values, each in (("blocks", tensors, kind), ("f32", exact, Kind.F32)):
        folder = tmp_path / name
        folder.mkdir()
        path = tiny_gguf.write(folder / "m.gguf", values, tiny_gguf.metadata(model), kind=each)
        converted = converted_under(folder, path)
        assert (converted / BLOCKS_FILE).exists() == (name == "blocks")
        runner = runner_of(converted, dtype="float32", model_impl=model_impl)
        assert kinds_kept(runner).keys() == {""} or model_impl == "transformers"
        assert runner.report.weights == "float32"
        found.append(logits_of(runner, ids))
    assert torch.equal(*found)


def test_a_file_that_changes_or_goes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, path = convert(tmp_path), tmp_path / "m.gguf"
    runner_of(folder)
    with monkeypatch.context() as patch:
        digest = read_blocks_table(folder).digest
        patch.setattr(blocksfile, "content_digest", lambda path, file: digest)
        path.write_bytes(path.read_bytes()[:-5000])
        with pytest.raises(CheckpointError, match=r"m\.gguf is truncated"):
            runner_of(folder)
    with pytest.raises(CheckpointError, match=r"The content of .*m\.gguf has changed since"):
        runner_of(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"Cannot read .*m\.gguf: No such file"):
        runner_of(folder)


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, path = convert(tmp_path), tmp_path / "m.gguf"
    read = blocks_source.GGUFBlocks._rows

    def change(tensor: Any, *rows: int) -> torch.Tensor:
        with path.open("r+b") as file:
            file.seek(-3, os.SEEK_END)
            file.write(b"\x01")
        return read(tensor, *rows)

    monkeypatch.setattr(blocks_source.GGUFBlocks, "_rows", change)
    with pytest.raises(CheckpointError, match="has changed since the weights were loaded"):
        runner_of(folder)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:500], lambda data: b"\xff", lambda data: b""]
)
def test_a_damaged_table_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    folder = convert(tmp_path)
    file, spec = folder / BLOCKS_FILE, read_spec(folder)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=r"model\.blocks is damaged"):
        runner_of(folder, spec=spec)


def test_a_table_that_lacks_a_matrix_or_has_it_in_another_shape_is_refused(tmp_path: Path) -> None:
    folder, name = convert(tmp_path), "model.layers.1.mlp.up_proj.weight"
    table, spec = read_blocks_table(folder), read_spec(folder)
    less = {key: value for key, value in table.tensors.items() if key != name}
    narrow = msgspec.structs.replace(table.tensors[name], shape=(64, 64))
    for tensors, words in (
        (less, f"Tensor '{name}' of shape \\[96, 64\\] is missing"),
        (less | {name: narrow}, rf"'{name}' in .*m\.gguf has shape \[64, 64\]"),
        (table.tensors | {"model.strange": narrow}, "'model.strange' in .* does not belong"),
    ):
        write_blocks_table(folder, msgspec.structs.replace(table, tensors=tensors))
        with pytest.raises(CheckpointError, match=words):
            runner_of(folder, spec=spec)


def test_only_blocks_that_are_multiplied_stay_in_the_file(tmp_path: Path) -> None:
    folder = convert(tmp_path, kinds={"token_embd.weight": Kind.F16})
    table = read_blocks_table(folder)
    assert len(table.tensors) == 14
    assert {stored.kind for stored in table.tensors.values()} == {"Q4_1"}
    written = {tensor.name for tensor in read_header(folder / "model.safetensors")}
    assert len(written) == 6, "the embedding and five norms"
    assert not written & table.tensors.keys()
    kept = read_spec(folder).blocks
    assert kept.kinds == ("Q4_1",)
    assert kept.embedding_bytes == 0
    assert kept.num_bytes == kept.num_parameters * 20 // 32
    model = tiny_gguf.TinyLlama()
    tensors = tiny_gguf.gguf_tensors(model, model.weights())
    plain = tiny_gguf.write(tmp_path / "f.gguf", tensors, tiny_gguf.metadata(model), kind=Kind.F16)
    assert not (converted_under(tmp_path, plain) / BLOCKS_FILE).exists()


@pytest.mark.parametrize("kind", VALUES)
def test_values_in_torch_are_those_of_the_gguf_package(kind: str) -> None:
    blocks, weight = quantised(kind, 70, row_of(kind, 3))
    assert torch.equal(dequantised(blocks).view(torch.int16), weight.view(torch.int16))


def test_transformers_model_reads_the_blocks(tmp_path: Path) -> None:
    folder = convert(tmp_path)
    theirs = runner_of(folder, dtype="float32", model_impl="transformers")
    ids = list(range(3, 30))
    ours = logits_of(runner_of(folder, dtype="float32"), ids)
    assert torch.allclose(logits_of(theirs, ids), ours, atol=1e-4)


def test_loading_takes_no_memory_twice(tmp_path: Path) -> None:
    """The peak of a process that loads a model of 32 MB in blocks is its weights and little more."""
    model = tiny_gguf.TinyLlama(
        hidden_size=1024, intermediate_size=4096, num_layers=4, num_heads=8, num_kv_heads=8
    )
    folder = convert(tmp_path, model=model)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder)], capture_output=True, text=True, check=True
    )
    grown, held = map(int, done.stdout.split())
    assert held > 30 << 20
    assert grown < 1.05 * held + (8 << 20)  # the largest matrix is 5 MB


PEAK = """
import resource, sys
from pathlib import Path
from typing import Any
import torch
from setpoint.checkpoint.folder.safetensors_file import read_header
from setpoint.checkpoint.spec import read_spec
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.kernels.cpu.library import load
load()
torch.randn(64, 64) @ torch.randn(64, 64)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
spec = read_spec(Path(sys.argv[1]))
before = peak()
runner = build_runner(EngineConfig(sys.argv[1], spec, page_size=4, num_threads=2))
print(peak() - before, runner.report.weight_bytes)
"""
