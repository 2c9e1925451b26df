"""``/v1/files`` on a fake engine: every operation through the official client, every refusal by
name, and what a restart finds."""

from __future__ import annotations

import errno
import logging
import re
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from batches import Clock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from setpoint.core.errors import ConfigError
from setpoint.frontend.storage.files import UploadLimits
from setpoint.frontend.storage.storage import Storage

Serve = Callable[..., None]
LINES = b'{"custom_id": "a"}\n'


@pytest.fixture
def clock() -> Clock:
    return Clock()


def on_disk(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "files").iterdir())


def test_a_file_through_its_life(serve: Serve, tmp_path: Path) -> None:
    async def scenario(server: Any) -> None:
        files = server.openai.files
        content = bytes(range(256)) * 9000 + b"\r\n--not-the-boundary"
        first = await files.create(file=("../../etc/passwd.jsonl", content), purpose="batch")
        assert (first.filename, first.bytes) == ("../../etc/passwd.jsonl", len(content))
        assert (first.purpose, first.status, first.expires_at) == ("batch", "processed", None)
        assert on_disk(tmp_path) == [first.id]
        assert (await files.content(first.id)).content == content
        assert await files.retrieve(first.id) == first
        second = await files.create(file=("b.txt", b"b"), purpose="user_data")
        assert [file.id for file in (await files.list()).data] == [second.id, first.id]
        assert [file.id for file in (await files.list(order="asc")).data] == [first.id, second.id]
        assert [file.id for file in (await files.list(purpose="batch")).data] == [first.id]
        page = await files.list(limit=1)
        assert page.has_more
        assert [file.id async for file in page] == [second.id, first.id]
        assert (await files.delete(first.id)).deleted
        assert on_disk(tmp_path) == [second.id]
        for call in (files.retrieve, files.content, files.delete):
            with pytest.raises(openai.NotFoundError, match="There is no file"):
                await call(first.id)

    storage = Storage(tmp_path)
    assert (tmp_path.stat().st_mode & 0o77, (tmp_path / "files").stat().st_mode & 0o77)[1] == 0
    serve(scenario, storage=storage)


