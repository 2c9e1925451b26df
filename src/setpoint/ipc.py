"""The ZeroMQ link between the frontend and the engine process: where its two sockets are, and the engine's end of it.

Carries the messages of ``core.messages`` as bytes, never pickle. Each side binds the socket it reads and connects the one
it writes, so neither has to wait for the other to start, and no message is dropped at a high-water mark. The frontend's
end, which lives in an asyncio loop, is ``frontend/ipc/link.py``.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from setpoint.core.messages import ToEngine, ToFrontend, decode_to_engine, encode

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Endpoints:
    """The two addresses, ``ipc://…``; frozen strings, so they can be handed to the engine process."""

    to_engine: str
    to_frontend: str

    @classmethod
    @contextmanager
    def in_private_folder(cls) -> Iterator[Endpoints]:
        """Fresh endpoints for the time of the block, in a folder only this user can enter (mode 0700).

        A forked child that ends leaves the folder alone: it is its parent's.
        """
        owner = os.getpid()
        folder = tempfile.mkdtemp(prefix="setpoint-")
        endpoints = cls(f"ipc://{folder}/to-engine", f"ipc://{folder}/to-frontend")
        try:
            yield endpoints
        finally:
            if os.getpid() == owner:
                endpoints.remove()

    def remove(self) -> None:
        """The folder, by whoever of both processes is the last."""
        shutil.rmtree(Path(self.to_engine.removeprefix("ipc://")).parent, ignore_errors=True)


def open_pull(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL)
    socket.set(zmq.RCVHWM, 0)
    socket.bind(address)
    return socket


def open_push(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.LINGER, 1000)  # ms for last words (Failed) to leave at close
    socket.connect(address)
    return socket


class EngineSocket:
    """The engine's end: used by one thread, the scheduler's loop."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pull = open_pull(self._context, endpoints.to_engine)
        self._push = open_push(self._context, endpoints.to_frontend)

    def receive(self, *, timeout_s: float | None = 0.0) -> list[ToEngine]:
        """All messages that are here. With none, waits up to ``timeout_s`` for the first (None: without limit).

        A malformed message is logged and dropped.
        """
        if timeout_s != 0.0:
            self._pull.poll(None if timeout_s is None else max(1, round(timeout_s * 1000)))
        messages: list[ToEngine] = []
        while True:
            try:
                data = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(decode_to_engine(data))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                logger.error("Dropped a malformed message of %d bytes from the frontend: %s", len(data), error)

    def send(self, message: ToFrontend) -> None:
        """Never blocks: what the frontend has not read yet is queued here."""
        self._push.send(encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        self._pull.close()
        self._push.close()
        self._context.term()
