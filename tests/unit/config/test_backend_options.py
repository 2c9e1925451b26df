"""Which implementations of attention and sampling are taken or refused, and what is promised about
bits."""

from __future__ import annotations

from typing import Any

import pytest
from resolving import CPU, GPU, decide, reason

from setpoint.config.absent_backends import REFUSED_BACKENDS
from setpoint.config.commandline import parse
from setpoint.config.commands import SERVE
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError


def test_the_choice_on_a_gpu_is_said_in_the_log() -> None:
    decision = reason(decide(hardware=GPU), "attention_backend")
    assert (decision.value, decision.is_news) == ("auto", True)
    assert "takes triton, whose steps can be captured as graphs" in decision.why
    assert not reason(decide(), "attention_backend").is_news


def test_triton_is_for_gpus() -> None:
    config = decide(Options.of(attention_backend="triton"), GPU)
    assert config.options.execution.attention_backend == "triton"
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises(ConfigError, match=f"{flag} triton does not run on --device cpu"):
            decide(Options.of(**{name: "triton"}))


def test_one_kind_of_step_decides_for_all() -> None:
    config = decide(Options.of(decode_attention_backend="torch_native"), GPU)
    assert config.options.execution.attention_backend == "torch_ref"
    assert reason(config, "attention_backend").why == (
        "--decode-attention-backend: one serves every step"
    )
    both = Options.of(prefill_attention_backend="triton", attention_backend="triton")
    assert decide(both, GPU).options.execution.attention_backend == "triton"


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_attention_backend": "triton", "decode_attention_backend": "torch_ref"},
        {"attention_backend": "triton", "decode_attention_backend": "torch_native"},
    ],
)
def test_two_that_differ_are_refused_with_the_reason(options: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"triton and --decode-attention-backend torch_ref differ, .* because a step may have",
    ):
        decide(Options.of(**options), GPU)


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
    for hardware, words in ((CPU, "where the C++ kernels run"), (GPU, "products of cuBLAS do")):
        decision = reason(decide(hardware=hardware), "enable_deterministic_inference")
        assert (decision.value, decision.warn) == (False, False)
        assert words in decision.why
    with pytest.raises(ConfigError, match=r"cannot be promised here: on a GPU, attention, norms"):
        decide(asked, GPU)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float16"}, "products in float16 are torch's"),
        ({"model_impl": "transformers"}, "with --model-impl transformers some"),
        ({"attention_backend": "torch_native"}, "with --attention-backend torch_ref some"),
        ({"enable_torch_compile": True}, "with --enable-torch-compile some"),
    ],
)
def test_what_may_depend_on_the_batch_is_not_promised(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decide(Options.of(enable_deterministic_inference=True, **options))
    assert words in reason(decide(Options.of(**options)), "enable_deterministic_inference").why
