"""The decode side of an engine's transfers: finds the prefill engine of each bootstrap room, and
keeps connections to it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import replace

from setpoint.core.bootstrap import Bootstrap
from setpoint.core.handover import PromptReceived
from setpoint.core.request import Ids
from setpoint.handover.bootstrap_client import prefill_server, transfer_address
from setpoint.handover.channel import GREETING_S, OTHER_WEIGHTS, Channel
from setpoint.handover.frames import HandoverError, in_words
from setpoint.handover.identity import Identity
from setpoint.handover.mover_thread import MoverThread
from setpoint.handover.taking import PromptTransfer, Taking, Wants, arrived, introduce

logger = logging.getLogger(__name__)

CONNECT_S = 0.9
"""How long a prefill engine may take to accept a connection."""
MAX_CONNECTIONS = 2
"""Connections to one prefill engine, so that a short prompt need not wait for a long one."""
CANCELLED = "cancelled"

Server = tuple[str, int]
"""Host and port of a bootstrap server."""
Engine = tuple[str, int, int]
"""The same, and the data-parallel rank."""


class RoomTaker:
    """Implements ``core.handover.Taker``."""

    def __init__(
        self,
        mover: MoverThread,
        wants: Wants,
        post: Callable[[PromptReceived], object],
        key_of: Callable[[str, int], bytes | None],
        *,
        tp_rank: int = 0,
    ) -> None:
        """post: may be called from any thread. key_of: the key of transfers from the prefill server
        with this bootstrap server, None if there is none. tp_rank: this rank's number in its
        engine; it asks for the same one."""
        self._mover = mover
        self.wants = wants
        self._post = post
        self._key_of = key_of
        self._tp_rank = tp_rank
        self._servers: dict[Server, int] = {}
        """Bootstrap server -> number of its engines, as long as there is a connection."""
        self._connections: dict[Engine, list[Taking]] = {}
        """No empty lists are kept, nor ended tasks below: clients name any number of engines."""
        self._opening: dict[Engine, asyncio.Task[None]] = {}
        self._looking: dict[int, PromptTransfer] = {}
        """Sequence -> its transfer, until it has a connection."""

    def fetch(
        self, seq_id: int, bootstrap: Bootstrap, digest: bytes, skipped_rows: int, rows: Ids
    ) -> None:
        self._mover.call(self._fetch, seq_id, bootstrap, digest, skipped_rows, rows)

    def cancel(self, seq_id: int) -> None:
        self._mover.call(self._cancel, seq_id)

    def renew(self, identity: Identity) -> None:
        """The engine's keys and values are of another kind from now on."""
        self._mover.call(self._renew, identity)

    # ------------------------------------------------------------------ the mover's thread

    def _renew(self, identity: Identity) -> None:
        self.wants = replace(self.wants, identity=identity)
        for takings in self._connections.values():
            for taking in takings:
                taking.channel.end(OTHER_WEIGHTS)

    def _fetch(
        self, seq_id: int, bootstrap: Bootstrap, digest: bytes, skipped_rows: int, rows: Ids
    ) -> None:
        now = self._mover.loop.time()
        transfer = PromptTransfer(seq_id, bootstrap.room, digest, skipped_rows, rows, now)
        self._looking[seq_id] = transfer
        self._mover.spawn(self._begin(transfer, bootstrap))

    def _cancel(self, seq_id: int) -> None:
        looking = self._looking.pop(seq_id, None)
        if looking is not None:
            looking.is_over = True
        else:
            takings = [each for found in self._connections.values() for each in found]
            if not any(each.cancel(seq_id) for each in takings):
                return  # it has ended, and the loop has been told
        self._post(PromptReceived(seq_id, failure=CANCELLED))

    async def _begin(self, transfer: PromptTransfer, bootstrap: Bootstrap) -> None:
        try:
            taking = await self._connection(bootstrap)
        except Exception as error:
            if not transfer.is_over:
                why = str(error) or type(error).__name__
                self._finish(transfer, arrived(transfer, failure=why))
            raise
        if not transfer.is_over:
            del self._looking[transfer.seq_id]
            taking.fetch(transfer)

    def _finish(self, transfer: PromptTransfer, message: PromptReceived) -> None:
        self._looking.pop(transfer.seq_id, None)
        transfer.is_over = True
        self._post(message)

    async def _connection(self, bootstrap: Bootstrap) -> Taking:
        """The connection to a bootstrap room's engine that has the least to do. Raises
        HandoverError."""
        server = (bootstrap.host, bootstrap.port)
        rank = bootstrap.prefill_rank
        if rank is None:
            if server not in self._servers:
                self._key(*server)  # without one nobody is asked
                found = await prefill_server(*server)
                self._servers[server] = found.dp_size
            rank = bootstrap.room % self._servers[server]
        engine = (*server, rank)
        if self._lacks_connection(engine):
            if engine not in self._opening:
                self._opening[engine] = self._mover.spawn(self._open(engine))
            await self._opening[engine]  # who comes at the same time has the same outcome
        best = self._least_busy(engine)
        if best is None:
            raise HandoverError("the connection to the prefill server has ended")
        return best

    def _key(self, host: str, port: int) -> bytes:
        """Raises HandoverError if there is none."""
        key = self._key_of(host, port)
        if key is None:
            raise HandoverError(
                f"this server and the prefill server at {host}:{port} have no key in common:"
                " either the prefill server has ended, or both need the same --api-key"
            )
        return key

    def _lacks_connection(self, engine: Engine) -> bool:
        best = self._least_busy(engine)
        return best is None or (
            best.num_open > 0 and len(self._connections[engine]) < MAX_CONNECTIONS
        )

    def _least_busy(self, engine: Engine) -> Taking | None:
        return min(self._connections.get(engine, ()), key=lambda each: each.num_open, default=None)

    async def _open(self, engine: Engine) -> None:
        try:
            await self._connect(engine)
        finally:
            del self._opening[engine]
            if engine not in self._connections:
                self._servers.pop(engine[:2], None)

    async def _connect(self, engine: Engine) -> None:
        host, port, rank = engine
        key = self._key(host, port)
        address, number = await transfer_address(host, port, rank, self._tp_rank)
        loop = self._mover.loop
        try:
            async with asyncio.timeout(CONNECT_S):
                sock = await _connected(loop, address, number)
        except (OSError, ValueError) as error:  # ValueError: no name can be like that
            why = in_words(error, f"no answer in {CONNECT_S} s")
            raise HandoverError(
                f"the prefill engine at {address}:{number} cannot be reached: {why}"
            ) from None
        channel = Channel(sock)
        try:
            async with asyncio.timeout(GREETING_S):
                taking = await introduce(channel, self.wants, key)
        except (HandoverError, TimeoutError) as error:
            channel.close()
            why = str(error) or "no greeting in time"
            raise HandoverError(f"the prefill engine at {address}:{number}: {why}") from None
        except BaseException:
            channel.close()
            raise
        self._connections.setdefault(engine, []).append(taking)
        how = f"TCP ({taking.why_tcp})" if taking.why_tcp else "shared memory"
        logger.info("Connected to the prefill engine at %s:%d; %s.", address, number, how)
        self._mover.spawn(self._converse(engine, taking, f"{address}:{number}"))

    async def _converse(self, engine: Engine, taking: Taking, where: str) -> None:
        try:
            why = await taking.run(self._finish)
        finally:
            self._connections[engine].remove(taking)
            if not self._connections[engine]:
                del self._connections[engine]
            self._servers.pop(engine[:2], None)
            taking.channel.close()
        logger.warning("The connection to the prefill engine at %s has ended: %s.", where, why)


async def _connected(loop: asyncio.AbstractEventLoop, host: str, port: int) -> socket.socket:
    try:  # an address need not wait for the threads that look names up
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    try:
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock
