"""Which matrices a step multiplies by, and in which kinds they are held."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from resolving import SPEC
from safetensors.numpy import save_file

from setpoint.checkpoint.folder.description import Description
from setpoint.checkpoint.folder.safetensors_file import TensorInfo
from setpoint.config.environment import read_environment
from setpoint.config.options import Options
from setpoint.core.model import Mixture, ModelSpec
from setpoint.launch.parent.model_report import examine, stored_of
from setpoint.planning.memory import MemoryModel, sampling_bytes
from setpoint.planning.pace import Stored
from setpoint_testing.specs import memory_of
from setpoint_testing.tiny_models import write_tiny_llama

SHAPES = {
    "model.embed_tokens.weight": (50, 10),
    "model.norm.weight": (10,),
    "model.layers.0.self_attn.q_proj.weight": (10, 10),
    "model.layers.0.mlp.experts.3.up_proj.weight": (20, 10),
    "lm_head.weight": (50, 10),
}


def description(*names: str, blocks: dict[str, str] | None = None) -> Description:
    tensors = tuple(TensorInfo(name, SHAPES[name], "BF16") for name in names)
    kept = tuple(
        TensorInfo(f"{name}.{kind}", (1, 1), "U8") for name, kind in (blocks or {}).items()
    )
    return Description(Path("config.json"), {}, Path("generation.json"), {}, tensors, kept)


def memory(spec: ModelSpec, *, kept: bool = True, quantization: str | None = None) -> MemoryModel:
    sizes = {"page_size": 1, "context_len": 64, "step_tokens": 64}
    return memory_of(spec, blocks_kept=kept, quantization=quantization, **sizes)


UNTIED = replace(SPEC, tie_embeddings=False)
IN_BLOCKS = {"model.layers.0.self_attn.q_proj.weight": "Q4_K", "lm_head.weight": "Q6_K"}


def test_an_embedding_is_looked_up_and_multiplied_by_only_if_it_is_the_head() -> None:
    found = stored_of(description(*SHAPES), UNTIED, memory(UNTIED), "bfloat16")
    assert found == (Stored("bfloat16", layers=100, experts=200, head=500),)
    tied = replace(SPEC, tie_embeddings=True)
    found = stored_of(description(*SHAPES), tied, memory(tied), "bfloat16")
    assert found == (Stored("bfloat16", layers=100, experts=200, head=500),)


def test_blocks_count_as_their_kinds_where_they_are_kept() -> None:
    known = description(*SHAPES, blocks=IN_BLOCKS)
    found = {each.kind: each for each in stored_of(known, UNTIED, memory(UNTIED), "bfloat16")}
    assert found == {
        "Q4_K": Stored("Q4_K", layers=100),
        "bfloat16": Stored("bfloat16", experts=200),
        "Q6_K": Stored("Q6_K", head=500),
    }
    found_as = stored_of(known, UNTIED, memory(UNTIED, kept=False), "float32")
    assert found_as == (Stored("float32", layers=100, experts=200, head=500),)
    int8 = memory(UNTIED, quantization="w8a8_int8", kept=False)
    assert [each.kind for each in stored_of(known, UNTIED, int8, "bfloat16")] == ["int8"]


def test_without_weights_the_numbers_follow_from_the_dimensions() -> None:
    mixture = Mixture(4, 2, 7, frozenset({0, 2}))
    spec = replace(UNTIED, num_parameters=10**9, mixture=mixture)
    table, experts = spec.vocab_size * spec.hidden_size, 2 * 3 * spec.hidden_size * 7 * 4
    found = stored_of(description(), spec, memory(spec), "bfloat16")
    assert found == (Stored("bfloat16", 10**9 - 2 * table - experts, experts, table),)


def test_needed_memory_grows_by_the_cache() -> None:
    """The arithmetic of the plan, for requests that were asked for."""
    model = memory(SPEC)
    few, many = model.needed(1), model.needed(10)
    assert many.kv_bytes - few.kv_bytes == 9 * model.context_len * SPEC.kv_bytes_per_token(2)
    assert few.weights_bytes == many.weights_bytes == model.weights()
    parts = few.weights_bytes + few.kv_bytes + few.workspace_bytes + few.graphs_bytes
    assert few.total_bytes == parts


def test_a_step_of_one_request_samples_one_row() -> None:
    """Red before: a large vocabulary took room for as many rows as a server samples at most."""
    model = memory(replace(SPEC, vocab_size=262_144))
    one, all_rows = model.needed(1).workspace_bytes, model.needed(256).workspace_bytes
    row = sampling_bytes(model.spec, num_sampling=1, dtype_bytes=2, by_kernels=False)
    assert one + 255 * row <= all_rows


@pytest.mark.timeout(30)
def test_an_expression_that_never_ends_is_the_reason_why_a_folder_is_not_served(
    tmp_path: Path,
) -> None:
    """Red before: ``setpoint models`` never ended."""
    section = {"quant_method": "gptq", "bits": 4, "dynamic": {"((.+)+)+!": {"bits": 8}}}
    write_tiny_llama(tmp_path, quantization_config=section)
    codes = {"model.layers.0.self_attn.q_proj.qweight": np.zeros((8, 64), np.int32)}
    save_file(codes, tmp_path / "model.safetensors")
    report = examine(
        Options.of(model_path=str(tmp_path)), read_environment({}), frozenset({"model_path"})
    ).report
    assert not report.runs
    assert f"{tmp_path / 'config.json'}: 'quantization_config.dynamic' has" in report.reason
    assert "which takes more than 0.8 s of CPU time" in report.reason
