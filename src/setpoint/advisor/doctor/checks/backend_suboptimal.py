"""backend-suboptimal: an attention backend was chosen that is slower than the default."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import estimate, said
from setpoint.advisor.doctor.checks.memory import total_gb
from setpoint.advisor.doctor.findings import Action, Finding, RuledOut

SLOW = {"torch_native": 0.85, "triton": 0.5}
"""Backends that are there for any device -> how sure it is that another one is faster."""
NVIDIA_GB = (
    (14.0, 50.0, "flashinfer"),
    (75.0, 82.0, "fa3"),
    (88.0, 97.0, "fa3"),
    (135.0, 142.0, "fa3"),
)
"""Memory of a device -> the backend that the guide names for it: Ampere and Ada, Hopper. Other
sizes are of other makers, or of devices whose best backend the guide leaves open."""


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
        summary=f"--attention-backend {name} was chosen, which is slower than the kernels made for "
        f"a device of {total:.0f} GB.",
        evidence=said(case, "attention_backend"),
        action=Action(
            f"Start the server with --attention-backend {better}, or without the option, which "
            "chooses the fastest one that the device has.",
            "--attention-backend",
            "set",
            better,
        ),
        effect=estimate(
            "output throughput",
            1.0,
            1.3 if name == "triton" else 2.0,
            2.0 if name == "triton" else 5.0,
            "a range of published comparisons: it depends on the length of contexts and the model",
        ),
        ruled_out=(RuledOut("healthy", "No limit binds because of it, but every step is slower."),),
        risk="Numbers differ in the last bits, so that outputs may differ.",
        verify="gen throughput rises at the same number of running requests.",
        falsify="The model has a feature that only this backend supports (the server says so when "
        "it starts with another).",
    )


CHECK = Check(
    cause="backend-suboptimal",
    title="A slow attention backend was chosen",
    find=find,
    meaning="Several libraries compute attention. Those made for one kind of device are much "
    "faster than those that run everywhere, and the server chooses the fastest unless it is told "
    "otherwise.",
    rule="The options name torch_native or triton as the attention backend of a device whose "
    "memory is that of an NVIDIA GPU of a kind that has faster ones.",
    counter_evidence="Other makers' devices, models that need the backend, and CPUs.",
    guide="SGLang's tuning guide of 2026: Hopper: fa3; Blackwell: trtllm_mha or trtllm_mla; Ampere "
    "and Ada: flashinfer; and: try different backends and measure.",
)
