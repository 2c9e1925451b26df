"""The bootstrap server of a prefill server, with SGLang's routes: decode servers learn here how
many engines there are, and where each sends keys and values.

It has its own port (--disaggregation-bootstrap-port), because routers tell decode servers nothing
else.
"""

from __future__ import annotations

import hmac
import re
from collections import OrderedDict
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from setpoint.core.bootstrap import BootstrapRoom
from setpoint.handover.bootstrap_client import KEY_HEADER, NO_RANK

MAX_BODY = 1 << 20
MAX_ROOMS = 65536
"""Most bootstrap rooms whose rank is kept; the oldest are forgotten first."""
NOT_READY = "Not all engines of this prefill server have registered yet."

NUMBER = re.compile("-?[0-9]{1,7}")
Small = Annotated[int, Meta(ge=0, le=1 << 16)]


class Registration(msgspec.Struct, frozen=True):
    """One rank of an engine, as it registers. SGLang's other fields are ignored."""

    rank_ip: Annotated[str, Meta(max_length=255)]
    rank_port: Annotated[int, Meta(ge=1, le=65535)]
    system_dp_rank: Small = 0
    attn_tp_rank: Small = 0


class RoomRank(msgspec.Struct, frozen=True):
    bootstrap_room: BootstrapRoom
    dp_rank: Small


class RoomQuery(msgspec.Struct, frozen=True):
    bootstrap_rooms: Annotated[list[BootstrapRoom], Meta(max_length=65536)]


class ServerFacts(msgspec.Struct, frozen=True):
    """What the answer about the whole server says, with SGLang's names."""

    attn_tp_size: int
    dp_size: int
    page_size: int
    kv_cache_dtype: str
    attn_cp_size: int = 1
    pp_size: int = 1
    follow_bootstrap_room: bool = True


class BootstrapServer:
    """The routes, in ``app``."""

    def __init__(self, facts: ServerFacts, key: bytes, *, api_key: str | None = None) -> None:
        """key: this server's engines show it when they register. api_key: without it, nothing is
        said or learnt about single bootstrap rooms. Where the engines are is no secret: their
        transfer ports want a proof (``secrets``)."""
        self._facts = facts
        self._key = key
        self._api_key = api_key
        self._ranks: dict[tuple[int, int], Registration] = {}
        """(Rank of the engine, rank in it) -> its registration."""
        self._rooms: OrderedDict[int, int] = OrderedDict()
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/route", self._register, methods=["PUT"]),
                Route("/route", self._route, methods=["GET"]),
                Route("/register_dp_rank", self._register_room, methods=["POST"]),
                Route("/query_dp_ranks", self._query_rooms, methods=["POST"]),
            ]
        )

    async def _health(self, request: Request) -> Response:
        return PlainTextResponse("OK")

    async def _register(self, request: Request) -> Response:
        if not self._is_own(request):
            return _refused(403, "Only this server's own engines register here.")
        found = await _body(request, Registration)
        if isinstance(found, Response):
            return found
        facts, rank = self._facts, (found.system_dp_rank, found.attn_tp_rank)
        if rank[0] >= facts.dp_size or rank[1] >= facts.attn_tp_size:
            return _refused(
                400, f"This server has {facts.dp_size} engines of {facts.attn_tp_size} ranks."
            )
        self._ranks[rank] = found
        return PlainTextResponse("OK")

    async def _route(self, request: Request) -> Response:
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        given = [request.query_params.get(name, "") for name in names]
        if not all(map(NUMBER.fullmatch, given)):
            return _refused(400, f"These parameters must be numbers: {', '.join(names)}.")
        ranks = [int(each) for each in given]
        facts = self._facts
        if len(self._ranks) < facts.dp_size * facts.attn_tp_size:
            return _refused(503, NOT_READY)
        if ranks == [NO_RANK] * len(ranks):
            return JSONResponse(msgspec.to_builtins(facts))
        engine = self._ranks.get((ranks[0], ranks[2]))
        if engine is None or ranks[1] or ranks[3]:
            return _refused(
                404,
                f"This prefill server has no such rank, but {facts.dp_size} engines of"
                f" {facts.attn_tp_size} ranks.",
            )
        return JSONResponse({"rank_ip": engine.rank_ip, "rank_port": engine.rank_port})

    async def _register_room(self, request: Request) -> Response:
        if not self._may_ask(request):
            return _refused(401, "This bootstrap server wants the API key of its server.")
        found = await _body(request, RoomRank)
        if isinstance(found, Response):
            return found
        self._rooms[found.bootstrap_room] = found.dp_rank
        if len(self._rooms) > MAX_ROOMS:
            self._rooms.popitem(last=False)
        return PlainTextResponse("OK")

    async def _query_rooms(self, request: Request) -> Response:
        """The ranks of bootstrap rooms: those that were registered, otherwise those that the
        bootstrap room says."""
        if not self._may_ask(request):
            return _refused(401, "This bootstrap server wants the API key of its server.")
        found = await _body(request, RoomQuery)
        if isinstance(found, Response):
            return found
        size = self._facts.dp_size
        rooms = found.bootstrap_rooms
        return JSONResponse({str(room): self._rooms.get(room, room % size) for room in rooms})

    def _is_own(self, request: Request) -> bool:
        given = request.headers.get(KEY_HEADER, "")
        return hmac.compare_digest(given.encode(), self._key.hex().encode())

    def _may_ask(self, request: Request) -> bool:
        if self._api_key is None:
            return True
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        is_own = hmac.compare_digest(key.encode(), self._api_key.encode())
        return is_own and scheme.lower() == "bearer"


async def _body(request: Request, kind: type[Any]) -> Any:
    """The body as ``kind``, or the answer that refuses it."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY:
            return _refused(413, f"A body may have at most {MAX_BODY} bytes.")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _refused(400, f"The body cannot be used: {error}")


def _refused(status_code: int, why: str) -> Response:
    return PlainTextResponse(why, status_code=status_code)
