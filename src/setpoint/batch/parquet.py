"""Parquet files as input and output, through pyarrow (``pip install 'setpoint[parquet]'``), which
is imported on use.

Input: a row is a request. Columns are ``custom_id`` and either ``body`` (a struct, or JSON text;
with ``url`` and ``method`` as in a JSONL line) or ``messages`` or ``prompt``, and then every
further column is a key of the body. Output: a row per request, written at the end from the journal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from setpoint.batch.duplicates import Duplicates
from setpoint.batch.entry import BatchError, Entry, Marks, Problem, Survey
from setpoint.batch.jsonl import digest_of, open_input
from setpoint.batch.record import Record, decode
from setpoint.batch.tally import Tally
from setpoint.core.jsonfile import parse_json

READ_ROWS = 64
"""Rows in memory at once. pyarrow reads the pages of a row group as they are needed."""
WRITE_ROWS, WRITE_BYTES = 1024, 32 << 20
"""Whichever comes first is written as one row group."""
_METADATA = b"setpoint_batch"
_ENVELOPE = ("custom_id", "method", "url", "body")
_URLS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/embeddings"}
"""Column -> what a row with it is sent to, unless it has a url."""


def is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


def journal_of(output: Path) -> Path:
    """Where the answers are until the Parquet file is written."""
    return output.with_name(output.name + ".journal.jsonl")


class ParquetSource:
    def __init__(self, path: Path) -> None:
        """Raises BatchError for a file that is no Parquet file or has not the columns of a
        batch."""
        self._pa = _pyarrow()
        self._path = path
        self._raw = open_input(path)
        try:
            self._file = self._pa.parquet.ParquetFile(self._raw)
            self._check_columns()
        except BaseException as error:
            self._raw.close()
            if isinstance(error, self._pa.ArrowException | OSError):
                raise BatchError(
                    f"{path} is not a readable Parquet file: {_first_line(error)}."
                ) from None
            raise

    def survey(self) -> Survey:
        num_rows: int = self._file.metadata.num_rows
        duplicates = Duplicates()
        for _, row in self._rows(["custom_id"]):
            duplicates.add(_text(row["custom_id"]))
        duplicates.check(
            ((number, _text(row["custom_id"])) for number, row in self._rows(["custom_id"])),
            what="rows",
        )
        return Survey(digest_of(self._raw), num_rows, num_rows)

    def entries(self, survey: Survey, done: Marks) -> Iterator[Entry]:
        for number, row in self._rows(None):
            if number not in done:
                yield _entry(number, row)

    def close(self) -> None:
        self._raw.close()

    def _check_columns(self) -> None:
        names = self._file.schema_arrow.names
        forms = [name for name in ("body", *_URLS) if name in names]
        if (
            "custom_id" not in names
            or len(forms) != 1
            or (forms == ["body"] and not set(names) <= set(_ENVELOPE))
        ):
            raise BatchError(
                f"{self._path} has the columns {', '.join(names)}; a batch has custom_id and either"
                " body (with url and method) or one of messages, prompt and input (with further"
                " keys of the body)."
            )

    def _rows(self, columns: list[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
        number = 0
        try:
            for batch in self._file.iter_batches(READ_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except (self._pa.ArrowException, OSError) as error:
            raise BatchError(
                f"{self._path} cannot be read after row {number}: {_first_line(error)}."
            ) from None


def _entry(number: int, row: dict[str, Any]) -> Entry:
    custom_id = _text(row.pop("custom_id"))
    method, url = row.pop("method", None) or "POST", row.pop("url", None)
    try:
        body = _body(row)
        num_bytes = len(msgspec.json.encode(body))
        problem = None
        if custom_id is None:
            problem = Problem("bad_request", "custom_id must be a non-empty string.")
        elif method != "POST":
            problem = Problem("bad_request", f"method must be POST, got {method!r}.")
    except (ValueError, TypeError) as error:
        return Entry(
            number=number,
            num_bytes=0,
            custom_id=custom_id,
            problem=Problem("bad_request", f"{error}."),
        )
    if url is None:
        url = next((to for column, to in _URLS.items() if column in row), "/v1/chat/completions")
    return Entry(
        number=number,
        num_bytes=num_bytes,
        custom_id=custom_id,
        url=url,
        body=None if problem else body,
        problem=problem,
    )


def _body(row: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError. A null is a key that is not there: Parquet has no other way to leave one
    out."""
    if "messages" in row:
        row["messages"] = _json(row["messages"])
    body = _json(row["body"]) if "body" in row else row
    if not isinstance(body, dict):
        raise ValueError(f"body must be an object, not {type(body).__name__}")
    return {key: _without_nulls(value) for key, value in body.items() if value is not None}


def _json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def finished(output: Path, survey: Survey) -> int | None:
    """The number of failed requests of an output that is complete; None if there is none yet.
    Raises BatchError for another file."""
    if not output.exists():
        _pyarrow()  # better missed now than after the work
        return None
    pa = _pyarrow()
    try:
        found = pa.parquet.read_metadata(output).metadata or {}
        about = json.loads(found.get(_METADATA, b"{}"))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BatchError(
            f"{output} exists and is not a readable Parquet file: {_first_line(error)}. Name"
            " another file with -o."
        ) from None
    if about.get("digest") != survey.digest:
        raise BatchError(
            f"{output} exists and belongs to another input. Name another file with -o."
        )
    return int(about["num_failed"])


def write(output: Path, journal: Path, tally: Tally, survey: Survey) -> None:
    """The journal as a Parquet file, in its order; the journal is removed once that is safe on
    disk. Raises BatchError."""
    pa = _pyarrow()
    text = pa.large_string()  # a string column of one row group may hold only 2 GiB
    about = json.dumps({"digest": survey.digest, "num_failed": tally.num_failed}).encode()
    schema = pa.schema(
        [
            ("id", text),
            ("custom_id", text),
            ("status_code", pa.int64()),
            ("request_id", text),
            ("body", text),
            ("error", text),
        ],
        metadata={_METADATA: about},
    )
    part = output.with_name(output.name + ".part")
    try:
        with part.open("wb") as file:
            with pa.parquet.ParquetWriter(file, schema) as writer, journal.open("rb") as lines:
                for rows in _row_groups(lines):
                    writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
            file.flush()
            os.fsync(file.fileno())
        part.replace(output)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise BatchError(
            f"{output} cannot be written: {error.strerror or error}. All answers are in {journal}."
        ) from None
    journal.unlink()


def _row_groups(lines: Iterable[bytes]) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    num_bytes = 0
    for line in lines:
        rows.append(_row(decode(line)))
        num_bytes += len(line)
        if len(rows) == WRITE_ROWS or num_bytes >= WRITE_BYTES:
            yield rows
            rows, num_bytes = [], 0
    if rows:
        yield rows


def _row(record: Record) -> dict[str, Any]:
    response, error = record.response, record.error
    return {
        "id": record.id,
        "custom_id": record.custom_id,
        "status_code": None if response is None else response.status_code,
        "request_id": None if response is None else response.request_id,
        "body": None if response is None else msgspec.json.encode(response.body).decode(),
        "error": None if error is None else msgspec.json.encode(error).decode(),
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise BatchError("Parquet files need pyarrow: pip install 'setpoint[parquet]'.") from None
    return pyarrow