def test_a_restart_finds_what_is_whole_and_removes_the_rest(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def upload(server: Any) -> None:
        for name in ("a", "b"):
            await server.openai.files.create(file=(f"{name}.jsonl", LINES), purpose="batch")
        with pytest.raises(ConfigError, match="is in use by another server"):
            Storage(tmp_path)

    async def look(server: Any) -> None:
        (kept,) = (await server.openai.files.list()).data
        assert (await server.openai.files.content(kept.id)).content == LINES

    serve(upload, storage=Storage(tmp_path))
    files = tmp_path / "files"
    damaged = on_disk(tmp_path)[0]
    with closing(sqlite3.connect(tmp_path / "documents.sqlite3")) as database:
        database.execute(
            "UPDATE documents SET content = ? WHERE id = ?", (b'{"id": "file-', damaged)
        )
        database.commit()
    (files / f"file-{'0' * 24}").write_bytes(b"content whose document was not written any more")
    (files / f"file-{'1' * 24}.part").write_bytes(b"half")
    (files / "notes.txt").write_bytes(b"not ours")
    with caplog.at_level(logging.WARNING):
        storage = Storage(tmp_path)
    assert f"The stored file {damaged} is damaged; it is ignored." in caplog.messages
    assert {damaged, "notes.txt"} < {*on_disk(tmp_path)}
    assert len(on_disk(tmp_path)) == 3
    serve(look, storage=storage)


def test_a_file_expires_when_it_should(serve: Serve, tmp_path: Path, clock: Clock) -> None:
    async def scenario(server: Any) -> None:
        files = server.openai.files
        expires: Any = {"anchor": "created_at", "seconds": 3600}
        file = await files.create(file=("a", LINES), purpose="batch", expires_after=expires)
        assert file.expires_at == file.created_at + 3600
        clock.at += 3599
        await files.retrieve(file.id)
        clock.at += 1
        with pytest.raises(openai.NotFoundError):
            await files.retrieve(file.id)
        assert on_disk(tmp_path) == []

    serve(scenario, storage=Storage(tmp_path, now=clock))


REFUSED: list[tuple[dict[str, str], str]] = [
    ({"purpose": "nonsense"}, "purpose must be one of assistants, batch, .*got 'nonsense'"),
    ({}, "purpose must be one of"),
    (
        {"purpose": "batch", "color": "red"},
        "'color' is not a known field of the form; it may have file",
    ),
    ({"purpose": "x" * 2000}, "purpose may have at most 1024 bytes"),
    (
        {"purpose": "batch", "expires_after[anchor]": "created_at"},
        "expires_after.seconds must be a whole number from 3600 to 2592000",
    ),
    (
        {"purpose": "batch", "expires_after[seconds]": "7200"},
        "expires_after.anchor must be 'created_at'",
    ),
]


def test_forms_that_cannot_be_honoured_are_refused_by_name_and_leave_nothing(
    serve: Serve, tmp_path: Path
) -> None:
    async def scenario(server: Any) -> None:
        for form, message in REFUSED:
            answer = await server.http.post("/v1/files", data=form, files={"file": ("a", LINES)})
            assert answer.status_code == 400
            assert re.search(message, answer.json()["error"]["message"])
            assert on_disk(tmp_path) == []

    serve(scenario, storage=Storage(tmp_path))


def test_forms_without_a_file(serve: Serve, tmp_path: Path) -> None:
    multipart = {"content-type": "multipart/form-data; boundary=b"}
    part = b'--b\r\ncontent-disposition: form-data; name="%s"\r\n\r\nx\r\n'

    async def scenario(server: Any) -> None:
        async def refusal(content: bytes, headers: dict[str, str] | None = None) -> str:
            answer = await server.http.post(
                "/v1/files", content=content, headers=headers or multipart
            )
            assert answer.status_code == 400
            return str(answer.json()["error"]["message"])

        assert "multipart/form-data" in await refusal(b"{}", {"content-type": "application/json"})
        assert "multipart/form-data" in await refusal(b"", {"content-type": "multipart/form-data"})
        assert "file is missing" in await refusal(part % b"purpose" + b"--b--\r\n")
        assert "must be a file with a filename" in await refusal(part % b"file" + b"--b--\r\n")
        assert "two parts with the name purpose" in await refusal(
            part % b"purpose" + part % b"purpose" + b"--b--\r\n"
        )
        assert "The form is incomplete" in await refusal(part % b"purpose")
        assert "not valid multipart" in await refusal(b"nonsense")
        named = (
            b'--b\r\ncontent-disposition: form-data; name="file"; filename="%s"\r\n\r\n\r\n--b--'
        )
        assert "file is empty" in await refusal(named % b"a")
        assert "255 characters" in await refusal(named % (b"a" * 256))
        assert on_disk(tmp_path) == []

    serve(scenario, storage=Storage(tmp_path))


HEAD = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
FORMS = st.tuples(
    st.sampled_from([b"", HEAD]),
    st.lists(st.binary(max_size=30) | st.sampled_from([b"\r\n", b"--b", b"--", HEAD]), max_size=6),
)


@settings(
    max_examples=4,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # it keeps nothing
)
@given(forms=st.lists(FORMS, min_size=50, max_size=50))
def test_no_form_is_a_bug(
    serve: Serve,
    tmp_path_factory: pytest.TempPathFactory,
    forms: list[tuple[bytes, list[bytes]]],
) -> None:
    folder = tmp_path_factory.mktemp("files")

    async def pieces(form: tuple[bytes, list[bytes]]) -> AsyncIterator[bytes]:
        for piece in (form[0], *form[1]):
            yield piece

    async def scenario(server: Any) -> None:
        headers = {"content-type": "multipart/form-data; boundary=b"}
        for form in forms:
            answer = await server.http.post("/v1/files", content=pieces(form), headers=headers)
            assert answer.status_code == 400, form
            assert on_disk(folder) == []

    storage = Storage(folder)
    serve(scenario, storage=storage)
    storage.close()


def test_limits(serve: Serve, tmp_path: Path) -> None:
    async def scenario(server: Any) -> None:
        files = server.openai.files
        with pytest.raises(openai.APIStatusError, match="at most 100 bytes") as refused:
            await files.create(file=("a", b"x" * 101), purpose="batch")
        assert refused.value.status_code == 413
        for _ in range(2):
            await files.create(file=("a", b"x" * 60), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="more than 150 bytes; delete some"):
            await files.create(file=("a", b"x" * 60), purpose="batch")
        third = await files.create(file=("a", b"x"), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="at most 3 files"):
            await files.create(file=("a", b"x"), purpose="batch")
        await files.delete(third.id)
        await files.create(file=("a", b"x" * 30), purpose="batch")

    limits = UploadLimits(file_bytes=100, num_files=3, total_bytes=150)
    serve(scenario, storage=Storage(tmp_path, limits=limits))


def test_a_full_disk(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", full)
            with pytest.raises(openai.InternalServerError, match="No space left") as refused:
                await server.openai.files.create(file=("a", LINES), purpose="batch")
        assert refused.value.status_code == 507
        assert on_disk(tmp_path) == []
        await server.openai.files.create(file=("a", LINES), purpose="batch")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    serve(scenario, storage=Storage(tmp_path))


def test_a_server_without_storage_says_how_to_get_it(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for method, path in (
            ("GET", "/v1/files"),
            ("POST", "/v1/files"),
            ("GET", "/v1/files/file-1/content"),
            ("GET", "/v1/batches"),
            ("POST", "/v1/batches"),
        ):
            answer = await server.http.request(method, path)
            assert answer.status_code == 400
            assert "--file-storage-path FOLDER" in answer.json()["error"]["message"]

    serve(scenario)


def test_an_id_is_never_a_path(serve: Serve, tmp_path: Path) -> None:
    async def scenario(server: Any) -> None:
        for path in ("..%2f..%2fetc%2fpasswd", "lock", "file-1.json", "%00"):
            answer = await server.http.get(f"/v1/files/{path}/content")
            assert answer.status_code == 404
            assert answer.json()["error"]["message"]

    serve(scenario, storage=Storage(tmp_path))


LISTS = {
    "limit=0": "limit must be from 1 to 10000",
    "limit=x": "limit",
    "order=up": "order must be asc or desc, got 'up'",
    "after=file-9": "after: this list has no entry 'file-9'",
}


def test_lists_that_cannot_be_made(serve: Serve, tmp_path: Path) -> None:
    async def scenario(server: Any) -> None:
        for query, message in LISTS.items():
            answer = await server.http.get(f"/v1/files?{query}")
            assert answer.status_code == 400
            assert message in answer.json()["error"]["message"]

    serve(scenario, storage=Storage(tmp_path))


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used: "):
        Storage(tmp_path / "file")
    (tmp_path / "documents.sqlite3").write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match=r"documents.sqlite3: file is not a database"):
        Storage(tmp_path)


def test_a_folder_of_an_earlier_version_is_left_alone(tmp_path: Path) -> None:
    old = tmp_path / "files" / f"file-{'0' * 24}"
    old.parent.mkdir()
    old.write_bytes(LINES)
    old.with_suffix(".json").write_text("{}")
    with pytest.raises(ConfigError, match="written by an earlier version"):
        Storage(tmp_path)
    assert old.read_bytes() == LINES


def test_a_full_disk_under_the_documents(serve: Serve, tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    (limit,) = storage._documents._database.execute("PRAGMA page_count").fetchone()
    storage._documents._database.execute(f"PRAGMA max_page_count = {limit}")

    async def scenario(server: Any) -> None:
        async def fill() -> None:
            for _ in range(50):
                await server.openai.files.create(file=("a" * 200, LINES), purpose="batch")

        with pytest.raises(openai.InternalServerError, match="is full") as refused:
            await fill()
        assert refused.value.status_code == 507
        kept = [file.id for file in (await server.openai.files.list()).data]
        assert (await server.openai.files.content(kept[0])).content == LINES

    serve(scenario, storage=storage)
    storage.close()
    with closing(Storage(tmp_path)) as again:
        assert {*on_disk(tmp_path)} == {file.id for file in again.files.listing()}
