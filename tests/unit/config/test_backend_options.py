"""Which implementations of attention and sampling are taken or refused, and what is promised about
bits."""

from __future__ import annotations

from typing import Any

import pytest
from resolving import CPU, GPU, SPEC, decide, reason

from setpoint.config.absent_backends import REFUSED_BACKENDS
from setpoint.config.commandline import parse
from setpoint.config.commands import SERVE
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError
from setpoint.launch.child.mapping import engine_config


def test_the_choice_on_a_gpu_is_said_in_the_log() -> None:
    decision = reason(decide(hardware=GPU), "attention_backend")
    assert (decision.value, decision.is_news) == ("auto", True)
    assert "takes triton, whose steps can be captured as graphs" in decision.why
    assert not reason(decide(), "attention_backend").is_news


@pytest.mark.parametrize("name", ["triton", "flashinfer", "fa3"])
def test_some_are_for_gpus(name: str) -> None:
    config = decide(Options.of(attention_backend=name), GPU)
    assert config.options.execution.attention_backend == name
    for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        flag = f"--{field.replace('_', '-')}"
        with pytest.raises(ConfigError, match=f"{flag} {name} does not run on --device cpu"):
            decide(Options.of(**{field: name}))


def engine(**asked: str) -> tuple[str, str | None, bool, bool]:
    """The implementations that the engine gets, and whether it has graphs of decode steps and of
    others."""
    config = decide(Options.of(**asked), GPU)
    got, sizes = engine_config(config, SPEC, "m"), config.graph_sizes
    found = got.attention_backend, got.decode_attention_backend
    return (*found, bool(sizes.rows), bool(sizes.tokens))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, ("auto", None, True, True)),
        ({"attention_backend": "fa3"}, ("fa3", None, True, True)),
        ({"attention_backend": "flashinfer"}, ("flashinfer", None, False, False)),
        (
            {"prefill_attention_backend": "fa3", "decode_attention_backend": "fa3"},
            ("fa3", None, True, True),
        ),
        (
            {"prefill_attention_backend": "fa3", "decode_attention_backend": "flashinfer"},
            ("fa3", "flashinfer", False, True),
        ),
        (
            {"attention_backend": "flashinfer", "decode_attention_backend": "triton"},
            ("flashinfer", "triton", True, False),
        ),
        ({"decode_attention_backend": "torch_native"}, ("auto", "torch_ref", False, True)),
        ({"prefill_attention_backend": "flashinfer"}, ("flashinfer", "auto", True, False)),
        (
            {"attention_backend": "triton", "prefill_attention_backend": "triton"},
            ("triton", None, True, True),
        ),
    ],
)
def test_each_kind_of_step_may_have_its_own(
    asked: dict[str, str], expected: tuple[str, str | None, bool, bool]
) -> None:
    assert engine(**asked) == expected


def test_two_kinds_are_said_in_the_log() -> None:
    asked = Options.of(prefill_attention_backend="fa3", decode_attention_backend="triton")
    config = decide(asked, GPU)
    for name, words in (
        ("attention_backend", "for steps with prompt tokens; decode steps may have another one"),
        ("decode_attention_backend", "for steps with one token of each request"),
    ):
        assert words in reason(config, name).why
        assert reason(config, name).is_news


def test_on_a_cpu_two_that_differ_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"cpu for steps .* and torch_ref for .* one recording"):
        decide(Options.of(attention_backend="cpu", decode_attention_backend="torch_native"))


def test_why_there_are_no_graphs() -> None:
    config = decide(Options.of(decode_attention_backend="flashinfer"), GPU)
    for name in ("cuda_graph_backend_decode", "cuda_graph_backend_prefill"):
        assert ("flashinfer plans each step on the host" in reason(config, name).why) == (
            name == "cuda_graph_backend_decode"
        )


@pytest.mark.parametrize(
    ("field", "name"),
    [(field, name) for field, names in REFUSED_BACKENDS.items() for name in names],
)
def test_every_other_name_is_refused_with_its_reason(field: str, name: str) -> None:
    why = REFUSED_BACKENDS[field][name]
    flag = f"--{field.replace('_', '-')}"
    with pytest.raises(ConfigError) as caught:
        decide(parse(SERVE, [flag, name]).options)
    assert f"{flag} {name} is not supported" in str(caught.value)
    assert str(caught.value).endswith(f"{why[1:]}.")
    assert "leave" in why


def test_what_is_promised_about_bits() -> None:
    asked = Options.of(enable_deterministic_inference=True)
    decision = reason(decide(asked), "enable_deterministic_inference")
    assert decision.value is True
    assert "does not depend on the number of rows (docs/kernels.md)" in decision.why
    for hardware, words in (
        (CPU, "where the C++ kernels run"),
        (GPU, "the products of cuBLAS depend on the number of rows and attention on the chunk"),
    ):
        decision = reason(decide(hardware=hardware), "enable_deterministic_inference")
        assert (decision.value, decision.warn) == (False, False)
        assert words in decision.why
    decision = reason(decide(asked, GPU), "enable_deterministic_inference")
    assert decision.value is True
    assert "on no batch, no chunk and no cached prefix (docs/gpu.md)" in decision.why
    for dtype in ("float16", "float32"):
        options = Options.of(enable_deterministic_inference=True, dtype=dtype)
        assert reason(decide(options, GPU), "enable_deterministic_inference").value is True


TORCHS = [
    ({"model_impl": "transformers"}, "with --model-impl transformers some"),
    ({"attention_backend": "torch_native"}, "with --attention-backend torch_ref some"),
    ({"enable_torch_compile": True}, "with --enable-torch-compile some"),
]


@pytest.mark.parametrize(
    ("options", "words"), [({"dtype": "float16"}, "products in float16 are torch's"), *TORCHS]
)
def test_what_may_depend_on_the_batch_is_not_promised(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decide(Options.of(enable_deterministic_inference=True, **options))
    assert words in reason(decide(Options.of(**options)), "enable_deterministic_inference").why


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *TORCHS,
        ({"decode_attention_backend": "torch_ref"}, "--decode-attention-backend torch_ref some"),
        ({"attention_backend": "fa3"}, "attention by fa3 depends on the batch"),
        ({"decode_attention_backend": "flashinfer"}, "attention by flashinfer depends"),
    ],
)
def test_nor_is_it_promised_on_a_gpu(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decide(Options.of(enable_deterministic_inference=True, **options), GPU)
