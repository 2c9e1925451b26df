"""The memory model: its formulas by hand, its limits by name, and advice that points the right
way."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest

from setpoint.core.errors import OutOfMemoryError
from setpoint.core.footprint import Footprint
from setpoint.core.graph_sizes import GraphSizes
from setpoint.core.limits import GPU_LOGITS_ROWS
from setpoint.core.model import KeptBlocks, Pooling
from setpoint.planning.memory import (
    CPU_POOL_BYTES,
    GIB,
    KIB,
    MIB,
    REFERENCE_SCORES,
    MemoryModel,
    activation_bytes,
    auto_mem_fraction,
    captured_bytes,
    format_bytes,
    graph_bytes,
    max_running_requests,
    reference_attention_bytes,
    sampling_bytes,
    table_bytes,
    weight_bytes,
)
from setpoint_testing.specs import memory_of, tiny_spec

SPEC = tiny_spec(dtype="float32")
TOKEN = 2 * 2 * 16 * 2 * 4  # K and V, kv heads, head_dim, layers, bytes
CPU_MODEL = memory_of(
    SPEC, dtype_bytes=4, kv_element_bytes=4, context_len=512, step_tokens=256, requested_slots=8
)
GPU_MODEL = replace(CPU_MODEL, device="cuda", head_copied=False)


def test_parts_by_hand() -> None:
    assert weight_bytes(SPEC, 4) == 4_000_000
    assert weight_bytes(SPEC, 4, head_copied=True) == 4_000_000 + 256 * 64 * 4
    assert weight_bytes(replace(SPEC, tie_embeddings=False), 4, head_copied=True) == 4_000_000
    weights, channels = (
        64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128,
        (64 + 2 * 32) + 64 + 2 * 128 + 64,
    )
    headless, head = 4_000_000 - 2 * (3 * weights - 8 * channels), 256 * 64 + 8 * 256
    assert (
        weight_bytes(replace(SPEC, pooling=Pooling("mean", True, 64, None, "")), 4, rounded=1)
        == headless
    )
    assert weight_bytes(SPEC, 4, head_copied=True, rounded=1) == headless + head
    assert (
        weight_bytes(replace(SPEC, tie_embeddings=False), 4, rounded=1)
        == headless + head - 4 * 256 * 64
    )
    assert replace(CPU_MODEL, quantization="w8a8_int8").weights() == weight_bytes(
        SPEC, 4, head_copied=True, rounded=1
    )
    assert replace(CPU_MODEL, quantization="unquant").weights() == CPU_MODEL.weights()
    assert SPEC.kv_bytes_per_token(4) == TOKEN
    assert activation_bytes(SPEC, num_tokens=1, dtype_bytes=2) == 2 * (3 * 64 + 4 * 128)
    sampling = partial(sampling_bytes, SPEC, by_kernels=False)
    assert sampling(num_sampling=1, dtype_bytes=2) == 256 * (2 + 24)
    assert sampling(num_sampling=1, dtype_bytes=8) == 256 * (8 + 48)
    assert table_bytes(3, context_len=33, page_size=16) == 4 * 3 * (33 + 3)


def test_kernels_that_sample_need_one_copy_and_little_more() -> None:
    """1,024 rows of 128,256 logits: 1.2 GB and not 3.4 GB."""
    spec = replace(SPEC, vocab_size=128_256)
    sampling = partial(sampling_bytes, spec, num_sampling=1024, dtype_bytes=2)
    rows = 1024 * (128_256 * (2 + 4) + 65_536)
    assert sampling(by_kernels=True) == rows + 6 * 64 * MIB
    assert sampling(by_kernels=False) > 2.6 * sampling(by_kernels=True)
    few = sampling_bytes(spec, num_sampling=2, dtype_bytes=2, by_kernels=True)
    assert few == 2 * (128_256 * (2 + 4 + 24) + 65_536)
    gpu = replace(GPU_MODEL, spec=spec, requested_slots=1024)
    torch_sampled = replace(gpu, reference_attention=True)
    assert gpu.workspace(10_000) + 1.9 * GIB < torch_sampled.workspace(10_000)
    cpu = replace(gpu, device="cpu")
    assert cpu.workspace(10_000) > 256 * 128_256 * (4 + 24)


def test_a_step_reads_all_weights_but_a_table_of_tokens() -> None:
    """An embedding that is not multiplied with is only looked up."""
    table = 256 * 64 * 4
    assert CPU_MODEL.weights_read() == 4_000_000  # the copy is the head
    assert GPU_MODEL.weights_read() == 4_000_000  # the embedding is the head
    untied = replace(SPEC, tie_embeddings=False)
    assert replace(CPU_MODEL, spec=untied).weights_read() == 4_000_000 - table
    embedder = replace(SPEC, pooling=Pooling("mean", True, 64, None, ""))
    model = replace(CPU_MODEL, spec=embedder, head_copied=False)
    assert model.weights_read() == 4_000_000 - table
    kept = KeptBlocks(900_000, 480_000, 500_000, ("Q4_1", "Q8_0"), 10_000)
    model = replace(CPU_MODEL, spec=replace(SPEC, blocks=kept), dtype_bytes=2)
    assert model.weights_read() == model.weights() == 2 * 100_000 + 500_000
    untied = replace(SPEC, blocks=kept, tie_embeddings=False)
    assert replace(model, spec=untied).weights_read() == 2 * 100_000 + 500_000 - 10_000


def test_blocks_of_a_gguf_take_their_own_bytes() -> None:
    kept = replace(SPEC, blocks=KeptBlocks(900_000, 480_000, 500_000, ("Q4_1",), 0))
    assert weight_bytes(kept, 2, blocks=True) == 2 * 100_000 + 500_000
    assert (
        weight_bytes(kept, 2, head_copied=True, blocks=True) == 2 * 100_000 + 500_000 + 2 * 256 * 64
    )
    assert weight_bytes(kept, 2, blocks=False) == weight_bytes(SPEC, 2, blocks=True) == 2_000_000
    tied = replace(kept, blocks=KeptBlocks(900_000, 480_000, 500_000, ("Q4_1", "Q8_0"), 10_000))
    assert weight_bytes(tied, 2, head_copied=True, blocks=True) == 2 * 100_000 + 500_000
    assert replace(CPU_MODEL, spec=tied, dtype_bytes=2).weights() == 2 * 100_000 + 500_000


def test_a_captured_step_by_hand() -> None:
    spec = replace(SPEC, vocab_size=1000, intermediate_size=200)
    layers = 2 * 512 * (4 * 64 + 128 + 200)  # attention's result is as wide as a hidden state
    head = 2 * 256 * (64 + 1000)
    assert captured_bytes(spec, 2) == layers + head + 512 * (
        4 + 8 + 8
    )  # best tokens lie where ids were
    assert captured_bytes(replace(spec, num_norms=4), 2) == captured_bytes(spec, 2) + 2 * 512 * 64
    spec = replace(spec, num_kv_heads=1)
    assert captured_bytes(replace(spec, head_norms=True), 2) == captured_bytes(
        spec, 2
    ) + 2 * 512 * (64 + 16)


def test_captured_steps_take_from_the_pool() -> None:
    model = replace(CPU_MODEL, mem_fraction_static=1.0, requested_slots=1)
    plan, without = (replace(model, captured=captured).plan(64 * MIB) for captured in (True, False))
    assert (plan.graphs_bytes, without.graphs_bytes) == (captured_bytes(SPEC, 4), 0)
    assert (
        f" of workspace, {format_bytes(plan.graphs_bytes)} of captured steps, " in plan.limited_by
    )
    assert "captured" not in without.limited_by
    more = without.kv_bytes + without.workspace_bytes - plan.kv_bytes - plan.workspace_bytes
    assert abs(more - plan.graphs_bytes) <= 16 * TOKEN


def test_attention_decides_where_it_is_wider_than_the_mlp() -> None:
    narrow = replace(SPEC, intermediate_size=1)
    assert activation_bytes(narrow, num_tokens=1, dtype_bytes=2) == 2 * (
        3 * 64 + (2 * 4 + 2 * 2) * 16
    )


@pytest.mark.parametrize(
    ("tokens", "context", "requested", "running"),
    [
        (186_413, 8192, None, 4096),
        (40_000, 8192, None, 2500),
        (30_000, 8192, None, 2048),
        (100, 8192, None, 50),
        (10_000, 8192, 300, 300),
        (500, 8192, 300, 250),
        (1, 8192, 300, 0),
    ],
)
def test_max_running_requests(
    tokens: int, context: int, requested: int | None, running: int
) -> None:
    assert max_running_requests(tokens, context, requested) == running


def test_auto_mem_fraction_has_a_floor_on_large_gpus() -> None:
    graphs = graph_bytes(GraphSizes((1, 2, 48), (4, 8)))
    assert graphs == (2 * 48 + 8 * 2) * MIB
    assert auto_mem_fraction(24 * GIB, step_tokens=4096, graphs_bytes=graphs) == round(
        (24 * 1024 - 512 - 6144 - 128 - 112) / (24 * 1024), 3
    )
    assert auto_mem_fraction(80 * GIB, step_tokens=1, graphs_bytes=graphs) == round(
        (80 - 10) / 80, 3
    )
    assert auto_mem_fraction(24 * GIB, step_tokens=1, graphs_bytes=0) == auto_mem_fraction(
        24 * GIB, step_tokens=2048, graphs_bytes=0
    )


def test_graphs_of_a_gpu_are_counted_and_leave_the_pool_room() -> None:
    sizes = GraphSizes((1, 2, 4), (4, 8, 12))
    model = replace(GPU_MODEL, mem_fraction_static=0.999, graph_sizes=sizes)
    plan, without = (
        replace(model, graph_sizes=each).plan(GIB) for each in (sizes, GraphSizes((), ()))
    )
    assert (plan.graphs_bytes, without.graphs_bytes) == (32 * MIB, 0)
    assert "32.00 MiB of captured steps" in plan.limited_by
    assert "reserve" not in plan.limited_by
    assert plan.total_bytes <= GIB
    footprint = Footprint(weights=0, rotations=0, captured=None, step_tokens=1, activations=None)
    assert model.plan(GIB, footprint=footprint).graphs_bytes == 32 * MIB
    with pytest.raises(OutOfMemoryError, match="or --cuda-graph-max-bs-decode"):
        replace(model, graph_sizes=GraphSizes((600,), ())).plan(GIB)


def test_pool_of_a_gpu_follows_the_formula() -> None:
    """rest = free after the weights - (1 - fraction) * free before, in whole pages, one of which is
    the dummy."""
    before, after = GIB, GIB - 10 * MIB
    plan = replace(GPU_MODEL, mem_fraction_static=0.5).plan(before, available_after_load=after)
    rest = after - before // 2
    assert plan.pool_tokens == (rest // (16 * TOKEN) - 1) * 16
    assert plan.kv_bytes == (plan.pool_tokens + 16) * TOKEN
    assert plan.weights_bytes == 10 * MIB
    assert "--mem-fraction-static 0.5" in plan.limited_by


def test_measured_weights_take_the_place_of_the_estimate() -> None:
    estimate = CPU_MODEL.plan(GIB)
    assert estimate.weights_bytes == weight_bytes(SPEC, 4, head_copied=True)
    assert CPU_MODEL.plan(GIB, available_after_load=GIB - estimate.weights_bytes) == estimate
    assert CPU_MODEL.plan(GIB, available_after_load=GIB + 1).weights_bytes == 0


def test_ceiling_of_a_cpu_pool_unless_more_is_asked_for() -> None:
    plan = CPU_MODEL.plan(100 * GIB)
    assert plan.kv_bytes - 16 * TOKEN == CPU_POOL_BYTES
    assert "ceiling" in plan.limited_by
    assert replace(CPU_MODEL, fraction_given=True).plan(100 * GIB).kv_bytes > 70 * GIB
    assert (
        replace(CPU_MODEL, max_total_tokens=20 * GIB // TOKEN).plan(100 * GIB).pool_tokens
        == 20 * GIB // TOKEN
    )
    long = replace(CPU_MODEL, context_len=8 * GIB // TOKEN)
    assert long.plan(1000 * GIB).pool_tokens == 4 * long.context_len


def test_max_total_tokens_is_an_upper_bound_in_whole_pages() -> None:
    assert replace(CPU_MODEL, max_total_tokens=100).plan(GIB).pool_tokens == 96
    assert replace(CPU_MODEL, max_total_tokens=100).plan(GIB).limited_by == "--max-total-tokens 100"
    assert replace(CPU_MODEL, max_total_tokens=10**12).plan(GIB).pool_tokens < 10**9


def test_a_cpu_pool_leaves_workspace_and_reserve() -> None:
    plan = replace(CPU_MODEL, mem_fraction_static=0.99, fraction_given=True).plan(100 * MIB)
    left = 100 * MIB - plan.weights_bytes - plan.kv_bytes - plan.workspace_bytes - plan.graphs_bytes
    assert 10 * MIB <= left < 10 * MIB + 16 * TOKEN
    assert "10.00 MiB of reserve" in plan.limited_by


def test_workspace_counts_what_is_touched_on_a_cpu() -> None:
    many = replace(CPU_MODEL, context_len=1 << 20, requested_slots=200)
    on_cpu, on_gpu = many.workspace(16_000), replace(many, device="cuda").workspace(16_000)
    sampling = partial(sampling_bytes, SPEC, num_sampling=200, dtype_bytes=4)
    on_gpu += sampling(by_kernels=False) - sampling(by_kernels=True)
    tables = table_bytes(200, context_len=1 << 20, page_size=16)
    assert on_gpu - on_cpu == tables - (4 * (16_000 + 1000) + 8 * KIB * 200)


def test_reference_attention_needs_room_for_scores() -> None:
    scores, gathered = 4 * 256 * 512, 2 * 512 * 2 * 16
    assert replace(CPU_MODEL, reference_attention=True).workspace(1000) - CPU_MODEL.workspace(
        1000
    ) == 4 * (4 * scores + gathered)
    long = reference_attention_bytes(SPEC, num_tokens=10**4, context_len=10**5, dtype_bytes=8)
    assert long == 8 * (4 * REFERENCE_SCORES + 2 * 10**5 * 2 * 16)


def test_every_rotary_base_has_a_table() -> None:
    two = replace(CPU_MODEL, spec=replace(SPEC, num_rotaries=2))
    assert two.workspace(1000) - CPU_MODEL.workspace(1000) == 4 * 512 * 16


def test_workspace_grows_with_the_step_and_stops_at_the_logits_budget() -> None:
    pool = 10**6
    assert replace(CPU_MODEL, step_tokens=512).workspace(pool) > CPU_MODEL.workspace(pool)
    few, many = (
        replace(GPU_MODEL, step_tokens=8192, requested_slots=slots).workspace(pool)
        for slots in (GPU_LOGITS_ROWS, GPU_LOGITS_ROWS + 1)
    )
    assert many - few == table_bytes(1, context_len=512, page_size=16)


@pytest.mark.parametrize(
    ("model", "available", "message"),
    [
        (CPU_MODEL, 3 * MIB, r"Free memory or use a smaller model\.$"),
        (
            replace(CPU_MODEL, mem_fraction_static=0.001),
            GIB,
            r"Raise --mem-fraction-static to 0\.\d+ or more\.$",
        ),
        (
            replace(CPU_MODEL, mem_fraction_static=0.99),
            5 * MIB,
            r"lower --chunked-prefill-size or --max-running-requests\.$",
        ),
        (
            replace(GPU_MODEL, mem_fraction_static=0.001),
            GIB,
            r"Raise --mem-fraction-static to 0\.\d+ or more\.$",
        ),
    ],
)
def test_no_room_for_one_page_says_what_to_do(
    model: MemoryModel, available: int, message: str
) -> None:
    with pytest.raises(OutOfMemoryError, match=message) as caught:
        model.plan(available)
    assert "\n" not in str(caught.value)
    assert format_bytes(available) in str(caught.value)


@pytest.mark.parametrize("model", [CPU_MODEL, GPU_MODEL])
def test_the_advised_share_works(model: MemoryModel) -> None:
    """Red before: the error did not say which share would do."""
    rest = GIB - 100 * MIB
    with pytest.raises(OutOfMemoryError) as caught:
        replace(model, mem_fraction_static=0.001).plan(GIB, available_after_load=rest)
    (share,) = re.findall(r"Raise --mem-fraction-static to (\S+) or more", str(caught.value))
    wider = replace(model, mem_fraction_static=float(share))
    # The next start may find less: other programs run on the machine.
    plan = wider.plan(GIB, available_after_load=rest - GIB // 20)
    assert plan.pool_tokens > 0


def test_room_for_one_page_and_the_dummy_is_enough() -> None:
    two_pages = 2 * 16 * TOKEN
    model = replace(GPU_MODEL, mem_fraction_static=0.5)
    before = 100 * MIB
    plan = model.plan(before, available_after_load=before // 2 + two_pages)
    assert plan.pool_tokens == 16
    with pytest.raises(OutOfMemoryError):
        model.plan(before, available_after_load=before // 2 + two_pages - 1)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (812 * MIB, "812.00 MiB"),
        (3 * GIB, "3.00 GiB"),
    ],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_what_was_measured_takes_the_place_of_estimates() -> None:
    model = replace(CPU_MODEL, max_total_tokens=1024, captured=True)
    footprint = Footprint(
        weights=0, rotations=7, captured=1 << 20, step_tokens=128, activations=1 << 16
    )
    estimated, measured, partly = (
        model.plan(GIB, footprint=each)
        for each in (None, footprint, replace(footprint, activations=None))
    )
    assert measured.graphs_bytes == 1 << 20 != estimated.graphs_bytes
    activations = activation_bytes(SPEC, num_tokens=256, dtype_bytes=4)
    assert partly.workspace_bytes - measured.workspace_bytes == activations - 2 * (1 << 16), (
        "the largest step has twice the tokens of the measured one"
    )
    rotations = 4 * SPEC.num_rotaries * 512 * SPEC.head_dim
    assert estimated.workspace_bytes - partly.workspace_bytes == rotations - 7


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_plan_shows_what_windows_free(device: str) -> None:
    """A model of Gemma 3's shape holds three times the tokens and more at a context of 32,768."""
    windows = tuple(1024 if (layer + 1) % 6 else None for layer in range(34))
    model = replace(
        CPU_MODEL if device == "cpu" else GPU_MODEL,
        spec=tiny_spec(num_layers=34, num_kv_heads=4, head_dim=256, windows=windows),
        context_len=32_768,
        step_tokens=2048,
        fraction_given=True,
    )
    kept = replace(model, spec=replace(model.spec, windows=()))
    plan, before = (each.plan(40 * GIB) for each in (model, kept))
    assert plan.kv_bytes == pytest.approx(before.kv_bytes, rel=0.1)
    assert plan.pool_tokens > 3 * before.pool_tokens
    assert before.pool_tokens == before.num_pages * 16
    asked = replace(model, max_total_tokens=100_000).plan(40 * GIB)
    assert asked.num_pages == 100_000 * len(model.layout.groups) // 16, "whatever the lengths"
    assert asked.pool_tokens > 300_000
