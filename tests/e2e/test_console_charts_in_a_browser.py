"""The console's charts in a real browser, with moments made up for the purpose: nothing is drawn
that was not measured. Needs Chromium."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from setpoint.playback.playback_routes import create_app
from setpoint_testing.browser import CHROMIUM, Page, browser_page
from setpoint_testing.server_process import wait_until

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]
BEGAN = 1_760_000_000.0
REST = (60.0, 480.0)
GAP = (540.0, 570.0)
LONE = 590.0
END = 600.0
CHARTS = [
    "Throughput",
    "Requests",
    "KV pool in use",
    "Time to first token",
    "Time between tokens",
    "Prefix cache and retractions",
]
COLOURED = """(title) => {
  const card = [...document.querySelectorAll('.chart')]
    .find((each) => each.querySelector('h3').textContent === title);
  const canvas = card.querySelector('canvas');
  const over = card.querySelector('.u-over').getBoundingClientRect();
  const frame = canvas.getBoundingClientRect();
  const scale = canvas.width / frame.width;
  const copy = new OffscreenCanvas(canvas.width, canvas.height)
    .getContext('2d', {willReadFrequently: true});
  copy.drawImage(canvas, 0, 0);
  const [left, top, width, height] = [over.left - frame.left, over.top - frame.top, over.width,
    over.height].map((each) => Math.round(each * scale));
  const data = copy.getImageData(left, top, width, height).data;
  const columns = [];
  for (let x = 0; x < width; x++) {
    const rows = [];
    for (let y = 0; y < height; y++) {
      const [r, g, b, a] = data.slice((y * width + x) * 4, (y * width + x) * 4 + 4);
      if (a > 120 && Math.max(r, g, b) - Math.min(r, g, b) > 40) rows.push(y / height);
    }
    columns.push(rows);
  }
  return columns;
}"""
"""For each column of pixels of a chart, the heights (0: top, 1: bottom) at which there is colour,
which neither the axes nor the shade of idle stretches has."""


def busy(at: float, **known: Any) -> dict[str, Any]:
    return {
        "at": BEGAN + at,
        "seconds": 1.0,
        "limit": "seq-cap",
        "num_decode": 20,
        "running": 8.0,
        "running_max": 8.0,
        "queue": 4.0,
        "queue_max": 4.0,
        "usage": 0.5,
        "usage_max": 0.6,
        "gen_throughput": 160.0,
        "input_throughput": 50.0,
        "new_tokens": 1,
        "cached_tokens": 49,
        "quantiles": {"ttft_p50": 0.2, "ttft_p95": 0.4, "itl_p50": 0.02, "itl_p95": 0.03},
        **known,
    }


def moments() -> list[dict[str, Any]]:
    """A minute under load, seven minutes without requests as one moment, another minute under load
    with other figures, half a minute in which the server was away, and at its end a second in which
    one request came."""
    begin, end = REST
    quiet = {"running": 0.0, "queue": 0.0, "usage": 0.1, "usage_max": 0.2}
    quiet |= {"gen_throughput": 0.0, "input_throughput": 0.0}
    rest = {"at": BEGAN + begin, "seconds": end - begin, "limit": "idle", **quiet}
    alone = {"num_decode": 5, "running": 1.0, "usage": 0.1, "new_tokens": 0, "cached_tokens": 0}
    last = [busy(at, **alone, quantiles={}, limit="client-bound") for at in range(570, 600)]
    last[int(LONE - 570)] |= {"new_tokens": 10, "quantiles": {"ttft_p50": 0.3, "ttft_p95": 0.3}}
    return [
        *(busy(at) for at in range(int(begin))),
        rest,
        *(busy(at, cached_tokens=0, new_tokens=50) for at in range(int(end), int(GAP[0]))),
        *last,
    ]


class Film:
    """What the page is shown, in place of a recording."""

    def recording(self) -> dict[str, Any]:
        state = {"model": "m", "model_path": "m", "options": [], "limits": {}, "paused": None}
        return {"state": state, "moments": moments(), "notes": []}

    def at(self, time: float) -> dict[str, Any]:
        table = {"num_running": 0, "num_queued": 0, "num_preparing": 0, "rows": [], "paused": None}
        return {"requests": table, "doctor": {"verdict": "healthy", "findings": []}}


@contextmanager
def shown() -> Iterator[str]:
    """The address of a server that shows the film."""
    sock = socket.create_server(("127.0.0.1", 0))
    app = create_app(Film())  # type: ignore[arg-type]
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@asynccontextmanager
async def ten_minutes(folder: Path, url: str) -> AsyncIterator[Page]:
    """The page with all of the film in its window."""
    async with browser_page(folder) as page:
        await page.size(1440, 1000, scale=2)
        await page.open(f"{url}/console")
        await page.wait("!document.getElementById('player').hidden")
        await page.click("#window [data-seconds='600']")
        await page.evaluate(
            "(() => { const bar = document.getElementById('scrub'); bar.value = bar.max;"
            " bar.dispatchEvent(new Event('input')); })()"
        )
        await page.wait("document.querySelectorAll('#limits .band span').length > 2")
        await page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        yield page
        assert page.errors == []


async def heights(page: Page, title: str, begin: float, end: float) -> list[list[float]]:
    """``COLOURED`` for the columns well inside of a stretch of time."""
    columns = await page.evaluate(f"({COLOURED})({title!r})")
    first, last = (round(at / END * len(columns)) for at in (begin + 8, end - 8))
    return columns[first:last]


def test_lines_end_where_nothing_was_measured_and_a_rest_is_level(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        async with ten_minutes(tmp_path, url) as page:
            for title in CHARTS:
                assert any(await heights(page, title, 0, 60)), title
                assert not any(await heights(page, title, *GAP)), title
                rest = await heights(page, title, *REST)
                if title in ("Throughput", "Requests", "KV pool in use"):
                    assert all(rest), f"{title}: how little it was is known"
                    assert min(row for column in rest for row in column) > 0.85
                else:
                    assert not any(rest), f"{title}: nothing was measured"

    with shown() as url:
        asyncio.run(main(url))


def test_what_was_measured_once_is_a_dot(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        async with ten_minutes(tmp_path, url) as page:
            columns = await page.evaluate(f"({COLOURED})('Time to first token')")
            seen = [index / len(columns) * END for index, rows in enumerate(columns) if rows]
            late = [at for at in seen if at > GAP[1]]
            assert late
            assert max(abs(at - LONE) for at in late) < 8

    with shown() as url:
        asyncio.run(main(url))


def test_the_band_and_the_shade_show_rest_and_gap(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        async with ten_minutes(tmp_path, url) as page:
            spans = await page.evaluate(
                "[...document.querySelectorAll('#limits .band span')].map((each) =>"
                " [each.title.split(',')[0], parseFloat(each.style.left), parseFloat(each.style.width)])"
            )
            share = 100 / END
            assert [name for name, *_ in spans] == [
                "Request limit reached",
                "Idle",
                "Request limit reached",
                "Waiting for requests",
            ]
            for (_, left, width), (begin, end) in zip(
                spans, [(0, 60), REST, (REST[1], GAP[0]), (GAP[1], END)], strict=True
            ):
                assert left == pytest.approx(begin * share, abs=0.2)
                assert width == pytest.approx((end - begin) * share, abs=0.2)
            legend = "document.querySelectorAll('.chart')[5].querySelector('.legend b').textContent"
            assert await page.evaluate(legend) == "0 %", "ten seconds ago one prompt was computed"
            await page.evaluate(
                "(() => { const bar = document.getElementById('scrub');"
                " bar.value = Number(bar.min) + 300; bar.dispatchEvent(new Event('input')); })()"
            )
            await page.wait(f"{legend} === '–'")

    with shown() as url:
        asyncio.run(main(url))
