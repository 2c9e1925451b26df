"""Reading a batch file: what is a request, what is wrong with the rest, and what refuses the whole
file."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from setpoint.batch import duplicates, jsonl
from setpoint.batch.entry import BatchError, Entry, Marks
from setpoint.batch.jsonl import JsonlSource, parse_line

GOOD = b'{"custom_id":"%s","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}\n'


def good(custom_id: str) -> bytes:
    return GOOD % custom_id.encode()


def source(folder: Path, content: bytes) -> JsonlSource:
    (folder / "in.jsonl").write_bytes(content)
    return JsonlSource(folder / "in.jsonl")


def entries(read: JsonlSource, *done: int) -> list[Entry]:
    survey = read.survey()
    marks = Marks(survey.last_number)
    for number in done:
        marks.add(number)
    return list(read.entries(survey, marks))


def test_lines_are_counted_and_blank_ones_are_no_requests(tmp_path: Path) -> None:
    read = source(tmp_path, good("a") + b"\n \r\n" + good("b") + b"nonsense\n" + good("c").rstrip())
    survey = read.survey()
    assert (survey.num_requests, survey.last_number) == (4, 6)
    assert [(entry.number, entry.custom_id) for entry in entries(read)] == [
        (1, "a"),
        (4, "b"),
        (5, None),
        (6, "c"),
    ]
    assert [entry.number for entry in entries(read, 1, 5)] == [4, 6]
    read.close()


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (b"{", "not_json", "not valid JSON"),
        (b"\xff\xfe", "not_json", "not valid JSON"),
        (b'{"body":{"a":' + b"[" * 100_000, "not_json", "not valid JSON"),
        (b"[]", "bad_request", "The line must be an object, got a list"),
        (b"{}", "bad_request", "custom_id is missing"),
        (
            b'{"custom_id":1,"method":"POST","url":"u","body":{}}',
            "bad_request",
            "custom_id must be a string, got a whole number",
        ),
        (
            b'{"custom_id":"","method":"POST","url":"u","body":{}}',
            "bad_request",
            "custom_id must not be empty",
        ),
        (b'{"custom_id":"a","url":"u","body":{}}', "bad_request", "method is missing"),
        (
            b'{"custom_id":"a","method":"GET","url":"u","body":{}}',
            "bad_request",
            "method must be POST, got 'GET'",
        ),
        (
            b'{"custom_id":"a","method":"POST","url":"u","body":"b"}',
            "bad_request",
            "body must be an object, got a string",
        ),
        (
            b'{"custom_id":"a","method":"POST","url":"u","body":{},"more":1}',
            "bad_request",
            "more is not known",
        ),
    ],
)
def test_a_bad_line_says_what_is_wrong(line: bytes, code: str, message: str) -> None:
    entry = parse_line(7, line)
    assert entry.number == 7
    assert entry.problem is not None
    assert entry.problem.code == code
    assert re.search(message, entry.problem.message)
    assert entry.custom_id == ("a" if b'"custom_id":"a"' in line else None)


def test_a_line_beyond_all_measure_is_skipped_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 200)
    read = source(tmp_path, good("a") + b"x" * 1234 + b"\n" + good("b") + b"y" * 200)
    assert [
        (entry.number, entry.custom_id, entry.problem and entry.problem.code)
        for entry in entries(read)
    ] == [
        (1, "a", None),
        (2, None, "too_long"),
        (3, "b", None),
        (4, None, "too_long"),
    ]
    read.close()


def test_lines_on_a_server_are_like_bodies(tmp_path: Path) -> None:
    deep = b'{"custom_id":"b","method":"POST","url":"u","body":{"a":' + b"[" * 101 + b"]" * 101
    path = tmp_path / "in.jsonl"
    path.write_bytes(good("a") + deep + b"}}\n" + b"x" * 1000 + b"\n" + good("c"))
    read = JsonlSource(path, max_body_bytes=500)
    assert [entry.problem and entry.problem.code for entry in entries(read)] == [
        None,
        "too_complex",
        "too_long",
        None,
    ]
    read.close()


def test_the_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    one = source(tmp_path, good("a"))
    first = one.survey().digest
    os.utime(tmp_path / "in.jsonl", (1, 1))
    assert one.survey().digest == first
    two = source(tmp_path, good("b"))
    assert two.survey().digest != first
    one.close()
    two.close()


def test_a_file_that_grows_meanwhile_stays_the_batch_it_was(tmp_path: Path) -> None:
    read = source(tmp_path, good("a") + good("b"))
    survey = read.survey()
    with (tmp_path / "in.jsonl").open("ab") as file:
        file.write(good("c"))
    assert [entry.custom_id for entry in read.entries(survey, Marks(survey.last_number))] == [
        "a",
        "b",
    ]
    read.close()


def test_duplicate_ids_refuse_the_file_with_both_lines(tmp_path: Path) -> None:
    read = source(
        tmp_path,
        good("a") + good("b") + b"nonsense\n" + good("a") + b"nonsense\n" + good("c") + good("c"),
    )
    with pytest.raises(
        BatchError, match=r"'a' on lines 1 and 4; 'c' on lines 6 and 7\. Nothing was computed"
    ) as caught:
        read.survey()
    assert "\n" not in str(caught.value)
    read.close()


def test_equal_hashes_of_different_ids_are_no_duplicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "hash", lambda text: len(text), raising=False)
    read = source(tmp_path, good("a") + good("b") + good("cc"))
    assert read.survey().num_requests == 3
    read.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "absent cannot be read: No such file"),
        (".", "Is a directory|not a regular file"),
        ("/dev/null", "not a reg"),
    ],
)
def test_an_input_that_cannot_be_one(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        JsonlSource(tmp_path / name)


def test_a_compressed_input_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="is compressed with gzip; unpack it first"):
        source(tmp_path, b"\x1f\x8b\x08\x00")
