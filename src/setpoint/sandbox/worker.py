"""The child's side of ``child.LimitedChild``. Imports nothing but Python's own modules, so that a
child starts in hundredths of a second."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Callable

from setpoint.core.framing import Unpacker, framed
from setpoint.sandbox.process_limits import OUT_OF_MEMORY, ProcessLimits, limit_memory, limited_time

_CHUNK = 1 << 20


def serve(answer: Callable[[bytes], bytes], limits: ProcessLimits) -> None:
    """Answer one job after the other, which arrive at standard input, a socket, until the other end
    is gone or a limit is reached."""
    limit_memory(resource.RLIMIT_AS, limits.memory_bytes)
    link, unpacker = socket.socket(fileno=sys.stdin.fileno()), Unpacker()
    while data := link.recv(_CHUNK):
        try:
            for job in unpacker.feed(data):
                with limited_time(limits.cpu_s):
                    reply = answer(job)
                link.sendall(framed(reply))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BrokenPipeError:
            return
