"""The process that compiles kernels ahead: ``python -m setpoint.launch.child.kernel_compiler
CAPABILITY`` with an EngineJob on its standard input. It writes messages
(``launch.compiled_kernels``) to its standard output, and the kernels to Triton's folder.
"""

from __future__ import annotations

import shutil
import sys

from setpoint.core.errors import ConfigError, SetpointError
from setpoint.engine.executor.ahead_of_time import Limits, run_steps, use_absent_gpu
from setpoint.engine.kernels.triton.absent_gpu import (
    VERSION,
    AbsentGpu,
    Variant,
    kernels_folder,
)
from setpoint.launch.child.mapping import computation_of
from setpoint.launch.compiled_kernels import (
    Compiled,
    Finished,
    Message,
    Refused,
    encode_message,
)
from setpoint.launch.deadline import leave
from setpoint.launch.job import EngineJob, decode_job

MOST_SLOTS = 4096
"""Most requests at a time that a server runs if it is given no number."""
FULL_BYTES = 4 << 20
"""With less free space than that, it is what a write has failed for."""


def main(capability: int) -> int:
    """Returns the exit code."""
    job = decode_job(sys.stdin.buffer.readline())
    folder = kernels_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        use_absent_gpu(AbsentGpu(capability), _tell)
        run_steps(computation_of(job).engine, _limits(job), job.config.options.parallel.tp_size)
    except Exception as error:
        if folder.exists() and shutil.disk_usage(folder).free < FULL_BYTES:
            _send(Refused(f"There is no space left for kernels in {folder}.", by_options=False))
        elif isinstance(error, OSError):
            _send(
                Refused(f"Kernels cannot be kept in {folder}: {error.strerror}.", by_options=False)
            )
        elif isinstance(error, SetpointError):
            _send(Refused(str(error), isinstance(error, ConfigError)))
        else:
            raise
        return 1
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    _send(Finished(str(folder), VERSION, tag))
    return 0


def _limits(job: EngineJob) -> Limits:
    slots = job.config.options.scheduling.max_running_requests or MOST_SLOTS
    return Limits(slots, job.config.context_len, job.config.step_tokens)


def _tell(variant: Variant) -> None:
    _send(Compiled(variant.kernel, variant.seconds, variant.is_known))


def _send(message: Message) -> None:
    print(encode_message(message), flush=True)


if __name__ == "__main__":
    leave(main(int(sys.argv[1])))
