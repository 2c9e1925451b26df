"""Traces steps with torch's profiler into Chrome trace files (chrome://tracing, ui.perfetto.dev).

The executor calls ``after_step`` for every step. A replayed step appears as one call into captured
code; with ``--disable-cuda-graph`` the trace shows the operations.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import tempfile
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler

from setpoint.core.errors import ConfigError, RequestError, SetpointError
from setpoint.core.operations import StartProfile
from setpoint.engine.kernels.device import traced

logger = logging.getLogger(__name__)

MAX_STEPS = 1000
"""Number of steps after which a trace without a limit of its own ends: each may take a megabyte of
memory."""


class Profiler:
    """At most one trace at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wanted: StartProfile | None = None
        self._trace: Any = None
        """torch.autograd.profiler.profile, while steps are traced."""
        self._num_steps = 0
        """Steps since ``start``."""

    def start(self, wanted: StartProfile) -> None:
        """Begin to trace after ``wanted.start_step`` steps. Raises RequestError if a trace is
        running, if nothing of what is wanted can be traced or if the file exists, and ConfigError
        if its folder cannot be made."""
        if self._wanted is not None:
            raise RequestError("A profile is already running; stop it first (/stop_profile).")
        if not any(traced(self._device, host=wanted.cpu, device_too=wanted.gpu)):
            raise RequestError("activities: none of these can be traced here; CPU always can be.")
        path = Path(wanted.path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            exists = path.exists()
        except OSError as error:
            raise ConfigError(f"The folder for the profile cannot be created: {error}") from None
        if exists:
            raise RequestError(f"{path.name} already exists; choose another profile_id.")
        if not wanted.start_step:
            self._begin(wanted)
        self._wanted, self._num_steps = wanted, 0

    def stop(self) -> str:
        """End the trace. Returns the path where its file will be soon: a thread compresses it.
        Raises RequestError if no step was traced, and ConfigError if it cannot be written."""
        if self._wanted is None:
            raise RequestError("No profile is running; start one first (/start_profile).")
        if self._trace is None:
            self._wanted = None
            raise RequestError(
                "The profile was stopped before its first step, so no file was written."
            )
        path = Path(self._wanted.path)
        trace, self._trace, self._wanted = self._trace, None, None
        trace.__exit__(None, None, None)
        folder = ""
        try:
            folder = tempfile.mkdtemp(dir=path.parent)
            plain = Path(folder) / "trace.json"
            trace.export_chrome_trace(str(plain))
        except (OSError, RuntimeError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(f"The profile cannot be written to {path}: {error}") from None
        # The compression takes longest, and nothing waits for it here.
        Thread(target=_finish, args=(plain, path, self._num_steps), name="profile").start()
        return str(path)

    def after_step(self) -> None:
        """Call this when the result of a step is there. A trace that fails is dropped and logged;
        steps continue."""
        if self._wanted is None:
            return
        try:
            self._follow(self._wanted)
        except Exception as error:
            self._trace = self._wanted = None
            logger.error("The profile failed: %s", error, exc_info=_unexpected(error))

    def _follow(self, wanted: StartProfile) -> None:
        self._num_steps += 1
        if self._trace is None:
            if self._num_steps == wanted.start_step:
                self._num_steps = 0
                self._begin(wanted)
        elif self._num_steps >= (wanted.num_steps or MAX_STEPS):
            self.stop()

    def _begin(self, wanted: StartProfile) -> None:
        # torch.profiler.profile imports the compiler first, which takes a second or more.
        host, on_device = traced(self._device, host=wanted.cpu, device_too=wanted.gpu)
        trace = autograd_profiler.profile(
            use_cpu=host,
            use_device=on_device,
            use_kineto=True,
            profile_memory=wanted.memory,
            with_stack=wanted.with_stack,
            record_shapes=wanted.record_shapes,
        )
        trace.__enter__()
        self._trace = trace


def _unexpected(error: Exception) -> Exception | None:
    """The error, for the log's traceback, if its message alone does not say what is wrong."""
    return None if isinstance(error, SetpointError) else error


def _finish(plain: Path, path: Path, num_steps: int) -> None:
    """Compress a trace to ``path``, which must not exist, and remove its folder. ``os.link`` does
    not replace a file that someone else has made there meanwhile: others may write to the
    folder."""
    try:
        packed = plain.with_suffix(".gz")
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as file:
            shutil.copyfileobj(source, file, 1 << 20)
        os.link(packed, path)
    except OSError as error:
        logger.error("The profile cannot be written to %s: %s", path, error)
    else:
        logger.info("Wrote the profile of %d steps to %s", num_steps, path)
    finally:
        shutil.rmtree(plain.parent, ignore_errors=True)
