"""cpu-contended: other programs take the CPU on which the steps are computed."""

from __future__ import annotations

from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import (
    confidence,
    estimate,
    events,
    percent,
    quote,
    quote_events,
)
from setpoint.doctor.findings import Action, Finding, RuledOut
from setpoint.doctor.limits import is_disturbed
from setpoint.doctor.observations import EventKind, Evidence
from setpoint.observe.contention import LEAST_SHARE

LEAST_KNOWN = 0.01
"""A share below it counts as this one: the warning of a log rounds its times, down to 0.0 s."""
LEAST_BUSY_S = 3.0
KIND: EventKind = "cpu-contention"


def find(case: Case) -> Finding | None:
    busy_s, cpu_s, evidence = _from_moments(case) or _from_log(case)
    if not case.has_load or busy_s < LEAST_BUSY_S or cpu_s >= LEAST_SHARE * busy_s:
        return None
    known = case.load.where(lambda moment: bool(moment.num_decode or moment.num_prefill))
    share = cpu_s / busy_s
    least = max(share, LEAST_KNOWN)
    return Finding(
        cause="cpu-contended",
        confidence=confidence(case, min(1.0, (1 - share) / 0.4), known),
        summary=f"Other programs take the CPU: the engine had work for {busy_s:.1f} s, and a CPU"
        f" for {cpu_s:.1f} s of them ({percent(share)}).",
        evidence=evidence,
        action=Action(
            "End the other programs on this machine, or give the server CPUs of its own (with"
            " taskset, or with the cpuset of its container). If the server runs in a container with"
            " a CPU limit, raise that limit. No option of the server helps."
        ),
        effect=estimate(
            "output throughput",
            1 + 0.5 * (1 / least - 1),
            1 / least,
            1.1 / least,
            f"with CPUs of its own, the engine does in {least * busy_s:.1f} s what took"
            f" {busy_s:.1f} s",
        ),
        ruled_out=(RuledOut("client-bound", "The engine has work, but no CPU to do it with."),),
        risk="None for the server. The other programs get less of the CPU, or end.",
        verify="The log has no new line that begins with “CPU contention”, and output throughput"
        " (gen throughput) rises.",
        falsify="Output throughput stays the same although `top` shows no other program that uses"
        " the CPU. Then the engine waits for something else, such as memory that was swapped out.",
        share=round(1 - share, 3),
    )


def _from_moments(case: Case) -> tuple[float, float, tuple[Evidence, ...]] | None:
    """Busy seconds, those with a CPU, and evidence; None if the moments do not tell."""
    known = case.load.where(lambda moment: bool(moment.busy_s) and moment.cpu_s is not None)
    if not known.moments:
        return None
    busy_s = sum(moment.busy_s or 0.0 for moment in known.moments)
    cpu_s = sum(moment.cpu_s or 0.0 for moment in known.moments)
    slow = known.where(is_disturbed)
    return busy_s, cpu_s, quote(slow)


def _from_log(case: Case) -> tuple[float, float, tuple[Evidence, ...]]:
    """The same from the warnings of a log. What they do not cover was not disturbed."""
    found = events(case, KIND)
    busy_s = sum(float(event.values["busy_s"]) for event in found)
    cpu_s = sum(float(event.values["cpu_s"]) for event in found)
    loaded_s = sum(case.load.weights) if case.load.has_clock else busy_s
    undisturbed_s = max(loaded_s - busy_s, 0.0)
    if undisturbed_s > busy_s:  # it has passed, or comes and goes
        return 0.0, 0.0, ()
    return busy_s, cpu_s, quote_events(case, KIND, 3)


CHECK = Check(
    cause="cpu-contended",
    title="Other programs take the CPU",
    find=find,
    meaning="On a CPU, the thread of the engine computes the steps of the model itself. When other"
    " programs run on the same CPUs, or a container may use only a part of them, the thread waits"
    " for a CPU in the middle of its steps. Everything becomes slower, and no option of the server"
    " changes that.",
    rule="While it has work, the engine has a CPU for less than 70 % of the time. Setpoint's own"
    " records say for how much. In a log, the doctor reads the warnings that begin with “CPU"
    " contention”; they must cover at least half of the time under load.",
    counter_evidence="Time in which the server waits for requests does not count. An engine on a"
    " GPU is not judged, because its thread waits for the device.",
    advice="End the other programs, or give the server CPUs of its own.",
    guide="The guides assume that a server has its machine to itself.",
    picture="""\
CPU 0   [step.....][other program][.....step][other program][step...
                    the step waits            the step waits""",
)
