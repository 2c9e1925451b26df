"""What the machine is, and what it reaches: copies, products, launches, replays. The sweeps are
shares of these rates."""

from __future__ import annotations

import platform
import shutil

import torch
from gpu.results import Results, read
from gpu.roofline import CHIPS
from gpu.timing import captured, device, host_seconds_of, seconds_of, synchronize
from machine import commit, versions

from setpoint.engine.kernels.triton.triton_ops import TritonOps

COPY, BF16, FP8 = "copy", "product in bf16", "product in fp8"
LAUNCHES = 100


def rates(out: Results) -> None:
    """Measure all of them, or, in a rehearsal, tiny ones."""
    side, copied = (64, 1 << 16) if out.rehearsal else (8192, 2 << 30)
    out.add("machine", _machine())
    out.add("versions", ", ".join(f"{k} {v}" for k, v in versions("torch", "triton").items()))
    out.add("commit", commit())
    out.add("C compiler", shutil.which("gcc") or shutil.which("clang") or "none")
    sheet = next((chip for chip in CHIPS if chip.name in _machine()), None)
    out.add(COPY, _copied(copied), "TB/s", predicted=sheet and sheet.copies / 1e12)
    left, right = (torch.randn(side, side, device=device()).bfloat16() for _ in range(2))
    flops = 2 * side**3 / 1e12
    rate = flops / seconds_of(lambda: left @ right.t())
    out.add(BF16, rate, "TFLOP/s", predicted=sheet and sheet.rate("bf16") / 1e12)
    out.attempt(FP8, lambda: _fp8(out, left, right, flops))
    out.attempt("launches", lambda: _launches(out))


def _machine() -> str:
    if device().type == "cpu":
        return f"{platform.machine()}, no GPU"
    found = torch.cuda.get_device_properties(0)
    return (
        f"{found.name}, {found.total_memory / 1e9:.0f} GB, {found.multi_processor_count}"
        f" multiprocessors, compute capability {found.major}.{found.minor}"
    )


def _copied(num_bytes: int) -> float:
    source = torch.empty(num_bytes, dtype=torch.int8, device=device())
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source)) / 1e12


def _fp8(out: Results, left: torch.Tensor, right: torch.Tensor, flops: float) -> None:
    codes = [each.to(torch.float8_e4m3fn) for each in (left, right)]
    ones = torch.ones(len(left), 1, device=device())

    def multiply() -> torch.Tensor:
        return torch._scaled_mm(codes[0], codes[1].t(), ones, ones.t(), out_dtype=torch.bfloat16)

    out.add(FP8, flops / seconds_of(multiply), "TFLOP/s")


def _launches(out: Results) -> None:
    """What launches cost the host, and what a kernel adds to a graph."""
    ops, x = TritonOps(), torch.zeros(1, 64, device=device(), dtype=torch.bfloat16)

    def triton() -> None:
        ops.silu_mul(x)

    def graph() -> None:
        for _ in range(LAUNCHES):
            triton()

    times = 2 if out.rehearsal else LAUNCHES
    for name, call in (("a kernel in Triton", triton), ("an operation of torch", lambda: x + x)):
        out.add(f"host: launch of {name}", host_seconds_of(call, times) * 1e6, "µs")
    if device().type == "cpu":
        return
    replay = captured(graph)
    out.add(f"host: replay of {LAUNCHES} kernels", host_seconds_of(replay, 20) * 1e6, "µs")
    synchronize()
    each = seconds_of(graph) / LAUNCHES
    out.add("device: a tiny kernel in a graph", each * 1e6, "µs")


def measured(out: Results) -> dict[str, float]:
    """The rates that the part of this module has found: bytes per second, and operations per
    second by type."""
    part = read(out.folder, "rates")
    values = {each["name"]: each["value"] for each in part.found["results"]} if part else {}
    found = {"memory": values.get(COPY), "bf16": values.get(BF16), "fp8": values.get(FP8)}
    return {name: value * 1e12 for name, value in found.items() if isinstance(value, float)}
