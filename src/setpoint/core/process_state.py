"""Tells a process that stands still from one that works or has ended."""

from __future__ import annotations


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP) has stopped a process. False for a process that has ended, whose
    end its parent hears of."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b") ")[2][:1]
    except OSError:
        return False
    return state in (b"T", b"t")
