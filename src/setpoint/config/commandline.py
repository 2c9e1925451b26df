"""From a command line, and the YAML file it may name, to :class:`Options`.

Spellings are brought to the canonical one first (``sglang_names``), for both sources alike; argparse then sees exact names
only, converts types and prints the help. Choices and bounds are checked by ``check``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import yaml

from setpoint.config import sglang_names
from setpoint.config.check import check_options
from setpoint.config.declare import Field, Option, Scalar
from setpoint.config.human import parse_human_int
from setpoint.config.options import OPTION_FIELDS, Options
from setpoint.core.errors import ConfigError

_POSITIONAL = "model"


def parse_serve(argv: list[str]) -> tuple[Options, frozenset[str]]:
    """The options of ``setpoint serve`` and the names of those the user gave.

    A spelling that is accepted without effect is among the names too (see ``sglang_names.NOTED``), so that it gets its
    decision. Raises ConfigError for anything that cannot be honoured; ``--help`` prints and raises SystemExit(0).
    """
    tokens, noted = _canonical_tokens(argv)
    values = _namespace(tokens)
    if "config" in values:
        from_file, noted_in_file = _canonical_tokens(_yaml_tokens(Path(values["config"])))
        values = {**_namespace(from_file), **values}
        noted |= noted_in_file
    options = Options(**values)
    check_options(options)
    return options, frozenset(values) | noted


def _namespace(tokens: list[str]) -> dict[str, Any]:
    parsed, rest = _parser().parse_known_args(tokens)
    if rest:
        raise ConfigError(f"unexpected argument {rest[0]!r}; see 'setpoint serve --help'.")
    values = vars(parsed)
    model = values.pop(_POSITIONAL)
    if model is not None:
        if "model_path" in values:
            raise ConfigError(f"the model is given twice: {model!r} and --model-path {values['model_path']!r}.")
        values["model_path"] = model
    return values


def _canonical_tokens(argv: list[str]) -> tuple[list[str], frozenset[str]]:
    """``argv`` with every option in its canonical spelling, less those accepted without effect, whose names come second."""
    tokens: list[str] = []
    noted = set()
    for position, token in enumerate(argv):
        if token == "--":
            tokens += argv[position:]
            break
        name, equals, value = token.partition("=")
        if not name.startswith("--") or " " in name:
            tokens.append(token)
            continue
        flag = sglang_names.canonical(name)
        if flag in sglang_names.NOTED:
            noted.add(sglang_names.field_name(flag))
        else:
            tokens.append(flag + equals + value)
    return tokens, frozenset(noted)


def _yaml_tokens(path: Path) -> list[str]:
    """The file's keys and values as command-line tokens, so that there is one way to read an option."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold 'option: value' lines.")
    try:
        return [token for key, value in content.items() for token in _yaml_option(key, value)]
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from None


def _yaml_option(key: object, value: Any) -> list[str]:
    flag = sglang_names.canonical("--" + str(key).lstrip("-").replace("_", "-"))
    if flag in ("--config", "--help"):
        raise ConfigError(f"{key} has no place in a config file.")
    if value is None:
        return []
    field = sglang_names.SUPPORTED.get(flag)
    if field is None or field.kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{key} must be true or false, got {value!r}.")
        return [flag] if value else []
    if isinstance(value, dict) and field.about.metavar == "JSON":
        value = json.dumps(value)
    if isinstance(value, (bool, list, dict)):
        raise ConfigError(f"{key} must be a single value, got {value!r}.")
    return [f"{flag}={value}"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument ") + ".")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="setpoint serve",
        usage="setpoint serve [MODEL] [options]",
        description="Serve a model over HTTP, in SGLang's and OpenAI's language.",
        epilog="Options have SGLang's names and meanings; unambiguous prefixes are accepted (--tp 1). "
        "Whole numbers of tokens may be written 32k (= 32000) or 32Ki (= 32768).",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(_POSITIONAL, nargs="?", metavar="MODEL", default=None, help="same as --model-path")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in OPTION_FIELDS:
        about = field.about
        if about.group not in groups:
            groups[about.group] = parser.add_argument_group(about.group)
        others = [alias for alias, flag in sglang_names.ALIASES.items() if flag == field.flag]
        text = _help(field, others).replace("%", "%%")
        if field.kind is bool:
            groups[about.group].add_argument(field.flag, action="store_true", help=text)
        else:
            groups[about.group].add_argument(field.flag, type=_converter(field), metavar=metavar(field), help=text)
    return parser


def metavar(field: Field[Option]) -> str:
    """What stands for the value in help and documentation."""
    if field.about.choices:
        return "{" + ",".join(map(str, field.about.choices)) + "}"
    return field.about.metavar or {int: "N", float: "X"}.get(field.kind, field.name.rpartition("_")[2].upper())


def default_text(default: Scalar) -> str:
    return "" if default is None or default is False else str(default)


def _help(field: Field[Option], others: list[str]) -> str:
    notes = [f"also {', '.join(others)}"] if others else []
    if default_text(field.default):
        notes.append(f"default: {field.default}")
    return field.about.help + (f" ({'; '.join(notes)})" if notes else "")


def _converter(field: Field[Option]) -> Callable[[str], Scalar]:
    def convert(text: str) -> Scalar:
        try:
            if field.about.human:
                return parse_human_int(text)
            return field.kind(text)  # type: ignore[no-any-return]
        except ValueError as error:
            wanted = "a whole number" if field.kind is int else "a number"
            raise argparse.ArgumentTypeError(str(error) if field.about.human else f"{text!r} is not {wanted}") from None

    return convert
