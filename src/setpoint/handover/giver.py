"""The prefill side of an engine's transfers: takes bootstrap rooms from the engine's loop, and
connections from decode servers."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import replace

from setpoint.core.handover import HandoverState, PromptSent, PromptWanted
from setpoint.core.request import Ids
from setpoint.handover.channel import GREETING_S, OTHER_WEIGHTS, Channel
from setpoint.handover.frames import HandoverError
from setpoint.handover.giving import Terms, greet
from setpoint.handover.identity import Identity
from setpoint.handover.mover_thread import MoverThread
from setpoint.handover.offers import Offer, Offers

logger = logging.getLogger(__name__)

MAX_STRANGERS = 128
"""Most connections that have not proved yet that they may connect; for one more the oldest ends."""
MAX_CHANNELS = 512
"""Most connections that have. Each has segments of its own."""
LOG_INTERVAL_S = 1.0
"""Refused connections are counted, and logged at most so often."""
REPEAT_S = 600.0
"""How long the same refusal of the same server is not logged again."""
CROWDED = "it has proved nothing, and others want to connect"
BACKLOG = 128
EXPIRE_S = 1.0


def listening(host: str) -> socket.socket:
    """A socket for decode servers, at a port that the system chooses."""
    return socket.create_server((host, 0), backlog=BACKLOG)


class RoomGiver:
    """Implements ``core.handover.Giver``."""

    def __init__(
        self,
        mover: MoverThread,
        listener: socket.socket,
        terms: Terms,
        post: Callable[[PromptWanted | PromptSent], object],
    ) -> None:
        """listener: owned by this object from now on. post: may be called from any thread."""
        self._mover = mover
        self._listener = listener
        self.terms = terms
        self._offers = Offers(post, mover.loop.time)
        self._channels: set[Channel] = set()
        self._strangers: dict[Channel, None] = {}
        """The channels that have not proved yet that they may connect, in order of arrival."""
        self._num_refused = 0
        self._logged_at = float("-inf")
        self._logged = ("", "")
        """Whom the last warning of a refusal was about, and why."""
        listener.setblocking(False)
        mover.call(lambda: mover.spawn(self._accept()))
        mover.call(lambda: mover.spawn(self._expire()))

    def renew(self, identity: Identity) -> None:
        """The engine's keys and values are of another kind from now on."""
        self._mover.call(self._renew, identity)

    def _renew(self, identity: Identity) -> None:
        self.terms = replace(self.terms, identity=identity)
        for channel in self._channels:
            channel.end(OTHER_WEIGHTS)

    def offer(self, seq_id: int, room: int, digest: bytes) -> None:
        self._mover.call(self._offers.add, Offer(seq_id, room, digest))

    def supply(self, seq_id: int, rows: Ids, handed: HandoverState) -> None:
        self._mover.call(self._offers.supply, seq_id, rows, handed)

    def withdraw(self, seq_id: int, reason: str) -> None:
        self._mover.call(self._offers.withdraw, seq_id, reason)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_S)
            self._offers.expire()

    async def _accept(self) -> None:
        while True:
            try:
                sock, address = await self._mover.loop.sock_accept(self._listener)
            except OSError as error:  # for example no descriptor left
                self._refused("a connection", str(error))
                await asyncio.sleep(LOG_INTERVAL_S)
                continue
            if len(self._channels) - len(self._strangers) >= MAX_CHANNELS:
                sock.close()
                self._refused(address[0], f"{MAX_CHANNELS} connections are open")
                continue
            if len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.end(CROWDED)
            channel = Channel(sock)
            self._channels.add(channel)
            self._strangers[channel] = None
            self._mover.spawn(self._converse(channel, address[0]))
            await asyncio.sleep(0)  # those who are here go on, however many come

    async def _converse(self, channel: Channel, who: str) -> None:
        try:
            try:
                async with asyncio.timeout(GREETING_S):
                    giving = await greet(channel, self.terms)
            except (HandoverError, TimeoutError) as error:
                self._refused(who, str(error) or "no greeting in time")
                return
            finally:
                self._strangers.pop(channel, None)
            how = "shared memory" if giving.is_shared else "TCP"
            logger.info("A decode server has connected from %s; pages go through %s.", who, how)
            reason = await giving.run(self._offers)
            logger.info("The connection of the decode server at %s has ended: %s.", who, reason)
        finally:
            self._channels.discard(channel)
            channel.close()

    def _refused(self, who: str, reason: str) -> None:
        self._num_refused += 1
        now = self._mover.loop.time()
        pause_s = REPEAT_S if (who, reason) == self._logged else LOG_INTERVAL_S
        if now - self._logged_at < pause_s:
            return
        logger.warning(
            "Refused a connection to the transfer port from %s: %s (%d so far).",
            who,
            reason,
            self._num_refused,
        )
        self._logged_at, self._logged = now, (who, reason)
