"""Where Triton's kernels cannot run, the reason is said."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from setpoint.core.errors import ConfigError
from setpoint.engine.attention import triton_attention
from setpoint.engine.attention.attention_backend import BACKENDS, PREFERENCE
from setpoint.engine.kernels.device import check_device
from setpoint.engine.kernels.kernel_registry import choose
from setpoint.engine.kernels.ops import KernelsUnavailable
from setpoint.engine.kernels.triton.availability import require_triton
from setpoint_testing.attention_problems import make_shape


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return monkeypatch


def stand_in(backend: str, capability: int) -> Any:
    target = SimpleNamespace(backend=backend, arch=capability)
    return SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: target))


def test_no_kernel_takes_float64() -> None:
    with pytest.raises(KernelsUnavailable, match=r"not torch\.float64"):
        require_triton(torch.float64)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(KernelsUnavailable, match="cannot be imported"):
        require_triton(torch.bfloat16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(no_interpreter: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelsUnavailable, match="no GPU"):
        require_triton(torch.bfloat16)


def test_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert require_triton(torch.bfloat16) == 0


@pytest.mark.parametrize(
    ("backend", "capability", "reason"),
    [("hip", 94, "not on hip"), ("cuda", 75, r"7\.5, and the Triton kernels need 8\.0")],
)
def test_on_another_gpu(
    backend: str, capability: int, reason: str, no_interpreter: pytest.MonkeyPatch
) -> None:
    no_interpreter.setattr(triton.runtime, "driver", stand_in(backend, capability))
    with pytest.raises(KernelsUnavailable, match=reason):
        require_triton(torch.bfloat16)


def test_a_gpu_needs_a_compiler_and_the_headers(no_interpreter: pytest.MonkeyPatch) -> None:
    no_interpreter.setattr(triton.runtime, "driver", stand_in("cuda", 90))
    no_interpreter.setattr(torch.cuda, "is_available", lambda: True)
    no_interpreter.setattr(sysconfig, "get_path", lambda *_: "/nowhere")
    no_interpreter.setattr(shutil, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    no_interpreter.delenv("CC", raising=False)
    with pytest.raises(KernelsUnavailable, match=r"/nowhere/Python\.h, which is missing"):
        require_triton(torch.bfloat16)
    no_interpreter.setenv("CC", "icc")
    with pytest.raises(KernelsUnavailable, match="there is no icc"):
        require_triton(torch.bfloat16)


def test_where_triton_attention_cannot_run_the_reference_does_and_says_why(
    no_interpreter: pytest.MonkeyPatch,
) -> None:
    no_interpreter.setattr(triton.runtime, "driver", stand_in("cuda", 80))
    no_interpreter.setattr(triton_attention, "require_device", lambda device: None)
    shape = make_shape(8, 2, 64, 16, torch.bfloat16, torch.float8_e4m3fn)
    chosen = choose(BACKENDS, PREFERENCE["cuda"], shape)
    assert (chosen.name, chosen.fallback) == (
        "torch_ref",
        "triton: compute capability 8.0 has no fp8 of the kind e4m3; e5m2 can be in the cache",
    )
    no_interpreter.setattr(torch.cuda, "is_available", lambda: True)
    no_interpreter.setattr(shutil, "which", lambda name: None)
    no_interpreter.delenv("CC", raising=False)
    chosen = choose(BACKENDS, PREFERENCE["cuda"], shape)
    assert chosen.name == "torch_ref"
    assert chosen.fallback.startswith("triton: Triton compiles its launchers with a C compiler")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_torch_cannot_drive_is_an_error_with_what_torch_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The files of a driver are there, which is all that is known before torch is imported."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ConfigError) as caught:
        check_device(torch.device("cuda"))
    assert str(caught.value) == (
        f"--device cuda was asked for, but torch {torch.__version__} (built for CUDA"
        f" {torch.version.cuda or 'none'}) sees no CUDA device here: the driver may be older"
        " than this torch needs (nvidia-smi tells both), and CUDA_VISIBLE_DEVICES is '7'. Use"
        " --device cpu, or auto."
    )
