"""The end of ``setpoint console``: a page that is open gets its end, and nothing is logged."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from setpoint.commands.console_command import _serve
from setpoint.frontend.http.port import bind_socket
from setpoint.frontend.http.serve import small_server


def test_an_open_page_ends_with_the_command(caplog: pytest.LogCaptureFixture) -> None:
    async def endless(_: object) -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield b"piece"
                await asyncio.sleep(0.01)

        return StreamingResponse(pieces())

    async def run() -> None:
        server = small_server(Starlette(routes=[Route("/", endless)]), where="the console's port")
        with bind_socket("127.0.0.1", 0) as sock:
            serving = asyncio.create_task(_serve(server, sock))
            await server.listening.wait()
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await reader.readuntil(b"piece")
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(serving, 20)
            writer.close()

    asyncio.run(run())
    assert not caplog.records
