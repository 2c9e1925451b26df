"""backend-suboptimal: an attention backend was chosen that is slower than the default."""

from __future__ import annotations

from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import estimate, lines_on
from setpoint.doctor.checks.memory import total_gb
from setpoint.doctor.findings import Action, Finding, RuledOut

SLOW = {"torch_native": 0.85, "triton": 0.5}
"""Backends for any device -> the confidence that another one is faster."""
NVIDIA_GB = (
    (14.0, 50.0, "flashinfer"),
    (75.0, 82.0, "fa3"),
    (88.0, 97.0, "fa3"),
    (135.0, 142.0, "fa3"),
)
"""Memory of a device -> the backend that the guide names for it (Ampere and Ada, Hopper). Other
sizes belong to other makers, or to devices for which the guide names no single backend."""


def find(case: Case) -> Finding | None:
    name = case.option("attention_backend")
    total = total_gb(case)
    if case.facts.engine != "sglang" or case.facts.device == "cpu" or not case.has_load:
        return None
    if name not in SLOW or total is None:
        return None
    better = next((best for low, high, best in NVIDIA_GB if low <= total <= high), None)
    if better is None:
        return None
    return Finding(
        cause="backend-suboptimal",
        confidence=SLOW[name],
        summary=f"A slow attention backend is in use: --attention-backend {name} is slower than "
        f"{better}, which is made for this kind of device ({total:.0f} GB).",
        evidence=lines_on(case, "attention_backend"),
        action=Action(
            f"Set --attention-backend to {better}, or remove the option: the server then chooses "
            "the fastest backend for the device.",
            "--attention-backend",
            "set",
            better,
        ),
        effect=estimate(
            "output throughput",
            1.0,
            1.3 if name == "triton" else 2.0,
            2.0 if name == "triton" else 5.0,
            "this is the range of published comparisons; it depends on the model and on the length "
            "of contexts",
        ),
        ruled_out=(
            RuledOut("healthy", "The backend limits nothing, but it makes every step slower."),
        ),
        risk="Results differ in the last bits, so outputs may differ slightly.",
        verify="Output throughput (gen throughput) rises with the same number of running requests.",
        falsify="The model needs a feature that only this backend supports. The server then says "
        "so when it starts with another one.",
    )


CHECK = Check(
    cause="backend-suboptimal",
    title="A slow attention backend is in use",
    find=find,
    meaning="Attention can be computed by several libraries (backends). Those made for one kind of "
    "device are much faster than those that run everywhere. The server chooses the fastest one "
    "unless an option names another.",
    rule="--attention-backend is torch_native or triton, and the device's memory size is that of "
    "an NVIDIA GPU for which a faster backend exists.",
    counter_evidence="It is not reported for devices of other makers or for CPUs. Some models need "
    "the backend that was chosen.",
    advice="Set --attention-backend to the one that is made for the device, or remove the option.",
    guide="SGLang's tuning guide of 2026: fa3 on Hopper, trtllm_mha or trtllm_mla on Blackwell, "
    "flashinfer on Ampere and Ada. It also says: try different backends and measure.",
)
