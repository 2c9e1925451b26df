"""Declares each command once: its name, its purpose, its own options, and which of the server's
options it takes.

``commandline`` parses with these declarations, ``docs`` writes them to ``docs/flags.md``, and
``cli`` lists them. This module does not run commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import msgspec

from setpoint.config.bench import (
    OURS,
    OfflineOptions,
    OneBatchOptions,
    QualityOptions,
    ServingOptions,
)
from setpoint.config.command_options import (
    BatchOptions,
    ChatOptions,
    CompileOptions,
    ConsoleOptions,
    DoctorOptions,
    ModelsOptions,
    NoOptions,
    ReplayOptions,
    RouteOptions,
    SetOptions,
    TopOptions,
)
from setpoint.config.groups.declare import Field, Option, Scalar, declared
from setpoint.config.options import OPTION_FIELDS
from setpoint.config.sglang import KNOWN


@dataclass(slots=True, frozen=True, kw_only=True)
class Command:
    """One command, and how its command line is read."""

    name: str
    summary: str
    """One line of text for 'setpoint --help'."""
    description: str
    arguments: str
    """The text after the name in the usage line."""
    positional: str
    """The option that a first argument without a flag sets; "" if there is no such argument."""
    rest: str = ""
    """The list option that further arguments without a flag set; "" if there are none."""
    own: type[msgspec.Struct] = NoOptions
    listens: bool = False
    """Whether the command serves clients and therefore takes the options that are
    ``server_only``."""
    defaults: Mapping[str, Scalar] = field(default_factory=dict)
    """Defaults that differ from the server's."""

    sglang_flags: Set[str] = KNOWN
    """Flags that SGLang has too; the documentation marks the others as Setpoint's own."""
    has_engine: bool = True
    """Whether the command starts an engine and therefore takes its options."""
    extra: str = ""
    """The part of the installation that it needs (``config.extras``)."""
    is_function: bool = False
    """Whether it is called from Python with keywords, not from a command line."""

    @property
    def called(self) -> str:
        return f"{self.name}()" if self.is_function else f"'setpoint {self.name}'"

    @property
    def manual(self) -> str:
        """The page that lists its options."""
        return "docs/flags.md" if self.is_function else f"'setpoint {self.name} --help'"

    @property
    def own_fields(self) -> tuple[Field[Option], ...]:
        return declared(self.own, Option)

    def fields(self) -> tuple[Field[Option], ...]:
        """Every option of the command, its own first."""
        if not self.has_engine:
            return self.own_fields
        return (
            *self.own_fields,
            *(each for each in OPTION_FIELDS if self.listens or not each.about.server_only),
        )


def _of_sglang(own: type[msgspec.Struct]) -> Set[str]:
    """The flags of a benchmark's own options that SGLang has too."""
    return frozenset(field.flag for field in declared(own, Option)) - OURS


