"""Where the ranks of several nodes meet (--dist-init-addr): node 0 listens, and each rank of the
other nodes joins, with a handshake. After it the connection is the rank's link to rank 0.

Messages are MessagePack with a length before it. Until both sides have proved that they know
--dist-secret and agree about what they serve, a message is short and has a time limit, and nothing
in it is acted upon. This module knows neither models nor engines.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection

import msgspec

from setpoint.core.errors import SetpointError
from setpoint.core.handshake import is_proof, key_for, new_bytes, proof
from setpoint.launch.deadline import RANK_LOST, leave

NAME = "setpoint ranks 2"
"""Names the protocol and its version. Must change when a message of the handshake does."""
USE, RANK, NODE_0 = "ranks", "rank", "node 0"
"""What the handshake is for, and the roles of its sides (``core.handshake``)."""
MAX_BYTES = 1 << 16
"""Longest message of a handshake."""
HANDSHAKE_S = 10.0
"""How long each message of a handshake may take."""
MAX_HANDSHAKES = 32
"""Number of handshakes at the same time; for one more the oldest ends."""
RETRY_S = 0.5
SAY_EVERY_S = 10.0
LOST_S = 20
"""How long a link may be silent, although it has something to deliver or is asked whether it
lives, until it counts as lost."""

logger = logging.getLogger(__name__)


class RendezvousFailed(SetpointError):
    """The ranks have not met; the message says which, where and why."""


class Challenge(msgspec.Struct, frozen=True, tag=True, array_like=True):
    name: str
    nonce: bytes


class Join(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank asks to join. facts: what all ranks must agree about, by name."""

    nonce: bytes
    proof: bytes
    rank: int
    node: int
    facts: dict[str, str]


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The rank has joined. seed: of the weights, where they are drawn."""

    proof: bytes
    seed: int


class JoinRefused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    reason: str


_encode = msgspec.msgpack.Encoder().encode
_decode_challenge = msgspec.msgpack.Decoder(Challenge).decode
_decode_join = msgspec.msgpack.Decoder(Join).decode
_decode_answer = msgspec.msgpack.Decoder(Welcome | JoinRefused).decode


class Rendezvous:
    """Node 0's side. It listens until it is closed, so that a rank that comes too late or twice is
    told so."""

    def __init__(
        self,
        address: tuple[str, int],
        nodes: Mapping[int, int],
        *,
        facts: Mapping[str, str],
        seed: int,
        secret: str | None,
    ) -> None:
        """nodes: rank -> its node, for each rank that has to join. Raises RendezvousFailed if the
        address cannot be listened on."""
        self._place = _written(address)
        self._nodes = nodes
        self._facts = facts
        self._seed = seed
        self._key = key_for(USE, secret or "")
        self._links: dict[int, Connection] = {}
        self._refusals: dict[str, str] = {}
        """Who was refused -> why, of those who could have been a rank."""
        self._changed = threading.Condition()
        self._handshakes: dict[socket.socket, None] = {}
        """Their sockets, in order of arrival. Guarded by ``_changed``."""
        self._is_closed = False
        self._socket = _listen(address)
        if secret is None and not self._socket.getsockname()[0].startswith(("127.", "::1")):
            logger.warning(
                "Every program that reaches %s can join as a rank; --dist-secret prevents it.",
                self._place,
            )
        threading.Thread(target=self._accept, daemon=True).start()

    def wait(self, timeout_s: float) -> list[Connection]:
        """The links of the ranks, in order, once all have joined. Raises RendezvousFailed with the
        missing ones after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._links) == len(self._nodes), timeout_s)
            missing = self.missing
            if not missing:
                return [self._links[rank] for rank in sorted(self._links)]
            refused = "; ".join(f"{who} was refused: {why}" for who, why in self._refusals.items())
        reason = (
            f"{missing} did not join at {self._place} within {timeout_s:g} s (--dist-timeout)."
            + (f" {refused}" if refused else "")
        )
        logger.error("%s", reason)  # a server that starts its engine again does not say why
        raise RendezvousFailed(reason)

    @property
    def missing(self) -> str:
        """The ranks that have not joined, in words; "" if there are none."""
        waited = [
            f"rank {rank} (node {node})"
            for rank, node in self._nodes.items()
            if rank not in self._links
        ]
        return _listed(waited)

    def close(self) -> None:
        """Stop listening, and close all links."""
        self._is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept() up
        self._socket.close()
        for link in self._links.values():
            if not link.closed:
                _end(link)

    def watch_links(self) -> None:
        """End this process as soon as a link is lost."""
        for rank, link in self._links.items():
            who = f"rank {rank} (node {self._nodes[rank]}, {peer(link)})"

            def lost(why: str, who: str = who) -> None:
                if not self._is_closed:
                    logger.error("The link to %s is lost: %s. The engine ends.", who, why)
                    leave(RANK_LOST)

            watch(link, lost)

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._socket.accept()
            except OSError:
                return  # it is closed
            same = sock.dup()
            with self._changed:
                if len(self._handshakes) >= MAX_HANDSHAKES:
                    oldest = next(iter(self._handshakes))
                    del self._handshakes[oldest]
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
                self._handshakes[same] = None
            threading.Thread(
                target=self._handshake, args=(sock, same, address[0]), daemon=True
            ).start()

    def _handshake(self, sock: socket.socket, same: socket.socket, host: str) -> None:
        """same: a second descriptor of the connection, by which others can end it."""
        # A limit for each message alone would let a client keep its place by a byte now and then.
        late = threading.Timer(HANDSHAKE_S, _end_socket, [same])
        late.daemon = True
        late.start()
        link = Connection(sock.detach())
        try:
            _limit(link, HANDSHAKE_S)
            nonce = new_bytes()
            link.send_bytes(_encode(Challenge(NAME, nonce)))
            join = _decode_join(link.recv_bytes(MAX_BYTES))
            reason = self._why_not(join, nonce, host)
            if reason:
                logger.warning("Refused a rank from %s: %s", host, reason)
                link.send_bytes(_encode(JoinRefused(reason)))
                link.close()
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            logger.warning(
                "Closed a connection from %s that is not a rank of Setpoint (%s).",
                host,
                type(error).__name__,
            )
            link.close()
        finally:
            late.cancel()
            with self._changed:
                self._handshakes.pop(same, None)
                same.close()
        if link.closed:
            return
        with self._changed:
            if join.rank in self._links:  # two of them at the same moment
                link.close()
                return
            own = proof(self._key, NODE_0, nonce, join.nonce)
            try:
                link.send_bytes(_encode(Welcome(own, self._seed)))
                _keep_alive(link)
            except OSError:
                link.close()
                return
            self._links[join.rank] = link
            self._changed.notify_all()
        logger.info("Rank %d (node %d) has joined from %s.", join.rank, join.node, host)

    def _why_not(self, join: Join, nonce: bytes, host: str) -> str:
        """Why a rank cannot join; "" if it can."""
        if not is_proof(join.proof, self._key, RANK, join.nonce, nonce):
            return "it has another --dist-secret than node 0"
        who = f"rank {join.rank} (node {join.node})"
        with self._changed:
            known = self._links.get(join.rank)
        if known is not None:
            return f"{who} has joined already, from {peer(known)}: was it started twice?"
        reason = _differences(join.facts, self._facts)
        if not reason and self._nodes.get(join.rank) != join.node:
            reason = f"there is no {who} here"
        if reason:
            with self._changed:
                self._refusals[f"{who}, from {host},"] = reason
        return reason


