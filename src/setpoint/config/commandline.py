"""Parses a command line, and the YAML file that it may name, into :class:`Options` and the
command's own options.

In both sources, every spelling is first replaced by the canonical one (``sglang``). argparse then
sees exact names only; it converts types and prints the help. ``check`` checks choices and bounds.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from setpoint.config import other_engines, sglang
from setpoint.config.check import check_options, check_values
from setpoint.config.commands import Command
from setpoint.config.groups.declare import Field, Option, Scalar, masked
from setpoint.config.groups.human import parse_human_int
from setpoint.config.keywords import as_keywords
from setpoint.config.multi_model import named_model
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError
from setpoint.core.plain_file import SETTINGS_MIB, read_plain

_POSITIONAL = "argument without a flag"
_REST = "further arguments"


@dataclass(slots=True, frozen=True)
class CommandLine:
    options: Options
    own: Any
    """An instance of ``Command.own``."""
    given: frozenset[str]
    """Names of the options that the user wrote, including options of SGLang alone whose value is
    SGLang's default."""
    models: tuple[str, ...] = ()
    """The values of --model-path if it was given several times (``config.multi_model``)."""


def parse(command: Command, argv: list[str]) -> CommandLine:
    """Parse the words after ``setpoint COMMAND``. Raises ConfigError for anything that cannot be
    honoured; ``--help`` prints and raises SystemExit(0)."""
    return _Reader(command).read(argv)


def parse_keywords(command: Command, values: Mapping[str, Any]) -> CommandLine:
    """Parse keywords from Python: names with underscores; values of the option's type, or text as
    on a command line. Raises ConfigError."""
    reader = _Reader(command)
    try:
        return reader.read(
            [token for key, value in values.items() for token in reader.tokens(key, value)]
        )
    except ConfigError as error:
        raise ConfigError(as_keywords(str(error))) from None


