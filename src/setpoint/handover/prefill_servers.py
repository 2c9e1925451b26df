"""The prefill servers that a decode server sends its clients' bodies to by itself, as a router
would (docs/decisions/0075-pairs-without-a-router.md). For one event loop."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt
from setpoint.core.request import Request
from setpoint.handover.frames import in_words
from setpoint.handover.http_exchange import exchange

logger = logging.getLogger(__name__)
T = TypeVar("T")

PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")
"""Routes whose bodies a prefill server understands without knowing what came before."""
ONLY_HERE = ("session_params", "best_of")
"""Fields of bodies that are computed here: the prefill server does not have the session, or would
have to compute as many samples."""
RETRY_AFTER_S = 1
LOOK_S = 1.0
"""Pause between two attempts to reach a prefill server that does not answer."""
ASK_S = 5.0
MAX_INFO = 8 << 20
LOG_INTERVAL_S = 1.0
LONGEST_ERROR = 1000
"""Bytes of an error's body that are logged."""
ROOM_BITS = 62


class _Info(msgspec.Struct):
    """The part of /server_info that is used here."""

    disaggregation_mode: str = "null"
    disaggregation_bootstrap_port: Annotated[int, Meta(ge=0, le=65535)] = 0


class PrefillServer:
    """One of them."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.url, self.host, self.port = url, parts.hostname, parts.port or 80
        self.bootstrap_port = 0
        """0: it has not answered yet."""
        self.is_up = False
        """Whether it has answered, and has not ended since."""
        self.num_open = 0
        self.why_not = ""
        """Why it was not used when it was asked last."""


@dataclass(slots=True)
class PairedBody:
    """Implements ``frontend.pairing.Paired``."""

    servers: PrefillServers
    server: PrefillServer
    path: str
    body: dict[str, Any]
    num_open: int
    """Requests that have not ended."""
    rid: str
    """The name of the first of these requests, for people."""
    sending: asyncio.Task[None] | None = None

    def noting(self, started: Callable[[T], object]) -> Callable[[T], None]:
        def begun(job: T) -> None:
            started(job)
            self.sending = self.servers.start(self)

        return begun

    def recording(self, finished: Callable[[T], object]) -> Callable[[T], None]:
        def ended(output: T) -> None:
            finished(output)
            self.num_open -= 1
            if not self.num_open and self.sending is not None:
                self.sending.cancel()  # which closes the connection

        return ended


class PrefillServers:
    """Implements ``frontend.pairing.Pairing`` and ``KnownServers``."""

    def __init__(self, urls: Sequence[str], *, api_key: str | None) -> None:
        """urls: http://HOST:PORT of each. api_key: theirs."""
        self._servers = [PrefillServer(url) for url in urls]
        self._api_key = api_key
        self._turns = count()
        self._sending: set[asyncio.Task[None]] = set()
        self.num_alone = 0
        self._logged_at = float("-inf")

    def up(self) -> dict[str, bool]:
        return {each.url: each.is_up for each in self._servers}

    def known(self, host: str, port: int) -> tuple[str, int]:
        """Raises RequestError."""
        meant = [each for each in self._servers if each.host == host.lower()]
        for server in meant:
            if server.bootstrap_port == port:
                return server.host, port
        late = next((each for each in meant if not each.bootstrap_port), None)
        if late is not None:
            raise RequestError(
                f"The prefill server at {late.url} has not answered this server yet. Try again.",
                status_code=503,
                retry_after_s=RETRY_AFTER_S,
            )
        raise RequestError(
            f"bootstrap_host {excerpt(host)} with port {port} is none of this server's"
            " --disaggregation-prefill-servers. Leave bootstrap_host and bootstrap_room out: this"
            " server chooses a prefill server itself."
        )

    def pair(
        self, path: str, requests: Sequence[Request], received: Mapping[str, Any]
    ) -> PairedBody | None:
        if path not in PATHS or any(received.get(name) for name in ONLY_HERE):
            return None
        if any(each.options.logprobs and each.options.logprobs.start >= 0 for each in requests):
            return None  # those of the prompt would be in the prefill server's answer
        ready = [each for each in self._servers if each.is_up]
        if not ready:
            self._alone()
            return None
        turn, rid = next(self._turns), excerpt(requests[0].rid)
        server = min(
            (ready[(turn + index) % len(ready)] for index in range(len(ready))),
            key=lambda each: each.num_open,
        )
        room = {
            "bootstrap_host": server.host,
            "bootstrap_port": server.bootstrap_port,
            "bootstrap_room": secrets.randbits(ROOM_BITS),
        }
        return PairedBody(self, server, path, {**received, **room}, len(requests), rid)

    def start(self, paired: PairedBody) -> asyncio.Task[None]:
        """Send a body, in a task of its own."""
        task = asyncio.create_task(self._send(paired))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        return task

    async def watch(self) -> None:
        """Look for servers that do not answer, until cancelled."""
        while True:
            await asyncio.gather(*(self._look(each) for each in self._servers if not each.is_up))
            await asyncio.sleep(LOOK_S)

    async def _look(self, server: PrefillServer) -> None:
        try:
            async with asyncio.timeout(ASK_S):
                status, data = await self._call(server, "GET", "/server_info")
            info = msgspec.json.decode(data, type=_Info) if status == 200 else _Info()
            why = (
                f"it answers {status}"
                if status != 200
                else "it has no --disaggregation-mode prefill"
            )
            what = f"is not used ({why})"
        except ValueError as error:  # it is no such server
            info, what = _Info(), f"is not used ({in_words(error, '')})"
        except (OSError, TimeoutError) as error:
            info, what = _Info(), f"does not answer ({in_words(error, 'no answer in time')})"
        if info.disaggregation_mode == "prefill" and info.disaggregation_bootstrap_port:
            server.bootstrap_port, server.why_not = info.disaggregation_bootstrap_port, ""
            server.is_up = True
            logger.info("Prompts are computed by the prefill server at %s.", server.url)
            return
        if what != server.why_not:
            logger.warning(
                "The prefill server at %s %s. It is asked again every second; as long as none"
                " answers, this server computes prompts itself.",
                *(server.url, what),
            )
            server.why_not = what

    async def _send(self, paired: PairedBody) -> None:
        """The answer, a first token, is of no use here; what it stands for comes as a transfer."""
        server, why = paired.server, ""
        body = {**paired.body, "stream": False}
        body.pop("stream_options", None)
        server.num_open += 1
        try:
            status, data = await self._call(
                server, "POST", paired.path, msgspec.json.encode(body), most=LONGEST_ERROR
            )
            if status != 200:
                why = f"{status} {data.decode(errors='replace')}"
        except (OSError, ValueError) as error:
            if server.is_up:  # else another request has found out
                logger.warning(
                    "The prefill server at %s ended before it had answered request %s (%s); this"
                    " server computes the prompt.",
                    *(server.url, paired.rid, in_words(error, "no answer in time")),
                )
            server.is_up = False
        finally:
            server.num_open -= 1
        if why:
            logger.warning(
                "The prefill server at %s has not computed the prompt of request %s: %s",
                *(server.url, paired.rid, why),
            )

    async def _call(
        self,
        server: PrefillServer,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        most: int = MAX_INFO,
    ) -> tuple[int, bytes]:
        """(status, the beginning of the body) of an answer. Raises OSError or ValueError."""
        headers = {} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"}
        return await exchange(
            server.host, server.port, method, path, headers=headers, body=body, most=most
        )

    def _alone(self) -> None:
        self.num_alone += 1
        now = time.monotonic()
        if now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            logger.warning(
                "No prefill server answers, so this server computes prompts itself (%d so far).",
                self.num_alone,
            )
