"""One run of ``setpoint bench serving`` for the tests of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from setpoint import cli

SMALL = [
    "--num-prompts",
    "6",
    "--random-input-len",
    "12",
    "--random-output-len",
    "5",
    "--random-range-ratio",
    "1",
]
"""Options of a run of six short requests."""


def measure(folder: Path, url: str, *arguments: str, code: int = 0) -> dict[str, Any]:
    """The last line of its output file; ``folder`` has the tokenizer, ``code`` is the exit code."""
    out = folder / "out.jsonl"
    given = [
        "--base-url",
        url,
        "--tokenizer",
        str(folder),
        *SMALL,
        "--output-file",
        str(out),
        "--output-details",
        *arguments,
    ]
    assert cli.main(["bench", "serving", *given]) == code
    return dict(json.loads(out.read_text().splitlines()[-1]))
