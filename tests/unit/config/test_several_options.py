"""Several models on the command line and in a config file."""

from __future__ import annotations

from pathlib import Path

import pytest

from setpoint.config.commandline import parse
from setpoint.config.commands import COMMANDS
from setpoint.config.multi_model import REFUSED, each_model
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError

SERVE = COMMANDS["serve"]


def test_one_model_is_as_before() -> None:
    line = parse(SERVE, ["--model-path", "/a=b.gguf"])
    assert (line.options.model.model_path, line.models) == ("/a=b.gguf", ())
    assert parse(SERVE, ["/a"]).options.model.model_path == "/a"
    assert "model_path" in line.given


@pytest.mark.parametrize("words", [["--model-path", "a=/x"], ["a=/x"], ["--model", "a=/x"]])
def test_one_model_may_have_a_name(words: list[str]) -> None:
    """Red before: the whole was the path."""
    for command in ("serve", "chat"):
        line = parse(COMMANDS[command], words)
        assert line.models == ()
        assert (line.options.model.model_path, line.options.model.served_model_name) == ("/x", "a")
        assert {"model_path", "served_model_name"} <= line.given
    assert parse(SERVE, [*words, "--served-model-name", "a"]).options.model.model_path == "/x"
    with pytest.raises(ConfigError, match="two names: 'a' in --model-path 'a=/x', and"):
        parse(SERVE, [*words, "--served-model-name", "b"])


def test_a_path_with_an_equals_sign_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run=3").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in ("run=3", "./a=b", "~/a=b", "/a=b", "https://host/x?a=b"):
        options = parse(SERVE, ["--model-path", path]).options
        assert options.model.model_path == path
        assert options.model.served_model_name is None


def test_several_models_come_from_flags_or_from_a_file(tmp_path: Path) -> None:
    words = ["--model-path", "a=/x", "--model", "b=org/y=z"]
    line = parse(SERVE, words)
    assert line.models == ("a=/x", "b=org/y=z")
    file = tmp_path / "server.yaml"
    file.write_text("model-path: [a=/x, b=org/y=z]\n")
    assert parse(SERVE, ["--config", str(file)]).models == line.models
    found = each_model(line.options, line.models, line.given)
    assert [(each.model.served_model_name, each.model.model_path) for each in found] == [
        ("a", "/x"),
        ("b", "org/y=z"),
    ]


def test_other_commands_take_one_model() -> None:
    with pytest.raises(ConfigError, match="only 'setpoint serve' takes several"):
        parse(COMMANDS["chat"], ["--model-path", "a=/x", "--model-path", "b=/y"])


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (["/x", "b=/y"], "each needs a name"),
        (["=/x", "b=/y"], "each needs a name"),
        (["a=", "b=/y"], "each needs a name"),
        (["a:1=/x", "b=/y"], "each needs a name"),
        (["a=/x", "a=/y"], "given twice"),
        (["a=/x", "default=/y"], "means the first model"),
    ],
)
def test_names_that_clients_could_not_use_are_refused(models: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        each_model(Options(), models, frozenset())


def test_refused_options_exist_and_are_refused_by_name() -> None:
    for option in REFUSED:
        default = Options().get(option)
        other: object = {bool: True, int: 2, str: "other", tuple: ("other",), type(None): "other"}[
            type(default)
        ]
        options = Options().replace(**{option: other})
        with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} cannot be combined"):
            each_model(options, ["a=/x", "b=/y"], {option})
        each_model(Options(), ["a=/x", "b=/y"], {option})
