"""Starts and ends engine processes, for ``serve``, the offline Engine and the batch runner.

The order of a start: engine processes (which import torch), model on disk, configuration,
tokenizer, jobs sent to the engines. ``launch.parent.engine_session`` does what follows on an event
loop. This module knows nothing of HTTP, batches or terminals.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from setpoint.config.devices import gpus_of_engines
from setpoint.config.environment import EnvSettings
from setpoint.config.options import Options
from setpoint.core.progress import reported_to
from setpoint.launch.parent.lockstep import SteppingEngines
from setpoint.launch.parent.phases import Phases
from setpoint.launch.parent.preflight import preflight
from setpoint.launch.parent.process import EngineProcess, Spawn, StartupError, spawn_child
from setpoint.observe.progress_display import Display, Waiting

if TYPE_CHECKING:
    from setpoint.frontend.text.processor import TextProcessor
    from setpoint.launch.job import EngineJob
    from setpoint.launch.parent.served_model import MachineShare, ServedModel

logger = logging.getLogger(__name__)

STARTING = "starting its engine"


@dataclass(slots=True, frozen=True)
class Launched:
    """Engine processes that have got their jobs, and the data from which the jobs were made."""

    processes: list[EngineProcess]
    """The latest process of each rank; ended by the code that created this."""
    served: ServedModel
    text: TextProcessor
    waiting: Waiting
    """Shows what the start is doing until ``end`` is called."""
    spawn: Spawn
    share: MachineShare | None = None
    """How this model shares the machine with others; None: it is the only one."""

    def start_first(self, rank: int) -> None:
        """Give the first process of a rank its job, if several models are served; a model that is
        alone has it already."""
        if self.share is not None:
            self.waiting.doing(STARTING)
            with suppress(StartupError):  # it has ended, which its session notices and tells
                self.processes[rank].hand_over(self.served.job(rank=rank))

    def start_again(self, rank: int, job: EngineJob) -> EngineProcess:
        """Start a process that replaces the ended process of a rank."""
        return self.replace(rank, self.start_another(rank, job))

    def start_another(self, rank: int, job: EngineJob) -> EngineProcess:
        """Start a second process for a rank; the caller ends it."""
        process = self.spawn(rank)
        with suppress(StartupError):  # it has ended, which its watcher notices
            process.hand_over(job)
        return process

    def replace(self, rank: int, process: EngineProcess) -> EngineProcess:
        """Make this process the one of the rank, whose earlier process has ended."""
        self.processes[rank].end()
        self.processes[rank] = process
        return process


@contextmanager
def launch_engine(
    options: Options,
    env: EnvSettings,
    *,
    given: Set[str],
    phases: Phases,
    display: Display | None,
    stderr: int | None = None,
    tells_prefixes: bool = False,
    share: MachineShare | None = None,
) -> Iterator[Launched]:
    """A context with started engine processes for these options; its exit ends them. With
    ``share`` the processes wait for ``Launched.start_first``.

    display: shows the user which step of the start is slow. stderr: the descriptor for the engine's
    log; this process's if not given. tells_prefixes: see ``ServedModel``. Raises SetpointError for
    a model or configuration that cannot be served."""
    preflight(options)
    owner = os.getpid()
    processes: list[EngineProcess] = []
    text: TextProcessor | None = None
    waiting: Waiting | None = None
    with _spawning(options, stderr) as spawn:
        try:
            for rank in range(options.parallel.dp_size):
                processes.append(spawn(rank))
            # Imported while the engine processes import torch, which takes longer.
            from setpoint.checkpoint.source import DEFAULT_MODEL
            from setpoint.launch.parent.configuration import settle
            from setpoint.launch.parent.start_log import log_configuration

            waiting = Waiting(_what_starts(options, share, DEFAULT_MODEL), display)
            with reported_to(waiting.doing):
                served = settle(options, env, given, share)
                served = replace(served, tells_prefixes=tells_prefixes or served.num_engines > 1)
                phases.mark("model and configuration")
                # Read now, so that an error in it is reported before weights are loaded.
                from setpoint.frontend.text.processor import TextProcessor

                text = TextProcessor.from_folder(
                    served.tokenizer, served.template, is_shared=share is not None
                )
            waiting.doing("" if share is None else _its_turn(share))
            phases.mark("tokenizer")
            log_configuration(served, os.environ)
            if share is None:
                for rank, process in enumerate(processes):
                    process.hand_over(served.job(rank=rank))
            _warn_of_template(served, text)
            yield Launched(processes, served, text, waiting, spawn, share)
        finally:
            if os.getpid() == owner:  # a forked child that ends also gets here
                if waiting is not None:
                    waiting.end()
                if text is not None:
                    text.close()
                for process in processes:
                    process.end()


def _what_starts(options: Options, share: MachineShare | None, default: str) -> str:
    """How the progress calls the model; default: the name of the default model."""
    if share is not None:
        return f"Model {options.model.served_model_name}"
    return f"Loading {options.model.model_path or default}"


def _its_turn(share: MachineShare) -> str:
    """What a model does whose engine has not got its job."""
    *others, last = share.before or ("",)
    if not last:
        return STARTING
    have = f"{', '.join(others)} and {last} have" if others else f"{last} has"
    return f"waits until {have} been loaded once"


def _spawning(options: Options, stderr: int | None) -> AbstractContextManager[Spawn]:
    """A context with the function that starts engines."""
    parallel = options.parallel
    if parallel.enable_dp_attention:
        return SteppingEngines(parallel.dp_size, stderr=stderr)
    gpus = gpus_of_engines(parallel)
    has_all = gpus == [tuple(range(parallel.ranks_per_node))]  # a single engine, from GPU 0 on

    def spawn(rank: int) -> EngineProcess:
        return spawn_child(
            None if has_all else gpus[rank], num_ranks=parallel.ranks_per_node, stderr=stderr
        )

    return nullcontext(spawn)


def _warn_of_template(served: ServedModel, text: TextProcessor) -> None:
    # ``preflight`` has already tried a file of --chat-template.
    given = served.config.options.model.chat_template
    if given is None and (limit := text.template_exceeds()) is not None:
        logger.warning(
            "The chat template in %s cannot be used: %s. Chats will be answered 400. For"
            " another template, %s.",
            served.tokenizer,
            limit,
            text.template_advice,
        )
