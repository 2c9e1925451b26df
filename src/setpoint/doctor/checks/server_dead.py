"""server-dead: the server ended, or it hangs."""

from __future__ import annotations

import re

from setpoint.core.moments import Moment
from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import counted, events, survived
from setpoint.doctor.checks.memory import ooms
from setpoint.doctor.findings import Action, Finding, RuledOut
from setpoint.doctor.observations import Event, Evidence, Silence
from setpoint.doctor.phases import running_of, waits

_STAMP = re.compile(r"^\[[^\]]*\] ")
NOT_BUILT = ("no kernel image", "invalid device function", "is not supported on this", "sm_")
"""Words about kernels that were not built for the device."""
GOES_ON_S = 5.0
"""Batches this long after an error show that the server survived it."""
SILENT_S = 60.0
"""If a log goes on for this long without a batch although requests wait, the server hangs."""
SILENT_RUNNING_S = 120.0
"""The same if requests ran that cannot all have ended before the next line about them."""
UNFINISHED = 4
"""So many running requests do not all end within the 40 steps between two lines …"""
LEVEL = 0.7
"""… unless their number was already below this share of the usual one."""


def find(case: Case) -> Finding | None:
    if ooms(case, "init", "prefill", "decode") or events(case, "leak"):
        return None  # these causes say why
    found = [event for event in _fatal(case) if not survived(case, event, GOES_ON_S)]
    if found:
        first = found[0]
        what, action = _reason(case, found)
        evidence = [_quoted(event) for event in [first, *found[1:][-2:]]]
        return _finding(0.95, what, action, evidence)
    return _hangs(case)


def _quoted(event: Event) -> Evidence:
    """The line of an event; of a traceback, the last one, which names the exception."""
    error, line = event.values.get("error"), event.values.get("error_line")
    if isinstance(error, str) and isinstance(line, int):
        return Evidence(line, error)
    return Evidence(event.line, event.text)


