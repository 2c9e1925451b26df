"""AIPerf: streamed chats and text completions."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from checks import MODEL, URL, check, report, run, tokenizer


def profile(kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(
            "aiperf",
            "profile",
            "--model",
            MODEL,
            "--url",
            URL,
            "--endpoint-type",
            kind,
            "--streaming",
            "--use-server-token-count",
            "--tokenizer",
            tokenizer(),
            "--concurrency",
            "4",
            "--request-count",
            "8",
            "--isl",
            "32",
            "--osl",
            "16",
            "--extra-inputs",
            "ignore_eos:true",
            "--ui",
            "none",
            "--artifact-dir",
            folder,
            cwd=folder,
            # When told to stay offline, it takes a tokenizer's folder for a name on the hub.
            env={name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
        )
        (path,) = Path(folder).rglob("profile_export_aiperf.json")
        result = json.loads(path.read_text())
    assert result["request_count"]["avg"] == 8, result["request_count"]
    assert result["output_sequence_length"]["avg"] == 16, result["output_sequence_length"]
    assert result["time_to_first_token"]["avg"] > 0


@check("streamed chats")
def chat() -> None:
    profile("chat")


@check("streamed text completions")
def text() -> None:
    profile("completions")


report()
