"""Responses in the background on a disk that is full or damaged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from answers import says
from background_responses import (
    ROOM,
    ROUTE,
    TEXTS,
    begun,
    body_of,
    copied,
    ended,
    engine_of,
    events_after,
    server_on,
    until,
)

from setpoint.core.errors import ConfigError
from setpoint.frontend.storage.storage import Storage


def test_a_full_disk_is_told_and_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("setpoint.frontend.storage.background.RETRY_S", 0.01)

    async def main() -> None:
        async with server_on(tmp_path, engine_of("cut", step_s=0.002)) as server:
            body = body_of("cut", max_output_tokens=1000)
            own_id = await begun(server, body)
            response = server.service.answering.responses.background.responses[own_id]
            await until(lambda: response.num_written > 3)
            database = server.service.storage._documents._database
            (pages,) = database.execute("PRAGMA page_count").fetchone()
            database.execute(f"PRAGMA max_page_count = {pages}")
            (tmp_path / "responses").rename(tmp_path / "away")
            num_written = response.num_written
            await until(lambda: response.num_shown > num_written + 10)
            refused = await server.http.post(ROUTE, json=body | {"input": "x" * 3000})
            assert refused.status_code == 507
            assert "full" in refused.json()["message"]
            assert len(server.service.answering.responses.background.responses) == 1
            (tmp_path / "away").rename(tmp_path / "responses")
            database.execute("PRAGMA max_page_count = 100000")
            await until(lambda: response.num_written > num_written + 10)
            assert "are stored again" not in caplog.text  # tokens alone do not prove it
            while "Responses in the background are stored again." not in caplog.text:
                await begun(server, body_of("plain"))  # an older fault may still be tried again
            await copied(server, tmp_path, tmp_path.with_name("copy"))
        async with server_on(tmp_path.with_name("copy"), engine_of("cut")) as server:
            assert (
                server.service.answering.responses.background.responses[own_id].num_shown
                > num_written
            )
            text = (await ended(server, own_id))["output"][0]["content"][0]["text"]
            # The engine says the text again and again, with an end that is ignored between.
            assert text == ((TEXTS["cut"][0] + "\0") * 100)[:1000].replace("\0", "")

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert "cannot be stored (No such file or directory). The response continues" in caplog.text
    assert "Responses in the background cannot be stored at the moment" in caplog.text


def test_a_disk_that_stays_full_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with server_on(tmp_path, engine_of("cut", step_s=0.002)) as server:
            body = body_of("cut", max_output_tokens=1000)
            response = server.service.answering.responses.background.responses[
                await begun(server, body)
            ]
            await until(lambda: response.num_written > 3)
            database = server.service.storage._documents._database
            (pages,) = database.execute("PRAGMA page_count").fetchone()
            database.execute(f"PRAGMA max_page_count = {pages}")
            for _ in range(3):
                refused = await server.http.post(ROUTE, json=body | {"input": "x" * 3000})
                assert refused.status_code == 507
                num_written = response.num_written  # its tokens still find room
                await until(lambda: response.num_written > num_written + 3)  # noqa: B023
            await ended(server, response.id)
            # It has ended by itself, which a cancellation does not change, and may say.
            cancelled = await server.http.post(f"{ROUTE}/{response.id}/cancel")
            assert (cancelled.status_code, response.is_saved) == (200, False)
            assert cancelled.json()["status"] == "incomplete"
            database.execute("PRAGMA max_page_count = 100000")

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    told = [each for each in caplog.messages if "Responses in the background" in each]
    # A document that fits in the place of an older one is stored, which may be told in between.
    faults = ["cannot be stored" in each for each in told]
    assert faults == [number % 2 == 0 for number in range(len(told))], told
    assert faults


def damage(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0" * 4096,
        lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
        lambda data: b"\xff" * len(data),
        lambda data: b"",
    ],
)
def test_damaged_outputs_are_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[bytes], bytes]
) -> None:
    async def main() -> None:
        async with server_on(tmp_path / "a", engine_of("calls", step_s=0.005)) as server:
            own_id = await begun(server, body_of("calls"))
            response = server.service.answering.responses.background.responses[own_id]
            await until(lambda: response.num_shown > 30)
            await copied(server, tmp_path / "a", tmp_path / "b")
            await ended(server, own_id)
            expected = await events_after(server, own_id)
        damage(tmp_path / "b" / "responses" / own_id, change)
        async with server_on(tmp_path / "b", engine_of("calls")) as server:
            await ended(server, own_id)
            assert (await events_after(server, own_id))[:-1] == expected[:-1]

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert ("of the stored output of resp_" in caplog.text) == bool(change(b"0123"))


def test_a_file_that_cannot_be_read_ends_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with server_on(tmp_path / "a", engine_of("calls", step_s=0.005)) as server:
            own_id = await begun(server, body_of("calls"))
            response = server.service.answering.responses.background.responses[own_id]
            await until(lambda: response.num_shown > 30)
            await copied(server, tmp_path / "a", tmp_path / "b")
            await ended(server, own_id)
            expected = await events_after(server, own_id)
        responses = tmp_path / "b" / "responses"
        (responses / own_id).unlink()
        (responses / own_id).mkdir()
        (responses / "resp_of_nobody").mkdir()
        async with server_on(tmp_path / "b", engine_of("calls")) as server:
            await ended(server, own_id)
            assert (await events_after(server, own_id))[:-1] == expected[:-1]
        assert (responses / "resp_of_nobody").is_dir()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "cannot be read (Is a directory): it is computed again." in caplog.text
    assert "resp_of_nobody belongs to no response and stays: Is a directory." in caplog.text


def test_a_broken_database_ends_the_start_with_the_name_of_the_folder(tmp_path: Path) -> None:
    with closing(Storage(tmp_path)) as storage:
        storage._documents._database.executemany(
            "INSERT INTO documents VALUES ('response', ?, ?)",
            [(str(number), bytes(3000)) for number in range(20)],
        )
    path = tmp_path / "documents.sqlite3"
    content = path.read_bytes()
    path.write_bytes(content[:12288] + b"\xff" * (len(content) - 12288))
    with pytest.raises(ConfigError) as refusal:
        Storage(tmp_path)
    assert f"--file-storage-path {tmp_path} cannot be used: documents.sqlite3" in str(refusal.value)


def test_a_damaged_document_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with server_on(tmp_path, says("Hi", context_len=ROOM)) as server:
            own_id = await begun(server, body_of("plain"))
            await ended(server, own_id)
            await server.service.answering.responses.background.save()
            database = server.service.storage._documents._database
            database.execute("UPDATE documents SET content = '{' WHERE kind = 'response'")
        async with server_on(tmp_path, says("Hi", context_len=ROOM)) as server:
            assert (await server.http.get(f"{ROUTE}/{own_id}")).status_code == 404

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "The stored response resp_" in caplog.text
