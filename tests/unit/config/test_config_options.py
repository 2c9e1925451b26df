"""The declarations are complete and true, and what is generated from them is current."""

from __future__ import annotations

import pytest

from setpoint.config import docs, sglang
from setpoint.config.check import check_options
from setpoint.config.environment import ENV_FIELDS, EnvSettings, read_environment, unread_variables
from setpoint.config.groups.declare import Range
from setpoint.config.groups.execution import ExecutionOptions
from setpoint.config.options import GROUPS, OPTION_FIELDS, Options, server_args
from setpoint.config.sglang import KNOWN
from setpoint.core.errors import ConfigError

OWN = {
    "--enable-force-include-usage",
    "--max-body-bytes",
    "--engine-standby",
    "--extra-api-keys",
    "--max-engine-restarts",
    "--max-loaded-models",
    "--num-threads",
    "--record",
    "--record-content",
    "--record-max-bytes",
    "--disaggregation-prefill-servers",
    "--dist-secret",
    "--drain-timeout",
    "--refuse-unknown-keys",
    "--strict-accounting",
    "--update-weights-folder",
    "--workload",
}
OLDER = {"--collect-tokens-histogram", "--enable-overlap-scheduler"}
"""The options of an earlier SGLang."""


@pytest.mark.parametrize("field", OPTION_FIELDS, ids=lambda field: field.name)
def test_option_is_declared_completely(field) -> None:
    about = field.about
    assert about.help.endswith(".")
    assert about.group
    assert field.kind in (str, int, float, bool)
    values = field.default if field.is_list else (field.default,)
    assert all(value is None or isinstance(value, field.kind) for value in values)
    assert all(isinstance(choice, field.kind) for choice in about.choices)
    if about.choices and field.default is not None:
        assert field.default in about.choices
    assert field.flag in KNOWN or field.flag in OWN | OLDER
    if isinstance(about.tunable, Range):
        assert about.tunable.low < about.tunable.high
        assert about.low is None or about.low <= about.tunable.low
    elif about.tunable is not None:
        assert field.default in (None, *about.tunable)


def test_defaults_pass_the_checks() -> None:
    check_options(Options())


def test_documentation_is_current() -> None:
    assert docs.PATH.read_text(encoding="utf-8") == docs.flags_markdown(), (
        "run python -m setpoint.config.docs"
    )


def test_documentation_names_every_option_and_variable() -> None:
    page = docs.flags_markdown()
    assert all(f"| `{field.flag}" in page for field in OPTION_FIELDS)
    assert all(f"| `{field.about.name}` |" in page for field in ENV_FIELDS)


@pytest.mark.parametrize(
    ("flag", "cells"),
    [
        ("--port N", ("`30000`", "1 – 65,535", "", "", "same")),
        ("--stream-interval N", ("`1`", "≥ 1", "yes", "1 – 64", "same")),
        ("--tp-size N", ("`1`", "1 – 64", "", "", "same, `--tensor-parallel-size`")),
        ("--record FILE", ("", "", "", "", "")),
        ("--retraction-policy POLICY", ("`length`", "`length`, `priority`", "yes", "", "same")),
        ("--enable-dp-attention", ("", "", "", "", "same")),
        ("--collect-tokens-histogram", ("", "", "", "", "older guides")),
    ],
)
def test_a_row_says_default_range_live_and_sglangs_name(flag: str, cells: tuple[str, ...]) -> None:
    """Red before: no column had the values that are accepted, and none SGLang's spellings."""
    lines = docs.flags_markdown().splitlines()
    row = next(line for line in lines if line.startswith(f"| `{flag}`"))
    found = tuple(cell.strip() for cell in row.replace("||", "| |").split("|")[2:7])
    assert found == cells


def test_every_group_is_a_section_that_says_what_it_is_about() -> None:
    page = docs.flags_markdown()
    places = []
    for group, fields in GROUPS.items():
        heading = f"\n## {fields[0].about.group}\n\n{docs.PURPOSES[group]}\n\n| option |"
        places.append(page.index(heading))
        assert {field.about.group for field in fields} == {fields[0].about.group}
        assert docs.PURPOSES[group].endswith(".")
    assert places == sorted(places)


