"""Asks a prefill server's bootstrap server where its engines are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec import Meta

from setpoint.handover.frames import HandoverError, in_words
from setpoint.handover.http_exchange import exchange

_Answer = TypeVar("_Answer")

TIMEOUT_S = 5.0
"""How long one answer may take, from connecting to its last byte."""
STARTING_S = 60.0
"""How long a prefill server's engines may take to register once somebody asks for one."""
RETRY_S = 0.25
"""How long to wait for a prefill server that is still starting."""
MAX_BODY = 64 << 10
REGISTER_TRIES = 400
KEY_HEADER = "X-Setpoint-Handover-Key"
"""The header with which an engine proves to its own bootstrap server that it belongs to it."""
NO_RANK = -1
"""The number that asks about the prefill server as a whole; it stands in all four fields of the
query."""


class ServerAnswer(msgspec.Struct, frozen=True):
    """The part of the answer about the whole server that is used here."""

    dp_size: Annotated[int, Meta(ge=1, le=1 << 16)]


class TransferAddress(msgspec.Struct, frozen=True):
    """The answer about one rank."""

    rank_ip: Annotated[str, Meta(max_length=255)]
    rank_port: Annotated[int, Meta(ge=1, le=65535)]


async def register(
    host: str, port: int, key: bytes, *, rank: int, tp_rank: int = 0, address: str, number: int
) -> None:
    """Tell the bootstrap server of one's own server where a rank of an engine sends keys and
    values; waits until it listens."""
    place = {"rank_ip": address, "rank_port": number}
    body = msgspec.json.encode({**place, "system_dp_rank": rank, "attn_tp_rank": tp_rank})
    headers = {KEY_HEADER: key.hex()}
    for _ in range(REGISTER_TRIES):
        try:
            status, answer = await _request(host, port, "PUT", "/route", headers, body)
        except HandoverError:
            await asyncio.sleep(RETRY_S)
            continue
        if status != 200:
            words = answer[:200].decode(errors="replace")
            raise HandoverError(f"the bootstrap server refuses this engine: {status} {words}")
        return
    raise HandoverError(f"the bootstrap server at {host}:{port} does not listen")


def query(rank: int, tp_rank: int = 0) -> str:
    """The path that asks for a rank of an engine, or with NO_RANK for the whole server."""
    other = NO_RANK if rank == NO_RANK else 0
    fields = {
        "prefill_dp_rank": rank,
        "prefill_cp_rank": other,
        "target_tp_rank": other or tp_rank,
        "target_pp_rank": other,
    }
    return "/route?" + urlencode(fields)


async def prefill_server(host: str, port: int) -> ServerAnswer:
    """Raises HandoverError."""
    return await _ask(host, port, query(NO_RANK), ServerAnswer)


async def transfer_address(host: str, port: int, rank: int, tp_rank: int) -> tuple[str, int]:
    """(host, port). Raises HandoverError."""
    found = await _ask(host, port, query(rank, tp_rank), TransferAddress)
    is_any = found.rank_ip in ("", "0.0.0.0", "::")
    return host if is_any else found.rank_ip, found.rank_port


async def _ask(host: str, port: int, path: str, kind: type[_Answer]) -> _Answer:
    try:
        async with asyncio.timeout(STARTING_S):
            while (answer := await _request(host, port, "GET", path, {}))[0] == 503:
                await asyncio.sleep(RETRY_S)  # its engines have not all registered yet
    except TimeoutError:
        raise HandoverError(
            f"the engines of the bootstrap server at {host}:{port} have not registered"
            f" in {STARTING_S:.0f} s"
        ) from None
    status, body = answer
    if status != 200:
        words = body[:200].decode(errors="replace")
        raise HandoverError(f"the bootstrap server at {host}:{port} answers {status}: {words}")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HandoverError(
            f"the bootstrap server at {host}:{port} is not a prefill server of Setpoint's: {error}"
        ) from None


async def _request(
    host: str,
    port: int,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes = b"",
) -> tuple[int, bytes]:
    """(status, body) of an answer. Raises HandoverError if there is none in time."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await exchange(
                host, port, method, path, headers=headers, body=body, most=MAX_BODY
            )
    except (OSError, ValueError) as error:
        why = in_words(error, f"no answer in {TIMEOUT_S} s")
        raise HandoverError(
            f"the bootstrap server at {host}:{port} cannot be reached: {why}"
        ) from None
