"""Writes the lines of an output file in OpenAI's batch output format, and reads back those that an
earlier run has left.

A record's id names its batch and the line that it answers, so the output can be understood without
any other file.
"""

from __future__ import annotations

from typing import Any

import msgspec

from setpoint.batch.entry import Entry, Problem
from setpoint.frontend.apis.openai.openai_errors import error_body
from setpoint.frontend.refusal import Refusal

_PREFIX = "batch_req_"


class Error(msgspec.Struct, frozen=True):
    code: str
    message: str
    line: int


class Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: Any


class OutputRecord(msgspec.Struct, frozen=True):
    """``error`` is set for every request that failed. For those, ``response`` is set only if a
    server would have answered with one."""

    id: str
    custom_id: str | None
    response: Response | None
    error: Error | None


class RecordHead(msgspec.Struct, frozen=True):
    """The part of a record that is read back: everything but the answer."""

    id: str
    error: Error | None


_encoder = msgspec.json.Encoder()
_decode_record = msgspec.json.Decoder(OutputRecord).decode
_decode_head = msgspec.json.Decoder(RecordHead).decode


def record_id(digest: str, number: int) -> str:
    return f"{_PREFIX}{digest}_{number}"


def parse_record_id(text: str) -> tuple[str, int] | None:
    """(digest, line) of a record's id; None if it is not the id of a record."""
    digest, _, number = text.removeprefix(_PREFIX).rpartition("_")
    if not text.startswith(_PREFIX) or not number.isdecimal():
        return None
    return digest, int(number)


def first_bytes(digest: str) -> bytes:
    """The bytes with which every record of a batch begins."""
    return f'{{"id":"{record_id(digest, 0)[:-1]}'.encode()


def answer_record(digest: str, entry: Entry, reply: dict[str, Any]) -> OutputRecord:
    own_id = record_id(digest, entry.number)
    return OutputRecord(
        own_id, entry.custom_id, Response(200, str(reply.get("id", own_id)), reply), None
    )


def failure_record(digest: str, entry: Entry, problem: Problem) -> OutputRecord:
    """The record of a request that was never sent."""
    return OutputRecord(
        record_id(digest, entry.number),
        entry.custom_id,
        None,
        Error(problem.code, problem.message, entry.number),
    )


def refusal_record(digest: str, entry: Entry, message: str, *, status_code: int) -> OutputRecord:
    """The record of a request that was sent and refused. Its response is what a server would have
    answered."""
    own_id = record_id(digest, entry.number)
    body = error_body(Refusal(message=message, status_code=status_code))
    error = Error(f"status_{status_code}", message, entry.number)
    return OutputRecord(own_id, entry.custom_id, Response(status_code, own_id, body), error)


def encode(record: OutputRecord) -> bytes:
    return _encoder.encode(record) + b"\n"


def decode(line: bytes) -> OutputRecord:
    """Decode a line of a journal that has been recovered."""
    return _decode_record(line)


def decode_head(line: bytes) -> RecordHead | None:
    """Decode the head of a record; None for a line that is not a record."""
    try:
        return _decode_head(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
