"""A real browser for tests: Chromium without a window, driven over its DevTools protocol. Records
what the page asks the network for and what it complains about."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
"""Path of the browser; None if there is none."""
PATIENCE_S = 30.0


class Page:
    """One page. ``urls``: all that it requested. ``errors``: messages of its console that are
    errors, exceptions, and violations of its content security policy."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.urls: list[str] = []
        self.errors: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol; returns its result. Raises RuntimeError if the
        browser refuses."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(
            json.dumps({"id": number, "method": method, "params": parameters})
        )
        async with asyncio.timeout(PATIENCE_S):
            return await answer

    async def read(self) -> None:
        """Read the browser's messages until it ends."""
        async for message in self._socket:
            content = json.loads(message.data)
            if "id" not in content:
                self._note(content["method"], content["params"])
            elif "error" in content:
                self._answers.pop(content["id"]).set_exception(RuntimeError(content["error"]))
            else:
                self._answers.pop(content["id"]).set_result(content["result"])

    def _note(self, method: str, content: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.urls.append(content["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = content["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and content["type"] in ("error", "warning"):
            self.errors.append(str([each.get("value") for each in content["args"]]))
        elif method == "Log.entryAdded" and content["entry"]["level"] in ("error", "warning"):
            entry = content["entry"]
            self.errors.append(f"{entry['text']} {entry.get('url', '')}")

    async def open(self, url: str) -> None:
        """Open an address; returns when the page and its scripts are loaded."""
        await self.call("Page.navigate", url=url)
        await self.wait(
            f"location.href === {json.dumps(url)} && document.readyState === 'complete'"
        )

    async def size(self, width: int, height: int, *, scale: float = 1, phone: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=phone,
        )

    async def media(self, **features: str) -> None:
        """Emulate media features: ``prefers_color_scheme="dark"``."""
        listed = [
            {"name": name.replace("_", "-"), "value": value} for name, value in features.items()
        ]
        await self.call("Emulation.setEmulatedMedia", features=listed)

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression. Raises RuntimeError if it throws."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    async def wait(self, expression: str, *, timeout_s: float = PATIENCE_S) -> Any:
        """Evaluate an expression until its value is true; returns the value."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not (value := await self.evaluate(expression)):
            assert loop.time() < deadline, f"not within {timeout_s:g} s: {expression}"
            await asyncio.sleep(0.1)
        return value

    async def click(self, selector: str) -> None:
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    async def type(self, text: str) -> None:
        """Type into whatever has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
        text = {"Enter": "\r", " ": " "}.get(key)
        about: dict[str, Any] = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": codes.get(key, 0),
            "modifiers": 8 if shift else 0,
        }
        await self.call(
            "Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {})
        )
        await self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    async def screenshot(self, path: Path | None = None, *, full: bool = False) -> bytes:
        """A picture of the page as PNG. full: the whole page instead of what the window shows."""
        shot = await self.call(
            "Page.captureScreenshot",
            format="png",
            captureBeyondViewport=full,
            **await self._clip(full),
        )
        content = base64.b64decode(shot["data"])
        if path is not None:
            path.write_bytes(content)
        return content

    async def _clip(self, full: bool) -> dict[str, Any]:
        if not full:
            return {}
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        return {"clip": {**size, "scale": 1}}


@asynccontextmanager
async def browser_page(folder: Path) -> AsyncIterator[Page]:
    """Yields an empty page in a new browser, whose profile is kept below ``folder``."""
    assert CHROMIUM is not None
    process = subprocess.Popen(
        [
            CHROMIUM,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--no-first-run", "--disable-dev-shm-usage", "--disable-background-networking"),
            *("--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}"),
            "about:blank",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port = await _port(folder / "profile" / "DevToolsActivePort", process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                pages = [each for each in await response.json() if each["type"] == "page"]
            url = pages[0]["webSocketDebuggerUrl"]
            async with session.ws_connect(url, max_msg_size=64 << 20) as socket:
                page = Page(socket)
                reading = asyncio.create_task(page.read())
                for domain in ("Page", "Runtime", "Network", "Log"):
                    await page.call(f"{domain}.enable")
                yield page
                reading.cancel()
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


async def _port(path: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not (path.exists() and path.read_text().strip()):
        assert process.poll() is None, "the browser has ended"
        assert asyncio.get_running_loop().time() < deadline, "the browser did not start"
        await asyncio.sleep(0.05)
    return int(path.read_text().split()[0])
