"""Accepts all waiting connections at once. uvloop accepts one in each turn of its loop, so the last
connection of a burst would wait until the requests of all others had been prepared."""

from __future__ import annotations

import asyncio
import logging
import socket
from asyncio import BaseProtocol, Task
from collections.abc import Callable
from functools import partial

from setpoint.frontend.http.pace import TurnLimiter, Urgency

logger = logging.getLogger(__name__)

BACKLOG = 4096
"""Most connections that wait for ``accept``; the system may allow fewer (net.core.somaxconn)."""
PER_TURN = 256
"""Most connections accepted in one turn of the loop, which takes some 7 ms."""
PEEKED_BYTES = 64
"""How many bytes of a request are read before its connection is opened; enough for the paths that
cannot wait."""
RETRY_S = 1.0
"""How long nothing is accepted after the system has refused a connection for want of resources."""


class Listener:
    """Takes connections off the kernel's queue and looks at how their requests begin: those that
    cannot wait are opened first. A connection in its hands has cost a tenth of an open one. To
    uvicorn it is an ``asyncio.Server``."""

    def __init__(
        self, sock: socket.socket, make_protocol: Callable[[], BaseProtocol], pace: TurnLimiter
    ) -> None:
        """sock: bound; its owner closes it. Made inside the running loop. Raises OSError if the
        address is already listened on."""
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self.sockets = [sock]
        self._make_protocol = make_protocol
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._opening: set[Task[None]] = set()
        self._held: set[socket.socket] = set()
        """Accepted, and not yet being opened."""
        self._resuming: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock, self._accept)

    def close(self) -> None:
        """Accept no more connections, and close those that were accepted but not opened."""
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self.sockets[0])
        for sock in self._held:
            sock.close()
        self._held.clear()

    async def wait_closed(self) -> None: ...

    def _accept(self) -> None:
        for _ in range(PER_TURN):
            try:
                sock, _address = self.sockets[0].accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue  # the client has left already
            except OSError as error:
                self._pause(error)
                return
            sock.setblocking(False)
            self._held.add(sock)
            rank = Urgency.CONNECTION if self._can_wait(sock) else Urgency.URGENT
            self._pace.call(partial(self._open, sock), rank)

    def _can_wait(self, sock: socket.socket) -> bool:
        """Whether its request can wait. What has sent nothing yet may be a probe."""
        try:
            head = sock.recv(PEEKED_BYTES, socket.MSG_PEEK)
        except OSError:
            return False
        method, _, rest = head.decode("latin-1").partition(" ")
        return self._pace.can_wait(method, rest.partition(" ")[0].partition("?")[0])

    def _pause(self, error: OSError) -> None:
        logger.error(
            "Cannot accept connections: %s. Trying again in %g s.", error.strerror, RETRY_S
        )
        sock = self.sockets[0]
        self._loop.remove_reader(sock)
        self._resuming = self._loop.call_later(RETRY_S, self._loop.add_reader, sock, self._accept)

    def _open(self, sock: socket.socket) -> None:
        if sock in self._held:
            self._held.remove(sock)
            task = self._loop.create_task(self._opened(sock))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _opened(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, sock)
        except OSError as error:
            logger.debug("A connection was lost before it was open: %s", error)
            sock.close()