def _finding(sure: float, what: str, action: Action, evidence: list[Evidence]) -> Finding:
    return Finding(
        cause="server-dead",
        confidence=sure,
        summary=what,
        evidence=tuple(evidence),
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
    found += [event for event in events(case, "traceback") if _ends_a_process(event)]
    return sorted(found, key=lambda event: event.line)


def _ends_a_process(event: Event) -> bool:
    """Tracebacks of single requests are frequent and harmless."""
    if event.values.get("way") or "hit an exception" in event.text:
        return True
    return event.values.get("in") == "scheduler"


def _hangs(case: Case) -> Finding | None:
    """The finding if no process says that it ended, but nothing is computed any more."""
    last = max(
        (moment for rank in case.ranks for moment in rank.moments),
        key=lambda moment: moment.line,
        default=None,
    )
    line = 0 if last is None else last.line
    failed = [event for event in events(case, "unhealthy") if event.line > line]
    if last is None and not (failed and _is_serving(case, failed)):
        return None
    silence = case.seen.silence
    seconds = 0.0 if silence is None else silence.seconds
    action = Action(
        "Restart the server, and let a supervisor do so whenever /health fails. To see where it "
        "hangs, take a stack trace of its scheduler process (py-spy dump --pid …) before the "
        "restart, and look for device errors in the kernel log (dmesg)."
    )
    quoted = [] if last is None else [Evidence(last.line, last.text)]
    if failed:
        after = "" if last is None else " after the last batch"
        count = f"{counted(len(failed), 'health check')} failed{after}"
        what = f"The server hangs: {count}, and no batch followed."
        sure = 0.9 if len(failed) > 1 or "ealth check failed" in failed[0].text else 0.75
        shown = [Evidence(event.line, event.text) for event in (failed[0], failed[-1])]
        return _finding(sure, what, action, [*quoted, *dict.fromkeys(shown)])
    if last is None or silence is None or not _is_unfinished(case, last, seconds, silence):
        return None
    left = _left(last)
    what = (
        f"The server hangs: {left}, and no batch followed, although the log goes on for "
        f"{seconds / 60:.0f} minutes."
    )
    return _finding(0.8, what, action, [*quoted, silence.last])


def _left(last: Moment) -> str:
    """The open requests after the last batch, in words: "12 requests ran and 3 waited"."""
    ran, waited = round(running_of(last) or 0), round(last.queue or 0)
    return f"{counted(ran, 'request')} ran and {waited:,} waited when the last batch was logged"


def _is_serving(case: Case, failed: list[Event]) -> bool:
    """Whether the server has started: while it starts, it answers health checks with 503, too."""
    said = any("ealth check failed" in event.text for event in failed)
    has_pool = case.facts.available_gb is not None or case.facts.left_after_pool_gb is not None
    return said or bool(events(case, "ready")) or has_pool


def _is_unfinished(case: Case, last: Moment, seconds: float, silence: Silence) -> bool:
    """Whether there was work after the last batch that was never continued: requests in the queue,
    running ones that cannot have ended unseen, or requests that arrived later."""
    usual = case.decoding.median(running_of) or 0.0
    running = running_of(last) or 0.0
    if seconds >= SILENT_S and (waits(last) or silence.num_requests > running + 1):
        return True
    return seconds >= SILENT_RUNNING_S and running >= max(UNFINISHED, LEVEL * usual)


def _reason(case: Case, found: list[Event]) -> tuple[str, Action]:
    kinds = {event.kind for event in found}
    ways = [str(event.values["way"]) for event in found if event.values.get("way")]
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
    if "slots" in ways:
        return _no_slots(found)
    if any("apture" in _error(event) and "failed" in _error(event) for event in found):
        return _capture_failed(found)
    if "device" in ways:
        return (
            f"The server ended {when} after a device error: {_excerpt(found, 'device')}",
            Action(
                "Restart the server. If the error comes back, try another --attention-backend or a "
                "newer version, and look for device errors in the kernel log (dmesg)."
            ),
        )
    if "killed" in ways:
        return (
            f"The server ended: the operating system killed it {when}, probably because the "
            "machine's own memory (not the GPU's) ran out.",
            Action(
                "Give the machine or container more main memory, or load less into it. The kernel "
                "log (dmesg) shows whether the out-of-memory killer ended the server."
            ),
        )
    if {"segmentation fault", "abort"} & set(ways):
        way = "segmentation fault" if "segmentation fault" in ways else "abort"
        return (
            f"The server crashed {when}, in native code, without a traceback of its scheduler: "
            f"{_excerpt(found, way)}",
            Action(
                "Restart the server under a supervisor. If it crashes again, try another "
                "--attention-backend or other versions of the libraries (torch, NCCL, the driver), "
                "and report the stack of the core dump."
            ),
        )
    return (
        f"A scheduler process ended {when}: {_excerpt(found)}",
        Action(
            "Restart the server under a supervisor, and report the exception with the lines before "
            "it. A newer version may have fixed it."
        ),
    )


def _no_slots(found: list[Event]) -> tuple[str, Action]:
    """The reason and the action if the table of running requests is full."""
    return (
        f"The server ended while serving: its table of running requests had no free row: "
        f"{_excerpt(found, 'slots')}",
        Action(
            "Lower --max-running-requests, as the message says: the table then keeps more rows "
            "in reserve. It is not the device's memory that ran out.",
            "--max-running-requests",
            "decrease",
        ),
    )


def _capture_failed(found: list[Event]) -> tuple[str, Action]:
    """The reason and the action if the CUDA graphs could not be captured for another reason than a
    failed allocation. Kernels that were not built for the device fail with every share of memory;
    an error of the device may have any cause, a lack of memory among them."""
    text = " ".join(_error(event) for event in found)
    what = f"The server ended while starting: capturing the CUDA graphs failed: {_excerpt(found)}"
    if any(words in text for words in NOT_BUILT):
        return what, Action(
            "Install a version of the kernels (torch, flashinfer, sgl-kernel) that is built for "
            "this device, or choose another --attention-backend that is. Neither less memory nor "
            "a start without graphs mends it."
        )
    return what, Action(
        "Lower --mem-fraction-static by 0.05 first: graphs and their workspaces need memory "
        "outside the KV pool. If the error comes back, capture fewer graphs "
        "(--cuda-graph-max-bs), then try another --attention-backend."
    )


def _error(event: Event) -> str:
    """The exception and its message, or else the line of the event."""
    return str(event.values.get("error") or event.text)


def _excerpt(found: list[Event], way: str = "") -> str:
    """The line that names the error, without its time, in quotation marks, and where it was
    raised."""
    of_way = [event for event in found if way and event.values.get("way") == way]
    named = [event for event in found if "error" in event.values or "Error: " in event.text]
    # A device error within a traceback is an event of its own, which has no frame.
    raised = [each for each in named if any(_error(each) in one.text for one in of_way)]
    event = next(iter([*raised, *of_way, *named, found[0]]))
    text = _STAMP.sub("", _error(event)).rstrip(": ")
    frame = event.values.get("frame")
    where = f" in {frame}" if frame and "error" in event.values else ""
    return f'"{text if len(text) <= 200 else f"{text[:200]}…"}"{where}.'


CHECK = Check(
    cause="server-dead",
    title="The server has ended or hangs",
    find=find,
    meaning="A process of the server has ended, or the watchdog ended it because a step did not "
    "return. Clients' connections are refused, or their requests wait forever, while /health may "
    "still answer 200.",
    rule="The log shows that a process ended (a watchdog timeout, an exception in the scheduler, "
    "a device error, a signal such as SIGQUIT or SIGKILL, a segmentation fault, an exit code "
    "other than 0, the kernel's out-of-memory killer), and no batch after it. Or the server "
    "hangs: health checks fail and no batch follows; or the last batch leaves requests that wait "
    "(or at least 4 that run), and the log goes on for more than one minute (two minutes) without "
    "a batch.",
    counter_evidence="If batches follow more than 5 s after the message, the server survived it. "
    "If a message about memory or about the KV pool's accounting tells why the server ended, the "
    "cause is oom-prefill, oom-decode, oom-init or pool-leak. Tracebacks of single requests do not "
    "count, nor does an end that was asked for (SIGTERM, Ctrl-C).",
    advice="Restart the server under a supervisor that watches /health; then what the way of "
    "its end asks for: more main memory, another --attention-backend, a stack trace of "
    "the hanging process, or a higher --watchdog-timeout.",
    guide="The guides do not cover it. It is often reported: sglang#3752, #7553, #6624 (/health "
    "answers 200 for an hour after the scheduler ended), #18582.",
    picture="""\
batches   |||||||||||||||||||||||  X
requests  |  |   |  |  |   |  |  |    |   |   (no answers)""",
)
