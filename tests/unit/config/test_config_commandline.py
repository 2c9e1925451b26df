"""Command lines and YAML files become Options, in SGLang's spellings, or are refused in one
line."""

from __future__ import annotations

from pathlib import Path

import pytest

from setpoint.config import sglang
from setpoint.config.commandline import parse
from setpoint.config.commands import SERVE
from setpoint.config.groups.declare import Field, Option
from setpoint.config.hardware import Hardware
from setpoint.config.options import OPTION_FIELDS, Options
from setpoint.config.resolve import resolve
from setpoint.config.sglang import KNOWN
from setpoint.core.errors import ConfigError
from setpoint.planning.memory import GIB
from setpoint_testing.specs import tiny_spec

CPU = Hardware(device="cpu", num_cores=2, available_bytes=20 * GIB)


def parse_serve(argv: list[str]) -> tuple[Options, frozenset[str]]:
    line = parse(SERVE, argv)
    return line.options, line.given


def test_nothing_given() -> None:
    assert parse_serve([]) == (Options(), frozenset())


@pytest.mark.parametrize(
    "argv",
    [
        ["m", "--port", "1", "--host", "h"],
        ["--port", "1", "m", "--host", "h"],
        ["--port=1", "--host", "h", "m"],
        ["--host=h", "--port", "1", "--model", "m"],
        ["--host=h", "--port", "1", "--model-path", "m"],
        ["--host=h", "--port", "1", "--", "m"],
    ],
)
def test_the_model_may_stand_anywhere(argv: list[str]) -> None:
    assert parse_serve(argv) == (
        Options.of(model_path="m", port=1, host="h"),
        frozenset({"model_path", "port", "host"}),
    )


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--tp", "1"], "tp_size", 1),
        (["--dp", "1"], "dp_size", 1),
        (["--ep", "1"], "ep_size", 1),
        (["--tensor-parallel-size", "1"], "tp_size", 1),
        (["--mem", "0.8"], "mem_fraction_static", 0.8),
        (["--max-t", "4k"], "max_total_tokens", 4_000),
        (["--chunked=512"], "chunked_prefill_size", 512),
        (["--chunked-prefill-size", "-1"], "chunked_prefill_size", -1),
        (["--context-length", "32k"], "context_length", 32_000),
        (["--context-l", "32Ki"], "context_length", 32_768),
        (["--max-total-tokens", "1.5M"], "max_total_tokens", 1_500_000),
        (["--schedule-c", "0.3"], "schedule_conservativeness", 0.3),
        (["--disable-radix"], "disable_radix_cache", True),
        (["--log-requests"], "log_requests", True),
        (["--port", "1", "--port", "2"], "port", 2),
        (["--chat-template", "a file.jinja"], "chat_template", "a file.jinja"),
        (["--api-key", "-- odd"], "api_key", "-- odd"),
        (["--json-model-override-args", '{"a": 1}'], "json_model_override_args", '{"a": 1}'),
    ],
)
def test_spellings(argv: list[str], field: str, value: object) -> None:
    options, given = parse_serve(argv)
    assert options.get(field) == value
    assert given == {field}


SPELLINGS = KNOWN | sglang.ALIASES.keys() | {"--help"}
"""What SGLang's own parser counts when it completes a prefix, and two spellings of older guides."""


def test_every_option_of_sglang_keeps_its_shortest_abbreviation() -> None:
    """What is unambiguous there is understood here, and as the same option."""
    for name in SPELLINGS:
        target = sglang.ALIASES.get(name, name)
        for length in range(3, len(name) + 1):
            prefix = name[:length]
            meant = {
                sglang.ALIASES.get(other, other) for other in SPELLINGS if other.startswith(prefix)
            }
            if prefix not in SPELLINGS and meant == {target}:
                assert sglang.canonical(prefix) == target
                break


