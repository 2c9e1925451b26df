"""The command lines of SGLang's tuning guides, read and resolved as ``setpoint serve`` does it."""

from __future__ import annotations

import re
from collections.abc import Set

import pytest

from setpoint.config.commandline import parse
from setpoint.config.commands import SERVE
from setpoint.config.decisions import Decision
from setpoint.config.groups.declare import Field, Option
from setpoint.config.groups.tiers import check_tiers
from setpoint.config.hardware import Hardware
from setpoint.config.options import OPTION_FIELDS, Options, launch_command
from setpoint.config.resolve import resolve
from setpoint.core.errors import ConfigError
from setpoint.planning.memory import GIB
from setpoint_testing.guide_commands import GUIDE_COMMANDS, GuideCommand
from setpoint_testing.specs import tiny_spec

CPU = Hardware(device="cpu", num_cores=2, available_bytes=20 * GIB)

GPU = Hardware(device="cuda", num_cores=16, available_bytes=100 * GIB, gpu_bytes=80 * GIB)


def decisions_of(options: Options, given: Set[str] = frozenset()) -> dict[str, Decision]:
    return {
        decision.field: decision
        for decision in resolve(options, CPU, tiny_spec(context_len=8192), given=given).decisions
    }


def start(command: GuideCommand) -> None:
    line = parse(SERVE, command.argv())
    resolve(line.options, CPU, tiny_spec(), given=line.given)


@pytest.mark.parametrize(
    "command", GUIDE_COMMANDS, ids=lambda command: f"{command.guide}: {' '.join(command.argv())}"
)
def test_a_command_of_the_guides_starts_or_says_why_not(command: GuideCommand) -> None:
    if command.refused:
        with pytest.raises(ConfigError) as caught:
            start(command)
        assert re.search(command.refused, str(caught.value))
        assert "\n" not in str(caught.value)
        return
    line = parse(SERVE, command.argv())
    warnings = {
        name: decision.why
        for name, decision in decisions_of(line.options, line.given).items()
        if decision.warn
    }
    assert warnings.keys() == set(command.without_effect)
    assert all(why.startswith("given, without effect: ") for why in warnings.values())


MULTI_TURN = (
    "--enable-hierarchical-cache --hicache-storage-backend file --disaggregation-mode decode"
    " --disaggregation-decode-enable-offload-kvcache"
)
LONG_CONTEXT = (
    "--enable-hierarchical-cache --hicache-ratio 2 --hicache-storage-backend file --page-size 64"
    " --schedule-policy lpm --chunked-prefill-size 16384"
)


@pytest.mark.parametrize(
    ("text", "without_effect"), [(MULTI_TURN, set()), (LONG_CONTEXT, {"hicache_ratio"})]
)
def test_whole_commands_of_the_guides_start_with_files(text: str, without_effect: set[str]) -> None:
    line = parse(SERVE, text.split())
    decisions = decisions_of(line.options, line.given)
    assert {name for name, each in decisions.items() if each.warn} == without_effect
    assert not any("--hicache-storage-backend" in decisions[name].why for name in without_effect)


def test_trust_remote_code_which_every_model_card_has_is_accepted() -> None:
    line = parse(SERVE, ["--model-path", "m", "--trust-remote-code", "--tp", "1"])
    assert [
        str(decision)
        for decision in decisions_of(line.options, line.given).values()
        if decision.warn
    ] == ["trust_remote_code=True (given, without effect: Setpoint never runs such code)"]


@pytest.mark.parametrize(
    "field",
    [field for field in OPTION_FIELDS if field.about.no_effect],
    ids=lambda field: field.name,
)
def test_what_changes_nothing_is_said_to_whoever_asks_for_it(field: Field[Option]) -> None:
    assert decisions_of(Options())[field.name].why == "default"
    value = True if field.kind is bool else (field.about.choices or (512,))[-1]
    decision = decisions_of(Options.of(**{field.name: value}), given={field.name})[field.name]
    assert (decision.value, decision.warn) == (value, True)
    assert decision.why == f"given, without effect: {field.about.no_effect}"


def test_an_option_of_sglang_alone_at_its_own_default_is_told() -> None:
    decision = decisions_of(Options(), given={"attn_cp_size"})["attn_cp_size"]
    assert (decision.value, decision.is_news) == ("1", True)


def test_a_host_tier_needs_a_pool_elsewhere() -> None:
    options = Options.of(enable_hierarchical_cache=True)
    decision = decisions_of(options, {"enable_hierarchical_cache"})["enable_hierarchical_cache"]
    assert "on a CPU the KV pool is in host memory already" in decision.why
    both = Options.of(enable_hierarchical_cache=True, hicache_storage_backend="file")
    assert not decisions_of(both, {"enable_hierarchical_cache"})["enable_hierarchical_cache"].warn
    on_gpu = resolve(options, GPU, tiny_spec())
    found = {each.field: each for each in on_gpu.decisions}
    assert not found["enable_hierarchical_cache"].warn


@pytest.mark.parametrize(
    ("argv", "field", "value", "words"),
    [
        (["--attention-backend", "torch_native"], "attention_backend", "torch_ref", "SGLang's torch_native"),
        (["--tokenizer-worker-num", "4"], "tokenizer_worker_num", 4, "given, without effect"),
        (["--cuda-graph-backend-prefill=disabled"], "cuda_graph_backend_prefill", "disabled", "given, without effect"),
    ],
)  # fmt: skip
def test_options_of_sglangs_own_tests(
    argv: list[str], field: str, value: object, words: str
) -> None:
    line = parse(SERVE, argv)
    resolved = resolve(line.options, CPU, tiny_spec(context_len=8192), given=line.given)
    assert resolved.options.get(field) == value
    (decision,) = [each for each in resolved.decisions if each.field == field]
    assert words in decision.why


def test_code_of_clients_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="would run Python code that clients send"):
        parse(SERVE, ["--enable-custom-logit-processor"])


def test_the_calls_of_granite_4_are_known_by_its_name() -> None:
    assert (
        parse(SERVE, ["--tool-call-parser", "granite4"]).options.model.tool_call_parser
        == "granite4"
    )


@pytest.mark.parametrize(
    ("backend", "extra", "words"),
    [
        ("valkey", None, "needs .*extra-config with url"),
        ("mooncake", "{}", "must be one of"),
        ("dynamic", '{"module_path": "m"}', "with class_name"),
        (
            "obstore",
            '{"url": "s3://b", "ttl_seconds": 5}',
            "ttl_seconds is not a setting of obstore",
        ),
        ("file", '{"pth": "/x"}', "pth is not a setting of file; the nearest is path"),
        ("file", '{"block_tokens": 0}', "block_tokens must be a whole number >= 1"),
        ("file", '{"path": ""}', "path is empty"),
        ("file", "/tmp/ok.json", "For a file, write @/tmp/ok.json"),
        ("file", "hush", "For a file, write @FILE"),
        ("file", '{"url": "redis://:hush@h"}', "url is not a setting of file. It has block_tokens"),
    ],
)
def test_settings_belong_to_a_storage(backend: str, extra: str | None, words: str) -> None:
    options = {
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": backend,
        "hicache_storage_backend_extra_config": extra,
    }
    with pytest.raises(ConfigError, match=words) as caught:
        check_tiers(Options.of(**options).tiers, has_cache=True)
    assert "hush" not in str(caught.value)
    command = launch_command(Options.of(**options), {"hicache_storage_backend_extra_config"})
    assert extra is None or extra not in command
