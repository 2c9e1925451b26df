"""The bootstrap server of a prefill server, which answers while the server lives."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from setpoint.handover.bootstrap_server import BootstrapServer
    from setpoint.launch.parent.served_model import ServedModel

logger = logging.getLogger(__name__)

CLOSE_S = 1.0
"""How long its last answers may take."""


@contextmanager
def bootstrapping(served: ServedModel, sock: socket.socket | None) -> Iterator[None]:
    """A context in which decode servers are answered at ``sock``, and those of this user on this
    machine know this server."""
    if sock is None:
        yield
        return
    from setpoint.handover.announcements import announced
    from setpoint.handover.bootstrap_server import BootstrapServer, ServerFacts

    options = served.config.options
    facts = ServerFacts(
        attn_tp_size=options.parallel.ranks_per_engine,
        dp_size=options.parallel.dp_size,
        page_size=served.config.page_size,
        kv_cache_dtype=options.model.kv_cache_dtype,
    )
    key = bytes.fromhex(served.handover_key)
    api_key = next(iter(options.server.api_keys), None)
    port = sock.getsockname()[1]
    with (
        answering(BootstrapServer(facts, key, api_key=api_key), sock),
        announced(options.server.host, port, key),
    ):
        logger.info("Decode servers find this server's engines at port %d.", port)
        yield


@contextmanager
def answering(server: BootstrapServer, sock: socket.socket) -> Iterator[None]:
    """A context in which a thread answers the routes, with an event loop of its own: whoever keeps
    it busy does not keep the clients of the main port waiting. Raises ConfigError if another
    program has bound the same address and listened first."""
    from setpoint.frontend.http.serve import small_server

    http = small_server(server.app, where="the bootstrap port")
    listening: Future[None] = Future()

    async def serve() -> None:
        serving = asyncio.create_task(http.serve(sockets=[sock]))
        heard = asyncio.create_task(http.listening.wait())
        await asyncio.wait([serving, heard], return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            listening.set_result(None)
        heard.cancel()
        await serving

    def run() -> None:
        try:
            asyncio.run(serve())
        except Exception as error:
            listening.set_exception(error)

    thread = threading.Thread(target=run, name="bootstrap", daemon=True)
    thread.start()
    listening.result()
    try:
        yield
    finally:
        http.end(CLOSE_S)
        thread.join(CLOSE_S + 1.0)
