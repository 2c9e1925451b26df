"""When a GGUF's blocks are kept, the decision says so and the memory model counts so; when steps
are captured, it counts that, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from setpoint.config.hardware import Hardware
from setpoint.config.options import Options
from setpoint.config.pool import memory_model
from setpoint.config.resolve import resolve
from setpoint.core.errors import ConfigError
from setpoint.core.model import KeptBlocks
from setpoint.planning.memory import GIB
from setpoint_testing.specs import tiny_spec

SPEC = tiny_spec(
    vocab_size=1024,
    num_parameters=200_000,
    blocks=KeptBlocks(
        num_parameters=190_000,
        num_bytes=140_000,
        held_bytes=150_000,
        kinds=("Q4_1", "Q8_0"),
        embedding_bytes=69_632,
    ),
)
CPU = Hardware(device="cpu", num_cores=2, available_bytes=20 * GIB)


@pytest.mark.parametrize(
    ("options", "num_bytes", "words"),
    [
        (
            Options(),
            2 * 10_000 + 150_000,
            "the Q4_1 and Q8_0 blocks of the file are multiplied",
        ),
        (
            Options.of(dtype="float32"),
            4 * (200_000 + 65_536),
            "dequantized at load; only Setpoint's own models in bfloat16 on a CPU",
        ),
        (
            Options.of(model_impl="transformers"),
            2 * (200_000 + 65_536),
            "dequantized at load; only",
        ),
        (Options.of(quantization="unquant"), 2 * (200_000 + 65_536), ""),
        (
            Options.of(quantization="blocks_int8"),
            2 * 10_000 + 150_000,
            "given: the Q4_1 and Q8_0 blocks of the model are multiplied by activations that are"
            " rounded to 8 bits; answers differ",
        ),
    ],
)
def test_blocks_of_a_gguf_are_kept_in_bfloat16(
    options: Options, num_bytes: int, words: str
) -> None:
    config = resolve(options, CPU, SPEC)
    (decision,) = (decision for decision in config.decisions if decision.field == "quantization")
    assert words in decision.why
    assert memory_model(config, SPEC).weights() == num_bytes


@pytest.mark.parametrize(
    ("options", "kinds", "words"),
    [
        (
            {"dtype": "float32"},
            ("Q4_K",),
            "blocks_int8 needs one of Setpoint's own models in bfloa",
        ),
        ({"model_impl": "transformers"}, ("Q4_K",), "leave it out, or --dtype, --device and"),
        ({}, ("MXFP4",), "this model has only MXFP4 blocks; leave it out, or use w8a8_int8"),
        ({}, (), "this model has no quantized blocks"),
    ],
)
def test_activations_of_8_bits_need_blocks_that_meet_them(
    options: dict[str, str], kinds: tuple[str, ...], words: str
) -> None:
    assert SPEC.blocks is not None
    blocks = replace(SPEC.blocks, kinds=kinds) if kinds else None
    with pytest.raises(ConfigError, match=words):
        resolve(
            Options.of(quantization="blocks_int8", **options), CPU, replace(SPEC, blocks=blocks)
        )


def test_captured_steps_are_counted_where_there_are_any() -> None:
    cuda = Hardware(device="cuda", num_cores=2, available_bytes=20 * GIB)
    config = resolve(Options(), CPU, SPEC)
    assert memory_model(config, SPEC).captured
    assert not memory_model(config, SPEC, attention="torch_ref").captured
    assert not memory_model(config, SPEC, model_impl="transformers").captured
    assert not memory_model(resolve(Options.of(disable_cuda_graph=True), CPU, SPEC), SPEC).captured
    assert not memory_model(resolve(Options.of(dtype="float64"), CPU, SPEC), SPEC).captured
    assert not memory_model(resolve(Options(), cuda, SPEC), SPEC).captured
