"""Runs ``setpoint compile``: a line for each kernel, and what the folder holds at the end."""

from __future__ import annotations

import sys
import time

from setpoint.config.commandline import CommandLine
from setpoint.config.environment import EnvSettings
from setpoint.launch.parent.kernel_compilation import compile_for
from setpoint.observe.logline import setup_logging

MB = 1e6


def compile_kernels(line: CommandLine, env: EnvSettings) -> int:
    """Run the command; returns the exit code. Raises SetpointError."""
    options, own = line.options, line.own
    setup_logging(options.logs.log_level, milliseconds=env.log_ms)
    began, num_kernels, num_compiled = time.perf_counter(), 0, 0

    def tell(kernel: str, seconds: float | None) -> None:
        nonlocal num_kernels, num_compiled
        num_kernels += 1
        num_compiled += seconds is not None
        how = "was there" if seconds is None else f"{seconds:.1f} s"
        print(f"{num_kernels:>4} so far  {kernel:<26} {how}", flush=True)

    try:
        done = compile_for(own.target, own.output, options, env, line.given, tell=tell)
    except KeyboardInterrupt:
        print(
            f"Interrupted after {num_kernels} kernels, {num_compiled} of them compiled. The"
            f" folder {own.output or 'of Triton'} keeps them: the same command continues there.",
            file=sys.stderr,
        )
        raise
    print(
        f"{num_kernels} kernels for {own.target}, {num_compiled} of them compiled, in"
        f" {time.perf_counter() - began:.0f} s.\n{done.folder} holds {done.num_bytes / MB:.1f} MB."
        f" A server finds the kernels there with TRITON_CACHE_DIR={done.folder}\nand with the same"
        f" Triton: {done.triton}, the wheel for {done.python}."
    )
    return 0
