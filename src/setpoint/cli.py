"""The ``setpoint`` command: picks a subcommand, and turns our errors into one line and an exit
code.

A subcommand's module is imported only when it is used, so that ``--help`` and a mistyped option
answer at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from setpoint import __version__
from setpoint.core.errors import ConfigError, SetpointError, SourceError
from setpoint.launch.ending import END_S, LIMIT

if TYPE_CHECKING:
    from setpoint.config.commandline import CommandLine
    from setpoint.config.environment import EnvSettings

_USAGE = """usage: setpoint COMMAND [options]

An LLM inference server that says what limits it, explains its settings, and replays what it did.

commands ('setpoint COMMAND --help' lists the options):
{commands}

options:
  -h, --help      show this text
  -V, --version   show the version
"""


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 for success, 2 for an option that cannot be honoured
    and for a source that the doctor cannot read, 1 for every other error of ours. Without ``argv``
    it runs the command of this process, which then ends in time, whatever its threads do."""
    if argv is not None:
        return _code(argv)
    LIMIT.exit_code = code = _code(sys.argv[1:])
    LIMIT.within(END_S)
    return code


def _code(arguments: list[str]) -> int:
    try:
        return _run(arguments)
    except SetpointError as error:
        print(f"setpoint: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | SourceError) else 1
    except KeyboardInterrupt:
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # another signal would kill the interpreter while it exits
        return 130  # during start-up; a server that is up ends in order


def _run(arguments: list[str]) -> int:
    command = arguments[0] if arguments else ""
    if command == "bench":
        return _bench(arguments[1:])
    if command in ("--help", "-h", "help"):
        print(_usage(), end="")
        return 0
    if command in ("--version", "-V", "version"):
        print(f"setpoint {__version__}")
        return 0
    runs = {
        "serve": _serve,
        "batch": _batch,
        "chat": _chat,
        "set": _set,
        "doctor": _doctor,
        "top": _top,
        "replay": _replay,
        "console": _console,
    }
    if command in runs:
        return runs[command](arguments[1:])
    if not command:
        raise ConfigError("a command is missing; see 'setpoint --help'.")
    raise ConfigError(
        f"unknown command {command!r}.{_nearest(command, [*runs, 'bench'])} See 'setpoint --help'."
    )


def _nearest(word: str, commands: Iterable[str]) -> str:
    """A question that names the command for which ``word`` may be a mistake; "" if no command
    resembles it."""
    import difflib

    close = difflib.get_close_matches(word, list(commands), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _usage(of: str = "") -> str:
    from setpoint.config.commands import COMMANDS

    return _USAGE.format(
        commands="\n".join(
            f"  {name:<16}{command.summary}"
            for name, command in COMMANDS.items()
            if name.startswith(of)
        )
    )


def _read(command: str, arguments: list[str]) -> tuple[CommandLine, EnvSettings]:
    from setpoint.config.commandline import parse
    from setpoint.config.commands import COMMANDS
    from setpoint.config.environment import read_environment

    return parse(COMMANDS[command], arguments), read_environment(os.environ)


def _serve(arguments: list[str]) -> int:
    line, env = _read("serve", arguments)
    from setpoint.launch.server import serve

    return serve(line.options, env, given=line.given)


def _batch(arguments: list[str]) -> int:
    line, env = _read("batch", arguments)
    from setpoint.commands.batch_command import run_batch

    return run_batch(line.own, line.options, env, given=line.given)


def _chat(arguments: list[str]) -> int:
    line, env = _read("chat", arguments)
    from setpoint.commands.chat_command import chat

    return chat(line, env, api_key=os.environ.get("OPENAI_API_KEY"))


def _replay(arguments: list[str]) -> int:
    line, _ = _read("replay", arguments)
    from setpoint.commands.replay_command import replay

    return replay(line.own)


def _doctor(arguments: list[str]) -> int:
    line, _ = _read("doctor", arguments)
    from setpoint.commands.doctor_command import doctor

    return doctor(line.own)


def _set(arguments: list[str]) -> int:
    line, _ = _read("set", arguments)
    from setpoint.commands.set_command import set_options

    return set_options(line.own, api_key=os.environ.get("OPENAI_API_KEY"))


def _top(arguments: list[str]) -> int:
    line, _ = _read("top", arguments)
    from setpoint.commands.top_command import top

    return top(line.own, api_key=os.environ.get("OPENAI_API_KEY"))


def _console(arguments: list[str]) -> int:
    line, _ = _read("console", arguments)
    from setpoint.commands.console_command import console

    return console(line.own)


def _bench(arguments: list[str]) -> int:
    runs = {
        "serving": _bench_serving,
        "offline": _bench_offline,
        "one-batch": _bench_one_batch,
        "quality": _bench_quality,
    }
    which = arguments[0] if arguments else ""
    if which in runs:
        return runs[which](arguments[1:])
    if which in ("--help", "-h"):
        print(_usage(of="bench"), end="")
        return 0
    if not which:
        raise ConfigError(
            f"'setpoint bench' needs one of: {', '.join(runs)}. See 'setpoint bench --help'."
        )
    raise ConfigError(
        f"unknown benchmark {which!r}.{_nearest(which, runs)} 'setpoint bench' has:"
        f" {', '.join(runs)}."
    )


def _bench_serving(arguments: list[str]) -> int:
    line, _ = _read("bench serving", arguments)
    from setpoint.bench.serving import bench_serving

    return bench_serving(line.own, api_key=os.environ.get("OPENAI_API_KEY"))


def _bench_offline(arguments: list[str]) -> int:
    line, env = _read("bench offline", arguments)
    from setpoint.bench.engines.offline_throughput import bench_offline

    return bench_offline(line, env)


def _bench_one_batch(arguments: list[str]) -> int:
    line, env = _read("bench one-batch", arguments)
    from setpoint.bench.engines.bare import bare_engine
    from setpoint.bench.engines.engine_turns import engine_turns
    from setpoint.bench.one_batch import bench_one_batch

    return bench_one_batch(
        line.own,
        lambda num_slots, length: bare_engine(line, env, num_slots=num_slots, length=length),
        lambda shapes: engine_turns(line, env, shapes),
    )


def _bench_quality(arguments: list[str]) -> int:
    line, env = _read("bench quality", arguments)
    from setpoint.bench.engines.quality import bench_quality

    return bench_quality(line, env)


if __name__ == "__main__":
    sys.exit(main())
