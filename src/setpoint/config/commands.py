"""The commands that start an engine, declared once: name, what it does, its own options, what it takes from the server's.

``commandline`` parses by these, ``docs`` writes them into ``docs/flags.md``, ``cli`` lists them. How a command runs is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from setpoint.config.declare import Field, Option, Scalar, declared
from setpoint.config.options import OPTION_FIELDS

BATCHES = "Batch"


class NoOptions(msgspec.Struct, frozen=True):
    """A command without options of its own."""


class BatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What ``setpoint batch`` has beside the engine's options."""

    input: Annotated[
        str | None, Option(BATCHES, "Requests: a file of OpenAI batch lines, or a .parquet file. The first argument.", metavar="INPUT")
    ] = None
    output: Annotated[
        str | None,
        Option(
            BATCHES,
            "Where the answers go; .parquet for a Parquet file. A run that ended early goes on from what is there.",
            metavar="FILE",
            short="-o",
        ),
    ] = None
    keep_order: Annotated[bool, Option(BATCHES, "Write answers in the order of the input instead of as they come.")] = False


@dataclass(slots=True, frozen=True, kw_only=True)
class Command:
    """How one command's line is read."""

    name: str
    summary: str
    """One line for 'setpoint --help'."""
    description: str
    arguments: str
    """What stands behind the name in the usage line."""
    positional: str
    """The option that the argument without a flag means."""
    own: type[msgspec.Struct] = NoOptions
    listens: bool = False
    """Serves clients: takes the options that are ``server_only``."""
    defaults: Mapping[str, Scalar] = field(default_factory=dict)
    """Defaults that differ from the server's."""

    @property
    def own_fields(self) -> tuple[Field[Option], ...]:
        return declared(self.own, Option)

    def fields(self) -> tuple[Field[Option], ...]:
        """Every option of the command, its own first."""
        return (*self.own_fields, *(each for each in OPTION_FIELDS if self.listens or not each.about.server_only))


SERVE = Command(
    name="serve",
    summary="serve a model over HTTP",
    description="Serve a model over HTTP, in SGLang's and OpenAI's language.",
    arguments="[MODEL] [options]",
    positional="model_path",
    listens=True,
)
BATCH = Command(
    name="batch",
    summary="answer a file of requests, resumably",
    description="Answer every request of a file exactly once. Ended at any moment, the same command goes on where it stopped.",
    arguments="INPUT -o OUTPUT [options]",
    positional="input",
    own=BatchOptions,
    defaults={"log_level": "warning"},
)
COMMANDS = {command.name: command for command in (SERVE,)}
