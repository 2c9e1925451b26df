"""GuideLLM: a benchmark of a few seconds over chat and text completions."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from checks import MODEL, URL, check, report, run, tokenizer


def benchmark(api: str, profile: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "report.json"
        run(
            "guidellm",
            "run",
            "--backend",
            f"kind=openai_http,target={URL}/v1,model={MODEL},request_format={api}",
            "--profile",
            profile,
            "--constraint",
            "kind=max_requests,count=8",
            "--data",
            "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
            "--tokenizer",
            f"kind=huggingface_auto,model={tokenizer()}",
            "--output",
            f"kind=json,path={written}",
            "--disable-console",
        )
        (result,) = json.loads(written.read_text())["benchmarks"]
    totals = result["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (8, 0), totals


@check("chat completions, four streams")
def chat() -> None:
    benchmark("/v1/chat/completions", "kind=concurrent,streams=4")


@check("text completions, one after the other")
def text() -> None:
    benchmark("/v1/completions", "kind=synchronous")


report()