def test_server_args_hold_every_option_and_no_secret() -> None:
    shown = server_args(Options.of(api_key="sesame", page_size=16))
    assert set(shown) == {field.name for field in OPTION_FIELDS}
    assert shown["page_size"] == 16
    assert "sesame" not in str(shown)
    assert server_args(Options())["api_key"] is None


def test_a_format_of_sglang_that_is_missing_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"kimi_k3 is not supported .* The nearest is kimi_k2\."):
        check_options(Options.of(tool_call_parser="kimi_k3"))
    with pytest.raises(ConfigError, match=r"must be one of .* The nearest is qwen3\."):
        check_options(Options.of(reasoning_parser="qwen33"))


def test_aliases_and_known_values_point_at_something() -> None:
    for alias, flag in sglang.ALIASES.items():
        assert flag in KNOWN, alias
        assert alias not in sglang.SUPPORTED
    for name, values in sglang.KNOWN_VALUES.items():
        supported = sglang.SUPPORTED["--" + name.replace("_", "-")].about.choices
        assert not set(values) & set(supported)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"chunked_prefill_size": 100, "page_size": 16},
            r"--chunked-prefill-size 100 is not divisible by --page-size 16; .* 112",
        ),
        ({"schedule_conservativeness": -0.1}, "--schedule-conservativeness must be at least 0"),
        ({"schedule_conservativeness": float("nan")}, "finite"),
        ({"mem_fraction_static": 0.0}, "between 0 and 1"),
        ({"mem_fraction_static": 1.0}, "between 0 and 1"),
        (
            {"enable_priority_scheduling": True, "schedule_policy": "lpm"},
            "orders the queue under .* fcfs or lof, not lpm",
        ),
        (
            {"enable_priority_scheduling": True, "schedule_policy": "random"},
            "fcfs or lof, not random",
        ),
        (
            {"retraction_policy": "priority"},
            "--retraction-policy priority needs --enable-priority-scheduling",
        ),
        (
            {"quantization": "quark"},
            "--quantization quark is not supported by this version .*; supported: w8a8_int8, blocks_int8, unquant",
        ),
        ({"retraction_policy": "oldest"}, "--retraction-policy must be one of length, priority"),
        (
            {"schedule_policy": "shortest-prefill-first", "disable_radix_cache": True},
            "needs the prefix cache",
        ),
        ({"prefill_decode_interval": -1}, "--prefill-decode-interval must be at least 0"),
        (
            {"prefill_decode_interval_min_bs": -1},
            "--prefill-decode-interval-min-bs must be at least 0",
        ),
        ({"num_continuous_decode_steps": 0}, "--num-continuous-decode-steps must be at least 1"),
        (
            {"priority_scheduling_preemption_threshold": -1},
            "--priority-scheduling-preemption-threshold must be at least 0",
        ),
        (
            {"prefill_delayer_max_delay_passes": 0},
            "--prefill-delayer-max-delay-passes must be at least 1",
        ),
        (
            {"prefill_delayer_max_delay_ms": -1.0},
            "--prefill-delayer-max-delay-ms must be at least 0",
        ),
        (
            {"prefill_delayer_token_usage_low_watermark": 1.5},
            "--prefill-delayer-token-usage-low-watermark must be at most 1",
        ),
        (
            {"prefill_delayer_queue_min_ratio": -0.1},
            "--prefill-delayer-queue-min-ratio must be at least 0",
        ),
        ({"min_free_slots_delay": -1}, "--min-free-slots-delay must be at least 0"),
        ({"page_size": 0}, "--page-size must be at least 1"),
        ({"max_prefill_tokens": 0}, "--max-prefill-tokens must be at least 1"),
        ({"max_running_requests": 0}, "--max-running-requests must be at least 1"),
        ({"max_total_tokens": 15, "page_size": 16}, "less than one page of 16"),
        ({"context_length": 0}, "--context-length must be at least"),
        ({"port": 0}, "--port must be at least 1"),
        ({"port": 65536}, "--port must be at most 65535"),
        ({"dtype": "int8"}, "--dtype must be one of auto, half"),
        ({"log_requests_level": 4}, "--log-requests-level must be one of 0, 1, 2, 3"),
        ({"pp_size": 2}, "--pp-size 2 is not supported by this version of Setpoint yet"),
        ({"tp_size": 0}, "--tp-size must be at least 1"),
        (
            {"kv_cache_dtype": "mxfp8"},
            (
                "--kv-cache-dtype mxfp8 is not supported by this version of Setpoint yet;"
                " supported: auto, bf16"
            ),
        ),
        ({"served_model_name": "a:b"}, "colon"),
        ({"json_model_override_args": "{"}, "not valid JSON"),
        ({"json_model_override_args": "[1]"}, "must be a JSON object"),
        ({"default_chat_template_kwargs": "[1]"}, "must be a JSON object"),
        ({"preferred_sampling_params": "{"}, "not valid JSON"),
        ({"preferred_sampling_params": '{"top_p": 5}'}, "--preferred-sampling-params: top_p must"),
        (
            {"skip_tokenizer_init": True, "reasoning_parser": "qwen3"},
            "--reasoning-parser concerns text, and with --skip-tokenizer-init the server handles none",
        ),
        (
            {"skip_tokenizer_init": True, "preferred_sampling_params": '{"stop": "x"}'},
            "stop needs a tokenizer, and --skip-tokenizer-init loads none",
        ),
        ({"preferred_sampling_params": '{"topp": 1}'}, "Unknown sampling parameter 'topp'"),
    ],
)
def test_contradictions_are_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_options(Options().replace(**changes))
    assert "\n" not in str(caught.value)


