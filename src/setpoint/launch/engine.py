"""The start and the end of an engine process, which ``serve``, the offline Engine and the batch
runner share.

Order of start: engine process (imports torch), model on disk, configuration, tokenizer, job sent to
the engine. What follows on an event loop is in ``launch.engine_session``. It knows nothing of HTTP,
batches or terminals.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from setpoint.checkpoint.source import DEFAULT_MODEL, ModelSource, tokenizer_folder
from setpoint.config.environment import EnvSettings
from setpoint.config.live import Asked
from setpoint.config.options import Options
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.progress import reported_to
from setpoint.launch.announce import announce
from setpoint.launch.configuration import configured, sampling_defaults
from setpoint.launch.job import EngineJob
from setpoint.launch.phases import Phases
from setpoint.launch.preflight import check_room, preflight
from setpoint.launch.process import end, hand_over, spawn_engine
from setpoint.observe.waiting import Display, Waiting

if TYPE_CHECKING:
    from setpoint.frontend.text.processor import TextProcessor

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Launched:
    """An engine process that has its job, and the parts of that job."""

    process: subprocess.Popen[bytes]
    asked: Asked
    config: ResolvedConfig
    source: ModelSource
    text: TextProcessor
    link: socket.socket
    """This process's end of the link to the engine; closed by the code that created this."""
    sampling: dict[str, float]
    """The sampling that the model's authors recommend, if that was asked for."""
    waiting: Waiting
    """Shows what the start is doing until ``end`` is called."""


@contextmanager
def launched(
    options: Options,
    env: EnvSettings,
    *,
    given: Set[str],
    phases: Phases,
    display: Display | None,
    stderr: int | None = None,
) -> Iterator[Launched]:
    """Start an engine process for these options; it has ended when the block ends.

    display: how to show a person what takes long. stderr: the descriptor for the engine's log, if
    not this process's. Raises SetpointError for a model or configuration that cannot be served.
    """
    preflight(options)
    owner = os.getpid()
    link, theirs = socket.socketpair()
    text: TextProcessor | None = None
    waiting = Waiting(f"Loading {options.model.model_path or DEFAULT_MODEL}", display)
    with link:
        with theirs:
            descriptor = theirs.fileno()
            process = spawn_engine(stderr, descriptor)
        try:
            with reported_to(waiting.doing):
                source, asked, config = configured(options, env, given)
                phases.mark("model and configuration")
                check_room(config, asked, source)
                sampling = sampling_defaults(options.answers.sampling_defaults, source)
                tokenizer = _tokenizer_folder(options, source)
                text = _text(options, tokenizer)
            phases.mark("tokenizer")
            announce(config, source, os.environ)
            job = EngineJob(config, asked.model, str(source.folder), str(tokenizer), descriptor)
            hand_over(process, job)
            yield Launched(process, asked, config, source, text, link, sampling, waiting)
        finally:
            if os.getpid() == owner:  # a forked child that ends also gets here
                waiting.end()
                if text is not None:
                    text.close()
                end(process)


def _tokenizer_folder(options: Options, source: ModelSource) -> Path:
    if options.model.tokenizer_path is None or options.model.skip_tokenizer_init:
        return source.folder
    return tokenizer_folder(options.model.tokenizer_path, log=logger.info)


def _text(options: Options, folder: Path) -> TextProcessor:
    """The text processor. It is read now, while the engine process imports torch, so that errors in
    it are reported before weights are loaded."""
    from setpoint.frontend.text.processor import TextProcessor

    if options.model.skip_tokenizer_init:
        return TextProcessor(None)
    text = TextProcessor.from_folder(folder, chat_template=options.model.chat_template)
    # A file of --chat-template has been tried before (preflight).
    if options.model.chat_template is None and (limit := text.template_exceeds()) is not None:
        logger.warning(
            "The chat template in %s cannot be used: %s. Chats will be answered 400; pass another"
            " template with --chat-template.",
            folder,
            limit,
        )
    return text
