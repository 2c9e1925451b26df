"""Which steps are captured as graphs of a GPU: the options, what they settle into, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from resolving import CPU, GPU, SPEC, decide, reason

from setpoint.config.commandline import parse
from setpoint.config.commands import SERVE
from setpoint.config.environment import EnvSettings
from setpoint.config.hardware import Hardware
from setpoint.config.live_changes import ConfigInputs, Running
from setpoint.config.memory_check import require_memory
from setpoint.config.options import Options
from setpoint.config.pool import memory_model
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.errors import ConfigError, OutOfMemoryError
from setpoint.core.graph_sizes import NO_GRAPHS, GraphSizes, decode_sizes, extend_sizes
from setpoint.core.limits import CAPTURED_TOKENS
from setpoint.core.model import Pooling
from setpoint.launch.child.mapping import engine_config
from setpoint.planning.memory import GIB, MIB


def on_gpu(text: str, gib: int = 80) -> ResolvedConfig:
    line = parse(SERVE, text.split())
    return decide(line.options, replace(GPU, gpu_bytes=gib * GIB), given=line.given)


@pytest.mark.parametrize(
    ("gib", "ranks", "largest"),
    [
        *((16, 1, 8), (24, 1, 48), (24, 4, 160), (48, 1, 32), (48, 4, 160)),
        *((80, 1, 256), (80, 8, 512), (141, 1, 256), (192, 1, 512)),
    ],
)
def test_the_largest_decode_size_follows_from_the_memory(
    gib: int, ranks: int, largest: int
) -> None:
    spec = replace(SPEC, num_heads=8, num_kv_heads=8)
    config = decide(Options.of(tp_size=ranks), replace(GPU, gpu_bytes=gib * GIB), spec)
    assert config.graph_sizes == GraphSizes(decode_sizes(largest), extend_sizes(512))
    decision = reason(config, "cuda_graph_max_bs_decode")
    assert (decision.value, decision.warn) == (largest, False)
    assert decision.why == f"chosen for a GPU with {gib}.00 GiB"
    assert config.options.graphs.cuda_graph_bs_decode == decode_sizes(largest)
    assert config.options.graphs.cuda_graph_backend_decode == "full"


def test_where_the_memory_is_not_known() -> None:
    config = decide(hardware=replace(GPU, gpu_bytes=None))
    assert config.graph_sizes.rows[-1] == 160
    assert "not known" in reason(config, "cuda_graph_max_bs_decode").why


@pytest.mark.parametrize(
    ("text", "rows", "tokens"),
    [
        ("--cuda-graph-max-bs 6", (1, 2, 4, 6), extend_sizes(512)),
        ("--cuda-graph-max-bs-decode 6", (1, 2, 4, 6), extend_sizes(512)),
        ("--cuda-graph-bs 1 5 9", (1, 5, 9), extend_sizes(512)),
        ("--cuda-graph-bs 1 5 --cuda-graph-bs-decode 1 5", (1, 5), extend_sizes(512)),
        ("--cuda-graph-bs-decode 1 5 9 --cuda-graph-max-bs 9", (1, 5, 9), extend_sizes(512)),
        ("--max-running-requests 10", (1, 2, 4, 8, 10), extend_sizes(512)),
        ("--cuda-graph-max-bs-prefill 1024", decode_sizes(256), extend_sizes(1024)),
        ("--cuda-graph-bs-prefill 64 100", decode_sizes(256), (64, 100)),
        ("--chunked-prefill-size 48", decode_sizes(256), extend_sizes(48)),
        ("--disable-decode-cuda-graph", (), extend_sizes(512)),
        ("--disable-prefill-cuda-graph", decode_sizes(256), ()),
        ("--cuda-graph-backend-prefill disabled", decode_sizes(256), ()),
        ("--cuda-graph-backend-prefill breakable", decode_sizes(256), extend_sizes(512)),
        ("--cuda-graph-backend-decode disabled", (), extend_sizes(512)),
        ("--disable-cuda-graph", (), ()),
        ("--attention-backend torch_ref", (), ()),
        ("--disaggregation-mode prefill", (), extend_sizes(512)),
    ],
)
def test_what_is_asked_for_is_what_the_engine_gets(
    text: str, rows: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    config = on_gpu(text)
    assert config.graph_sizes == GraphSizes(rows, tokens)
    engine = engine_config(config, SPEC, "m")
    assert engine.graph_sizes == config.graph_sizes
    assert engine.capture == ("--disable-cuda-graph" not in text)
    graphs = 2 * MIB * max(rows, default=0) + 8 * MIB * len(tokens)
    assert memory_model(config, SPEC).needed(1).graphs_bytes == graphs
    assert not any(decision.warn for decision in config.decisions)
    assert decide(config.options, GPU).graph_sizes == config.graph_sizes


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("--disable-cuda-graph", "cuda_graph_backend_decode", "--disable-cuda-graph"),
        ("--cuda-graph-backend-prefill breakable", "cuda_graph_backend_prefill", "captured whole"),
        (
            "--attention-backend torch_ref",
            "cuda_graph_backend_decode",
            "--attention-backend torch_ref plans each step on the host",
        ),
        ("--max-running-requests 10", "cuda_graph_max_bs_decode", "--max-running-requests 10"),
    ],
)
def test_the_reasons(text: str, field: str, words: str) -> None:
    assert words in reason(on_gpu(text), field).why


def test_a_model_for_embeddings_decodes_nothing() -> None:
    spec = replace(SPEC, pooling=Pooling("mean", True, 576, None, "by modules.json"))
    assert decide(Options.of(is_embedding=True), GPU, spec).graph_sizes.rows == ()


@pytest.mark.parametrize(
    "text",
    [
        "--cuda-graph-max-bs 512",
        "--cuda-graph-bs 1 2",
        "--cuda-graph-backend-decode full",
        "--cuda-graph-backend-prefill disabled",
        "--cuda-graph-max-bs-prefill 64",
        "--cuda-graph-bs-prefill 64",
        "--disable-decode-cuda-graph",
        "--disable-prefill-cuda-graph",
    ],
)
def test_on_a_cpu_they_are_said_to_have_no_effect(text: str) -> None:
    line = parse(SERVE, text.split())
    config = decide(line.options, CPU, given=line.given)
    (decision,) = (each for each in config.decisions if each.warn)
    assert decision.why.startswith("given, without effect: on a CPU, every step of up to")
    assert f" {CAPTURED_TOKENS} tokens is replayed" in decision.why
    assert config.graph_sizes == NO_GRAPHS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--cuda-graph-max-bs 0", "at least 1, got 0. For no such graphs give --disable-decode"),
        ("--cuda-graph-max-bs-prefill -1", "got -1. For no such graphs give --disable-prefill"),
        ("--cuda-graph-bs 0 4", "--cuda-graph-bs-decode must be at least 1, got 0"),
        ("--cuda-graph-bs 8 4", "in ascending order: write 4 8"),
        ("--cuda-graph-bs-prefill 4 4", "each size once, in ascending order: write 4"),
        ("--cuda-graph-bs 4 8 --cuda-graph-max-bs 16", "whose largest size is 8; leave"),
        (
            "--disable-prefill-cuda-graph --cuda-graph-backend-prefill full",
            "contradict each other; leave one",
        ),
        ("--cuda-graph-backend-decode breakable", "captured whole: take full"),
        ("--cuda-graph-max-bs 1000000000000", "-max-bs-decode must be at most 65536"),
        ("--cuda-graph-max-bs-prefill 65537", "-max-bs-prefill must be at most 65536"),
        ("--cuda-graph-bs-decode 8 1000000000000", "-bs-decode must be at most 65536"),
        ("--cuda-graph-bs-decode 65536", "graphs; lower .* or --cuda-graph-bs-decode, or"),
        ("--cuda-graph-max-bs-decode 65536", "graphs; lower .* or --cuda-graph-max-bs-decode, or"),
        ("--page-size 1000000", "graphs; lower --page-size or --cuda"),
        ("--chunked-prefill-size 1600000", "graphs; lower --chunked-prefill-size .* or --cuda"),
        (
            "--cuda-graph-max-bs 4 --cuda-graph-max-bs-decode 8",
            "--cuda-graph-max-bs 4 and --cuda-graph-max-bs-decode 8 are the same option",
        ),
        (
            "--cuda-graph-bs-decode=8 --cuda-graph-bs 4 8",
            "--cuda-graph-bs-decode 8 and --cuda-graph-bs 4 8 are the same option",
        ),
    ],
)
def test_what_is_no_size_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        on_gpu(text)


def start(hardware: Hardware, **options: Any) -> ConfigInputs:
    asked = ConfigInputs(
        Options.of(**options), frozenset(options), hardware, SPEC, {}, EnvSettings(), 0
    )
    require_memory(asked, asked.resolve(), name="m", is_counted=True, in_gguf=True)
    return asked


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"cuda_graph_max_bs_decode": 512, "max_running_requests": 128},
            "lower --cuda-graph-max-bs-decode to 128, or raise --max-running-requests",
        ),
        (
            {"cuda_graph_max_bs_decode": 512, "mem_fraction_static": 0.99},
            r"graphs of up to 512 requests and of 30 sizes of prompt steps take about 1.23 GiB, and"
            r" --mem-fraction-static 0.99 of 80.00 GiB leaves 819.20 MiB for them; lower it",
        ),
    ],
)
def test_a_start_refuses_what_never_runs_or_has_no_room(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        start(GPU, **options)
    start(CPU, **options)


def test_a_model_that_is_too_large_fits_on_several_gpus() -> None:
    spec = replace(
        SPEC,
        num_heads=64,
        num_kv_heads=8,
        hidden_size=8192,
        intermediate_size=28672,
        num_layers=80,
        num_parameters=70 * 10**9,
        head_dim=128,
    )
    asked = ConfigInputs(Options(), frozenset(), GPU, spec, {}, EnvSettings(), 0)
    with pytest.raises(
        OutOfMemoryError, match=r"What would fit here: --tp-size 2 on 2 such GPUs \(65\.\d+ GiB of"
    ):
        require_memory(asked, asked.resolve(), name="m", is_counted=True, in_gguf=True)


def test_fewer_requests_while_serving_are_no_contradiction() -> None:
    asked = start(GPU, cuda_graph_max_bs_decode=64)
    running = Running.started(asked, asked.resolve(), 100_000)
    assert (
        running.with_values({"max_running_requests": 16}).live_options()["max_running_requests"]
        == 16
    )
    with pytest.raises(ConfigError, match=r"not divisible by the 16 tokens .* such as 1008"):
        running.with_values({"chunked_prefill_size": 1000})


@pytest.mark.parametrize(
    ("options", "hardware", "size"),
    [
        ({}, CPU, 1),
        ({}, GPU, 16),
        ({"page_size": 1}, GPU, 1),
        ({"chunked_prefill_size": 1000}, GPU, 8),
        ({"max_total_tokens": 12}, GPU, 8),
        ({"workload": "long-context"}, GPU, 64),
    ],
)
def test_the_size_of_a_page(options: dict[str, Any], hardware: Hardware, size: int) -> None:
    config = decide(Options.of(**options), hardware)
    assert config.page_size == size
    if not options and size == 16:
        assert "2.1 GB for 4,096 slots" in reason(config, "page_size").why
