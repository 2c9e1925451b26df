"""A model on several ranks has the bits of one: logits and tokens, in every format, however the
work is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind

from setpoint.checkpoint.spec import read_spec
from setpoint.core.plan import OWN_LENGTH, TokenMasks
from setpoint.core.request import LogprobOptions, RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.parallel.group import head_spans, spans
from setpoint_testing import tiny_gguf
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.conversion import converted_under
from setpoint_testing.goldens import GOLDENS, tiny_config
from setpoint_testing.plans import Driver
from setpoint_testing.ranks import ranks
from setpoint_testing.specs import tiny_spec

CONTEXT = 128
RNG = np.random.default_rng(5)
PROMPTS = {
    slot: RNG.integers(3, 131, length).tolist() for slot, length in enumerate((37, 1, 16, 50))
}
ROWS = {"num_rows": 8 * CONTEXT // 4, "max_slots": 8, "context_len": CONTEXT}
NINE = tiny_config(
    "LlamaForCausalLM", "llama", hidden_size=144, num_attention_heads=9, num_key_value_heads=3
)
"""The heads of SmolLM2: 9, and 3 of K and V, which 2 does not divide."""
MODELS = {golden.name: golden.config for golden in GOLDENS if golden.model_impl == "setpoint"}
MODELS["llama: nine heads"] = NINE


def config_of(folder: Path, **fields: Any) -> EngineConfig:
    given = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "page_size": 4, "num_threads": 1}
    return EngineConfig(str(folder), read_spec(folder), **(given | fields))


def work(driver: Driver, chunk: int, vocab_size: int) -> list[Any]:
    """Prompts in chunks beside decoding rows, then more requests of all kinds; what came back."""
    found: list[Any] = [driver.generate(PROMPTS, 12, chunk=chunk)]
    plan = driver.plan()
    picky = SamplingParams(temperature=1.1, top_p=0.9, frequency_penalty=0.7, min_p=0.01)
    wanted = RequestOptions(logprobs=LogprobOptions(start=3, top=5, ids=(7, 9)))
    driver.admit(plan, 4, PROMPTS[3], sampling=picky, seed=9)
    driver.admit(plan, 5, PROMPTS[0], options=wanted, logprob_start=3)
    plan.add_row(4, 4, 0, len(PROMPTS[3]), 1)
    plan.add_row(5, 5, 0, len(PROMPTS[0]), 1)
    results = [driver.run(plan), *driver.decode([4, 5], 3)]
    words = np.zeros((1, -(-vocab_size // 32)), np.int32)
    words[0, 1] = 0b1011
    plan = driver.plan()
    plan.add_row(4, 4, OWN_LENGTH, 1, 1)
    plan.add_row(5, 5, OWN_LENGTH, 1, 1)
    results.append(driver.run(plan, TokenMasks(np.array([4], np.int32), words)))
    for result in results:
        found.append(result.token_ids.tolist())
        for part in (result.prompt_logprobs, result.output_logprobs):
            found.append({seq: each.values.tobytes() for seq, each in part.items()})
            found.append({seq: each.top_ids.tolist() for seq, each in part.items()})
    return found


def outcome(config: EngineConfig, size: int, chunk: int = 1 << 30) -> tuple[list[Any], list[int]]:
    with ranks(config, size, **ROWS) as executor:
        groups = len(executor.executor.runner.pool.layout.groups)
        found = work(Driver(executor, 4, CONTEXT // 4, groups), chunk, config.spec.vocab_size)
        return found, executor.checksums


def assert_same(config: EngineConfig, sizes: tuple[int, ...], chunk: int = 1 << 30) -> None:
    alone = outcome(config, 1, chunk)
    for size in sizes:
        assert outcome(config, size, chunk) == alone, size
    assert len(set(alone[1])) > 10


@pytest.mark.cases(8)
@pytest.mark.parametrize("name", MODELS)
def test_every_architecture(tmp_path: Path, name: str) -> None:
    folder = write_tiny(tmp_path, MODELS[name])
    sizes = [size for size in read_spec(folder).rank_counts if 1 < size <= 4]
    assert_same(config_of(folder), tuple(sizes))


@pytest.mark.parametrize(
    "fields",
    [
        {"quantization": "w8a8_int8"},
        {"dtype": "float32", "kv_dtype": "float32"},
        {"kv_dtype": "fp8_e4m3"},
        {"capture": False},
    ],
)
@pytest.mark.parametrize("chunk", [5, 1 << 30])
def test_every_precision(tmp_path: Path, fields: dict[str, Any], chunk: int) -> None:
    assert_same(config_of(write_tiny(tmp_path, NINE), **fields), (2, 3), chunk)


@pytest.mark.cases(5)
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K])
@pytest.mark.parametrize(
    ("tie", "quantization"), [(True, None), (False, None), (True, "blocks_int8")]
)
def test_blocks_of_a_gguf(tmp_path: Path, kind: Kind, tie: bool, quantization: str | None) -> None:
    model = tiny_gguf.TinyLlama(
        hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=4, tie=tie
    )
    tensors = tiny_gguf.gguf_tensors(model, model.weights())
    raw = {
        name: (tiny_gguf.random_blocks(tensor.shape, kind), kind)
        for name, tensor in tensors.items()
        if tensor.ndim == 2
    }
    path = tiny_gguf.write(
        tmp_path / "m.gguf", tensors, tiny_gguf.metadata(model), kind=kind, raw=raw
    )
    folder = converted_under(tmp_path, path)
    assert_same(config_of(folder, quantization=quantization), (2, 3))


def test_a_rank_holds_its_share(tmp_path: Path) -> None:
    wide = tiny_config(
        "LlamaForCausalLM",
        "llama",
        hidden_size=288,
        intermediate_size=1024,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=32,
        vocab_size=2048,
        tie_word_embeddings=True,
    )
    config = config_of(write_tiny(tmp_path, wide))
    whole = build_runner(config).report.weight_bytes
    with ranks(config, 2, **ROWS) as executor:
        own = executor.executor.runner.report.weight_bytes
    assert 0.4 * whole < own < 0.5 * whole  # the other rank has two of three heads


def test_a_stack_that_is_stored_whole_is_divided_in_each_of_its_parts(tmp_path: Path) -> None:
    """phi3 stores q, k and v as one tensor."""
    name = next(name for name in MODELS if name.startswith("phi3"))
    folder = write_tiny(tmp_path, MODELS[name])
    assert_same(config_of(folder, dtype="float32", kv_dtype="float32"), (2,))


def test_more_rows_than_a_step_takes(tmp_path: Path) -> None:
    """A step with more tokens than a captured one, and with so many sampling rows that the logits
    are computed after it."""
    config = config_of(write_tiny(tmp_path, MODELS["llama: nine heads"]))
    found = []
    for size in (1, 2):
        rows = {"num_rows": 600 * 8, "max_slots": 600, "context_len": 32}
        with ranks(config, size, **rows) as executor:
            driver = Driver(executor, 4, 8)
            prompts = {slot: [3 + slot % 100, 5, 3 + slot // 100] for slot in range(600)}
            found.append(driver.generate(prompts, 3))
    assert found[0] == found[1]


def test_heads() -> None:
    assert head_spans(9, 3, 2) == [((0, 3), (0, 1)), ((3, 9), (1, 3))]
    assert head_spans(4, 1, 2) == [((0, 2), (0, 1)), ((2, 4), (0, 1))]
    assert head_spans(6, 2, 4) == [
        ((0, 1), (0, 1)),
        ((1, 3), (0, 1)),
        ((3, 4), (1, 2)),
        ((4, 6), (1, 2)),
    ]
    assert tiny_spec(num_heads=9, num_kv_heads=3).rank_counts == [1, 2, 3, 6, 9]
    assert tiny_spec(num_heads=4, num_kv_heads=4).rank_counts == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("length", "size", "unit", "expected"),
    [
        (3, 2, 1, [(0, 1), (1, 3)]),
        (576, 2, 32, [(0, 288), (288, 576)]),
        (80, 2, 32, [(0, 32), (32, 80)]),
        (48, 2, 32, [(0, 24), (24, 48)]),
        (1000, 3, 32, [(0, 320), (320, 672), (672, 1000)]),
    ],
)
def test_spans(length: int, size: int, unit: int, expected: list[tuple[int, int]]) -> None:
    assert spans(length, size, unit=unit) == expected
