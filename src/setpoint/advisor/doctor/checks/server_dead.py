"""server-dead: the server ended, or it hangs."""

from __future__ import annotations

from setpoint.advisor.doctor.case import Case
from setpoint.advisor.doctor.checks.check import Check
from setpoint.advisor.doctor.checks.common import events
from setpoint.advisor.doctor.findings import Action, Finding, RuledOut
from setpoint.advisor.doctor.observations import Event, Evidence

GOES_ON_S = 5.0
"""Batches this long after an error show that the server survived it."""


def find(case: Case) -> Finding | None:
    if events(case, "oom") or events(case, "leak"):
        return None  # those say why
    found = _fatal(case)
    if not found or _goes_on(case, found[-1]):
        return None
    first = found[0]
    what, action = _reason(case, found)
    return Finding(
        cause="server-dead",
        confidence=0.95,
        summary=what,
        evidence=tuple(Evidence(event.line, event.text) for event in [first, *found[1:][-2:]]),
        action=action,
        ruled_out=(
            RuledOut("oom-decode", "No message tells of a failed allocation."),
            RuledOut("pool-leak", "No message tells that the pool's accounting is wrong."),
        ),
        verify="After a restart, batch lines go on past the time at which it ended.",
        falsify="Batch lines after the last of these lines: then the server had survived it.",
        share=1.0,
    )


def _fatal(case: Case) -> list[Event]:
    found = events(case, "watchdog") + events(case, "killed")
    found += [event for event in events(case, "traceback") if _ends_a_process(event.text)]
    return sorted(found, key=lambda event: event.line)


def _ends_a_process(text: str) -> bool:
    """Tracebacks of single requests are frequent and harmless."""
    return any(words in text for words in ("hit an exception", "CUDA error", "NCCL error"))


def _goes_on(case: Case, last: Event) -> bool:
    moments = [moment for rank in case.ranks for moment in rank.moments if moment.num_decode]
    after = [moment for moment in moments if moment.line > last.line > 0]
    return bool(after) and after[-1].at >= (last.at or 0.0) + GOES_ON_S


def _reason(case: Case, found: list[Event]) -> tuple[str, Action]:
    text = " ".join(event.text for event in found)
    kinds = {event.kind for event in found}
    started = any(rank.moments for rank in case.ranks)
    when = "while it served" if started else "while it started"
    if "watchdog" in kinds:
        return (
            f"The watchdog ended the server {when}: one step took longer than the time limit.",
            Action(
                "Look at the stacks that the watchdog wrote: a wait for another rank is a network "
                "or driver fault; a long compilation or prefill needs a larger "
                "--watchdog-timeout. Let a supervisor restart the server."
            ),
        )
    if "CUDA error" in text or "NCCL error" in text:
        return (
            f"A device error ended the server {when}: {_excerpt(found)}",
            Action(
                "Restart the server; if it comes back, try another --attention-backend and a newer "
                "version, and look for the device's errors in the kernel's log (dmesg)."
            ),
        )
    if "Killed" in text or "SIGKILL" in text or "exit code -9" in text:
        return (
            f"The operating system ended the server {when}, probably because the machine's own "
            "memory ran out.",
            Action(
                "Give the machine or container more memory (not the GPU), or load less into it; "
                "dmesg tells whether the kernel's out-of-memory killer did it."
            ),
        )
    return (
        f"A scheduler process ended {when}: {_excerpt(found)}",
        Action(
            "Restart the server under a supervisor, and report the exception with the lines before "
            "it; a newer version may have mended it."
        ),
    )


def _excerpt(found: list[Event]) -> str:
    text = found[0].text
    return text if len(text) <= 160 else f"{text[:160]}…"


CHECK = Check(
    cause="server-dead",
    title="The server ended or hangs",
    find=find,
    meaning="A process of the server has ended, or its watchdog ended it because a step did not "
    "return. Clients see refused connections, or wait for ever while /health may still answer 200.",
    rule="A watchdog's time-out, a signal that ends the server (SIGQUIT from a child, SIGKILL), an "
    "exception in the scheduler, or a device error, with no batch after it.",
    counter_evidence="Batches more than 5 s after the message. A message about memory or about "
    "the pool's accounting, which says why: oom-…, pool-leak. Tracebacks of single requests.",
    guide="The guides do not treat it. Frequent reports: sglang#3752, #7553, #6624 (/health says "
    "200 for an hour after the scheduler ended), #18582.",
    picture="""\
batches   |||||||||||||||||||||||  X
access    |  |   |  |  |   |  |  |    |   |   (no answers)""",
)
