"""Asks the CUDA driver how much memory the GPU of an engine has.

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


def first_gpu_bytes() -> int | None:
    """Memory of the first visible GPU. If the driver does not report it: None, and a warning with
    the reason."""
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
            return int(asked.stdout)
        why = (
            asked.stderr.strip()
            or f"the process that asked the CUDA driver ended with code {asked.returncode}"
        )
    logger.warning("The size of the GPU's memory is not known: %s", why)
    return None


def _ask_driver() -> int:
    """Memory of the first visible GPU. Raises OSError if there is no driver or it refuses, and
    AttributeError if it is too old to have these calls."""
    driver = ctypes.CDLL(DRIVER)
    device, num_bytes = ctypes.c_int(), ctypes.c_size_t()
    for name, arguments in (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), 0)),
        ("cuDeviceTotalMem_v2", (ctypes.byref(num_bytes), device)),
    ):
        code = getattr(driver, name)(*arguments)
        if code != 0:
            raise OSError(f"the CUDA driver answers {name} with error {code}")
    return num_bytes.value


if __name__ == "__main__":
    try:
        print(_ask_driver())
    except (OSError, AttributeError) as error:
        sys.exit(str(error))
