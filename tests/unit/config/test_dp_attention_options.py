"""What --enable-dp-attention refuses and changes."""

from __future__ import annotations

from typing import Any

import pytest
from resolving import GPU, decide, reason

from setpoint.config.dp_attention import of_all_engines
from setpoint.config.options import Options
from setpoint.config.pool import memory_model
from setpoint.core.errors import ConfigError
from setpoint.core.model import Mixture
from setpoint_testing.specs import tiny_spec

MIXTURE = tiny_spec(mixture=Mixture(8, 2, 64, frozenset({0, 1})))
TWO = {"enable_dp_attention": True, "dp_size": 2, "tp_size": 2}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"enable_dp_attention": True},
            "needs several engines, and --dp-size is 1: give --dp-size N",
        ),
        (TWO | {"tp_size": 1}, r"needs --tp-size 2, because .* leave --enable-dp-attention out\."),
        (TWO | {"tp_size": 4}, r"needs --tp-size 2, because .* got --tp-size 4\."),
        (
            TWO | {"nnodes": 2, "dist_init_addr": "a:1"},
            "--enable-dp-attention cannot be combined with --nnodes 2, because its engines share",
        ),
        (TWO | {"enable_torch_compile": True}, "combined with --enable-torch-compile"),
        (TWO | {"enable_eplb": True, "ep_size": 2}, "combined with --enable-eplb"),
        (TWO | {"model_impl": "transformers"}, "combined with --model-impl transformers"),
    ],
)
def test_what_does_not_fit_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decide(Options.of(**values), spec=MIXTURE)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has none\. Leave it out: --dp-size 2 alone gives"):
        decide(Options.of(**TWO), spec=tiny_spec())


def test_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"runs on CPUs only yet, not on cuda; use --device cpu"):
        decide(Options.of(**TWO), GPU, spec=MIXTURE)


def test_limits_are_those_of_an_engine_with_reasons_in_the_log() -> None:
    given = {"chunked_prefill_size": 600, "max_running_requests": 5}
    config = decide(Options.of(**TWO, **given, page_size=8), spec=MIXTURE)
    scheduling = config.options.scheduling
    assert scheduling.chunked_prefill_size == config.chunked_prefill_size == 296
    assert scheduling.max_running_requests == 2
    assert scheduling.schedule_conservativeness == pytest.approx(0.3)
    for field, why in (
        ("chunked_prefill_size", "600 divided by --dp-size 2 with --enable-dp-attention"),
        ("max_running_requests", "5 divided by --dp-size 2 with --enable-dp-attention"),
        ("schedule_conservativeness", "1 x 0.3 with --enable-dp-attention, as in SGLang"),
    ):
        assert reason(config, field).is_news
        assert why in reason(config, field).why


def test_prompts_that_are_not_split_stay_so() -> None:
    config = decide(Options.of(**TWO, chunked_prefill_size=-1), spec=MIXTURE)
    assert config.chunked_prefill_size == -1
    assert config.options.scheduling.max_running_requests is None


def test_an_engine_has_its_share_of_the_experts_and_all_heads() -> None:
    alone, shared = (
        memory_model(decide(Options.of(**values), spec=MIXTURE), MIXTURE) for values in ({}, TWO)
    )
    experts = 2 * MIXTURE.mixture.expert_parameters(MIXTURE.hidden_size) * alone.dtype_bytes
    assert alone.weights() - shared.weights() == experts // 2
    assert alone.layout == shared.layout


@pytest.mark.parametrize(
    "values",
    [
        {"chunked_prefill_size": 256},
        {"chunked_prefill_size": -1},
        {"max_running_requests": 1},
        {"max_running_requests": 20},
        {"schedule_conservativeness": 0.3},
        {"schedule_conservativeness": 0.7},
    ],
)
def test_a_value_that_is_set_is_the_value_in_force(values: dict[str, Any]) -> None:
    (name, value), options = *values.items(), Options.of(**TWO)
    given = of_all_engines(values, options.parallel.dp_size)
    config = decide(options.replace(**given), spec=MIXTURE)
    assert config.options.get(name) == value
