"""Recognizes lines which say that a process of the server has ended, or no longer answers.

Wordings: SGLang's own (its watchdogs of processes, its launcher, its health check; sglang#10856,
#15235, #18582, #20287), Python's ("Fatal Python error"), the shell's ("… Segmentation fault (core
dumped)"), the kernel's and the container runtime's ("Killed process", "exited with code 137"),
systemd's, Slurm's and Ray's, the drivers' (Xid, "Memory access fault by GPU").
"""

from __future__ import annotations

import re

KEYWORDS = (
    b"ealth check failed",
    b"ness probe failed",
    b"egmentation fault",
    b"segfault",
    b"core dumped",
    b"Fatal Python error",
    b"erminate called",
    b"Floating point exception",
    b"llegal instruction",
    b"llegal memory access",
    b"xit code",
    b"xitcode",
    b"xited with",
    b"erminated with",
    b"unexpectedly",
    b"is dead",
    b" died",
    b"Killed",
    b"killed",
    b"oom-kill",
    b"oom_kill",
    b"SYSTEM_ERROR",
    b"CUDA error",
    b"CUDA driver error",
    b"HIP error",
    b"NCCL error",
    b"ncclSystemError",
    b"ncclRemoteError",
    b"ncclUnhandledCudaError",
    b"DistBackendError",
    b"launch failure",
    b"access fault by GPU",
    b"Xid",
    b"igquit",
    b"SIG",
)
"""A line with none of these reports no death."""

_CODES = (
    re.compile(rb"\bexit ?code(?:[ :=]+| is )(-?\d{1,3})\b"),
    re.compile(rb"\bexit(?:ed|s)? with (?:an? )?(?:exit )?(?:code|status)[ :=]*(-?\d{1,3})\b"),
    re.compile(rb"\bterminated with (-\d{1,2})\b"),
    re.compile(rb"\bcode=(?:exited|killed|dumped), status=(\d{1,3})\b"),
)
_ORDERLY = (b"0", b"-15", b"143", b"-2", b"130", b"15", b"2")
"""Exit codes of a process that was asked to end: by SIGTERM (15) or from the keyboard (SIGINT,
2)."""

_SIGNALS = {9: "killed", 11: "segmentation fault", 6: "abort", 7: "abort", 4: "abort", 8: "abort"}
_KILLED = re.compile(
    rb"Killed process \d|oom[-_]kill|OOM[- ]?[Kk]illed|OOMKilled|SIGKILL|killed by signal 9"
    rb"|^Killed\s*$|: +\d+ Killed\b|Worker exit type: SYSTEM_ERROR"
)
_SEGMENTATION = re.compile(rb"[Ss]egmentation fault|SIGSEGV|\bsegfault at\b")
_ABORT = re.compile(
    rb"Fatal Python error|core dumped|SIGABRT|SIGBUS|SIGILL|SIGFPE|[Tt]erminate called"
)
_DEVICE = re.compile(
    rb"CUDA error|CUDA driver error|HIP error|NCCL error|nccl(?:System|Remote|UnhandledCuda)Error"
    rb"|DistBackendError|unspecified launch failure|illegal memory access|access fault by GPU"
    rb"|\bXid \("
)
_CHILD = re.compile(
    rb"eceived sigquit|SIGQUIT received|[Cc]hild process (?:unexpectedly )?(?:failed|died)"
    rb"|[Ss]cheduler (?:process )?(?:is dead|died)|detokenizer (?:is dead|died)"
    rb"|rocess \S+ died unexpectedly|[Ww]orker \S{0,40} ?(?:is dead|died)"
)
_NO_ANSWER = re.compile(rb"ealth check failed|(?:Live|Readi|Start)ness probe failed")
_HEALTH = rb"/(?:health|health_generate|healthz|ready|readyz|livez|ping)"
_HEALTH_PATH = re.compile(_HEALTH)
_HEALTH_STATUS = re.compile(rb'"GET ' + _HEALTH + rb'(?: [^"]*)?" 50\d\b')


def was_killed(text: bytes) -> bool:
    """Whether the operating system killed a process, most likely for the machine's memory."""
    return _KILLED.search(text) is not None


def way_of_death(text: bytes) -> str | None:
    """How a process ended, as the line says: "killed" (by the system), "segmentation fault",
    "abort", "device" (a device error), "exit N", or "child" (only that one failed). None: the line
    reports no such end."""
    for pattern, way in _WAYS:
        if pattern.search(text):
            return way
    if b"returned non-zero exit status" in text:  # a tool that the server started
        return None
    for pattern in _CODES:
        code = pattern.search(text)
        if code is not None:
            return None if code[1] in _ORDERLY else _of_code(int(code[1]))
    return "child" if _CHILD.search(text) else None


_WAYS = (
    (_KILLED, "killed"),
    (_SEGMENTATION, "segmentation fault"),
    (_ABORT, "abort"),
    (_DEVICE, "device"),
)


def _of_code(code: int) -> str:
    """The end that an exit code means: -N (Python's) and 128 + N (the shell's) mean signal N."""
    signal = -code if code < 0 else code - 128 if code > 128 else code
    is_signal = code < 0 or code > 128 or code == 9
    return _SIGNALS.get(signal, f"exit {code}") if is_signal else f"exit {code}"


def is_health_path(path: bytes) -> bool:
    """Whether a path is that of a health check, and not one that a client made up."""
    return _HEALTH_PATH.fullmatch(path) is not None


def has_no_answer(text: bytes) -> bool:
    """Whether a health check failed: the server's own message, a probe's, or the status of the
    answer to one."""
    return _NO_ANSWER.search(text) is not None or _HEALTH_STATUS.search(text) is not None