class _Reader:
    """Reads the lines of one command."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._fields = {field.flag: field for field in command.fields()}

    def read(self, argv: list[str]) -> CommandLine:
        tokens, dropped = self._canonical_tokens(argv)
        values = self._namespace(tokens)
        if "config" in values:
            of_file, dropped_of_file = self._of_file(Path(values["config"]))
            values = {**of_file, **values}
            dropped |= dropped_of_file
        models = self._take_repeated(values)
        given = frozenset(values) | dropped
        own = self._command.own(
            **{
                field.name: values.pop(field.name)
                for field in self._command.own_fields
                if field.name in values
            }
        )
        check_values(own, self._command.own_fields)
        options = Options.of(**{**self._command.defaults, **values})
        check_options(options)
        return CommandLine(options, own, given, models)

    def _take_repeated(self, values: dict[str, Any]) -> tuple[str, ...]:
        """Leave the one value of an option that may be repeated, or take its several values out.
        Raises ConfigError if this command takes one only."""
        found = values.get("model_path")
        if not isinstance(found, list):
            found = [] if found is None else [found]
        if len(found) == 1:
            values["model_path"], name = named_model(found[0])
            if name and values.setdefault("served_model_name", name) != name:
                raise ConfigError(
                    f"the model has two names: {name!r} in --model-path {found[0]!r}, and"
                    f" --served-model-name {values['served_model_name']!r}."
                )
        if len(found) < 2:
            return ()
        if not self._command.listens:
            raise ConfigError(
                f"--model-path is given {len(found)} times; only 'setpoint serve' takes several"
                " models."
            )
        del values["model_path"]
        return tuple(found)

    def _namespace(self, tokens: list[str]) -> dict[str, Any]:
        parser = _parser(self._command)
        if self._command.rest:
            parsed, rest = parser.parse_known_intermixed_args(tokens)
        else:
            parsed, rest = parser.parse_known_args(tokens)
        values = vars(parsed)
        if rest:
            if self._command.listens and named_model(rest[0])[1]:
                models = [values.get(_POSITIONAL), *rest]
                raise ConfigError(f"unexpected argument {rest[0]!r}. {_each_with_option(models)}")
            raise ConfigError(
                f"unexpected argument {rest[0]!r}; see 'setpoint {self._command.name} --help'."
            )
        for field in self._command.fields():
            if field.is_list and field.name in values:
                values[field.name] = tuple(values[field.name])
        argument = values.pop(_POSITIONAL, None)
        name = self._command.positional
        further = values.pop(_REST, None) or []
        if argument is not None and name in values and self._command.rest:
            further = [argument, *further]
        elif argument is not None and name in values:
            self._refuse_second(name, argument, values[name])
        elif argument is not None:
            values[name] = argument
        if further:
            values[self._command.rest] = (*values.get(self._command.rest, ()), *further)
        return values

    def _refuse_second(self, name: str, argument: str, given: Any) -> NoReturn:
        """Refuse an argument without an option whose option is given, too."""
        with_option = given if isinstance(given, list) else [given]
        if self._command.listens and named_model(argument)[1]:
            advice = _each_with_option([*with_option, argument])
            raise ConfigError(f"{argument!r} stands without an option. {advice}")
        what, flag = name.partition("_")[0], "--" + name.replace("_", "-")
        raise ConfigError(
            f"the {what} is given twice: {argument!r} and {flag}"
            f" {' and '.join(map(repr, with_option))}."
        )

    def _canonical_tokens(self, argv: list[str]) -> tuple[list[str], frozenset[str]]:
        """Returns two things: ``argv`` with every option in its canonical spelling and without the
        options that only SGLang has; and the names of those options. Raises ConfigError if one of
        them asks for anything but SGLang's default."""
        tokens: list[str] = []
        dropped = set()
        written: dict[str, tuple[str, tuple[str, ...]]] = {}  # first spelling and value
        rest = deque(argv)
        while rest:
            token = rest.popleft()
            if token == "--":
                tokens += [token, *rest]
                break
            name, equals, value = token.partition("=")
            self._check_engine(name, value if equals else next(iter(rest), None))
            if not name.startswith("--") or " " in name:
                tokens.append(token)
                continue
            flag = self._canonical(name)
            if flag in self._fields:
                words = self._words(flag, [value, *rest] if equals else [*rest])
                self._refuse_two_values(
                    flag, written.setdefault(flag, (name, words)), (name, words)
                )
            if flag in self._fields or flag == "--help":
                tokens.append(flag + equals + value)
            elif sglang.is_default(flag, value if equals else None):
                dropped.add(sglang.field_name(flag))
            elif rest and not equals and sglang.is_default(flag, rest[0]):
                rest.popleft()
                dropped.add(sglang.field_name(flag))
            else:
                raise sglang.refusal(flag, name)
        return tokens, frozenset(dropped)

    def _words(self, flag: str, following: list[str]) -> tuple[str, ...]:
        """The words of the value, which are the first of those that follow the option."""
        field = self._fields[flag]
        if field.kind is bool:
            return ()
        if not field.is_list:
            return tuple(following[:1])
        return tuple(takewhile(lambda word: not word.startswith("--"), following))

    def _refuse_two_values(
        self, flag: str, first: tuple[str, tuple[str, ...]], again: tuple[str, tuple[str, ...]]
    ) -> None:
        """Raise ConfigError for an option that has one value under an alias and another one under
        another spelling: whoever wrote both took them for two options. first, again: spelling and
        value."""
        (name, words), (other, others) = first, again
        if words == others or name == other or not {name, other} & sglang.ALIASES.keys():
            return
        if not self._fields[flag].about.repeats:
            raise ConfigError(
                f"{' '.join((name, *words))} and {' '.join((other, *others))} are the same option"
                " with two values; leave one of them out."
            )

    def _check_engine(self, name: str, value: str | None) -> None:
        """Raise ConfigError for an option of another engine; the message names its equivalent in
        Setpoint. value: the next word, which may be the next option."""
        own = {field.about.short for field in self._command.fields()} | self._fields.keys()
        if not self._command.has_engine or name in own:
            return
        if value is not None and value.startswith("-"):
            value = None
        if hint := other_engines.hint(name, value):
            raise ConfigError(hint)

    def _canonical(self, name: str) -> str:
        if not self._command.has_engine:
            return sglang.own_flag(name, self._fields.keys(), manual=self._command.manual)
        return sglang.canonical(
            name, self._fields.keys(), command=self._command.called, manual=self._command.manual
        )

    def _of_file(self, path: Path) -> tuple[dict[str, Any], frozenset[str]]:
        """Returns a YAML file's values, and the names of the options in it that only SGLang has.
        The file is converted to command-line tokens, so that one piece of code reads all
        options."""
        import yaml

        try:
            content = yaml.safe_load(read_plain(path, SETTINGS_MIB).decode())
        except OSError as error:
            raise ConfigError(f"--config {path} cannot be read: {error.strerror}.") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--config {path} is not valid YAML: {' '.join(str(error).split())}."
            ) from None
        if content is not None and not isinstance(content, dict):
            raise ConfigError(f"--config {path} must consist of 'option: value' lines.")
        try:
            self._check_secrets(content or {})
            tokens, dropped = self._canonical_tokens(
                [
                    token
                    for key, value in (content or {}).items()
                    for token in self.tokens(key, value)
                ]
            )
            values = self._namespace(tokens)
        except ConfigError as error:
            raise ConfigError(f"--config {path}: {error}") from None
        if "config" in values:
            raise ConfigError(f"--config {path}: a config file cannot name another config file.")
        return values, dropped

    def _check_secrets(self, content: Mapping[object, Any]) -> None:
        """Raise ConfigError for a secret without a value: a server whose key got lost on the way
        into the file must not serve everybody."""
        for key, value in content.items():
            field = self._fields.get("--" + str(key).lstrip("-").replace("_", "-"))
            if field is not None and field.about.secret and value is None:
                raise ConfigError(f"{key} has no value. Give one, or leave the line out.")

    def tokens(self, key: object, value: Any) -> list[str]:
        """The command-line tokens for an option whose value is not text yet."""
        name = "--" + str(key).lstrip("-").replace("_", "-")
        self._check_engine(name, None if value is None else str(value))
        flag = self._canonical(name)
        if flag == "--help":
            raise ConfigError(f"{key} is not an option of this command.")
        if value is None:
            return []
        field = self._fields.get(flag)
        if field is None:  # only SGLang has it; its value is checked later
            return (
                []
                if value is False
                else (
                    [flag]
                    if value is True
                    else [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]
                )
            )
        if field.kind is bool:
            if not isinstance(value, bool):
                raise ConfigError(f"{key} must be true or false, got {value!r}.")
            return [flag] if value else []
        if isinstance(value, bool) and {"off", "on"} <= set(field.about.choices):
            value = "on" if value else "off"  # YAML reads the unquoted words as booleans
        if isinstance(value, dict) and field.about.metavar == "JSON":
            value = json.dumps(value)
        if field.is_list and isinstance(value, (list, tuple)) and value:
            return [flag, *map(str, value)]
        if field.about.repeats and isinstance(value, (list, tuple)) and value:
            return [f"{flag}={each}" for each in value]
        if isinstance(value, (bool, list, dict)):
            raise ConfigError(f"{key} must be a single value, got {masked(field, value)!r}.")
        return [f"{flag}={value}"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        name, _, wrong = message.removeprefix("argument ").partition(": ")
        if wrong in ("expected one argument", "expected at least one argument"):
            action = self._option_string_actions[name.rpartition("/")[2]]
            about = (
                str(action.help).replace("%%", "%").rstrip(".").replace(". (default:", " (default:")
            )
            message = f"{name} needs a value, {action.metavar}: {about}"
        raise ConfigError(message.removeprefix("argument ") + ".")


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps lines between words only, so that the name of an option stays in one piece."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.fill(
            " ".join(text.split()),
            width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )


