"""The output file as a journal: whatever it is cut to, reopening loses and repeats nothing; a file
that is not ours is not touched."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from setpoint.batch import output_record as record
from setpoint.batch.entry import BatchError, Entry, Marks, Problem, Survey
from setpoint.batch.journal import Journal
from setpoint.batch.output import InOrder
from setpoint.batch.tally import Tally

DIGEST = "0123456789abcdef"
SURVEY = Survey(DIGEST, 9, 9)


def made(number: int, *, digest: str = DIGEST, code: str = "") -> bytes:
    entry = Entry(number=number, num_bytes=1, custom_id=f"id-{number}")
    if code:
        return record.encode(record.failure_record(digest, entry, Problem(code, "wrong")))
    return record.encode(
        record.answer_record(digest, entry, {"id": "r", "text": f"answer\n{number}"})
    )


def recover(path: Path, *, in_order: bool = False) -> tuple[Marks, Tally]:
    with Journal(path) as journal:
        tally = Tally(SURVEY.num_requests)
        return journal.recover(SURVEY, tally, in_order=in_order), tally


def test_cut_at_every_byte_it_keeps_what_is_whole_and_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # hundreds of them take seconds
    records = [made(3), made(1, code="not_json"), made(7)]
    whole = b"".join(records)
    ends = [sum(len(one) for one in records[:count]) for count in range(len(records) + 1)]
    path = tmp_path / "out.jsonl"
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with Journal(path) as journal:
            tally = Tally(9)
            done = journal.recover(SURVEY, tally, in_order=False)
            kept = max(count for count, end in enumerate(ends) if end <= size)
            assert [number for number in range(1, 10) if number in done] == sorted([3, 1, 7][:kept])
            assert (tally.num_done, tally.num_before, tally.num_failed) == (
                kept,
                kept,
                int(kept > 1),
            )
            assert path.read_bytes() == b"".join(records[:kept])
            for one in records[kept:]:
                journal.append(one)
        assert path.read_bytes() == whole


def test_zero_bytes_behind_the_last_record_are_what_a_power_cut_leaves(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(made(1) + bytes(5000))
    done, _ = recover(path)
    assert 1 in done
    assert path.read_bytes() == made(1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"my notes\n", "is not an output of setpoint batch, or it is damaged: line 1"),
        (b'{"custom_id": "a"}\n', "is not an output of setpoint batch, or it is damaged: line 1"),
        (b"my notes without an end", "its end, from byte 0, is not a record"),
        (b'{"id":"batch_req_fedc', "its end, from byte 0, is not a record"),
        (made(1) + b"torn\n" + made(2), f"damaged: line 2 .byte {len(made(1))}."),
        (made(1) + b"notes", "is not a record"),
        (
            made(1, digest="f" * 16),
            (
                "belongs to another input: its line 1 answers batch ffffffffffffffff, not"
                " 0123456789abcdef"
            ),
        ),
        (made(10), "belongs to another input"),
        (
            made(1) + made(2) + made(1),
            "holds two answers to line 1 of the input; the second is on line 3",
        ),
    ],
)
def test_what_is_not_this_batchs_output_is_refused_and_left_alone(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(BatchError, match=message) as caught:
        recover(path)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content


def test_keep_order_goes_on_only_from_an_ordered_beginning(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(made(1) + made(3))
    done, _ = recover(path, in_order=True)
    with (
        Journal(path) as journal,
        pytest.raises(BatchError, match="reaches line 3, but line 2 is missing"),
    ):
        InOrder(journal, after=done.last).expect(2)
    path.write_bytes(made(3) + made(1))
    with pytest.raises(BatchError, match="was started without --keep-order"):
        recover(path, in_order=True)


def test_in_order_holds_back_and_counts_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Journal(path) as journal:
        output = InOrder(journal, after=0)
        for number in (1, 2, 4):
            output.expect(number)
        output.put(4, b"four\n")
        output.put(2, b"two\n")
        assert (path.read_bytes(), output.held_bytes) == (b"", 9)
        output.put(1, b"one\n")
        assert (path.read_bytes(), output.held_bytes) == (b"one\ntwo\nfour\n", 0)


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    code = (
        "import sys, pathlib, setpoint.batch.journal as"
        " j\nj.Journal(pathlib.Path(sys.argv[1]))\nprint('open', flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(BatchError, match="is being written by another run"):
            Journal(path)
        other.kill()
        other.wait()
    with Journal(path):
        pass


def test_a_full_disk_ends_the_file_with_a_whole_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "out.jsonl", os.write

    def full(fd: int, data: memoryview) -> int:
        if len(data) <= len(made(2)) // 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[: len(data) // 2])

    with Journal(path) as journal:
        journal.append(made(1))
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(
            BatchError,
            match=r"cannot be written: No space left on device\. The answers in it are complete",
        ):
            journal.append(made(2))
        monkeypatch.undo()
        assert path.read_bytes() == made(1)
        journal.append(made(3))
    assert path.read_bytes() == made(1) + made(3)


def test_a_sync_that_failed_once_is_never_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    journal = Journal(tmp_path / "out.jsonl")
    journal.append(made(1))
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(BatchError, match="Input/output error"):
        journal.sync()
    monkeypatch.undo()
    with pytest.raises(BatchError, match="Input/output error"):
        journal.__exit__(None, None, None)


def test_what_is_needed_is_synced_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, num_synced = tmp_path / "out.jsonl", 0
    path.write_bytes(made(1))

    def counts(fd: int) -> None:
        nonlocal num_synced
        num_synced += 1

    monkeypatch.setattr(os, "fsync", counts)
    with Journal(path) as journal:
        journal.recover(SURVEY, Tally(9), in_order=False)
        num_synced = 0
        journal.sync()
        journal.sync()
        assert num_synced == 1, "a killed run may have left what is not on the disk"
        journal.append(made(2))
    assert num_synced == 2


def test_an_output_deleted_meanwhile_is_noticed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out.jsonl")
    journal.append(made(1))
    (tmp_path / "out.jsonl").unlink()
    with pytest.raises(BatchError, match="was deleted while it was being written"):
        journal.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent/out.jsonl", "No such file or directory"),
        (".", "Is a directory"),
        ("/dev/null", "not a regular file"),
    ],
)
def test_an_output_that_cannot_be_one(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        Journal(tmp_path / path)


def test_the_summary_counts_reasons_with_an_example() -> None:
    tally = Tally(5)
    entry = Entry(number=4, num_bytes=0)
    for code, message in (("not_json", "a"), ("too_long", "b"), ("not_json", "c")):
        tally.count(record.failure_record(DIGEST, entry, Problem(code, message)).error)
    tally.num_before = 1
    tally.count(None)
    lines = tally.summary().splitlines()
    assert lines[0] == "4 of 5 requests done, 1 of them in earlier runs: 1 answered, 3 failed."
    assert lines[1].startswith("This run: 3 in ")
    assert lines[2:] == ["  2 × not_json, e.g. line 4: a", "  1 × too_long, e.g. line 4: b"]
