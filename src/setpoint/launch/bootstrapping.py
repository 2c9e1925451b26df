"""The bootstrap server of a prefill server: binds its port at the start, and answers while the
server lives."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from setpoint.config.groups.server import api_keys
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError

if TYPE_CHECKING:
    from setpoint.launch.served import Served

logger = logging.getLogger(__name__)


def bootstrap_socket(options: Options) -> socket.socket | None:
    """The bound socket of a prefill server's bootstrap port. Raises ConfigError."""
    if options.disaggregation.role != "prefill":
        return None
    from setpoint.frontend.http.port import bind_socket

    host, port = options.server.host, options.disaggregation.disaggregation_bootstrap_port
    try:
        return bind_socket(host, port)
    except ConfigError as error:
        words = str(error).replace("--port", "--disaggregation-bootstrap-port")
        raise ConfigError(f"The bootstrap port: {words}") from None


@asynccontextmanager
async def bootstrapping(served: Served, sock: socket.socket | None) -> AsyncIterator[None]:
    """A context in which decode servers are answered at ``sock``."""
    if sock is None:
        yield
        return
    from setpoint.handover.bootstrap_listener import answering
    from setpoint.handover.bootstrap_server import BootstrapServer, Facts

    options = served.config.options
    facts = Facts(
        attn_tp_size=options.parallel.ranks_per_engine,
        dp_size=options.parallel.dp_size,
        page_size=options.memory.page_size,
        kv_cache_dtype=options.model.kv_cache_dtype,
    )
    key = bytes.fromhex(served.handover_key)
    api_key = next(iter(api_keys(options.server)), None)
    async with answering(BootstrapServer(facts, key, api_key=api_key), sock):
        logger.info("Decode servers find this server's engines at port %d.", sock.getsockname()[1])
        yield
