"""What the console says about cache tiers, in a real browser. Needs Chromium."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from test_cache_storages import until_off
from test_cache_tiers import PROMPTS, answer, known, server, settled
from test_console_in_a_browser import console

from setpoint_testing.browser import CHROMIUM
from setpoint_testing.server_process import running_server

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]
TEXT = "document.querySelector('#tiers:not([hidden])')?.textContent ?? ''"
TONE = "document.querySelector('#tiers p').dataset.tone"


def test_a_tier_says_what_it_has_loaded_and_saved(tiny_model: Path, tmp_path: Path) -> None:
    async def look(url: str) -> None:
        async with console(tmp_path / "browser", url) as page:
            await page.wait(f"/storage [1-9]/.test({TEXT})")
            text = await page.evaluate(TEXT)
            assert f"Storage file in {tmp_path}/cache: loaded" in text
            assert "instead of computing for" in text
            assert await page.evaluate(TONE) == "good"
            await page.screenshot(tmp_path / "tiers.png")

    (tmp_path / "browser").mkdir()
    for life in range(2):
        with server(tiny_model, tmp_path, f"life{life}") as each:
            known(each)
            for prompt in PROMPTS:
                answer(each, prompt)
            settled(each)
            if life:
                asyncio.run(look(each.url))


def test_a_tier_that_is_off_says_why(tiny_model: Path, tmp_path: Path) -> None:
    async def look(url: str) -> None:
        async with console(tmp_path / "browser", url) as page:
            why = "storage: 3 errors in a row, the last one: redis:..127.0.0.1:1"
            await page.wait(f"/Storage redis in redis:..127.0.0.1:1.0: off. {why}/.test({TEXT})")
            assert await page.evaluate(TONE) == "bad"
            await page.size(390, 800, phone=True)
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            await page.screenshot(tmp_path / "off.png")

    (tmp_path / "browser").mkdir()
    pytest.importorskip("valkey")
    extra = {"url": "redis://127.0.0.1:1/0", "block_tokens": 16, "prefetch_threshold": 32}
    options = (
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "redis"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
    )
    with running_server(tmp_path, "--model-path", str(tiny_model), *options) as each:
        until_off(each)
        asyncio.run(look(each.url))


def test_without_tiers_nothing_is_said(tiny_model: Path, tmp_path: Path) -> None:
    async def look(url: str) -> None:
        async with console(tmp_path / "browser", url) as page:
            await page.wait("document.querySelector('#about').textContent.length > 20")
            assert await page.evaluate(TEXT) == ""

    (tmp_path / "browser").mkdir()
    with running_server(tmp_path, "--model-path", str(tiny_model)) as each:
        asyncio.run(look(each.url))
