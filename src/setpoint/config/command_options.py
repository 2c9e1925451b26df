"""Declares the options that commands have of their own, besides those of the engine (``commands``)
and those of the benchmarks (``bench``)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.groups.declare import Option

BATCHES = "Batch"
CHATS = "Chat"
COMPILES = "Compile"
REPLAYS = "Replay"
ROUTES = "Route"


class NoOptions(msgspec.Struct, frozen=True):
    """A command without options of its own."""


class BatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``setpoint batch``, in addition to the engine's."""

    input: Annotated[
        str | None,
        Option(
            BATCHES,
            "File of requests: OpenAI batch lines, or a .parquet file. May be given as the first"
            " argument.",
            metavar="INPUT",
        ),
    ] = None
    output: Annotated[
        str | None,
        Option(
            BATCHES,
            "File for the answers; a name that ends in .parquet makes it a Parquet file. If an"
            " earlier run ended early, this one continues after the answers that the file holds.",
            metavar="FILE",
            short="-o",
        ),
    ] = None
    keep_order: Annotated[
        bool,
        Option(
            BATCHES,
            "Write the answers in the order of the input, not in the order in which they are"
            " ready.",
        ),
    ] = False


class CompileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``setpoint compile``, in addition to the engine's."""

    target: Annotated[
        str | None,
        Option(
            COMPILES,
            "GPU to compile for: sm_80 (A100), sm_90 (H100, H200) or sm_100 (B200).",
            metavar="SM",
        ),
    ] = None
    output: Annotated[
        str | None,
        Option(
            COMPILES,
            "Folder for the kernels, which a server finds if its environment variable"
            " TRITON_CACHE_DIR names it. If not given, the folder of this command's"
            " TRITON_CACHE_DIR, or Triton's own, ~/.triton/cache.",
            metavar="FOLDER",
            short="-o",
        ),
    ] = None


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``setpoint replay``."""

    file: Annotated[
        str | None,
        Option(
            REPLAYS,
            "Recording that 'setpoint serve --record FILE' wrote. May be given as the first"
            " argument.",
            metavar="FILE",
        ),
    ] = None
    print: Annotated[
        bool,
        Option(REPLAYS, "Show the engine's log lines with their times; do not replay."),
    ] = False


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``setpoint chat``, in addition to the engine's."""

    base_url: Annotated[
        str | None,
        Option(
            CHATS,
            "Talk to a server with OpenAI's API, such as http://127.0.0.1:30000/v1, instead of"
            " starting an engine.",
            metavar="URL",
        ),
    ] = None
    api_key: Annotated[
        str | None,
        Option(
            CHATS,
            "API key of that server. If not given, the environment variable OPENAI_API_KEY is"
            " used.",
            metavar="KEY",
            secret=True,
        ),
    ] = None
    system: Annotated[str, Option(CHATS, "System prompt.", metavar="TEXT")] = ""
    drop_old_turns: Annotated[
        bool,
        Option(
            CHATS,
            "When the conversation no longer fits the context, drop its oldest turns, with a"
            " note, instead of refusing the question.",
        ),
    ] = False
    temperature: Annotated[
        float | None,
        Option(CHATS, "Sampling temperature; with 0, the likeliest token is always taken.", low=0),
    ] = None
    top_p: Annotated[
        float | None,
        Option(
            CHATS,
            "Sample among the likeliest tokens whose probabilities add up to this value.",
            metavar="P",
            high=1,
        ),
    ] = None
    top_k: Annotated[
        int | None, Option(CHATS, "Sample among this many of the likeliest tokens.", low=-1)
    ] = None
    min_p: Annotated[
        float | None,
        Option(
            CHATS,
            "Sample among the tokens whose probability is at least this share of the likeliest"
            " token's.",
            metavar="P",
            low=0,
            high=1,
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        Option(
            CHATS,
            "Maximum tokens of an answer. If not given, an answer may fill the context.",
            low=1,
        ),
    ] = None
    seed: Annotated[
        int | None, Option(CHATS, "Sampling seed. If not given, each answer gets a different one.")
    ] = None


DIAGNOSES = "Doctor"


class DoctorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``setpoint doctor``."""

    source: Annotated[
        tuple[str, ...],
        Option(
            DIAGNOSES,
            "A log file (also .gz or .zst), - for standard input, a folder with the logs of"
            " several ranks, a saved /metrics page, a recording, or the URL of a server or of"
            " its /metrics. May be given as arguments.",
            metavar="SOURCE",
        ),
    ] = ()
    seconds: Annotated[
        float,
        Option(DIAGNOSES, "Seconds for which a server is watched.", metavar="SECONDS", low=1),
    ] = 30.0
    api_key: Annotated[
        str | None,
        Option(
            DIAGNOSES,
            "API key of the server. If not given, the environment variable OPENAI_API_KEY is used.",
            metavar="KEY",
            secret=True,
        ),
    ] = None
    json: Annotated[
        bool, Option(DIAGNOSES, "Print the report as JSON (docs/doctor.md describes it).")
    ] = False
    watch: Annotated[
        bool,
        Option(
            DIAGNOSES,
            "Show a report on the last minutes of a live server or a growing log, and refresh it"
            " until Ctrl-C.",
        ),
    ] = False
    all: Annotated[
        bool,
        Option(DIAGNOSES, "Show all evidence, alternatives and charts, not only one screen."),
    ] = False
    explain: Annotated[
        str | None,
        Option(
            DIAGNOSES,
            "Explain a cause, such as seq-cap, instead of diagnosing; --explain list lists all"
            " causes.",
            metavar="CAUSE",
        ),
    ] = None
    no_color: Annotated[
        bool,
        Option(
            DIAGNOSES,
            "Show no colours. The environment variable NO_COLOR does the same, and so does"
            " output that is not a terminal.",
        ),
    ] = False


EXAMINES = "Models"


class ModelsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``setpoint models``, in addition to the engine's."""

    model: Annotated[
        tuple[str, ...],
        Option(
            EXAMINES,
            "A folder, a GGUF file or a hub id. May be given as arguments. Without any, the default"
            " model.",
        ),
    ] = ()
    json: Annotated[
        bool, Option(EXAMINES, "Print what is known as JSON (docs/models.md describes it).")
    ] = False


PLAYS = "Console"


class ConsoleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``setpoint console``."""

    file: Annotated[
        str | None,
        Option(
            PLAYS,
            "Recording that 'setpoint serve --record FILE' wrote. May be given as the first"
            " argument.",
            metavar="FILE",
        ),
    ] = None
    port: Annotated[
        int,
        Option(
            PLAYS, "Port of the page on this machine; 0 means any free port.", low=0, high=65535
        ),
    ] = 30100


CHANGES = "Change"
SHOWS = "Top"


class SetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``setpoint set``."""

    url: Annotated[
        str | None,
        Option(
            CHANGES,
            "The server, such as http://127.0.0.1:30000. May be given as the first argument.",
        ),
    ] = None
    change: Annotated[
        tuple[str, ...],
        Option(
            CHANGES,
            "Options and their new values, all changed at once; the value none returns an option"
            " to what the server would choose. May be given as further arguments. Without any,"
            " the options that can be set are listed.",
            metavar="NAME=VALUE",
        ),
    ] = ()
    model: Annotated[
        str | None,
        Option(
            CHANGES,
            "Name of the model whose options change, on a server with several. If not given, the"
            " options of the first model are listed.",
            metavar="NAME",
        ),
    ] = None
    why: Annotated[str, Option(CHANGES, "The reason, for the server's log.", metavar="TEXT")] = ""
    api_key: Annotated[
        str | None,
        Option(
            CHANGES,
            "API key of the server. If not given, the environment variable OPENAI_API_KEY is used.",
            metavar="KEY",
            secret=True,
        ),
    ] = None


class TopOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``setpoint top``."""

    url: Annotated[
        str | None,
        Option(
            SHOWS,
            "The server, such as http://127.0.0.1:30000. May be given as the first argument.",
        ),
    ] = None
    api_key: Annotated[
        str | None,
        Option(
            SHOWS,
            "API key of the server. If not given, the environment variable OPENAI_API_KEY is used.",
            metavar="KEY",
            secret=True,
        ),
    ] = None


class RouteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``setpoint route``."""

    url: Annotated[
        tuple[str, ...],
        Option(
            ROUTES,
            "The servers, such as http://127.0.0.1:30000. May be given as arguments.",
            metavar="URL",
        ),
    ] = ()
    host: Annotated[str, Option(ROUTES, "Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Option(ROUTES, "Port to listen on.", low=1, high=65535)] = 30200
    policy: Annotated[
        str,
        Option(
            ROUTES,
            "How the router chooses a server for a request. cache_aware: the server that has"
            " probably cached the beginning of the prompt, unless it has much more to do than"
            " another.",
            choices=("cache_aware", "least_load", "power_of_two", "round_robin", "random"),
        ),
    ] = "cache_aware"
    api_key: Annotated[
        str | None,
        Option(
            ROUTES,
            "API key of the servers. If not given, the environment variable OPENAI_API_KEY is"
            " used.",
            metavar="KEY",
            secret=True,
        ),
    ] = None
