"""Each command has its own options besides the engine's, help that names them all, and keywords in
their types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from setpoint.config.command_options import BatchOptions
from setpoint.config.commandline import parse, parse_keywords
from setpoint.config.commands import BATCH, COMMANDS, ENGINE, SERVE
from setpoint.config.options import OPTION_FIELDS, Options
from setpoint.core.errors import ConfigError


def parse_serve(argv: list[str]) -> tuple[Options, frozenset[str]]:
    line = parse(SERVE, argv)
    return line.options, line.given


def _file(folder: Path, text: str) -> str:
    path = folder / "serve.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_help_names_every_option_with_default_and_choices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    with pytest.raises(SystemExit) as caught:
        parse_serve(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(field.flag in text for field in OPTION_FIELDS)
    assert "--schedule-policy {fcfs,lpm," in text
    assert "(default: 30000)" in text
    assert "Scheduling:" in text


def test_a_command_has_options_of_its_own_beside_those_of_the_engine(tmp_path: Path) -> None:
    line = parse(
        BATCH, ["in.jsonl", "-o", "out.jsonl", "--keep", "--page-size", "4", "--model", "m"]
    )
    assert line.own == BatchOptions(input="in.jsonl", output="out.jsonl", keep_order=True)
    assert line.options == Options.of(
        page_size=4, model_path="m", log_level="warning", workload="offline"
    )
    assert line.given == {"input", "output", "keep_order", "page_size", "model_path"}
    path = _file(tmp_path, "output: there.jsonl\nkeep_order: true\nlog-level: error\n")
    line = parse(BATCH, ["in.jsonl", "--config", path])
    assert line.own == BatchOptions(input="in.jsonl", output="there.jsonl", keep_order=True)
    assert line.options.logs.log_level == "error"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["i", "--port", "1"],
            "--port belongs to 'setpoint serve'; 'setpoint batch' has no use for it",
        ),
        (["i", "--api", "k"], "--api-key belongs to 'setpoint serve'"),
        (["i", "j"], "unexpected argument 'j'; see 'setpoint batch --help'"),
        (["i", "--input", "j"], "the input is given twice: 'i' and --input 'j'"),
        (["--qqqqqq"], r"unknown option --qqqqqq\. See 'setpoint batch --help'"),
        (["--output"], "--output needs a value"),
        (["--page-size", "0"], "--page-size must be at least 1"),
    ],
)
def test_another_commands_options_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(BATCH, argv)


def test_serve_knows_no_option_of_another_command() -> None:
    with pytest.raises(ConfigError, match="unknown option --keep-order"):
        parse_serve(["--keep-order"])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    with pytest.raises(SystemExit):
        parse(COMMANDS[name], ["--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: setpoint {name} ")
    assert all(field.flag in text for field in COMMANDS[name].fields())
    assert ("--port" in text) == (name in ("serve", "console", "route", "bench serving"))
    assert (f"default: {COMMANDS[name].defaults.get('log_level', 'info')})" in text) == COMMANDS[
        name
    ].has_engine


def test_keywords_are_options_in_their_own_types() -> None:
    line = parse_keywords(
        ENGINE,
        {
            "model_path": "m",
            "tensor_parallel_size": 1,
            "max_total_tokens": "32k",
            "disable_radix_cache": True,
        },
    )
    options = line.options
    assert (
        options.model.model_path,
        options.parallel.tp_size,
        options.memory.max_total_tokens,
        options.memory.disable_radix_cache,
    ) == ("m", 1, 32000, True)
    assert line.given == {"model_path", "tp_size", "max_total_tokens", "disable_radix_cache"}
    assert options.logs.log_level == "warning"
    overrides = parse_keywords(
        ENGINE, {"json_model_override_args": {"rope_theta": 10.0}, "context_length": None}
    ).options
    assert (overrides.model.json_model_override_args, overrides.model.context_length) == (
        '{"rope_theta": 10.0}',
        None,
    )


def test_keywords_may_name_a_file(tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("page-size: 16\nmax-total-tokens: 32k\n")
    options = parse_keywords(ENGINE, {"config": tmp_path / "options.yaml", "page_size": 32}).options
    assert (options.memory.page_size, options.memory.max_total_tokens) == (32, 32000)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle_path": "m"}, "unknown option modle_path. Did you mean model_path"),
        ({"qqqq": 1}, "unknown option qqqq. See docs/flags.md."),
        ({"host": "::"}, r"host belongs to 'setpoint serve'; Engine\(\) has no use for it."),
        ({"pp_size": 2}, "pp_size 2 is not supported by this version"),
        ({"page_size": 1.5}, "page_size: '1.5' is not a whole number"),
        ({"disable_radix_cache": 1}, "disable_radix_cache must be true or false, got 1"),
        ({"dtype": ["float32"]}, "dtype must be a single value"),
        ({"help": True}, "help is not an option of this command"),
    ],
)
def test_bad_keywords(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_keywords(ENGINE, values)
