"""The ``setpoint`` command: picks a subcommand, and turns our errors into one line and an exit
code.

A subcommand's module is imported only when it is used, so that ``--help`` and a mistyped option
answer at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from setpoint.core.errors import ConfigError, SetpointError, SourceError
from setpoint.core.excerpt import printable
from setpoint.core.version import __version__
from setpoint.launch.deadline import END_S, LIMIT, end_at_signals

if TYPE_CHECKING:
    from setpoint.config.commandline import CommandLine
    from setpoint.config.environment import EnvSettings
    from setpoint.launch.parent.model_report import ModelExamination

_USAGE = """usage: setpoint {group}COMMAND [options]

An LLM inference server that says what limits it, explains its settings, and replays what it did.

commands ('setpoint {group}COMMAND --help' lists the options):
{commands}
{missing}
options:
  -h, --help      show this text
  -V, --version   show the version
"""


_AT_SIGNALS = {"serve": 0, "batch": 130}
"""Commands that a signal ends in order from their first moment on -> the exit code."""


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 for success, 2 for an option that cannot be honoured
    and for a source that the doctor cannot read, 1 for every other error of ours. Without ``argv``
    it runs the command of this process, which then ends in time, whatever its threads do."""
    if argv is not None:
        return _code(argv)
    if (code_at_signals := _AT_SIGNALS.get("".join(sys.argv[1:2]))) is not None:
        end_at_signals(code_at_signals)
    LIMIT.exit_code = code = _code(sys.argv[1:])
    LIMIT.within(END_S)
    return code


