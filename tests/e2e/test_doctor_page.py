"""The page of ``setpoint doctor --html`` in a real browser."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import pytest

from setpoint import cli
from setpoint_testing.browser import CHROMIUM

CASE = Path(__file__).parents[1] / "doctor_corpus" / "cases" / "cap-16-of-many.log.gz"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium"),
]


def browse(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open the page; nothing that the machine's own browser has is used or changed."""
    return subprocess.run(
        [
            str(CHROMIUM),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}",
            *options,
            (folder / "report.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=90,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert cli.main(["doctor", str(CASE), "--html", str(tmp_path / "report.html")]) == 1
    return tmp_path


def test_a_browser_has_nothing_to_complain_about(folder: Path) -> None:
    done = browse(folder, "--dump-dom")
    assert "seq-cap" in done.stdout
    assert not re.search(r"CONSOLE|Refused to|ERR_", done.stderr), done.stderr


@pytest.mark.parametrize("size", [(1280, 800), (500, 900)])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_picture_of_the_page(folder: Path, size: tuple[int, int], theme: str) -> None:
    picture = folder / "page.png"
    options = ["--blink-settings=preferredColorScheme=0"] if theme == "dark" else []
    browse(folder, f"--window-size={size[0]},{size[1]}", f"--screenshot={picture}", *options)
    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == size
    assert len(data) > 30_000, "the page is not empty"
