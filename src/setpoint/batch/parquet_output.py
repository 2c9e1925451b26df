"""A Parquet file of answers, written at the end of a run from its journal: a row per request."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from setpoint.batch.entry import BatchError, Survey
from setpoint.batch.output_record import OutputRecord, decode
from setpoint.batch.parquet import first_line, load_pyarrow
from setpoint.batch.tally import Tally

WRITE_ROWS, WRITE_BYTES = 1024, 32 << 20
"""A row group is written when it reaches either of these limits."""
_METADATA = b"setpoint_batch"


def journal_of(output: Path) -> Path:
    """The file that holds the answers until the Parquet file is written."""
    return output.with_name(output.name + ".journal.jsonl")


def num_failed_of(output: Path, survey: Survey) -> int | None:
    """The number of failed requests of a complete output; None if there is no output yet. Raises
    BatchError for any other file."""
    if not output.exists():
        load_pyarrow()  # report a missing pyarrow now, not after the work
        return None
    pa = load_pyarrow()
    try:
        found = pa.parquet.read_metadata(output).metadata or {}
        about = json.loads(found.get(_METADATA, b"{}"))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BatchError(
            f"{output} exists and is not a readable Parquet file: {first_line(error)}. Name"
            " another file with -o."
        ) from None
    if about.get("digest") != survey.digest:
        raise BatchError(
            f"{output} exists and belongs to another input. Name another file with -o."
        )
    return int(about["num_failed"])


def write(output: Path, journal: Path, tally: Tally, survey: Survey) -> None:
    """Write the journal as a Parquet file, in the journal's order; then, when the file is safe on
    disk, remove the journal. Raises BatchError."""
    pa = load_pyarrow()
    text = pa.large_string()  # a string column holds at most 2 GiB per row group
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


def _row(record: OutputRecord) -> dict[str, Any]:
    response, error = record.response, record.error
    return {
        "id": record.id,
        "custom_id": record.custom_id,
        "status_code": None if response is None else response.status_code,
        "request_id": None if response is None else response.request_id,
        "body": None if response is None else msgspec.json.encode(response.body).decode(),
        "error": None if error is None else msgspec.json.encode(error).decode(),
    }