@pytest.mark.parametrize(
    ("prefix", "flag"),
    [
        ("--max-tot", "--max-total-tokens"),
        ("--max-q", "--max-queued-requests"),
        ("--page", "--page-size"),
        ("--enable-torch", "--enable-torch-compile"),
        ("--cuda-graph-max-bs-d", "--cuda-graph-max-bs-decode"),
        ("--num-t", "--num-threads"),
    ],
)
def test_a_prefix_is_looked_for_among_what_works(prefix: str, flag: str) -> None:
    assert sglang.canonical(prefix) == flag


def test_an_ambiguous_prefix_names_only_what_works() -> None:
    with pytest.raises(ConfigError, match=r"^--mo is ambiguous: it could mean (.*)\.$") as caught:
        parse_serve(["--mo", "5"])
    named = str(caught.value).partition("mean ")[2].rstrip(".").replace(" and ", ", ").split(", ")
    assert set(named) == {flag for flag in sglang.SUPPORTED if flag.startswith("--mo")}


NOT_HERE = sorted(name for name in KNOWN if sglang.ALIASES.get(name, name) not in sglang.SUPPORTED)


def test_every_known_option_is_told_from_an_unknown_one() -> None:
    for name in NOT_HERE:
        for words in ([name, "something else"], [name]):
            if sglang.is_default(name, None):
                continue
            with pytest.raises(
                ConfigError,
                match=(
                    f"{name} is an option of SGLang that is not supported by this version of"
                    " Setpoint yet"
                ),
            ):
                parse_serve(words)


@pytest.mark.parametrize("name", sorted(sglang.DEFAULTS))
def test_an_option_given_its_own_default_stops_nothing(name: str) -> None:
    """Each of SGLang's options is accepted at the value that it has there if nobody gives it."""
    default = sglang.DEFAULTS[name]
    for words in ([name, default], [f"{name}={default}"]):
        line = parse(SERVE, ["model", *words])
        assert line.options.model.model_path == "model"
        decisions = {
            decision.field: decision
            for decision in resolve(line.options, CPU, tiny_spec(), given=line.given).decisions
        }
        assert sglang.field_name(sglang.ALIASES.get(name, name)) in decisions


@pytest.mark.parametrize("name", sorted(sglang.IMPLIED))
def test_an_option_that_says_the_default_stops_nothing(name: str) -> None:
    assert parse_serve(["m", name, "--port", "1"])[1] == {
        "model_path",
        "port",
        sglang.field_name(name),
    }


def test_numbers_are_compared_as_numbers() -> None:
    assert sglang.is_default("--cpu-offload-gb", "0.0")
    assert not sglang.is_default("--cpu-offload-gb", "1")
    assert not sglang.is_default("--disaggregation-mode", "decode")