def join(
    address: tuple[str, int],
    *,
    rank: int,
    node: int,
    facts: Mapping[str, str],
    secret: str | None,
    timeout_s: float,
) -> tuple[Connection, int]:
    """A rank's side: join node 0 at the address. Returns the link and the seed of the weights.
    Raises RendezvousFailed with the reason if that fails, after ``timeout_s`` if nobody answers."""
    link, first = _challenged(address, timeout_s)
    try:
        challenge = _decode_challenge(first)
        if challenge.name != NAME:
            raise RendezvousFailed(
                f"{_written(address)} speaks {challenge.name!r}, and this node {NAME!r}."
            )
        nonce = new_bytes()
        key = key_for(USE, secret or "")
        own = proof(key, RANK, nonce, challenge.nonce)
        link.send_bytes(_encode(Join(nonce, own, rank, node, dict(facts))))
        answer = _decode_answer(link.recv_bytes(MAX_BYTES))
        if isinstance(answer, JoinRefused):
            raise RendezvousFailed(
                f"Node 0 ({_written(address)}) refuses rank {rank}: {answer.reason}"
            )
        if not is_proof(answer.proof, key, NODE_0, challenge.nonce, nonce):
            raise RendezvousFailed(f"{_written(address)} does not know --dist-secret.")
        _keep_alive(link)
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        link.close()
        raise RendezvousFailed(
            f"What listens at {_written(address)} is not node 0 of Setpoint, or has ended"
            f" ({type(error).__name__})."
        ) from None
    except RendezvousFailed:
        link.close()
        raise
    return link, answer.seed