def test_environment_is_read_by_declaration() -> None:
    assert read_environment({}) == EnvSettings()
    read = read_environment(
        {
            "SGLANG_INIT_NEW_TOKEN_RATIO": "0.5",
            "SGLANG_TEST_RETRACT": "1",
            "SGLANG_RETRACT_DECODE_STEPS": " 7 ",
            "HOME": "/x",
        }
    )
    assert read == EnvSettings(init_new_token_ratio=0.5, test_retract=True, retract_decode_steps=7)
    assert read_environment({"SGLANG_LOG_MS": ""}) == EnvSettings()
    assert (
        read_environment(
            {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "False"}
        ).health_endpoint_generation
        is False
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SGLANG_LOG_MS", "maybe"),
        ("SGLANG_RETRACT_DECODE_STEPS", "1.5"),
        ("SGLANG_INIT_NEW_TOKEN_RATIO", "nan"),
    ],
)
def test_environment_of_the_wrong_type_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"environment variable {name} must be .*{text}"):
        read_environment({name: text})


def test_unread_variables_are_named() -> None:
    assert unread_variables({"SGLANG_LOG_MS": "1", "SGLANG_RUST_SERVER": "1", "PATH": ""}) == (
        "SGLANG_RUST_SERVER",
    )


def test_every_declared_variable_has_help_and_a_unique_name() -> None:
    assert all(field.about.help.endswith(".") for field in ENV_FIELDS)
    assert len({field.about.name for field in ENV_FIELDS}) == len(ENV_FIELDS)


@pytest.mark.parametrize("name", ["file_storage_path", "update_weights_folder", "record"])
def test_an_empty_path_is_no_path(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(
        ConfigError, match=f"{flag} is empty: name a (file|folder), or leave it out"
    ):
        check_options(Options.of(**{name: ""}))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"constrained_json_whitespace_pattern": ""}, "is empty"),
        ({"constrained_json_whitespace_pattern": " ", "grammar_backend": "xgrammar"}, "alone"),
        (
            {
                "constrained_json_whitespace_pattern": " ",
                "constrained_json_disable_any_whitespace": True,
            },
            "contradict each other",
        ),
    ],
)
def test_whitespace_of_json_that_makes_no_sense_is_refused(args, words) -> None:
    with pytest.raises(ConfigError, match=words):
        check_options(Options(execution=ExecutionOptions(**args)))