def _code(arguments: list[str]) -> int:
    try:
        return _run(arguments)
    except SetpointError as error:
        words = "\n".join(printable(line) for line in str(error).split("\n"))
        print(f"setpoint: error: {words}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | SourceError) else 1
    except KeyboardInterrupt:
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # another signal would kill the interpreter while it exits
        return 130


def _run(arguments: list[str]) -> int:
    word = arguments[0] if arguments else "help"
    if word in ("--help", "-h", "help"):
        print(_usage(), end="")
        return 0
    if word in ("--version", "-V", "version"):
        print(f"setpoint {__version__}")
        return 0
    from setpoint.config.commands import COMMANDS

    name, rest = word, arguments[1:]
    group = [each for each in COMMANDS if each.startswith(f"{word} ")]
    if group:
        if not rest or rest[0] in ("--help", "-h"):
            print(_usage(of=word), end="")
            return 0
        name, rest = f"{word} {rest[0]}", rest[1:]
    if name not in COMMANDS:
        known = group or [each.partition(" ")[0] for each in COMMANDS]
        see = f"setpoint {word} --help" if group else "setpoint --help"
        hint = _instead_of_run(rest) if name == "run" else _OLLAMA.get(name, "")
        hint = hint or _nearest(name, known)
        raise ConfigError(f"unknown command {name!r}.{hint} See {see!r}.")
    if (extra := COMMANDS[name].extra) and not {"--help", "-h"} & set(rest):
        from setpoint.config.extras import check_extra

        check_extra(f"'setpoint {name}'", extra)
    return _RUNS[name](*_read(name, rest))


def _nearest(word: str, commands: Iterable[str]) -> str:
    """A question that names the command for which ``word`` may be a mistake; "" if no command
    resembles it."""
    import difflib

    close = difflib.get_close_matches(word, list(commands), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


_DESCRIBES = " 'setpoint models MODEL' says of a folder, a GGUF file or a hub id what it is"
_OLLAMA = {
    "pull": " 'setpoint serve owner/name' downloads a model of the hub before it serves it.",
    "list": f"{_DESCRIBES}. Setpoint has no list of models: they stay where they are.",
    "ls": f"{_DESCRIBES}. Setpoint has no list of models: they stay where they are.",
    "show": f"{_DESCRIBES}.",
    "ps": " 'setpoint top URL' shows a running server.",
    "stop": " Ctrl-C ends a server once its open requests are answered.",
}
"""Commands of Ollama -> what to do here."""


def _instead_of_run(rest: list[str]) -> str:
    """What stands here for ``run MODEL``, which people know from Ollama."""
    model = rest[0] if rest and not rest[0].startswith("-") else ""
    # Ollama's names have no owner, and may have a tag.
    if model and ("/" not in model or ":" in model) and not os.path.exists(model):
        model = "owner/name"
    called = f" {model}" if model else ""
    return f" 'setpoint chat{called}' talks to a model, and 'setpoint serve{called}' serves it."


def _usage(of: str = "") -> str:
    from setpoint.config.commands import COMMANDS

    return _USAGE.format(
        group=f"{of} " if of else "",
        commands="\n".join(
            f"  {name.removeprefix(f'{of} '):<16}{command.summary}"
            for name, command in COMMANDS.items()
            if name.startswith(of)
        ),
        missing=_missing(
            {name: command.extra for name, command in COMMANDS.items() if name.startswith(of)}
        ),
    )


def _missing(extras: Mapping[str, str]) -> str:
    """Lines about commands that cannot run, because an extra is not installed. extras: name of a
    command -> the extra that it needs, or ""."""
    from setpoint.config.extras import install_line, is_installed

    lines = [
        f"  {', '.join(name for name, needed in extras.items() if needed == extra)}:"
        f" {install_line(extra)}\n"
        for extra in dict.fromkeys(filter(None, extras.values()))
        if not is_installed(extra)
    ]
    return "".join(
        ["\nnot installed yet (run the line in Setpoint's folder):\n", *lines] if lines else []
    )


def _read(command: str, arguments: list[str]) -> tuple[CommandLine, EnvSettings]:
    from setpoint.config.commandline import parse
    from setpoint.config.commands import COMMANDS
    from setpoint.config.environment import read_environment

    return parse(COMMANDS[command], arguments), read_environment(os.environ)


_Run = Callable[["CommandLine", "EnvSettings"], int]
_RUNS: dict[str, _Run] = {}
"""Name of a command -> what runs it. ``config.commands`` has everything else about it."""


def _runs(name: str) -> Callable[[_Run], _Run]:
    """Register the decorated function as what runs the command of this name."""

    def register(run: _Run) -> _Run:
        return _RUNS.setdefault(name, run)

    return register


@_runs("serve")
def _serve(line: CommandLine, env: EnvSettings) -> int:
    from setpoint.config.nodes import check_rendezvous, with_torchrun_ranks

    options = with_torchrun_ranks(line.options, line.given, os.environ)
    check_rendezvous(options)
    if options.parallel.node_rank > 0:
        from setpoint.launch.parent.node import run_node

        return run_node(options, env, given=line.given)
    from setpoint.launch.parent.server import serve

    return serve(options, env, given=line.given, models=line.models)


@_runs("batch")
def _batch(line: CommandLine, env: EnvSettings) -> int:
    from setpoint.commands.batch_command import run_batch

    return run_batch(line.own, line.options, env, given=line.given)


@_runs("chat")
def _chat(line: CommandLine, env: EnvSettings) -> int:
    from setpoint.commands.chat_command import chat

    return chat(line, env, api_key=os.environ.get("OPENAI_API_KEY"))


@_runs("models")
def _models(line: CommandLine, env: EnvSettings) -> int:
    from setpoint.commands.models_command import show_models

    def measure(examined: ModelExamination) -> None:
        from setpoint.bench.engines.model_pace import measure_pace  # imports torch

        measure_pace(examined)

    return show_models(line, env, measure)


@_runs("compile")
def _compile(line: CommandLine, env: EnvSettings) -> int:
    from setpoint.commands.compile_command import compile_kernels

    return compile_kernels(line, env)


@_runs("replay")
def _replay(line: CommandLine, env: EnvSettings) -> int:
    from setpoint.commands.replay_command import replay

    return replay(line.own)


@_runs("doctor")
def _doctor(line: CommandLine, env: EnvSettings) -> int:
    from setpoint.commands.doctor_command import doctor

    return doctor(line.own)


@_runs("set")
def _set(line: CommandLine, env: EnvSettings) -> int:
    from setpoint.commands.set_command import set_options

    return set_options(line.own, api_key=os.environ.get("OPENAI_API_KEY"))


@_runs("route")
def _route(line: CommandLine, env: EnvSettings) -> int:
    from setpoint.commands.route_command import route

    return route(line.own, api_key=os.environ.get("OPENAI_API_KEY"))


@_runs("top")
def _top(line: CommandLine, env: EnvSettings) -> int:
    from setpoint.commands.top_command import top

    return top(line.own, api_key=os.environ.get("OPENAI_API_KEY"))


@_runs("console")
def _console(line: CommandLine, env: EnvSettings) -> int:
    from setpoint.commands.console_command import console

    return console(line.own)


@_runs("bench serving")
def _bench_serving(line: CommandLine, env: EnvSettings) -> int:
    from setpoint.bench.serving import bench_serving

    return bench_serving(line.own, api_key=os.environ.get("OPENAI_API_KEY"))


@_runs("bench offline")
def _bench_offline(line: CommandLine, env: EnvSettings) -> int:
    from setpoint.bench.engines.offline_throughput import bench_offline

    return bench_offline(line, env)


@_runs("bench one-batch")
def _bench_one_batch(line: CommandLine, env: EnvSettings) -> int:
    from setpoint.bench.engines.bare import bare_engine
    from setpoint.bench.engines.engine_turns import engine_turns
    from setpoint.bench.one_batch import bench_one_batch

    return bench_one_batch(
        line.own,
        lambda num_slots, length: bare_engine(line, env, num_slots=num_slots, length=length),
        lambda shapes: engine_turns(line, env, shapes),
    )


@_runs("bench quality")
def _bench_quality(line: CommandLine, env: EnvSettings) -> int:
    from setpoint.bench.engines.quality import bench_quality

    return bench_quality(line, env)


if __name__ == "__main__":
    sys.exit(main())
