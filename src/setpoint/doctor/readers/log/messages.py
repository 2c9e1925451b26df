"""Reads the lines that are neither batches nor start-up facts: what happened, and where.

Wordings from threads of sgl-project/sglang: retractions (#4184, #14972, #26248), torch's
out-of-memory text (#4547, #5285), "Not enough memory" (#322, #4330), the pool's own (#4602, #1739),
leaks (#105, #6888, #11970, #16067, #20010), watchdog (#7783, #18582). ``deaths`` recognizes the end
of a process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from setpoint.doctor.observations import EventKind
from setpoint.doctor.readers.log import deaths
from setpoint.doctor.readers.log.wrapping import STAMP, seconds_of, unwrap

KEYWORDS = (
    b"server_args=",
    b"ServerArgs(",
    b"max_total_num_token",
    b"oad weight ",
    b"KV Cache is allocated",
    b"Memory pool end",
    b"Capture ",
    b"Model: ",
    b"Decision: ",
    b"fired up and ready",
    b" models are served, of which",
    b"reduced from",
    b"reset to",
    b"_reqs: ",
    b"ut of memory",
    b"ot enough memory",
    b"allocate memory",
    b"failed to allocate",
    b"OUT_OF_RESOURCES",
    b"ALLOC_FAILED",
    b"OUT_OF_MEMORY",
    b"rrorOutOfMemory",
    b"rrorMemoryAllocation",
    b"apture cuda graph failed",
    b"apture CUDA graph failed",
    b"bad_alloc",
    b"no room for one page",
    b"profiled value -",
    b"negative dimension",
    b"hit an exception",
    b"Exception in ",
    b"Traceback (most recent",
    b'" 50',
    b"atchdog ",
    b"eak detected",
    b"eak Detected",
    b"accounting is broken",
    b"queue is full",
    b"timeout reached",
    b"rammar preprocessing timed out",
    b"rammar of the request was not ready",
    b"was answered 50",
    b"max_new_tokens lowered",
    b"exceeds the maximum allowed length",
    b"ache flushed",
    b"Fallback: ",
    b"Cache tier ",
    b"CPU contention: ",
    b"Doctor: ",
    b"hutting down",
    b"engine ends",
    *deaths.KEYWORDS,
)
"""The doctor reads nothing from a line with none of these."""

_PREFIX = re.compile(
    rb"(?:\[(?:[\d:. ,-]*\d)?((?: ?[A-Z][A-Za-z_]*\d+)*|gpu(?:_id)?=\d+)"
    rb"(?:(?<=TP\d) [\w./:@+-]{1,200}| [\w./-]+\.py:\d+)?\]:? ?)?"
    rb"(?:[\d:. ,T-]{8,}(?: - )?)?(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)(?: - |: +))?"
)
"""What precedes a message: time, rank, the model of a server with several, and level."""
_CLIENT_TEXT = re.compile(
    rb"(?:Receive|Finish)[\w /]{0,40}: obj=|\{\"event\": ?\"request\.|self\.cur_batch"
)
_MIB = {b"B": 1 / (1 << 20), b"bytes": 1 / (1 << 20), b"K": 1 / 1024, b"M": 1.0, b"G": 1024.0}
_SIZE = rb"([\d.]+) ?(bytes|[KMG]iB|B)\b"
_TRIED = re.compile(rb"[Tt]ried to allocate " + _SIZE)
_FREE = re.compile(_SIZE + rb"(?: is)? free|[Ff]ree mem(?:ory)? ?[:=] ?([\d.]+) ?([KMG]i?B)\b")
_TOTAL = re.compile(rb"total capac?i?ty of " + _SIZE + rb"|; " + _SIZE + rb" total capac")
_RETRACTED = re.compile(rb"#retracted_reqs: (\d+)")
_RATIO = re.compile(rb"#new_token_ratio: ([\d.]+) -> ([\d.]+)")
_STATUS = re.compile(rb'" (50\d)\b')
_ACCESS = re.compile(rb'(?:\S+ - )?"[A-Z?]+ (\S*) HTTP/[\d.?]+(?=" \d{3})')
"""The beginning of a line about an HTTP request, whose path and reason may quote a client."""


@dataclass(slots=True)
class Message:
    """A line without its wrapping and prefix."""

    text: bytes
    origin: str
    rank: str
    at: float | None
    has_prefix: bool
    """Whether it begins a record of the log, so that it is not a line of a traceback."""


@dataclass(slots=True)
class Happened:
    kind: EventKind
    values: dict[str, float | str] = field(default_factory=dict)


def message_of(line: bytes) -> Message:
    if line.startswith(b"  "):  # of a traceback, as most lines that have no prefix
        return Message(line, "", "", None, has_prefix=False)
    wrapped = unwrap(line.rsplit(b"\r", 1)[-1])
    prefix = _PREFIX.match(wrapped.text)
    assert prefix is not None  # it may be empty
    stamp = STAMP.search(wrapped.text, 0, prefix.end())
    at = seconds_of(stamp.group()) if stamp else wrapped.stamp
    rank = (prefix[1] or b"").decode(errors="replace").strip()
    text = wrapped.text[prefix.end() :]
    if access := _ACCESS.match(text):
        status = text[access.end() : access.end() + len('" 200')]
        text = b'"GET ' + access[1] + status if deaths.is_health_path(access[1]) else status
    return Message(text, wrapped.origin, rank, at, has_prefix=bool(stamp) or bool(rank))


def quotes_a_client(text: bytes) -> bool:
    """Whether the line may quote a client, as the lines of request logs do."""
    return _CLIENT_TEXT.search(text, 0, 200) is not None


def event_in(text: bytes) -> Happened | None:
    """What a line tells. Where an allocation failed is for the caller to find out."""
    if _NO_GRAMMAR.search(text, 0, 400):  # before its grammar, which holds a client's words
        return Happened("grammar-timeout")
    if b"_reqs: " in text:
        return _retraction(text)
    if deaths.has_no_answer(text):
        return Happened("unhealthy")
    if _LEAK.search(text):
        return Happened("leak")
    if deaths.was_killed(text):  # the kernel calls the machine's lack of memory the same
        return Happened("killed", {"way": "killed"})
    if _SLOTS.search(text):
        return Happened("traceback", {"way": "slots"})
    if _FALLBACK.match(text):
        return Happened("fallback")
    if _NO_POOL.search(text) or (_NO_MEMORY.search(text) and not _HINT.search(text)):
        failed = _oom(text)
        free = failed.values.get("free_mib", 0.0)
        if b"OUT_OF_RESOURCES" not in text or float(free) < MUCH_FREE_MIB:
            return failed
        return Happened("killed", {"way": "device"})
    if _WATCHDOG.search(text):
        return Happened("watchdog")
    if _EXCEPTION.search(text):
        return Happened("traceback")
    way = deaths.way_of_death(text)
    if way is not None:
        return Happened("traceback" if way == "device" else "killed", {"way": way})
    if _TIER_OFF.match(text):
        return Happened("tier-off")
    if contended := _CONTENDED.match(text):
        cpu_s, busy_s = map(_float, contended.groups())
        return Happened("cpu-contention", {"cpu_s": cpu_s, "busy_s": busy_s})
    if diagnosed := _DIAGNOSED.match(text):
        return _diagnosed(diagnosed)
    kind = next((kind for words, kind in _WORDS.items() if words in text), None)
    if kind is not None:
        return Happened(kind)
    status = _STATUS.search(text)
    return Happened("access-error", {"status": status[1].decode()}) if status else None


_NO_GRAMMAR = re.compile(
    rb"^Grammar preprocessing timed out|rammar of the request was not ready in time"
)
_LEAK = re.compile(rb"(?i:leak detected)|accounting is broken")
_NO_MEMORY = re.compile(
    rb"[Oo]ut of memory|OutOfMemoryError|[Nn]ot enough memory|allocate memory|bad_alloc"
    rb"|no room for one page|HSA_STATUS_ERROR_OUT_OF_RESOURCES|HSA_STATUS_ERROR_OUT_OF_MEMORY"
    rb"|(?:CUBLAS|CUDNN|HIPBLAS|ROCBLAS|CUSOLVER)_STATUS_ALLOC_FAILED|CUDA_ERROR_OUT_OF_MEMORY"
    rb"|(?:hip|cuda)Error(?:OutOfMemory|MemoryAllocation)"
)
_SLOTS = re.compile(rb"alloc_req_slots runs out of memory")
"""The table of running requests is full, which is no memory of the device."""
MUCH_FREE_MIB = 2048.0
"""With so much free, a runtime that lacks resources lacks others than memory: queues, scratch."""
_FALLBACK = re.compile(rb"Fallback: (?!.*(?:Prefill|Decode) out of memory)")
"""A step that was lost for lack of memory is a failed allocation; graphs that were left out are
not."""
_NO_POOL = re.compile(rb"profiled value -\d|tensor with negative dimension")
"""The memory profile leaves a negative size for the pool."""
_HINT = re.compile(
    rb"\b(?i:if|may|might|could|avoids?|prevents?|in case|risk|when)\b[^.:]{0,60}"
    rb"out of memory"
)
"""Advice and not an error, such as what to do if the server runs out of memory."""
_WATCHDOG = re.compile(rb"atchdog (?:timeout|caught)|watchdog thread terminated")
_EXCEPTION = re.compile(
    rb"hit an exception|Traceback \(most recent"
    rb"|^Exception in (?:run_tp_server|Controller\w*|Model(?:Tp|Rpc)Server|\w*[Ss]cheduler)"
)
_TIER_OFF = re.compile(rb"Cache tier \w+ is off: ")
_CONTENDED = re.compile(
    rb"CPU contention: the engine had a CPU for (\d{1,6}\.\d) s of the last (\d{1,6}\.\d) s "
)
_DIAGNOSED = re.compile(
    rb"Doctor: ([a-z-]{1,40}) (?:(no longer limits)|limits) the server\."
    rb"(?: Other programs take the CPU: the engine had work for (\d{1,6}\.\d) s,"
    rb" and a CPU for (\d{1,6}\.\d) s)?"
)
_WORDS: dict[bytes, EventKind] = {
    b"engine ends": "killed",
    b"queue is full": "queue-full",
    b"timeout reached": "timeout",
    b"was answered 50": "aborted",
    b"max_new_tokens lowered": "clipped",
    b"exceeds the maximum allowed length": "aborted",
    b"ache flushed": "flushed",
    b"Fallback: ": "fallback",
    b"reduced from": "reduced",
    b"fired up and ready": "ready",
}
"""Words -> the event. The first that a line contains counts."""


def _retraction(text: bytes) -> Happened | None:
    count = _RETRACTED.search(text)
    if count is None or len(count[1]) > 9:  # no server runs a thousand million requests
        return None
    values: dict[str, float | str] = {"num": float(count[1])}
    ratio = _RATIO.search(text)
    if ratio:
        values |= {"ratio_before": _float(ratio[1]), "ratio_after": _float(ratio[2])}
    if b"Testing retraction" in text:
        values["testing"] = 1.0
    return Happened("retraction", values)


def _diagnosed(found: re.Match[bytes]) -> Happened:
    limit, is_gone, busy_s, cpu_s = found.groups()
    values: dict[str, float | str] = {"limit": "" if is_gone else limit.decode()}
    if busy_s and not is_gone:
        values |= {"busy_s": _float(busy_s), "cpu_s": _float(cpu_s)}
    return Happened("diagnosed", values)


def _oom(text: bytes) -> Happened:
    values: dict[str, float | str] = {}
    for name, pattern in (("tried_mib", _TRIED), ("free_mib", _FREE), ("total_mib", _TOTAL)):
        found = pattern.search(text)
        if found:
            number, unit = [group for group in found.groups() if group is not None]
            values[name] = _float(number) * _MIB.get(unit, _MIB.get(unit[:1], 1.0))
    return Happened("oom", values)


def _float(digits: bytes) -> float:
    try:
        return float(digits)
    except ValueError:
        return 0.0
