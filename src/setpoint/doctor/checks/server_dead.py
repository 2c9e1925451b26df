"""server-dead: the server ended, or it hangs."""

from __future__ import annotations

import re

from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import events
from setpoint.doctor.findings import Action, Finding, RuledOut
from setpoint.doctor.observations import Event, Evidence

_STAMP = re.compile(r"^\[[^\]]*\] ")
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
            RuledOut("oom-decode", "No message reports a failed memory allocation."),
            RuledOut("pool-leak", "No message reports an error in the KV pool's accounting."),
        ),
        verify="After a restart, the server runs past the point at which it ended.",
        falsify="The server logs batches after the last quoted line. Then it survived the error.",
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
    when = "while serving" if started else "while starting"
    if "watchdog" in kinds:
        return (
            f"The server ended: its watchdog stopped it {when}, because one step took longer than "
            "--watchdog-timeout allows.",
            Action(
                "Read the stack traces that the watchdog logged. If the step waited for another "
                "rank, look for a network or driver fault; if it compiled or computed a long "
                "prompt, raise --watchdog-timeout. Let a supervisor restart the server."
            ),
        )
    if "CUDA error" in text or "NCCL error" in text:
        return (
            f"The server ended {when} after a device error: {_excerpt(found)}",
            Action(
                "Restart the server. If the error comes back, try another --attention-backend or a "
                "newer version, and look for device errors in the kernel log (dmesg)."
            ),
        )
    if "Killed" in text or "SIGKILL" in text or "exit code -9" in text:
        return (
            f"The server ended: the operating system killed it {when}, probably because the "
            "machine's own memory (not the GPU's) ran out.",
            Action(
                "Give the machine or container more main memory, or load less into it. The kernel "
                "log (dmesg) shows whether the out-of-memory killer ended the server."
            ),
        )
    return (
        f"A scheduler process ended {when}: {_excerpt(found)}",
        Action(
            "Restart the server under a supervisor, and report the exception with the lines before "
            "it. A newer version may have fixed it."
        ),
    )


def _excerpt(found: list[Event]) -> str:
    """The line that names the error, without its time, in quotation marks."""
    text = next((each.text for each in found if "Error: " in each.text), found[0].text)
    text = _STAMP.sub("", text).rstrip(": ")
    return f'"{text if len(text) <= 160 else f"{text[:160]}…"}".'


CHECK = Check(
    cause="server-dead",
    title="The server has ended or hangs",
    find=find,
    meaning="A process of the server has ended, or the watchdog ended it because a step did not "
    "return. Clients' connections are refused, or their requests wait forever, while /health may "
    "still answer 200.",
    rule="The log shows a watchdog timeout, a signal that ends the server (SIGQUIT from a child "
    "process, SIGKILL), an exception in the scheduler or a device error, and no batch after it.",
    counter_evidence="If batches follow more than 5 s after the message, the server survived it. "
    "If a message about memory or about the KV pool's accounting tells why the server ended, the "
    "cause is oom-prefill, oom-decode, oom-init or pool-leak. Tracebacks of single requests do not "
    "count.",
    guide="The guides do not cover it. It is often reported: sglang#3752, #7553, #6624 (/health "
    "answers 200 for an hour after the scheduler ended), #18582.",
    picture="""\
batches   |||||||||||||||||||||||  X
requests  |  |   |  |  |   |  |  |    |   |   (no answers)""",
)