def _each_with_option(models: list[str | None]) -> str:
    """How several models are written."""
    written = " ".join(f"--model-path {each}" for each in models if each)
    return f"Write --model-path before each model: {written}."


def _parser(command: Command) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"setpoint {command.name}",
        usage=f"setpoint {command.name} {command.arguments}",
        description=command.description,
        epilog=(
            "Options have SGLang's names and meanings; unambiguous prefixes are accepted (--tp 1). "
            "Whole numbers of tokens may be written 32k (= 32000) or 32Ki (= 32768)."
            if command.has_engine
            else None
        ),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_HelpFormatter,
    )
    first = command.arguments.split()[0].strip("[]")
    if command.positional:
        parser.add_argument(
            _POSITIONAL,
            nargs="?",
            metavar=first,
            default=None,
            help=_help_of_argument(command, command.positional),
        )
    if command.rest:
        parser.add_argument(
            _REST, nargs="*", metavar=first, help=_help_of_argument(command, command.rest)
        )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in command.fields():
        about = field.about
        if about.group not in groups:
            groups[about.group] = parser.add_argument_group(about.group)
        others = [
            alias
            for alias, flag in sglang.ALIASES.items()
            if flag == field.flag and command.has_engine
        ]
        text = _help(field, command.defaults.get(field.name, field.default), others).replace(
            "%", "%%"
        )
        flags = [about.short, field.flag] if about.short else [field.flag]
        if field.kind is bool:
            groups[about.group].add_argument(*flags, action="store_true", help=text)
        elif about.repeats:
            groups[about.group].add_argument(
                *flags, action="append", type=converter(field), metavar=metavar(field), help=text
            )
        else:
            several = "+" if field.is_list else None
            groups[about.group].add_argument(
                *flags, type=converter(field), metavar=metavar(field), nargs=several, help=text
            )
    return parser


def _help_of_argument(command: Command, name: str) -> str:
    """The help of an option's values if they are given without its name."""
    field = next(each for each in command.fields() if each.name == name)
    about = field.about.meaning.replace(" May be given as arguments.", "")
    return f"{about} The same as {field.flag}.".replace("%", "%%")


def metavar(field: Field[Option]) -> str:
    """The text that stands for the value in the help: the choices, or a placeholder."""
    if field.about.choices:
        return "{" + ",".join(map(str, field.about.choices)) + "}"
    return placeholder(field)


def placeholder(field: Field[Option]) -> str:
    """One word that stands for the value."""
    return field.about.metavar or {int: "N", float: "X"}.get(
        field.kind, field.name.rpartition("_")[2].upper()
    )


def default_text(default: Any) -> str:
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return "" if default is None or default is False else str(default)


def _help(field: Field[Option], default: Any, others: list[str]) -> str:
    notes = [f"also {', '.join(others)}"] if others else []
    if default_text(default):
        notes.append(f"default: {default_text(default)}")
    return field.about.meaning + (f" ({'; '.join(notes)})" if notes else "")


def converter(field: Field[Option]) -> Callable[[str], Scalar]:
    """A function that converts a word to a value of the option; it raises
    argparse.ArgumentTypeError."""

    def convert(text: str) -> Scalar:
        try:
            if field.about.human:
                return parse_human_int(text)
            return field.kind(text)  # type: ignore[no-any-return]
        except ValueError as error:
            wanted = "a whole number" if field.kind is int else "a number"
            raise argparse.ArgumentTypeError(
                str(error) if field.about.human else f"{text!r} is not {wanted}"
            ) from None

    return convert
