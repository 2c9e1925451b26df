"""The console in a real browser, on a real server under load (docs/console.md). Needs Chromium."""

from __future__ import annotations

import asyncio
import json
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from setpoint_testing.browser import CHROMIUM, Page, browser_page
from setpoint_testing.server_process import (
    PATIENCE_S,
    ServerProcess,
    engines_of,
    running_server,
)

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]
PAINTED = """(() => {
  const canvases = [...document.querySelectorAll('.plot canvas')];
  return canvases.length === 6 && canvases.filter((canvas) => {
    const copy = new OffscreenCanvas(canvas.width, canvas.height)
      .getContext('2d', {willReadFrequently: true});  // or the browser complains
    copy.drawImage(canvas, 0, 0);
    const data = copy.getImageData(0, 0, canvas.width, canvas.height).data;
    const colours = new Set();
    for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 200) {
      const [r, g, b] = data.slice(at, at + 3);
      if (Math.max(r, g, b) - Math.min(r, g, b) > 60) colours.add(`${r},${g},${b}`);
    }
    return colours.size > 0;
  }).length;
})()"""
"""How many of the charts have something in colour, which axes and their labels are not."""


@asynccontextmanager
async def load(url: str, clients: int = 4) -> AsyncIterator[None]:
    async def ask(http: httpx.AsyncClient, number: int) -> None:
        while True:
            body = {
                "messages": [{"role": "user", "content": f"Count from {number}."}],
                "max_tokens": 24,
            }
            (await http.post(f"{url}/v1/chat/completions", json=body)).raise_for_status()

    async with httpx.AsyncClient(timeout=None) as http:
        tasks = [asyncio.create_task(ask(http, number)) for number in range(clients)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def console(folder: Path, url: str) -> AsyncIterator[Page]:
    """The page, which asks nobody else for anything and complains of nothing."""
    async with browser_page(folder) as page:
        await page.size(1280, 800)
        await page.open(f"{url}/console")
        yield page
        assert page.errors == []
        foreign = [each for each in page.urls if not each.startswith((f"{url}/", "data:"))]
        assert foreign in ([], ["about:blank"])


def text_of(selector: str) -> str:
    return f"document.querySelector('{selector}')?.textContent"


def differing_pixels(png: bytes) -> int:
    """How many different rows of bytes a picture has: an empty page has one or two."""
    data, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += length + 12
    raw = zlib.decompress(data)
    width = struct.unpack(">I", png[16:20])[0] * (3 if png[25] == 2 else 4) + 1
    return len({raw[start : start + width] for start in range(0, len(raw), width)})


def test_the_page_is_alive(smol: ServerProcess, tmp_path: Path) -> None:
    async def main() -> None:
        async with load(smol.url), console(tmp_path, smol.url) as page:
            await page.wait("document.querySelector('#model').textContent.startsWith('SmolLM2')")
            await page.wait("document.querySelector('#status').dataset.state === 'serving'")
            await page.wait(f"{PAINTED} >= 4")
            before = await page.evaluate(text_of(".chart .legend"))
            await page.wait(f"{text_of('.chart .legend')} !== {before!r}")
            await page.wait(
                "document.querySelectorAll('#requests-table tr[data-state=running]').length"
            )
            for table in ("#requests-table", "#options-table"):
                box = f"document.querySelector('{table}').closest('.scroll')"
                assert await page.evaluate(f"{box}.scrollWidth <= {box}.clientWidth"), table
            await page.wait("document.querySelectorAll('#limits .band span').length")
            await page.wait("/tokens/.test(document.querySelector('#pool .unit').textContent)")
            assert (
                await page.evaluate("document.querySelectorAll('#options-table tbody tr').length")
                > 5
            )
            # the doctor looks after some seconds of load
            await page.wait(
                "document.querySelector('#verdict').dataset.tone !== 'wait' ||"
                " /evidence/i.test(document.querySelector('#verdict').textContent)"
            )
            for theme in ("light", "dark"):
                await page.media(prefers_color_scheme=theme)
                assert differing_pixels(await page.screenshot()) > 200

    asyncio.run(main())


def test_the_verdict_does_not_repeat_its_heading(smol: ServerProcess, tmp_path: Path) -> None:
    """Red before: "Other programs take the CPU" twice, above and at the beginning of the text."""
    finding = {"cause": "cpu-contended", "confidence": 0.9}
    summary = "Other programs take the CPU: the engine had work for 23.0 s."
    report = {
        "verdict": "cpu-contended",
        "summary": summary,
        "findings": [finding | {"summary": summary}],
    }

    async def main() -> None:
        async with console(tmp_path, smol.url) as page:
            said = await page.evaluate(
                "import('/console/doctor.js').then(({Doctor}) => {"
                f" new Doctor(() => null).show({json.dumps(report)});"
                " return ['verdict-word', 'verdict-text', 'findings'].map("
                "(id) => document.getElementById(id).textContent); })"
            )
            title, proof = "Other programs take the CPU", "The engine had work for 23.0 s."
            assert said[:2] == [title, proof]
            assert said[2].count(title) == 1
            assert proof in said[2]

    asyncio.run(main())


def test_the_chat_answers_and_can_be_stopped(smol: ServerProcess, tmp_path: Path) -> None:
    async def main() -> None:
        async with console(tmp_path, smol.url) as page:
            await page.wait(
                "!document.querySelector('#chat-send').disabled && document.title !== 'Setpoint console'"
            )
            await page.evaluate("document.querySelector('#chat-limit').value = 12")
            await page.evaluate("document.querySelector('#chat-input').focus()")
            await page.type("Name three colours.")
            await page.press("Enter")
            await page.wait(
                "document.querySelector('.turn.assistant .said').textContent.length > 3"
            )
            await page.wait("/tokens.s/.test(document.querySelector('#chat-stats').textContent)")
            await page.wait("document.querySelector('#chat-stop').hidden")
            # a second turn, long enough to be stopped
            await page.evaluate("document.querySelector('#chat-limit').value = 2000")
            await page.type("<img src=x onerror=alert(1)> Tell a very long story.")
            await page.press("Enter")
            await page.wait(
                "document.querySelectorAll('.turn.assistant .said')[1]?.textContent.length > 3"
            )
            await page.click("#chat-stop")
            await page.wait("/stopped/.test(document.querySelector('#chat-stats').textContent)")
            assert await page.evaluate("document.querySelectorAll('.log img').length") == 0
            await page.click("#chat-clear")
            assert await page.evaluate("document.querySelectorAll('.turn').length") == 0
            # what the server refuses is a sentence
            await page.evaluate("document.querySelector('#chat-limit').value = 99999999")
            await page.evaluate("document.querySelector('#chat-input').focus()")
            await page.type("Hello")
            await page.press("Enter")
            await page.wait(
                "/context|length/.test(document.querySelector('.failure')?.textContent)"
            )
            page.errors.clear()  # the browser's own note of the status 400

    asyncio.run(main())


def test_it_is_used_with_keys_and_keeps_the_theme(smol: ServerProcess, tmp_path: Path) -> None:
    async def main() -> None:
        async with console(tmp_path, smol.url) as page:
            await page.wait("document.title !== 'Setpoint console'")
            focus = "(document.activeElement.id || document.activeElement.textContent.trim())"
            seen = []
            for _ in range(200):
                await page.press("Tab")
                seen.append(await page.evaluate(focus))
                if seen[-1] == "chat-send":
                    break
            assert seen[0] == "Skip to the verdict"
            wanted = ["1 min", "pause", "theme", "requests-filter", "options-filter", "chat-input"]
            assert [each for each in seen if each in wanted] == wanted
            await page.evaluate("document.querySelector('#theme').focus()")
            theme = await page.evaluate("document.documentElement.dataset.theme")
            await page.press("Enter")
            other = await page.evaluate("document.documentElement.dataset.theme")
            assert {theme, other} == {"light", "dark"}
            await page.open(f"{smol.url}/console")
            await page.wait(f"document.documentElement.dataset.theme === '{other}'")
            await page.evaluate("document.querySelector('#pause').focus()")
            await page.press(" ")
            await page.wait(f"{text_of('#pause')} === 'Resume'")
            await page.click("#window button")
            assert (
                await page.evaluate("document.querySelector('#window button').ariaPressed")
                == "true"
            )
            await page.size(390, 844, phone=True)
            assert await page.evaluate("document.documentElement.scrollWidth") == 390

    asyncio.run(main())


def test_rows_are_sorted_and_filtered(smol: ServerProcess, tmp_path: Path) -> None:
    async def main() -> None:
        async with load(smol.url), console(tmp_path, smol.url) as page:
            await page.wait("document.querySelectorAll('#requests-table tbody tr').length > 6")
            await page.click("#requests-table th:nth-child(7) button")
            assert (
                await page.evaluate(
                    "document.querySelector('#requests-table th:nth-child(7)').ariaSort"
                )
                == "descending"
            )
            column = (
                "[...document.querySelectorAll('#requests-table td:nth-child(7)')]"
                ".map((cell) => Number(cell.textContent))"
            )
            found = await page.evaluate(column)
            assert found == sorted(found, reverse=True)
            await page.evaluate("document.querySelector('#requests-filter').focus()")
            await page.type("ended")
            states = "[...document.querySelectorAll('#requests-table tbody tr')].map((row) => row.dataset.state)"
            await page.wait(f"{states}.every((state) => state === 'ended')")

    asyncio.run(main())


def value_of(field: str) -> str:
    """The value of an option in the table."""
    return (
        "[...document.querySelectorAll('#options-table tbody tr')]"
        f".find((row) => row.cells[0].textContent === '{field}')?.cells[1].textContent"
    )


async def change(page: Page, field: str, value: str) -> None:
    """Open the dialog of an option, and send another value."""
    await page.click(f"[aria-label='Change {field}']")
    assert await page.evaluate("document.querySelector('#change').open")
    await page.evaluate(f"document.querySelector('#change-value').value = '{value}'")
    await page.click("#change-send")


def test_options_change_while_the_server_runs(tiny_model: Path, tmp_path: Path) -> None:
    arguments = ("--model-path", str(tiny_model), "--dtype", "float32")

    async def main(server: ServerProcess) -> None:
        async with console(tmp_path, server.url) as page:
            await page.wait(f"{value_of('stream_interval')} === undefined")
            await page.wait("document.title !== 'Setpoint console'")
            await page.click("#options-all")
            assert await page.evaluate(value_of("schedule_policy")) == "fcfs"
            assert not await page.evaluate("document.querySelector(\"[aria-label='Change port']\")")
            await change(page, "schedule_policy", "lpm")
            await page.wait(
                "/fcfs → lpm/.test(document.querySelector('#change-outcome').textContent)"
            )
            assert await page.evaluate(value_of("schedule_policy")) == "lpm"
            await page.click("#change-close")
            info = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()
            assert info["schedule_policy"] == "lpm"
            await change(page, "max_running_requests", "999999")
            await page.wait(f"/has room/.test({text_of('#change-outcome .failure')})")
            page.errors.clear()  # the browser's own note of the status 400
            await page.evaluate("document.querySelector('#change-value').value = '2'")
            await page.click("#change-send")
            await page.wait("/→ 2/.test(document.querySelector('#change-outcome').textContent)")
            await page.click("#change-close")
            # the server's next facts have the reason, and a button stays on the row of its option
            await page.wait(
                "[...document.querySelectorAll('#options-table tbody tr')].some((row) =>"
                " row.cells[0].textContent === 'max_running_requests'"
                " && row.cells[1].textContent === '2'"
                " && row.cells[3].textContent !== 'changed just now')"
            )

    with running_server(tmp_path / "server", *arguments) as server:
        asyncio.run(main(server))


def test_with_an_admin_key_only_its_owner_changes_options(tiny_model: Path, tmp_path: Path) -> None:
    arguments = ("--model-path", str(tiny_model), "--dtype", "float32", "--api-key", "client")

    async def main(server: ServerProcess) -> None:
        async with console(tmp_path, server.url) as page:
            await page.wait("document.querySelector('#key').open")
            await page.evaluate("document.querySelector('#key-input').focus()")
            await page.type("client")
            await page.press("Enter")
            await page.wait("document.title !== 'Setpoint console'")
            await page.click("#options-all")
            await change(page, "schedule_policy", "lpm")
            await page.wait("!document.querySelector('#change-admin').hidden")
            assert "admin key" in await page.evaluate(text_of("#change-outcome .failure"))
            for key in ("wrong", "boss"):
                await page.evaluate(f"document.querySelector('#change-key').value = '{key}'")
                await page.evaluate("document.querySelector('#change-outcome').replaceChildren()")
                await page.click("#change-send")
                await page.wait(text_of("#change-outcome"))
            assert "fcfs → lpm" in await page.evaluate(text_of("#change-outcome"))
            assert "boss" not in await page.evaluate(
                "JSON.stringify({...sessionStorage, ...localStorage})"
            )
            page.errors[:] = [each for each in page.errors if "Failed to load resource" not in each]

    with running_server(tmp_path / "server", *arguments, "--admin-api-key", "boss") as server:
        asyncio.run(main(server))


def test_a_filter_without_hits_says_so(smol: ServerProcess, tmp_path: Path) -> None:
    body = {"text": "One", "sampling_params": {"max_new_tokens": 2}}
    httpx.post(f"{smol.url}/generate", json=body, timeout=None).raise_for_status()

    async def main() -> None:
        async with console(tmp_path, smol.url) as page:
            for table, name in (("requests", "request"), ("options", "option")):
                await page.wait(
                    f"document.querySelectorAll('#{table}-table td:not(.empty)').length"
                )
                await page.evaluate(f"document.querySelector('#{table}-filter').focus()")
                await page.type("zebra")
                said = await page.evaluate(text_of(f"#{table}-table td.empty"))
                assert said == f"No {name} matches “zebra”."

    asyncio.run(main())


def test_it_asks_for_the_key_and_comes_back_after_a_restart(
    tiny_model: Path, tmp_path: Path
) -> None:
    arguments = ("--model-path", str(tiny_model), "--dtype", "float32", "--api-key", "the-key")

    async def main() -> None:
        (tmp_path / "first").mkdir()
        (tmp_path / "second").mkdir()
        with running_server(tmp_path / "first", *arguments) as server:
            async with console(tmp_path, server.url) as page:
                await page.wait("document.querySelector('#key').open")
                for key in ("wrong", "the-key"):
                    await page.evaluate("document.querySelector('#key-input').focus()")
                    await page.type(key)
                    await page.press("Enter")
                    if key == "wrong":
                        await page.wait(f"/did not accept/.test({text_of('#key-text')})")
                await page.wait(
                    "!document.querySelector('#key').open && document.title !== 'Setpoint console'"
                )
                server.process.terminate()
                await asyncio.to_thread(server.wait_end)
                await page.wait("document.querySelector('#status').dataset.state === 'lost'")
                assert "Trying again" in await page.evaluate(text_of("#notice"))
                with running_server(tmp_path / "second", *arguments, port=server.port):
                    await page.wait("document.querySelector('#notice').hidden")
                    await page.wait("document.querySelector('#status').dataset.state === 'idle'")
                assert all("the-key" not in url for url in page.urls)
                # the browser's own notes of the 401s and of the refused connections
                page.errors[:] = [
                    each for each in page.errors if "Failed to load resource" not in each
                ]

    asyncio.run(main())


def test_engines_are_shown_together_and_each_by_itself(tmp_path: Path) -> None:
    """One of two is killed under load: the page says so, goes on, and shows either alone."""

    def state_of(name: str) -> str:
        buttons = "[...document.querySelectorAll('#engines button')]"
        return f"{buttons}.find((each) => each.textContent.startsWith('{name}'))?.dataset.state"

    async def main(server: ServerProcess) -> None:
        async with load(server.url, clients=6), console(tmp_path, server.url) as page:
            await page.wait(f"{state_of('DP0')} === 'ready' && {state_of('DP1')} === 'ready'")
            await page.wait(f"{PAINTED} >= 4")
            await page.wait(
                "/on DP0/.test(document.querySelector('#requests-table').textContent)"
                " && /on DP1/.test(document.querySelector('#requests-table').textContent)"
            )
            engines_of(server.process.pid)[1].kill()
            await page.wait(f"{state_of('DP0')} !== {state_of('DP1')}")
            assert (await page.evaluate("document.querySelector('#status').textContent")) not in (
                "Connection lost",
                "Waiting for an engine",
            )
            assert differing_pixels(await page.screenshot(tmp_path / "kill.png")) > 200
            await page.wait("/restarted once/.test(document.querySelector('#engines').textContent)")
            await page.wait(f"{state_of('DP0')} === 'ready' && {state_of('DP1')} === 'ready'")
            before = await page.evaluate(text_of(".chart .legend"))
            await page.click("#engines button:nth-child(2)")
            await page.wait(f"{text_of('.chart .legend')} !== {before!r}")
            await page.wait(f"{PAINTED} >= 3")
            assert (
                await page.evaluate(
                    "document.querySelector('#engines button[aria-pressed=true] b').textContent"
                )
                == "DP0"
            )

    with running_server(tmp_path, "--dp-size", "2") as server:
        asyncio.run(main(server))
