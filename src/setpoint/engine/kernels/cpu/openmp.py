"""Lets the kernels use torch's OpenMP runtime: a second one would keep a second pool of threads
spinning on the same cores."""

from __future__ import annotations

import ctypes
import os

from setpoint.engine.kernels.ops import KernelsUnavailable


def share_openmp() -> None:
    """Make the symbols of torch's OpenMP runtime visible to the kernels, which are linked without
    one. Raises KernelsUnavailable if torch has loaded none."""
    with open("/proc/self/maps") as maps:
        mapped = {line.split()[-1] for line in maps}
    runtimes = sorted(
        path
        for path in mapped
        if os.path.basename(path).startswith(("libgomp", "libiomp5", "libomp"))
    )
    if not runtimes:
        raise KernelsUnavailable("torch has loaded no OpenMP runtime to share")
    ctypes.CDLL(runtimes[0], mode=ctypes.RTLD_GLOBAL)
