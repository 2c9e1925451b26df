"""Resolution is pure and complete: every option gets a value and one reason, whatever the
machine."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resolving import CPU, GPU, SPEC, decide, reason

from setpoint.config.decisions import Decision
from setpoint.config.environment import EnvSettings
from setpoint.config.hardware import Hardware
from setpoint.config.options import OPTION_FIELDS, Options
from setpoint.config.pool import memory_model, resolve_pool
from setpoint.config.resolve import resolve
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.errors import ConfigError, OutOfMemoryError
from setpoint.core.model import Pooling
from setpoint.planning.memory import GIB


@pytest.mark.parametrize("hardware", [CPU, GPU, replace(GPU, gpu_bytes=None)])
@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options.of(model_path="m", page_size=16, api_key="sesame", disable_radix_cache=True),
    ],
)
def test_every_option_has_exactly_one_decision_with_its_value(
    options: Options, hardware: Hardware
) -> None:
    config = decide(options, hardware)
    names = [field.name for field in OPTION_FIELDS]
    assert [decision.field for decision in config.decisions] == [
        *names,
        "overlap_depth",
        "decode_after_piece",
        "placement",
        *(["gpus"] if hardware.device == "cuda" else []),
    ]
    for decision in config.decisions[: len(names)]:
        assert decision.why
        assert decision.field == "api_key" or decision.value == config.options.get(decision.field)
    assert "sesame" not in " ".join(map(str, config.decisions))


def test_what_is_given_is_kept_and_said() -> None:
    config = decide(Options.of(page_size=1, port=1), given=frozenset({"page_size", "port"}))
    assert reason(config, "page_size") == Decision("page_size", 1, "given")
    assert reason(config, "port").why == "given"
    assert reason(config, "host").why == "default"
    assert str(reason(config, "max_queued_requests")) == "max_queued_requests=None (default)"


def test_resolving_twice_changes_nothing() -> None:
    once = decide(Options.of(model_path="m"), drawn_seed=7)
    assert decide(once.options, drawn_seed=8).options == once.options


def test_it_crosses_a_process_border() -> None:
    config = decide(Options.of(model_path="m"), given=frozenset({"model_path"}))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ResolvedConfig) == config


@pytest.mark.parametrize(
    ("asked", "checkpoint", "hardware", "dtype"),
    [
        ("auto", "bfloat16", CPU, "bfloat16"),
        ("auto", "float16", CPU, "bfloat16"),
        ("auto", "float16", GPU, "float16"),
        ("auto", "float32", CPU, "bfloat16"),
        ("auto", "float32", GPU, "bfloat16"),
        ("auto", "float64", CPU, "float64"),
        ("half", "bfloat16", CPU, "float16"),
        ("float", "bfloat16", CPU, "float32"),
        ("float64", "bfloat16", CPU, "float64"),
    ],
)
def test_dtype_and_the_kv_cache_after_it(
    asked: str, checkpoint: str, hardware: Hardware, dtype: str
) -> None:
    config = decide(Options.of(dtype=asked), hardware, replace(SPEC, dtype=checkpoint))
    assert config.options.model.dtype == dtype
    assert config.options.model.kv_cache_dtype == dtype
    assert config.dtype_bytes == config.kv_element_bytes


@pytest.mark.parametrize(
    ("asked", "dtype", "num_bytes"),
    [
        ("bf16", "bfloat16", 2),
        ("fp32", "float32", 4),
        ("float32", "float32", 4),
        ("fp8_e4m3", "fp8_e4m3", 1),
        ("fp8_e5m2", "fp8_e5m2", 1),
    ],
)
def test_kv_cache_dtype(asked: str, dtype: str, num_bytes: int) -> None:
    config = decide(Options.of(kv_cache_dtype=asked))
    assert config.options.model.kv_cache_dtype == dtype
    assert config.kv_element_bytes == num_bytes


def test_a_file_of_scales_needs_a_cache_in_fp8(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    layers = {str(layer): 0.5 for layer in range(SPEC.num_layers)}
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": layers}}
    path.write_text(json.dumps({"model_type": SPEC.model_type, "kv_cache": cache}))
    options = {"quantization_param_path": str(path)}
    config = decide(Options.of(kv_cache_dtype="fp8_e4m3", **options))
    assert config.options.model.quantization_param_path == str(path)
    with pytest.raises(ConfigError, match=r"a KV cache in fp8; give --kv-cache-dtype fp8"):
        decide(Options.of(**options))
    with pytest.raises(ConfigError, match="must have scales of 2 ranks, 0 to 1"):
        decide(Options.of(kv_cache_dtype="fp8_e4m3", tp_size=2, **options))


def test_context_length() -> None:
    assert decide().context_len == 8192
    assert decide(Options.of(context_length=100)).context_len == 100
    with pytest.raises(
        ConfigError,
        match=(
            r"--context-length 8193 is more than the 8192 tokens .*"
            r" SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
        ),
    ):
        decide(Options.of(context_length=8193))
    longer = decide(Options.of(context_length=8193), env=EnvSettings(allow_longer_context=True))
    assert longer.context_len == 8193
    assert reason(longer, "context_length").warn


def test_a_rope_that_depends_on_the_length_is_fixed_and_said() -> None:
    assert all(decision.field != "rope_context_length" for decision in decide().decisions)
    config = decide(Options.of(context_length=4096), spec=replace(SPEC, rope_by_context=True))
    decision = reason(config, "rope_context_length")
    assert decision.value == 4096
    assert "sequences share the keys in the cache" in decision.why


def test_a_language_model_that_is_served_without_the_rest_is_said() -> None:
    assert all(decision.field != "language_model_only" for decision in decide().decisions)
    config = decide(spec=replace(SPEC, wrapper="Gemma3ForConditionalGeneration"))
    assert (
        "Gemma3ForConditionalGeneration accepts more than text"
        in reason(config, "language_model_only").why
    )


@pytest.mark.parametrize(
    ("options", "hardware", "chunk"),
    [
        (Options(), CPU, 512),
        (Options.of(page_size=48), CPU, 480),
        (Options.of(page_size=4096), CPU, 4096),
        (Options.of(chunked_prefill_size=96, page_size=48), CPU, 96),
        (Options.of(chunked_prefill_size=-1), CPU, -1),
        (Options.of(chunked_prefill_size=0), CPU, -1),
        (Options(), replace(GPU, gpu_bytes=16 * GIB), 2048),
        (Options(), replace(GPU, gpu_bytes=24 * GIB), 4096),
        (Options(), GPU, 8192),
        (Options(), replace(GPU, gpu_bytes=180 * GIB), 16384),
        (Options(), replace(GPU, gpu_bytes=None), 4096),
    ],
)
def test_chunked_prefill_size(options: Options, hardware: Hardware, chunk: int) -> None:
    assert decide(options, hardware).chunked_prefill_size == chunk


@pytest.mark.parametrize(
    ("options", "hardware", "interval", "after_piece", "why"),
    [
        (Options(), CPU, 0, 1, "a chunk takes long on a CPU"),
        (Options.of(enable_mixed_chunk=True), CPU, 0, 0, "for each running request anyway"),
        (Options(), GPU, 0, 0, "before the pause is noticeable"),
        (Options.of(prefill_decode_interval=0), CPU, 0, 0, "is given"),
        (Options.of(prefill_decode_interval=3, enable_mixed_chunk=True), CPU, 3, 0, "is given"),
        (Options.of(prefill_decode_interval=3), GPU, 3, 0, "is given"),
    ],
)
def test_decode_steps_between_prefill_steps(
    options: Options, hardware: Hardware, interval: int, after_piece: int, why: str
) -> None:
    config = decide(options, hardware)
    assert (config.prefill_decode_interval, config.decode_after_piece) == (interval, after_piece)
    assert why in reason(config, "decode_after_piece").why
    assert not reason(config, "prefill_decode_interval").warn


def test_step_tokens_without_chunking() -> None:
    assert decide(Options.of(chunked_prefill_size=-1)).step_tokens == 16384
    assert decide(Options.of(chunked_prefill_size=-1, max_prefill_tokens=100)).step_tokens == 8192


def test_device_and_what_follows_from_it() -> None:
    assert (decide().options.execution.device, decide().overlap_depth) == ("cpu", 0)
    assert (decide(hardware=GPU).options.execution.device, decide(hardware=GPU).overlap_depth) == (
        "cuda",
        1,
    )
    assert decide(Options.of(device="cpu"), GPU).overlap_depth == 0
    assert decide(Options.of(disable_overlap_schedule=True), GPU).overlap_depth == 0


def test_attention_backend_is_the_engines_choice_unless_given() -> None:
    assert decide().options.execution.attention_backend == "auto"
    assert (
        decide(Options.of(attention_backend="torch_ref")).options.execution.attention_backend
        == "torch_ref"
    )
    with pytest.raises(ConfigError, match="--attention-backend cpu does not run on --device cuda"):
        decide(Options.of(attention_backend="cpu"), GPU)


def test_quantization_is_named_and_known_to_the_memory_model() -> None:
    for name, hardware in itertools.product(("w8a8_int8", "fp8"), (CPU, GPU)):
        options = Options.of(quantization=name)
        config = decide(options, hardware, given=frozenset({"quantization"}))
        assert reason(config, "quantization") == Decision("quantization", name, "given")
        plain = memory_model(decide(hardware=hardware), SPEC)
        assert memory_model(config, SPEC).weights() < plain.weights()


def test_memory_model_knows_the_attention_backend() -> None:
    assert not memory_model(decide(), SPEC).reference_attention
    assert memory_model(decide(), SPEC, attention="torch_ref").reference_attention
    assert memory_model(decide(Options.of(attention_backend="torch_ref")), SPEC).reference_attention
    assert memory_model(decide(Options.of(dtype="float64")), SPEC).reference_attention
    assert not memory_model(decide(hardware=GPU), SPEC).reference_attention
    assert memory_model(decide(hardware=GPU), SPEC, attention="torch_ref").reference_attention
    assert memory_model(decide(), SPEC).head_copied
    assert not memory_model(decide(Options.of(dtype="float64")), SPEC).head_copied


def test_embeddings_say_how_they_are_pooled_and_count_no_head() -> None:
    spec = replace(SPEC, pooling=Pooling("mean", True, 576, None, "by modules.json"))
    config = decide(Options.of(is_embedding=True), spec=spec)
    assert reason(config, "embedding_pooling") == Decision(
        "embedding_pooling", "mean", "by modules.json", is_news=True
    )
    assert reason(config, "embedding_normalize").value is True
    assert not memory_model(config, spec).head_copied


def test_whose_model_code_runs() -> None:
    assert reason(decide(Options.of(model_impl="sglang")), "model_impl") == Decision(
        "model_impl", "setpoint", "given as sglang"
    )
    assert (
        reason(
            decide(Options.of(model_impl="transformers"), given=frozenset({"model_impl"})),
            "model_impl",
        ).why
        == "given"
    )
    assert reason(decide(), "model_impl").value == "auto"
    with pytest.raises(
        ConfigError, match="--model-impl mindspore is not supported by this version"
    ):
        decide(Options.of(model_impl="mindspore"))


def test_threads() -> None:
    assert decide().num_threads == 2
    assert not reason(decide(Options.of(num_threads=2)), "num_threads").warn
    assert reason(decide(Options.of(num_threads=3)), "num_threads").warn


def test_seed_names_and_log_level() -> None:
    config = decide(Options.of(model_path="a/b", log_level="debug"), drawn_seed=7)
    assert (
        config.random_seed,
        config.options.model.tokenizer_path,
        config.options.model.served_model_name,
    ) == (7, "a/b", "a/b")
    assert config.options.logs.log_level_http == "debug"
    assert decide(Options.of(random_seed=0), drawn_seed=7).random_seed == 0


def test_the_formats_of_a_chat_are_found_unless_given() -> None:
    found = {
        "tool_call_parser": ("hermes", "it says so"),
        "reasoning_parser": ("none", "it is not"),
    }
    config = resolve(Options(), CPU, SPEC, found=found)
    assert (config.options.model.tool_call_parser, config.options.model.reasoning_parser) == (
        "hermes",
        "none",
    )
    assert str(reason(config, "tool_call_parser")) == "tool_call_parser=hermes (it says so)"
    assert reason(config, "tool_call_parser").is_news
    assert not reason(config, "reasoning_parser").is_news
    given = Options.of(tool_call_parser="none", reasoning_parser="qwen3")
    config = resolve(given, CPU, SPEC, given={"tool_call_parser", "reasoning_parser"}, found=found)
    assert (config.options.model.tool_call_parser, config.options.model.reasoning_parser) == (
        "none",
        "qwen3",
    )
    assert str(reason(config, "tool_call_parser")) == "tool_call_parser=none (given)"


def test_what_was_found_is_not_called_given() -> None:
    found = {
        "model_path": ("a/b", "the default model"),
        "tokenizer_path": ("/cache/b", "the model's own"),
    }
    config = resolve(Options(), CPU, SPEC, found=found)
    shown = {
        name: str(reason(config, name))
        for name in ("model_path", "tokenizer_path", "served_model_name")
    }
    assert shown == {
        "model_path": "model_path=a/b (the default model)",
        "tokenizer_path": "tokenizer_path=/cache/b (the model's own)",
        "served_model_name": "served_model_name=a/b (the model path)",
    }
    config = resolve(Options.of(model_path="c"), CPU, SPEC, given={"model_path"}, found=found)
    assert str(reason(config, "model_path")) == "model_path=c (given)"
    assert config.options.model.served_model_name == "c"


def test_mem_fraction() -> None:
    assert decide().mem_fraction_static == 0.8
    assert decide(hardware=GPU).mem_fraction_static == round(
        (80 * 1024 - 512 - 1.5 * 8192 - 128 - 2 * 256 - 8 * 30) / (80 * 1024), 3
    )
    assert decide(hardware=replace(GPU, gpu_bytes=None)).mem_fraction_static == 0.95
    assert decide(Options.of(mem_fraction_static=0.3), GPU).mem_fraction_static == 0.3
    with pytest.raises(
        ConfigError,
        match=r"no room for steps of 2048 tokens and for 256\.00 MiB of graphs; lower --chunked",
    ):
        decide(hardware=replace(GPU, gpu_bytes=3 * GIB))


options_drawn = st.builds(
    Options.of,
    page_size=st.sampled_from([1, 3, 16, 64]),
    kv_cache_dtype=st.sampled_from(["auto", "bf16", "fp32", "fp8_e4m3"]),
    dtype=st.sampled_from(["auto", "float16", "float32", "float64"]),
    context_length=st.none() | st.integers(8, 8192),
    max_total_tokens=st.none() | st.integers(64, 10**8),
    max_running_requests=st.none() | st.integers(1, 10_000),
    mem_fraction_static=st.none() | st.floats(0.01, 0.99),
    chunked_prefill_size=st.none() | st.sampled_from([-1, 192, 1920]),
)
hardware_drawn = st.builds(
    lambda device, cores, total, share, gpu: Hardware(device, cores, round(total * share), gpu),
    st.sampled_from(["cpu", "cuda"]),
    st.integers(1, 256),
    st.integers(1, 2048 * GIB),
    st.floats(0, 1),
    st.none() | st.integers(40 * GIB, 300 * GIB),
)


@settings(max_examples=300)
@given(options_drawn, hardware_drawn)
def test_never_plans_more_than_there_is(options: Options, hardware: Hardware) -> None:
    config = decide(options, hardware)
    available = (
        hardware.available_bytes
        if config.options.execution.device == "cpu"
        else hardware.gpu_bytes or 16 * GIB
    )
    assert (
        config.step_tokens % config.options.memory.page_size == 0
        or config.chunked_prefill_size == -1
    )
    try:
        plan = memory_model(config, SPEC).plan(available)
        pool = resolve_pool(config, plan.pool_tokens, limited_by=plan.limited_by)
    except OutOfMemoryError:
        return
    assert plan.pool_tokens % config.options.memory.page_size == 0
    assert plan.pool_tokens >= config.options.memory.page_size
    assert plan.pool_tokens <= (options.memory.max_total_tokens or plan.pool_tokens)
    assert plan.weights_bytes + plan.kv_bytes <= available * config.mem_fraction_static + 1
    if config.options.execution.device == "cpu":
        assert (
            plan.kv_bytes + plan.weights_bytes + plan.workspace_bytes + plan.graphs_bytes
            <= available
        )
    assert 1 <= pool.max_running_requests <= plan.pool_tokens // 2
    assert 1 <= pool.max_req_input_len < pool.max_req_len < config.context_len


def test_what_a_command_sets_is_not_called_given() -> None:
    config = decide(Options.of(log_level="warning"), given=frozenset())
    assert reason(config, "log_level").why == "not given; set by this command"
