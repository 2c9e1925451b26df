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
from typing import TYPE_CHECKING

from setpoint.config.environment import EnvSettings
from setpoint.config.options import Options
from setpoint.core.progress import reported_to
from setpoint.launch.phases import Phases
from setpoint.launch.preflight import preflight
from setpoint.launch.process import end, hand_over, spawn_engine
from setpoint.observe.waiting import Display, Waiting

if TYPE_CHECKING:
    from setpoint.frontend.text.processor import TextProcessor
    from setpoint.launch.served import Served

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Launched:
    """An engine process that has its job, and what the job was made from."""

    process: subprocess.Popen[bytes]
    served: Served
    text: TextProcessor
    link: socket.socket
    """This process's end of the link to the engine; closed by the code that created this."""
    waiting: Waiting
    """Shows what the start is doing until ``end`` is called."""


@contextmanager
def launch_engine(
    options: Options,
    env: EnvSettings,
    *,
    given: Set[str],
    phases: Phases,
    display: Display | None,
    stderr: int | None = None,
) -> Iterator[Launched]:
    """A context with a started engine process for these options; its exit ends the process.

    display: how to show a person which step of the start is slow. stderr: the
    descriptor for the engine's log, if not this process's. Raises SetpointError for a model or
    configuration that cannot be served.
    """
    preflight(options)
    owner = os.getpid()
    link, theirs = socket.socketpair()
    text: TextProcessor | None = None
    waiting: Waiting | None = None
    with link:
        with theirs:
            descriptor = theirs.fileno()
            process = spawn_engine(stderr, descriptor)
        try:
            # Imported while the engine process imports torch, which takes longer.
            from setpoint.checkpoint.source import DEFAULT_MODEL
            from setpoint.launch.announce import announce
            from setpoint.launch.configuration import settle

            waiting = Waiting(f"Loading {options.model.model_path or DEFAULT_MODEL}", display)
            with reported_to(waiting.doing):
                served = settle(options, env, given)
                phases.mark("model and configuration")
                # Read now, while the engine process imports torch: errors in the tokenizer are
                # reported before weights are loaded.
                from setpoint.frontend.text.processor import TextProcessor

                text = TextProcessor.from_folder(served.tokenizer, served.template)
            phases.mark("tokenizer")
            announce(served, os.environ)
            hand_over(process, served.job(descriptor))
            _warn_of_template(served, text)
            yield Launched(process, served, text, link, waiting)
        finally:
            if os.getpid() == owner:  # a forked child that ends also gets here
                if waiting is not None:
                    waiting.end()
                if text is not None:
                    text.close()
                end(process)


def _warn_of_template(served: Served, text: TextProcessor) -> None:
    # A file of --chat-template has been tried before (preflight).
    given = served.config.options.model.chat_template
    if given is None and (limit := text.template_exceeds()) is not None:
        logger.warning(
            "The chat template in %s cannot be used: %s. Chats will be answered 400; pass another"
            " template with --chat-template.",
            served.tokenizer,
            limit,
        )
