"""Models that cannot fit are refused before they are loaded, with what would fit; those that fit
are not."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from setpoint.core.errors import OutOfMemoryError
from setpoint.core.model import KeptBlocks
from setpoint.planning.fit import Choices, check_fit
from setpoint.planning.memory import GIB, MemoryModel
from setpoint_testing.specs import memory_of, tiny_spec

LLAMA_70B = tiny_spec(
    num_layers=80,
    hidden_size=8192,
    intermediate_size=28_672,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
    context_len=131_072,
    tie_embeddings=False,
    num_parameters=70_553_706_496,
)
BF16 = memory_of(LLAMA_70B, context_len=131_072)
ALL = Choices(int8=True, gguf=True, blocks=True)


def refusal(model: MemoryModel, gib: float, choices: Choices = ALL) -> str:
    with pytest.raises(OutOfMemoryError) as error:
        check_fit(model, int(gib * GIB), name="org/model", is_counted=True, choices=choices)
    return str(error.value)


def test_a_70b_model_on_a_small_machine() -> None:
    words = refusal(BF16, 23)
    assert "org/model does not fit" in words
    assert "131.42 GiB (71 billion parameters)" in words
    assert "23.00 GiB are available" in words
    assert "weights and KV cache may take 18.40 GiB (--mem-fraction-static 0.8)" in words
    (largest,) = re.findall(r"about (\S+) billion parameters in bfloat16", words)
    assert 5 < float(largest) < 10
    assert "a GGUF file of it" not in words, "40 GiB do not fit either"
    (four,) = re.findall(r"about (\S+) billion in a GGUF file with 4 bits", words)
    assert 2.5 * float(largest) < float(four) < 4 * float(largest)
    (eight,) = re.findall(r"about (\S+) billion with --quantization w8a8_int8", words)
    assert 1.5 * float(largest) < float(eight) < 2.1 * float(largest)
    assert "w8a8" not in refusal(BF16, 23, replace(ALL, int8=False))


def test_advice_is_what_fits() -> None:
    assert "--quantization w8a8_int8 (" not in (words := refusal(BF16, 60)), "it does not fit"
    assert "a GGUF file of it with 4 bits (Q4_K_M) (39.8" in words
    words = refusal(BF16, 110)
    assert "--quantization w8a8_int8 (6" in words
    assert "GGUF" not in refusal(BF16, 110, replace(ALL, gguf=False))
    wide = replace(BF16, dtype_bytes=4, kv_element_bytes=4)
    assert "--dtype bfloat16 (13" in refusal(wide, 220)
    assert "; --mem-fraction-static 0.86;" in refusal(BF16, 155)


def test_the_advised_share_leaves_room_for_what_a_start_takes_besides_weights() -> None:
    """Red before: a share was advised with which the measured start had no room for one page."""
    small = tiny_spec(num_parameters=700_000_000, context_len=2048, tie_embeddings=False)
    model = replace(BF16, spec=small, context_len=2048, page_size=1, mem_fraction_static=0.01)
    words = refusal(model, 21)
    (share,) = re.findall(r"--mem-fraction-static (\S+);", words)
    advised = replace(model, mem_fraction_static=float(share))
    besides = 800 << 20  # measured: torch's own memory, and other programs of the machine
    left = 21 * GIB - model.weights() - besides
    assert advised.plan(21 * GIB, available_after_load=left).pool_tokens >= 2048


def test_what_would_fit_is_said_for_the_quantization_asked_for() -> None:
    """Red before: a size in bfloat16, half of what fits with 8-bit weights."""
    words = refusal(replace(BF16, quantization="w8a8_int8"), 23)
    (largest,) = re.findall(r"about (\S+) billion parameters with --quantization w8a8", words)
    assert 12 < float(largest) < 20
    assert "in bfloat16" not in words
    assert "of about 29 billion in a GGUF file with 4 bits (Q4_K_M)" in words
    wide = refusal(replace(BF16, dtype_bytes=4, kv_element_bytes=4), 23)
    assert "billion parameters in float32" in wide


def in_blocks(bits: float, held_bits: float, kind: str = "Q4_K") -> MemoryModel:
    """The large model as a GGUF file with so many bits for each weight."""
    number = LLAMA_70B.num_parameters
    held = round(number * held_bits / 8)
    blocks = KeptBlocks(number, round(number * bits / 8), held, (kind,), held // 70)
    return replace(BF16, spec=replace(LLAMA_70B, blocks=blocks))


def test_what_would_fit_in_place_of_a_gguf_file_is_counted_in_its_own_bits() -> None:
    """Red before: a size in bfloat16, a third of what a file of 4 bits may have."""
    words = refusal(in_blocks(4.85, 4.9), 23)
    (largest,) = re.findall(
        r"about (\S+) billion parameters with as many bits for each \(4\.9 in memory\)", words
    )
    assert 25 < float(largest) < 30
    assert "bfloat16" not in words
    assert "Q4_K_M" not in words, "that is what it is"
    assert "take more memory" not in words
    eight = refusal(in_blocks(8.5, 8.5, "Q8_0"), 60)
    assert "What would fit here: a GGUF file of it with 4 bits (Q4_K_M) (39.8" in eight


def test_blocks_that_take_more_memory_than_in_the_file_are_named() -> None:
    words = refusal(in_blocks(2.6, 5.1, "Q2_K"), 23)
    assert "blocks of Q2_K take more memory than the 21.36 GiB that they have in the file" in words


def test_an_option_that_widens_the_blocks_of_a_file_is_named() -> None:
    """Red before: the share of the memory, and nothing of the option."""
    for option in ("unquant", "w8a8_int8"):
        model = replace(in_blocks(4.85, 4.9), quantization=option, blocks_kept=False)
        words = refusal(model, 60)
        assert f"as they are, without --quantization {option} (40" in words
        assert "a GGUF file of it" not in words, "it is one"
        assert "as they are" not in refusal(model, 60, replace(ALL, blocks=False))
    wide = replace(in_blocks(4.85, 4.9), blocks_kept=False, dtype_bytes=4, kv_element_bytes=4)
    assert "as they are, with --dtype bfloat16 (40" in refusal(wide, 60)


def test_a_context_that_does_not_fit() -> None:
    small = tiny_spec(num_parameters=1_000_000, head_dim=256, context_len=8_000_000)
    model = replace(BF16, spec=small, context_len=8_000_000)
    (context,) = map(int, re.findall(r"--context-length (\d+)", refusal(model, 1.5)))
    assert context % 512 == 0
    assert replace(model, context_len=context).plan(round(1.5 * GIB)).pool_tokens >= 2048
    assert replace(model, context_len=context + 512).plan(round(1.5 * GIB)).pool_tokens < 2048


specs = st.builds(
    tiny_spec,
    num_layers=st.integers(1, 100),
    hidden_size=st.sampled_from([64, 1024, 8192]),
    intermediate_size=st.sampled_from([128, 4096, 28_672]),
    num_parameters=st.integers(1_000_000, 200_000_000_000),
    tie_embeddings=st.booleans(),
)


@given(
    spec=specs,
    gib=st.floats(0.5, 500),
    dtype_bytes=st.sampled_from([2, 4]),
    quantization=st.sampled_from([None, "w8a8_int8"]),
    device=st.sampled_from(["cpu", "cuda"]),
    context_len=st.sampled_from([512, 4096, 131_072]),
)
def test_nothing_is_refused_that_the_whole_plan_takes(
    spec: object, gib: float, dtype_bytes: int, quantization: str, device: str, context_len: int
) -> None:
    model = replace(
        BF16,
        spec=spec,
        dtype_bytes=dtype_bytes,
        kv_element_bytes=dtype_bytes,
        quantization=quantization,
        device=device,
        context_len=context_len,
    )
    available = int(gib * GIB)
    try:
        model.plan(available)
    except OutOfMemoryError:
        return
    for is_counted in (True, False):
        check_fit(model, available, name="m", is_counted=is_counted, choices=ALL)


def test_the_memory_of_ranks_is_that_of_all_together() -> None:
    with pytest.raises(OutOfMemoryError, match=r"\(for all 2 ranks together\); 100\.00 GiB are"):
        check_fit(BF16, 100 * GIB, name="m", is_counted=True, choices=ALL, num_ranks=2)
