"""Parquet files as input, through pyarrow (``.venv/bin/pip install -e '.[parquet]'``), which is
imported on use.

A row is a request. Its columns are ``custom_id`` and either ``body`` (a struct, or JSON text; with
``url`` and ``method`` as in a JSONL line) or one of ``messages``, ``prompt`` and ``input``; then
every further column is a key of the body.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from setpoint.batch.duplicates import Duplicates
from setpoint.batch.entry import BatchError, Entry, Marks, Problem, Survey
from setpoint.batch.jsonl import digest_of, open_input
from setpoint.core.jsonfile import parse_json

READ_ROWS = 64
"""Rows in memory at a time. pyarrow reads the pages of a row group only when they are needed."""
_ENVELOPE = ("custom_id", "method", "url", "body")
_URLS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/embeddings"}
"""Column -> the URL to which a row with this column is sent, unless the row has one."""


def is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


class ParquetSource:
    def __init__(self, path: Path) -> None:
        """Open the file. Raises BatchError if it is not a Parquet file or lacks the columns of a
        batch."""
        self._pa = load_pyarrow()
        self._path = path
        self._raw = open_input(path)
        try:
            self._file = self._pa.parquet.ParquetFile(self._raw)
            self._check_columns()
        except BaseException as error:
            self._raw.close()
            if isinstance(error, self._pa.ArrowException | OSError):
                raise BatchError(
                    f"{path} is not a readable Parquet file: {first_line(error)}."
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
                f"{self._path} cannot be read after row {number}: {first_line(error)}."
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
    """The body of a row. A null means that the key is absent, because Parquet has no other way to
    leave it out. Raises ValueError."""
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


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def first_line(error: BaseException) -> str:
    """The first line of a pyarrow error; traces follow it."""
    return str(error).partition("\n")[0].rstrip(".")


def load_pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise BatchError(
            "Parquet files need pyarrow: .venv/bin/pip install -e '.[parquet]'."
        ) from None
    return pyarrow
