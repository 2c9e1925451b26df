"""``setpoint console FILE`` in a real browser."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from setpoint_testing.browser import CHROMIUM, browser_page
from setpoint_testing.server_process import PATIENCE_S, running_server, wait_until

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]
SCRUB = """(() => {
  const bar = document.getElementById('scrub');
  bar.value = Number(bar.%s);
  bar.dispatchEvent(new Event('input'));
})()"""


@pytest.fixture
def recording(tiny_model: Path, tmp_path: Path) -> Path:
    path = tmp_path / "run.rec"
    options = ("--model-path", str(tiny_model), "--record", str(path))
    with running_server(tmp_path / "server", *options) as server:
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        for _ in range(3):
            assert (
                httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE_S).status_code
                == 200
            )
            time.sleep(1.5)  # so that the bar has somewhere to go
    return path


def test_the_bar_moves_through_the_recording(recording: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "setpoint.cli", "console", str(recording), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/console", said)
        assert found, said
        asyncio.run(look(found[0], tmp_path))
        process.send_signal(signal.SIGINT)
        wait_until(lambda: process.poll() is not None)
    finally:
        process.kill()
        process.communicate()


async def look(url: str, folder: Path) -> None:
    rows = "document.querySelectorAll('#requests-table tbody tr').length"
    async with browser_page(folder) as page:
        await page.size(1280, 800)
        await page.open(url)
        await page.wait("!document.getElementById('player').hidden")
        assert await page.evaluate("document.getElementById('chat').hidden")
        await page.evaluate(SCRUB % "max")
        await page.wait(f"{rows} >= 3")
        await page.evaluate(SCRUB % "min")
        await page.wait(f"{rows} < 3")
        before = await page.evaluate("document.getElementById('scrub').value")
        await page.click("#play")
        await page.wait(f"document.getElementById('scrub').value > {before}")
        assert page.errors == []
        assert all(each.startswith(url) for each in page.urls)
