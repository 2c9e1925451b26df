"""Parquet in and out: rows become the same requests as lines, and the output is written once,
whole, from the journal."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from setpoint.batch import output_record as record
from setpoint.batch import parquet_output
from setpoint.batch.entry import BatchError, Entry, Marks, Survey
from setpoint.batch.jsonl import parse_line
from setpoint.batch.parquet import ParquetSource
from setpoint.batch.tally import Tally

SURVEY = Survey("0123456789abcdef", 3, 3)


def table(folder: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    path = folder / "in.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def read(path: Path, *done: int) -> list[Entry]:
    with closing(ParquetSource(path)) as source:
        survey = source.survey()
        marks = Marks(survey.last_number)
        for number in done:
            marks.add(number)
        return list(source.entries(survey, marks))


def test_a_row_is_the_same_request_as_a_line(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    line = json.dumps(
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    ).encode()
    expected = parse_line(1, line)
    forms: list[dict[str, Any]] = [
        {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": json.dumps(chat),
        },
        {"custom_id": "a", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "a", **chat},
        {"custom_id": "a", "messages": json.dumps(chat["messages"]), "max_tokens": 5},
    ]
    for form in forms:
        (entry,) = read(table(tmp_path, [form]))
        assert (entry.custom_id, entry.url, entry.body) == (
            expected.custom_id,
            expected.url,
            expected.body,
        )
    (entry,) = read(table(tmp_path, [{"custom_id": "a", "prompt": "x", "seed": 1}]))
    assert (entry.url, entry.body) == ("/v1/completions", {"prompt": "x", "seed": 1})
    (entry,) = read(table(tmp_path, [{"custom_id": "a", "input": "x"}]))
    assert entry.url == "/v1/embeddings"


def test_a_null_is_a_key_that_is_not_there(tmp_path: Path) -> None:
    rows = [
        {"custom_id": "a", "prompt": "x", "max_tokens": None},
        {"custom_id": "b", "prompt": "y", "max_tokens": 3},
    ]
    assert [entry.body for entry in read(table(tmp_path, rows))] == [
        {"prompt": "x"},
        {"prompt": "y", "max_tokens": 3},
    ]


def test_bad_rows_are_failures_of_their_own(tmp_path: Path) -> None:
    rows = [
        {"custom_id": "a", "method": "GET", "body": "{}"},
        {"custom_id": None, "method": "POST", "body": "{}"},
        {"custom_id": "c", "method": "POST", "body": "{"},
        {"custom_id": "d", "method": None, "body": "[]"},
        {"custom_id": "e", "method": None, "body": None},
    ]
    problems = [
        entry.problem.message if entry.problem else "" for entry in read(table(tmp_path, rows))
    ]
    expected = (
        "method must be POST",
        "custom_id must be",
        "not valid JSON",
        "not list",
        "not NoneType",
    )
    for problem, words in zip(problems, expected, strict=True):
        assert words in problem


def test_row_groups_are_read_one_after_another_and_done_rows_skipped(tmp_path: Path) -> None:
    rows = [{"custom_id": str(number), "prompt": "x"} for number in range(3000)]
    path = table(tmp_path, rows, row_group_size=700)
    assert [entry.number for entry in read(path, *range(1, 2990))] == list(range(2990, 3001))


def test_duplicate_ids_are_refused_with_both_rows(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="'a' on rows 1 and 3"):
        read(table(tmp_path, [{"custom_id": name, "prompt": "x"} for name in "aba"]))


@pytest.mark.parametrize(
    "columns", [{"prompt": "x"}, {"custom_id": "a"}, {"custom_id": "a", "body": "{}", "more": 1}]
)
def test_other_columns_are_refused(tmp_path: Path, columns: dict[str, Any]) -> None:
    with pytest.raises(BatchError, match="a batch has custom_id and either body"):
        read(table(tmp_path, [columns]))


def test_what_is_no_parquet_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    path.write_bytes(b"nothing of that kind")
    with pytest.raises(BatchError, match="is not a readable Parquet file"):
        ParquetSource(path)


def test_the_output_is_the_journal_in_columns(tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    assert parquet_output.num_failed_of(output, SURVEY) is None
    journal = parquet_output.journal_of(output)
    entries = [Entry(number=number, num_bytes=1, custom_id=str(number)) for number in (1, 2, 3)]
    made = [
        record.answer_record(SURVEY.digest, entries[1], {"id": "r", "text": "é"}),
        record.refusal_record(SURVEY.digest, entries[0], "No.", status_code=400),
    ]
    tally = Tally(2)
    for one in made:
        tally.count(one.error)
    journal.write_bytes(b"".join(map(record.encode, made)))
    parquet_output.write(output, journal, tally, SURVEY)
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]
    first, second = pq.read_table(output).to_pylist()
    assert first["id"] == record.record_id(SURVEY.digest, 2)
    assert (first["custom_id"], first["status_code"], first["error"]) == ("2", 200, None)
    assert json.loads(first["body"]) == {"id": "r", "text": "é"}
    assert (second["status_code"], json.loads(second["error"])["code"]) == (400, "status_400")
    assert parquet_output.num_failed_of(output, SURVEY) == 1
    with pytest.raises(BatchError, match="exists and belongs to another input"):
        parquet_output.num_failed_of(output, Survey("f" * 16, 3, 3))
    output.write_bytes(b"notes")
    with pytest.raises(BatchError, match="exists and is not a readable Parquet file"):
        parquet_output.num_failed_of(output, SURVEY)


def test_an_output_that_cannot_be_written_leaves_the_journal(tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    output.mkdir()
    journal = parquet_output.journal_of(output)
    journal.write_bytes(
        record.encode(record.answer_record(SURVEY.digest, Entry(number=1, num_bytes=1), {}))
    )
    with pytest.raises(
        BatchError, match=r"cannot be written: Is a directory\. All answers are in .*journal.jsonl"
    ):
        parquet_output.write(output, journal, Tally(1), SURVEY)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out.parquet",
        "out.parquet.journal.jsonl",
    ]


def test_without_pyarrow_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = table(tmp_path, [{"custom_id": "a", "prompt": "x"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        BatchError, match=r"Parquet files need pyarrow: .venv/bin/pip install -e '\.\[parquet\]'"
    ):
        ParquetSource(path)
    with pytest.raises(BatchError, match="Parquet files need pyarrow"):
        parquet_output.num_failed_of(tmp_path / "out.parquet", SURVEY)
