"""Bootstrap rooms (SGLang's word): what names a request on the two servers that compute it
(docs/decisions/0072-prefill-and-decode-apart.md)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from setpoint.core.bounds import INT64_MAX, Count

FAKE_HOST = "2.2.2.2"
"""The bootstrap host of requests that no other server knows of: warm-ups and health checks."""

BootstrapRoom = Annotated[int, Meta(ge=0, le=INT64_MAX)]


class Bootstrap(msgspec.Struct, frozen=True):
    """Names a request on its prefill and its decode server."""

    room: BootstrapRoom
    host: str = ""
    """Where the prefill server's bootstrap server listens; the decode side needs it."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    prefill_rank: Count | None = None
    """Data-parallel rank of the engine that computes the prompt; None: the bootstrap room
    determines it."""

    @property
    def is_fake(self) -> bool:
        return self.host == FAKE_HOST