@pytest.mark.parametrize(
    "field",
    [field for field in OPTION_FIELDS if field.default not in (None, False, ())],
    ids=lambda field: field.name,
)
def test_our_own_defaults_are_accepted(field: Field[Option]) -> None:
    values = field.default if field.is_list else (field.default,)
    line = parse(SERVE, [field.flag, *map(str, values)])
    resolve(line.options, CPU, tiny_spec(), given=line.given)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--page-sise", "4"], r"unknown option --page-sise\. Did you mean --page-size"),
        (
            ["--max-runing-requests=4"],
            r"unknown option --max-runing-requests\. Did you mean --max-running-requests",
        ),
        (["--portt", "1"], r"unknown option --portt\. Did you mean --port\?$"),
        (["--keep-order"], r"unknown option --keep-order\. See 'setpoint serve --help'"),
        (["--enable-lorra"], r"unknown option --enable-lorra\. Did you mean --enable-lora"),
        (["--qqqqqq"], r"unknown option --qqqqqq\. See 'setpoint serve --help'"),
        (
            ["--log-r"],
            r"--log-r is ambiguous: .* --log-requests-format and --log-requests-level\.",
        ),
        (["--enable-"], r"--enable- is ambiguous: .* and \d+ more"),
        (
            ["--speculative-draft-model", "m"],
            "--speculative-draft-model is an option of SGLang that is not supported",
        ),
        (
            ["--speculative-draft-model-p", "m"],
            (
                r"--speculative-draft-model-path \(written --speculative-draft-model-p\) is an"
                r" option of"
            ),
        ),
        (
            ["--lora", "x"],
            (
                "--lora-backend, .* and 1 more are options of SGLang, and this version of Setpoint"
                " supports none of them yet"
            ),
        ),
        (
            ["--attn-cp-size", "2"],
            "--attn-cp-size is an option of SGLang that is not supported by this version of Setpoint yet",
        ),
        (["--attn-cp-size"], "--attn-cp-size is an option of SGLang that is not supported"),
        (["--enable-lora"], "--enable-lora is an option of SGLang that is not supported"),
        (
            ["--pp", "2"],
            "--pp-size 2 is not supported by this version of Setpoint yet; supported: 1",
        ),
        (
            ["--schedule-policy", "best"],
            "--schedule-policy must be one of fcfs, lpm, .*, priority; got 'best'",
        ),
        (
            ["--schedule-policy", "lpm", "--enable-priority-scheduling"],
            "--enable-priority-scheduling .* fcfs or lof, not lpm",
        ),
        (["--page-size", "four"], "--page-size: 'four' is not a whole number"),
        (["--schedule-conservativeness", "x"], "--schedule-conservativeness: 'x' is not a number"),
        (["--context-length", "32K"], "--context-length: '32K' is not an integer; write 32768"),
        (["--port"], "--port needs a value, N: Port to listen on"),
        (["-x"], "unexpected argument '-x'"),
        (["a", "b"], "unexpected argument 'b'"),
        (["a", "--model", "b"], "the model is given twice: 'a' and --model-path 'b'"),
        (
            ["--model-path", "a=x", "b=y"],
            "'b=y' stands without an option. Write --model-path before each model: --model-path a=x"
            " --model-path b=y",
        ),
        (["a=x", "b=y"], "unexpected argument 'b=y'. Write --model-path before each model"),
    ],
)
def test_refused_in_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_serve(argv)
    assert "\n" not in str(caught.value)


def _file(folder: Path, text: str) -> str:
    path = folder / "serve.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_config_file_and_the_command_line_wins(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        "model: there\nport: 1\ncontext-length: 32k\nmem_fraction_static: 0.5\ndisable-radix-cache:"
        " true\nlog-requests: false\nchat-template: null\ntp: 1\njson-model-override-args:"
        " {rope_theta: 5}\nenable-overlap-scheduler: true\nchunked-prefill-size: -1\n",
    )
    options, given = parse_serve(["here", "--config", path, "--port", "2"])
    assert options == Options.of(
        model_path="here",
        port=2,
        context_length=32_000,
        mem_fraction_static=0.5,
        disable_radix_cache=True,
        json_model_override_args='{"rope_theta": 5}',
        chunked_prefill_size=-1,
        enable_overlap_scheduler=True,
        config=path,
    )
    assert {"port", "context_length", "tp_size", "config", "enable_overlap_scheduler"} <= given
    assert "chat_template" not in given


def test_empty_config_file(tmp_path: Path) -> None:
    path = _file(tmp_path, "# nothing\n")
    assert parse_serve(["--config", path])[0] == Options.of(config=path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page-sise: 4", "unknown option --page-sise. Did you mean --page-size"),
        ("enable-lora: true", "--enable-lora is an option of SGLang"),
        ("page-size: [1, 2]", "page-size must be a single value"),
        ("page-size: true", "page-size must be a single value"),
        ("disable-radix-cache: 1", "disable-radix-cache must be true or false"),
        ("config: other.yaml", "a config file cannot name another config file"),
        ("page-size: [", "not valid YAML"),
        ("- page-size", "must consist of 'option: value' lines"),
    ],
)
def test_bad_config_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_serve(["--config", _file(tmp_path, text)])
    assert "serve.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_config_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml cannot be read: No such file"):
        parse_serve(["--config", str(tmp_path / "absent.yaml")])
