"""Publishes the KV cache events of the engines over ZeroMQ (--kv-events-config), in the format of
SGLang 0.5.23 (``core.kv_events``).

Each rank has a PUB socket, and a ROUTER socket from which subscribers can fetch batches that they
have missed. The ports are the configured ones plus the rank. A PUB socket never waits: if a
subscriber cannot keep up, batches for it are dropped, and it sees a gap in the sequence numbers.
This module knows nothing of engines or caches.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from setpoint.core.errors import ConfigError
from setpoint.core.kv_events import AllBlocksCleared, PublisherConfig

logger = logging.getLogger(__name__)

MAX_REPLAY_BYTES = 64 << 20
"""Maximum bytes of the batches that are kept for replay, for each rank."""
REPLAY_WAIT_MS = 2000
"""How long a subscriber may take to read one batch of a replay."""
LINGER_MS = 500
"""How long the last batches may take to reach the network at the end."""
END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number of the message after the last batch of a replay."""

_encoder = msgspec.msgpack.Encoder()
_CLEARED = _encoder.encode([AllBlocksCleared()])


@dataclass(slots=True)
class _Rank:
    rank: int
    publisher: zmq.Socket[bytes]
    replay: zmq.Socket[bytes] | None
    """The ROUTER socket. Only the thread for replays uses it once that thread runs."""
    next_number: int = 0
    kept: deque[tuple[int, bytes]] = field(default_factory=deque)
    """Number -> batch, for the latest batches; guarded by the lock."""
    num_kept_bytes: int = 0


class KVPublisher:
    """Publishes KV cache events (see the module's docstring). A context manager that binds its
    sockets when it is created. Not safe for several threads."""

    def __init__(self, config: PublisherConfig, num_ranks: int) -> None:
        """Bind the sockets. Raises ConfigError for an address that cannot be used, for example
        because its port is in use."""
        self._config = config
        self._topic = config.topic.encode()
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self.num_published = 0
        """Number of batches so far."""
        self.num_overruns = 0
        """How often a subscriber fell so far behind that it missed batches. ZeroMQ does not report
        how many batches it missed; only the subscriber can tell, from the sequence numbers."""
        self._ranks: list[_Rank] = []
        try:
            for rank in range(num_ranks):
                self._ranks.append(self._open(rank))
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._answering: threading.Thread | None = None
        if config.replay_endpoint is not None:
            self._answering = threading.Thread(target=self._answer, name="kv-replay", daemon=True)
            self._answering.start()

    def __enter__(self) -> KVPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.publisher.close(linger=LINGER_MS)
        # This ends the thread's wait, and returns when the thread has closed its sockets.
        self._context.term()
        if self._answering is not None:
            self._answering.join()

    def take(self, rank: int, events: bytes) -> None:
        """Publish a msgpack array of events of this rank's engine."""
        one = self._ranks[rank]
        payload = _encoder.encode((time.time(), msgspec.Raw(events), rank))
        number, one.next_number = one.next_number, one.next_number + 1
        if one.replay is not None:
            self._keep(one, number, payload)
        self.num_published += 1
        self._send(one.publisher, (self._topic, number.to_bytes(8, "big"), payload))

    def cleared(self, rank: int) -> None:
        """Publish that this rank's engine has ended, and its cache with it."""
        self.take(rank, _CLEARED)

    def _open(self, rank: int) -> _Rank:
        config = self._config
        publisher = self._context.socket(zmq.PUB)
        publisher.set_hwm(config.hwm)
        publisher.setsockopt(zmq.XPUB_NODROP, 1)
        _attach(publisher, "endpoint", at_rank(config.endpoint, rank), binds=config.binds)
        replay = None
        if config.replay_endpoint is not None:
            replay = self._context.socket(zmq.ROUTER)
            replay.setsockopt(
                zmq.ROUTER_MANDATORY, 1
            )  # otherwise it silently drops messages for which a peer has no room
            replay.setsockopt(zmq.SNDTIMEO, REPLAY_WAIT_MS)
            replay.setsockopt(zmq.LINGER, LINGER_MS)
            _attach(replay, "replay_endpoint", at_rank(config.replay_endpoint, rank), binds=True)
        return _Rank(rank, publisher, replay)

    def _keep(self, one: _Rank, number: int, payload: bytes) -> None:
        with self._lock:
            one.kept.append((number, payload))
            one.num_kept_bytes += len(payload)
            while (
                len(one.kept) > self._config.buffer_steps or one.num_kept_bytes > MAX_REPLAY_BYTES
            ):
                one.num_kept_bytes -= len(one.kept.popleft()[1])

    def _send(self, socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            # A subscriber has no room, and gets nothing until it has room again. The socket sends
            # the batch to the others only if it may drop messages.
            self.num_overruns += 1
            socket.setsockopt(zmq.XPUB_NODROP, 0)
            socket.send_multipart(frames, zmq.NOBLOCK)
            socket.setsockopt(zmq.XPUB_NODROP, 1)

    # ------------------------------------------------------------------ the thread that answers

    def _answer(self) -> None:
        poller = zmq.Poller()
        by_socket = {}
        for one in self._ranks:
            assert one.replay is not None
            by_socket[one.replay] = one
            poller.register(one.replay, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll():
                    self._replay(by_socket[socket])
        except zmq.ContextTerminated:
            pass
        finally:
            for socket in by_socket:
                socket.close()

    def _replay(self, one: _Rank) -> None:
        """Send a subscriber the stored batches, beginning with the number that it asks for."""
        socket = one.replay
        assert socket is not None
        frames = socket.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning(
                "A replay request for KV events is ignored, because it is not a sequence number."
            )
            return
        peer, first = frames[0], int.from_bytes(frames[2], "big")
        with self._lock:
            wanted = [(number, payload) for number, payload in one.kept if number >= first]
        try:
            for number, payload in wanted:
                head = (peer, b"", self._topic, number.to_bytes(8, "big"))
                socket.send_multipart((*head, payload))
            socket.send_multipart((peer, b"", b"", END, b""))
        except zmq.ContextTerminated:
            raise
        except zmq.ZMQError as error:
            logger.warning("A replay of KV events was broken off: %s.", error)


def at_rank(endpoint: str, rank: int) -> str:
    """The endpoint with the rank added to its port. An address without a port can serve only one
    rank."""
    if rank == 0:
        return endpoint
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}"


def _attach(socket: zmq.Socket[bytes], key: str, endpoint: str, *, binds: bool) -> None:
    try:
        if binds:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        verb, hint = ("bind to", " Name another port.") if binds else ("connect to", "")
        is_taken = error.errno == zmq.EADDRINUSE
        raise ConfigError(
            f"--kv-events-config: {key} cannot {verb} {endpoint}:"
            f" {zmq.strerror(error.errno or 0).lower()}.{hint if is_taken else ''}"
        ) from None