SERVE = Command(
    name="serve",
    extra="serve",
    summary="serve a model over HTTP",
    description="Serve a model over HTTP with SGLang's and OpenAI's APIs.",
    arguments="[MODEL] [options]",
    positional="model_path",
    listens=True,
)
BATCH = Command(
    name="batch",
    extra="serve",
    summary="answer a file of requests; an interrupted run can be resumed",
    description=(
        "Answer every request of a file exactly once. If a run ends early for any reason, the"
        " same command continues it."
    ),
    arguments="INPUT -o OUTPUT [options]",
    positional="input",
    own=BatchOptions,
    defaults={"log_level": "warning", "workload": "offline"},
)
CHAT = Command(
    name="chat",
    extra="serve",
    summary="chat with a model in the terminal",
    description=(
        "Chat with a model, in an engine that this command starts or on a server (--base-url)."
        " In the chat, /help lists the commands."
    ),
    arguments="[MODEL] [options]",
    positional="model_path",
    own=ChatOptions,
    defaults={"log_level": "warning"},
)
MODELS = Command(
    name="models",
    extra="serve",
    summary="what models are, whether they run here, and how fast",
    description=(
        "Say of each model what it is, how much memory it needs, whether this machine can serve it"
        " and about how fast. Nothing is loaded, converted or downloaded except small files; some"
        " products are timed. The memory is that of --max-running-requests requests (default: 1)"
        " of --context-length tokens. Exit codes: 0 all can be served here, 1 at least one cannot,"
        " 2 an option cannot be honoured."
    ),
    arguments="[MODEL ...] [options]",
    positional="",
    rest="model",
    own=ModelsOptions,
    defaults={"log_level": "warning"},
)
COMPILE = Command(
    name="compile",
    extra="serve",
    summary="compile a model's kernels for a GPU, on a machine without one",
    description=(
        "Compile the kernels that a server with the same options launches on a GPU, so that its"
        " first start compiles none. It needs no GPU and no weights, but the server's version of"
        " Python and of Triton. Options of memory and of the HTTP side make no difference."
    ),
    arguments="[MODEL] --target SM [options]",
    positional="model_path",
    own=CompileOptions,
    defaults={"log_level": "warning"},
)
REPLAY = Command(
    name="replay",
    summary="run a recording of a server again, without its model",
    description=(
        "Run a recording again, without a model. The same scheduler makes every plan again, and"
        " the command reports the first plan that differs."
    ),
    arguments="FILE [options]",
    positional="file",
    own=ReplayOptions,
    has_engine=False,
    sglang_flags=frozenset(),
)
DOCTOR = Command(
    name="doctor",
    summary="find what limits a server, and which option to change",
    description=(
        "Read what Setpoint or any SGLang server reports about itself, find the limit that binds"
        " it, show the evidence, and say which option to change and what to expect. Exit codes:"
        " 0 healthy, 1 a limit was found or the evidence is not enough to tell, 2 a source"
        " cannot be read."
    ),
    arguments="SOURCE [SOURCE ...] [options]",
    positional="",
    rest="source",
    own=DoctorOptions,
    has_engine=False,
    sglang_flags=frozenset(),
)
TOP = Command(
    name="top",
    summary="show a server live in the terminal",
    description=(
        "Show a running Setpoint server live: what limits it, its throughput, its requests and"
        " its KV pool. It is the server's page /console for the terminal. Ctrl-C ends it."
    ),
    arguments="URL [options]",
    positional="url",
    own=TopOptions,
    has_engine=False,
    sglang_flags=frozenset(),
)
ROUTE = Command(
    name="route",
    extra="route",
    summary="put several servers behind one address, with the router smg",
    description=(
        "Start the router smg in front of running servers, with the arguments that suit Setpoint's"
        " servers. It needs .venv/bin/pip install -e '.[route]'."
    ),
    arguments="URL [URL ...] [options]",
    positional="",
    rest="url",
    own=RouteOptions,
    has_engine=False,
    sglang_flags=frozenset(),
)
CONSOLE = Command(
    name="console",
    summary="show a recording in the browser",
    description=(
        "Show a recording of a server in the browser: for each moment, which requests ran, which"
        " waited and why, which limit applied, and what the doctor said. A running server has"
        " the same page at /console."
    ),
    arguments="FILE [options]",
    positional="file",
    own=ConsoleOptions,
    has_engine=False,
    sglang_flags=frozenset(),
)
ENGINE = Command(
    name="Engine",
    extra="serve",
    summary="",
    description="The offline Engine, whose options are keywords.",
    arguments="[MODEL] [options]",
    positional="model_path",
    is_function=True,
    defaults={"log_level": "warning"},
)
BENCH_SERVING = Command(
    name="bench serving",
    extra="bench",
    summary="measure any server with SGLang's or OpenAI's API",
    description=(
        "Send requests to a server and measure what its clients see: latency, throughput and"
        " goodput."
    ),
    arguments="[options]",
    positional="",
    own=ServingOptions,
    has_engine=False,
    sglang_flags=_of_sglang(ServingOptions),
)
BENCH_OFFLINE = Command(
    name="bench offline",
    extra="serve",
    summary="measure an engine without HTTP",
    description="Start an engine, give it all requests at once, and measure its throughput.",
    arguments="[MODEL] [options]",
    positional="model_path",
    own=OfflineOptions,
    sglang_flags=_of_sglang(OfflineOptions),
    defaults={"log_level": "warning"},
)
BENCH_ONE_BATCH = Command(
    name="bench one-batch",
    extra="serve",
    summary="measure single steps, without a scheduler",
    description=(
        "Run batches of given sizes directly on the model and time the prefill and the decode"
        " steps."
    ),
    arguments="[MODEL] [options]",
    positional="model_path",
    own=OneBatchOptions,
    sglang_flags=_of_sglang(OneBatchOptions),
    defaults={"log_level": "warning"},
)
BENCH_QUALITY = Command(
    name="bench quality",
    extra="serve",
    summary="measure how much a configuration's answers differ from bf16's",
    description=(
        "Compare a configuration with the same model in plain bf16: perplexity and greedy answers"
        " on fixed texts."
    ),
    arguments="[MODEL] [options]",
    positional="model_path",
    own=QualityOptions,
    sglang_flags=frozenset(),
    defaults={"log_level": "warning"},
)
SET = Command(
    name="set",
    summary="change options of a running server",
    description=(
        "Change live options of a running server between two steps. Without NAME=VALUE, list the"
        " live options with their current values."
    ),
    arguments="URL [NAME=VALUE ...] [options]",
    positional="url",
    rest="change",
    own=SetOptions,
    has_engine=False,
    sglang_flags=frozenset(),
)
COMMANDS = {
    command.name: command
    for command in (
        SERVE,
        BATCH,
        CHAT,
        MODELS,
        COMPILE,
        SET,
        DOCTOR,
        TOP,
        ROUTE,
        REPLAY,
        CONSOLE,
        BENCH_SERVING,
        BENCH_OFFLINE,
        BENCH_ONE_BATCH,
        BENCH_QUALITY,
    )
}
