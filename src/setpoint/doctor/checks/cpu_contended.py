"""cpu-contended: other programs take the CPU on which the steps are computed."""

from __future__ import annotations

from dataclasses import dataclass

from setpoint.doctor.binding_limit import is_disturbed
from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import (
    confidence,
    estimate,
    on_lines,
    percent,
    quote,
    quote_some,
)
from setpoint.doctor.findings import Action, Finding, RuledOut
from setpoint.doctor.load import Load
from setpoint.doctor.observations import Event, EventKind, Evidence, Rank
from setpoint.observe.contention import LATER_S, LEAST_SHARE

LEAST_KNOWN = 0.01
"""A share below it counts as this one: the warning of a log rounds its times, down to 0.0 s."""
LEAST_BUSY_S = 3.0
WARNING: EventKind = "cpu-contention"


@dataclass(slots=True, frozen=True)
class _CpuReport:
    """What a source tells of the CPU."""

    busy_s: float = 0.0
    cpu_s: float = 0.0
    """The part of ``busy_s`` in which the engine had a CPU."""
    share: float = 1.0
    """The share of the time under load that this is about."""
    evidence: tuple[Evidence, ...] = ()


def find(case: Case) -> Finding | None:
    told = _from_moments(case) or _from_log(case)
    busy_s, cpu_s = told.busy_s, told.cpu_s
    if not case.has_load or busy_s < LEAST_BUSY_S or cpu_s >= LEAST_SHARE * busy_s:
        return None
    known = case.load.where(lambda moment: bool(moment.num_decode or moment.num_prefill))
    share = cpu_s / busy_s
    least = max(share, LEAST_KNOWN)
    return Finding(
        cause="cpu-contended",
        confidence=confidence(case, min(1.0, (1 - share) / 0.4) * told.share, known),
        summary=f"Other programs take the CPU: the engine had work for {busy_s:.1f} s, and a CPU"
        f" for {cpu_s:.1f} s of them ({percent(share)}).",
        evidence=told.evidence,
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
        falsify="Output throughput stays the same although no other program uses the CPU (the"
        " command top shows them). Then the engine waits for something else, such as memory that"
        " was swapped out.",
        share=round(1 - share, 3),
    )


def note(case: Case) -> str:
    """A sentence that names the lines of a log about contention that is not a finding; "" if there
    are none."""
    found = [event for rank in case.ranks for event in _said(rank)]
    if not found:
        return ""
    lines = on_lines(case, found)
    return f"For a part of the time, other programs took the CPU ({lines})."


def _from_moments(case: Case) -> _CpuReport | None:
    """None if the moments do not tell."""
    known = case.load.where(lambda moment: bool(moment.busy_s) and moment.cpu_s is not None)
    if not known.moments:
        return None
    busy_s = sum(moment.busy_s or 0.0 for moment in known.moments)
    cpu_s = sum(moment.cpu_s or 0.0 for moment in known.moments)
    slow = known.where(is_disturbed)
    return _CpuReport(busy_s, cpu_s, evidence=quote(slow))


def _from_log(case: Case) -> _CpuReport:
    """The same from the lines of a log. What they do not cover was not disturbed, except after the
    last one: the next warning would come only after a minute of steps."""
    busy_s = cpu_s = unknown_s = undisturbed_s = 0.0
    said: list[Event] = []
    for rank in case.ranks:
        found = _said(rank)
        busy, cpu = _covered(rank, found)
        load = case.loads.get(rank.name, Load())
        loaded_s = load.seconds or busy
        unknown = 0.0
        if found and load.has_clock and not _is_over(rank, found[-1]):
            unknown = min(_after_s(load, found[-1].at or 0.0), LATER_S)
        busy_s, cpu_s, unknown_s = busy_s + busy, cpu_s + cpu, unknown_s + unknown
        undisturbed_s += max(loaded_s - busy - unknown, 0.0)
        said += found
    if not busy_s or undisturbed_s > busy_s:  # it has passed, or comes and goes
        return _CpuReport()
    share = busy_s / (busy_s + unknown_s + undisturbed_s)
    return _CpuReport(busy_s, cpu_s, share, quote_some(said, 3))


def _said(rank: Rank) -> list[Event]:
    """The lines that say how much of the CPU the engine had."""
    return [
        event
        for event in rank.events
        if event.kind in (WARNING, "diagnosed") and "busy_s" in event.values
    ]


def _covered(rank: Rank, said: list[Event]) -> tuple[float, float]:
    """The seconds that these lines are about, and those with a CPU. The server's own doctor speaks
    of the last two minutes, which a warning before may be about as well."""
    busy_s = cpu_s = 0.0
    before = float("-inf")
    for event in said:
        at, busy, cpu = event.at or 0.0, event.values["busy_s"], event.values["cpu_s"]
        new_s = max(min(float(busy), at - before), 0.0)
        busy_s, cpu_s = busy_s + new_s, cpu_s + new_s * float(cpu) / max(float(busy), 1e-9)
        before = at
    num_kept = sum(event.kind == WARNING for event in said)
    per_kept = rank.num_events.get(WARNING, num_kept) / num_kept if num_kept else 1.0
    return busy_s * per_kept, cpu_s * per_kept


def _after_s(load: Load, at: float) -> float:
    """Seconds of this load after a time."""
    return sum(load.where(lambda moment: moment.at > at).weights)


def _is_over(rank: Rank, last: Event) -> bool:
    """Whether the server's own doctor names another limit, or none, after this line."""
    return any(event.kind == "diagnosed" and event.line > last.line for event in rank.events)


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
    " contention”, and the lines “Doctor: cpu-contended …” of the server's own doctor. They"
    " must cover at least half of the time under load. After such a line, up to a minute is"
    " not counted, because no other warning can come before; the verdict is then less sure."
    " A report about contention that lasted shorter has a note that names the lines.",
    counter_evidence="Time in which the server waits for requests does not count. An engine on a"
    " GPU is not judged, because its thread waits for the device.",
    advice="End the other programs, or give the server CPUs of its own.",
    guide="The guides assume that a server has its machine to itself.",
    picture="""\
CPU 0   [step.....][other program][.....step][other program][step...
                    the step waits            the step waits""",
)
