"""Runs ``setpoint chat`` from its command line to its exit code: opens the source of answers, runs
the session and closes the source."""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing

from setpoint.chat.answers import AnswerSource, LocalSource, RemoteSource
from setpoint.chat.chat_screen import Screen
from setpoint.chat.conversation import PARAMS, Conversation, native_params
from setpoint.chat.session import Session
from setpoint.config.command_options import ChatOptions
from setpoint.config.commandline import CommandLine
from setpoint.config.environment import EnvSettings
from setpoint.core.addresses import check_url
from setpoint.core.errors import ConfigError, RequestError
from setpoint.core.sampling import SamplingParams
from setpoint.observe.logline import setup_logging
from setpoint.offline.offline_engine import Engine

_INVITATION = "Type a message, or /help for the commands."


def chat(line: CommandLine, env: EnvSettings, *, api_key: str | None) -> int:
    """Run a chat; returns the exit code. api_key: the server's key if the command line gives none.
    Raises SetpointError."""
    own: ChatOptions = line.own
    params = {name: getattr(own, name) for name in PARAMS if getattr(own, name, None) is not None}
    try:
        SamplingParams.parse(native_params(params))
    except RequestError as error:
        raise ConfigError(error.message) from None
    _check(line)
    with Screen() as screen, closing(_open(line, env, screen, api_key)) as source:
        session = Session(
            source, screen, Conversation(own.system, params), drop_old_turns=own.drop_old_turns
        )
        try:
            return session.run()
        # the reader of stdout is gone, and the interpreter must not fail at its final flush
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1


def _check(line: CommandLine) -> None:
    own: ChatOptions = line.own
    if own.base_url is None and own.api_key is not None:
        raise ConfigError(
            "--api-key is the key of a server; give the address of the server with --base-url."
        )
    if line.options.model.is_embedding:
        raise ConfigError("A chat needs a model that generates text; leave --is-embedding out.")
    if own.base_url is not None:
        check_url(own.base_url)
    engine_options = line.given - set(ChatOptions.__struct_fields__) - {"model_path", "config"}
    if own.base_url is not None and engine_options:
        flag = "--" + min(engine_options).replace("_", "-")
        raise ConfigError(
            f"{flag} is an option of an engine, but with --base-url the chat starts no engine;"
            " leave one of the two out."
        )


def _open(line: CommandLine, env: EnvSettings, screen: Screen, api_key: str | None) -> AnswerSource:
    own: ChatOptions = line.own
    if own.base_url is not None:
        remote = RemoteSource(
            own.base_url, model=line.options.model.model_path, api_key=own.api_key or api_key
        )
        if not remote.is_listed:
            screen.note(
                f"{own.base_url} does not list a model {remote.name}; another one may answer."
            )
        screen.note(f"{remote.name} at {own.base_url} is ready. {_INVITATION}")
        return remote
    setup_logging(line.options.logs.log_level, milliseconds=env.log_ms)
    started = time.perf_counter()
    screen.note("Loading …")
    local = LocalSource(Engine.from_options(line.options, env, given=line.given))
    screen.note(f"{local.name} is ready after {time.perf_counter() - started:.1f} s. {_INVITATION}")
    return local
