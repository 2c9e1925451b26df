"""Whether kernels in Triton can run here, in one place for all of them. Imports Triton on use."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import torch

from setpoint.engine.kernels.ops import KernelsUnavailable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST_CAPABILITY = 80
"""Older GPUs have no arithmetic in bf16."""
E4M3_CAPABILITY = 89
"""Compute capability of the first GPUs with fp8 of the kind e4m3 (Ada)."""


def require_triton(dtype: torch.dtype) -> int:
    """The compute capability for which kernels are compiled; 0 if they are interpreted. Raises
    KernelsUnavailable with the reason if they cannot run in this dtype. What counts is the driver
    that Triton uses: the one of a GPU, or one that stands in for it and launches nothing."""
    if dtype not in DTYPES:
        raise KernelsUnavailable(f"the Triton kernels take bf16, fp16 and fp32, not {dtype}")
    try:
        import triton
    except ImportError as error:
        raise KernelsUnavailable(
            f"Triton cannot be imported ({error}); every torch for GPUs brings it"
        ) from error
    if triton.knobs.runtime.interpret:
        return 0
    from setpoint.engine.kernels.triton.kernel_folder import let_folder_move

    let_folder_move()
    if torch.cuda.is_available():
        _require_compiler()
    try:
        target = triton.runtime.driver.active.get_current_target()
    except RuntimeError as error:
        raise KernelsUnavailable("Triton finds no GPU") from error
    if target.backend != "cuda":
        raise KernelsUnavailable(f"the Triton kernels run on CUDA, not on {target.backend}")
    if target.arch < LEAST_CAPABILITY:
        raise KernelsUnavailable(
            f"the GPU has compute capability {target.arch / 10}, and the Triton kernels need"
            f" {LEAST_CAPABILITY / 10}"
        )
    return target.arch


def require_device(device: torch.device) -> None:
    """Raise KernelsUnavailable with the reason if kernels, which can run here, cannot run on this
    device."""
    import triton

    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise KernelsUnavailable("the Triton kernels run on GPUs only")


def _require_compiler() -> None:
    """Triton compiles a launcher in C for each kernel when it is first launched."""
    wanted = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, wanted)):
        raise KernelsUnavailable(
            "Triton compiles its launchers with a C compiler, and there is no"
            f" {' or '.join(wanted)}"
        )
    header = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
    if not header.exists():
        raise KernelsUnavailable(
            f"Triton compiles its launchers with {header}, which is missing; the system's package"
            " of Python's headers has it (python3-dev)"
        )
