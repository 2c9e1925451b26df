"""Asks the CUDA driver which GPUs are visible and how much memory each has.

The driver knows which GPUs ``CUDA_VISIBLE_DEVICES`` leaves visible and how large a slice of a GPU
(MIG) is. A separate process runs this file as a script to ask it: a process that has called the
driver can no longer fork children that use it, and the caller may be a user's script. Imports no
torch.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys

logger = logging.getLogger(__name__)

DRIVER = "libcuda.so.1"
TIMEOUT_S = 30.0
"""Seconds to wait for the driver, which starts in a fraction of a second, or in a few seconds on a
machine with many idle GPUs."""


def visible_gpus() -> tuple[int, ...]:
    """Memory of each visible GPU. If the driver does not report it: none, and a warning with the
    reason."""
    try:
        asked = subprocess.run(
            [sys.executable, "-I", __file__],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    else:
        if asked.returncode == 0:
            return tuple(map(int, asked.stdout.split()))
        why = (
            asked.stderr.strip()
            or f"the process that asked the CUDA driver ended with code {asked.returncode}"
        )
    logger.warning("The GPUs and the size of their memory are not known: %s", why)
    return ()


def _ask_driver() -> list[int]:
    """Memory of each visible GPU. Raises OSError if there is no driver or it refuses, and
    AttributeError if it is too old to have these calls."""
    driver = ctypes.CDLL(DRIVER)

    def call(name: str, *arguments: object) -> None:
        code = getattr(driver, name)(*arguments)
        if code != 0:
            raise OSError(f"the CUDA driver answers {name} with error {code}")

    count, device, num_bytes = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    call("cuInit", 0)
    call("cuDeviceGetCount", ctypes.byref(count))
    sizes = []
    for number in range(count.value):
        call("cuDeviceGet", ctypes.byref(device), number)
        call("cuDeviceTotalMem_v2", ctypes.byref(num_bytes), device)
        sizes.append(num_bytes.value)
    return sizes


if __name__ == "__main__":
    try:
        print(*_ask_driver())
    except (OSError, AttributeError) as error:
        sys.exit(str(error))
