"""Has the kernels of a server compiled for a GPU that this machine need not have: settles the
options as a start on that GPU does, and gives them to a process that compiles
(``launch.child.kernel_compiler``)."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from setpoint.checkpoint.pooling import read_pooling
from setpoint.checkpoint.source import locate
from setpoint.checkpoint.spec import spec_of
from setpoint.config.backends import LIBRARIES, OF_STEPS
from setpoint.config.environment import EnvSettings
from setpoint.config.groups.declare import flag_of
from setpoint.config.groups.model import model_overrides
from setpoint.config.hardware import probe_hardware
from setpoint.config.live_changes import ConfigInputs
from setpoint.config.options import Options
from setpoint.core.errors import CheckpointError, ConfigError, SetpointError
from setpoint.launch.compiled_kernels import (
    Finished,
    Message,
    Refused,
    decode_message,
)
from setpoint.launch.job import EngineJob, encode_job
from setpoint.launch.parent.model_report import Found, find

logger = logging.getLogger(__name__)

GIB = 1 << 30
TARGETS = {"sm_80": 80 * GIB, "sm_90": 141 * GIB, "sm_100": 180 * GIB}
"""GPU -> the memory of the largest one (A100, H200, B200). With less memory a server has fewer
sizes of graphs and smaller chunks, whose kernels are among those of the larger one."""
LAST_WORDS = 2000
"""Characters of what a process that ends in a wrong way has written last."""


class CompilationError(SetpointError):
    """A kernel could not be compiled or kept."""


@dataclass(slots=True, frozen=True)
class KernelFolder:
    """The folder, in which all kernels of a server are now."""

    folder: Path
    num_bytes: int
    """Size of all that is in it."""
    triton: str
    """Version of Triton that compiled them."""
    python: str
    """Tag of its wheel's Python, such as cp312."""


def compile_for(
    target: str | None,
    output: str | None,
    options: Options,
    env: EnvSettings,
    given: Set[str],
    *,
    tell: Callable[[str, float | None], None],
) -> KernelFolder:
    """Compile every variant that is missing. output: the folder; None: Triton's own. tell: is
    called with each variant's kernel and the seconds that compiling it took, None for one that was
    there. Raises ConfigError before anything is compiled, CheckpointError, and
    CompilationError."""
    target = _checked(target)
    job = _job(target, options, env, given)
    if find_spec("triton") is None:
        raise ConfigError(
            "Triton is not installed. A torch for GPUs brings it; beside another one, install the"
            " version that the server has, such as: pip install triton==3.6.0 for torch 2.11."
        )
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if output is not None:
        environ["TRITON_CACHE_DIR"] = str(_writable(output))
    with tempfile.TemporaryFile() as words, _compiler(target, environ, words) as process:
        try:
            for message in _messages(process, job):
                if isinstance(message, Finished):
                    return _described(message)
                if isinstance(message, Refused):
                    raise (ConfigError if message.by_options else CompilationError)(message.text)
                tell(message.kernel, None if message.is_known else message.seconds)
        finally:
            process.kill()
        words.seek(0)
        last = words.read().decode(errors="replace")[-LAST_WORDS:].strip()
        raise CompilationError(f"Compiling kernels for {target} failed: {last}")


def _compiler(target: str, environ: dict[str, str], words: BinaryIO) -> subprocess.Popen[bytes]:
    """words: what it writes besides messages."""
    return subprocess.Popen(
        [sys.executable, "-m", "setpoint.launch.child.kernel_compiler", target.removeprefix("sm_")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=words,
        env=environ,
    )


def _messages(process: subprocess.Popen[bytes], job: EngineJob) -> Iterator[Message]:
    """Gives the process its job."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):  # it has ended, and its words say why
        process.stdin.write(encode_job(job))
        process.stdin.close()
    for line in process.stdout:
        yield decode_message(line)


def _described(done: Finished) -> KernelFolder:
    folder = Path(done.folder)
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return KernelFolder(folder, num_bytes, done.triton, done.python)


def _checked(target: str | None) -> str:
    """The GPU. Raises ConfigError if it is not supported."""
    if target in TARGETS:
        return target
    raise ConfigError(
        f"--target {target or 'is missing'}: the kernels' registers and shared memory are checked"
        f" for {', '.join(TARGETS)}, so choose one of these."
    )


def _job(target: str, options: Options, env: EnvSettings, given: Set[str]) -> EngineJob:
    """The job of an engine on this GPU, with weights only if their form decides which kernels
    run."""
    if options.execution.device == "cpu":
        raise ConfigError("--device cpu has no kernels of a GPU; leave it out.")
    _check_attention(options)
    found, overrides = find(options.replace(load_format="dummy")), model_overrides(options.model)
    spec = spec_of(found.description, overrides=overrides)
    in_codes = bool(spec.blocks or spec.quantised)
    if in_codes and found.folder is None:
        found = _converted(options)
        spec = spec_of(found.description, overrides=overrides)
    if options.model.is_embedding:
        if found.folder is None:
            raise CheckpointError("A model for embeddings must be in a folder on this machine.")
        spec = replace(spec, pooling=read_pooling(found.folder, spec))
    hardware = replace(probe_hardware(), device="cuda", gpu_bytes=TARGETS[target], gpus=())
    config = ConfigInputs(
        options, frozenset(given), hardware, spec, {}, env, secrets.randbelow(1 << 30)
    ).resolve()
    if not in_codes:
        config = replace(config, options=config.options.replace(load_format="dummy"))
    elif found.folder is None or not found.description.tensors:
        raise CheckpointError(
            "The weights of this model are stored in codes, which decide what a GPU runs, and they"
            " are not on this machine; download them first."
        )
    return EngineJob(config, spec, str(found.folder or ""), None, None, None, tells_prefixes=False)


def _converted(options: Options) -> Found:
    """The folder of a GGUF file, which is made of it if there is none yet. Downloads no weights."""
    model = options.model
    source = locate(model.model_path, revision=model.revision, load_format="dummy", log=logger.info)
    return Found(source.description, source.folder)


def _check_attention(options: Options) -> None:
    """Raise ConfigError for attention that has no kernels in Triton."""
    for name in ("attention_backend", *OF_STEPS):
        if (asked := options.get(name)) in LIBRARIES:
            raise ConfigError(
                f"{flag_of(name)} {asked}: the kernels of libraries are not compiled ahead;"
                " leave it out here, and give it to the server."
            )


def _writable(output: str) -> Path:
    """The folder, which is made if it is missing. Raises ConfigError."""
    folder = Path(output).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be created: {error.strerror}.") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--output {output} is not writable.")
    return folder