def _challenged(address: tuple[str, int], timeout_s: float) -> tuple[Connection, bytes]:
    """A link to node 0, and its first message. Node 0 closes a connection at once if it has too
    many; then another one is made."""
    end = time.monotonic() + timeout_s
    while True:
        link = _connect(address, max(end - time.monotonic(), 0.0))
        _limit(link, HANDSHAKE_S)
        try:
            return link, link.recv_bytes(MAX_BYTES)
        except (OSError, EOFError) as error:
            link.close()
            is_busy = isinstance(error, EOFError | ConnectionResetError)
            if not is_busy or time.monotonic() + RETRY_S > end:
                raise RendezvousFailed(
                    f"What listens at {_written(address)} is not node 0 of Setpoint, or has ended"
                    f" ({type(error).__name__})."
                ) from None
        time.sleep(RETRY_S)


def _end_socket(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def watch(link: Connection, lost: Callable[[str], None]) -> None:
    """Have a thread wait until the link is lost or the other side has closed it, and call ``lost``
    with the reason. Reads nothing."""
    sock = socket.socket(fileno=os.dup(link.fileno()))

    def wait() -> None:
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        poll.poll()
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        sock.close()
        lost(os.strerror(code) if code else "its process has ended")

    threading.Thread(target=wait, daemon=True).start()


def peer(link: Connection) -> str:
    """The host at the other end."""
    with socket.socket(fileno=os.dup(link.fileno())) as sock:
        return str(sock.getpeername()[0])


def own_host(link: Connection) -> str:
    """The host at this end, as the other end sees it."""
    with socket.socket(fileno=os.dup(link.fileno())) as sock:
        return str(sock.getsockname()[0])


def _listen(address: tuple[str, int]) -> socket.socket:
    place = _written(address)
    try:
        family, kind, proto, _, found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        with ExitStack() as on_error:
            sock = on_error.enter_context(socket.socket(family, kind, proto))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(found)
            sock.listen(MAX_HANDSHAKES)
            on_error.pop_all()
    except OSError as error:
        advice = {
            errno.EADDRINUSE: "another program uses it; choose another port",
            errno.EADDRNOTAVAIL: "it is not an address of this machine, where node 0 runs",
        }.get(error.errno or 0, error.strerror or str(error))
        raise RendezvousFailed(f"Cannot listen on --dist-init-addr {place}: {advice}.") from None
    return sock


def _connect(address: tuple[str, int], timeout_s: float) -> Connection:
    deadline, said = time.monotonic() + timeout_s, 0.0
    while True:
        left = deadline - time.monotonic()
        try:
            sock = socket.create_connection(address, timeout=max(0.1, min(left, HANDSHAKE_S)))
        except OSError as error:
            why = error.strerror or str(error)
        else:
            sock.setblocking(True)
            return Connection(sock.detach())
        if left <= 0:
            raise RendezvousFailed(
                f"Node 0 cannot be reached at --dist-init-addr {_written(address)} within"
                f" {round(timeout_s, 1):g} s (--dist-timeout): {why}."
            )
        if time.monotonic() - said > SAY_EVERY_S:
            said = time.monotonic()
            logger.info("Waiting for node 0 at %s (%s).", _written(address), why)
        time.sleep(min(RETRY_S, max(left, 0)))


def _limit(link: Connection, seconds: float) -> None:
    """Let each read and each write take no longer; 0: as long as it takes."""
    with socket.socket(fileno=os.dup(link.fileno())) as sock:
        length = struct.pack("ll", int(seconds), 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, length)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, length)


def _end(link: Connection) -> None:
    """Close the link for all who hold it, ``watch`` among them."""
    with socket.socket(fileno=os.dup(link.fileno())) as sock, suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    link.close()


def _keep_alive(link: Connection) -> None:
    """Make the link last as long as both ends, and notice within LOST_S that it is cut."""
    _limit(link, 0)
    with socket.socket(fileno=os.dup(link.fileno())) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, LOST_S // 4)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, LOST_S // 4)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)


def _differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """What a rank and node 0 do not agree about, with both values; "" if there is nothing."""
    differing = [
        f"{name} is {theirs.get(name, 'unknown')} there and {ours.get(name, 'unknown')} on node 0"
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    ]
    return "; ".join(differing)


def _listed(names: list[str]) -> str:
    text = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return text[:1].upper() + text[1:]


def _written(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
