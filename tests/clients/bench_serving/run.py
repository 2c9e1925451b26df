"""SGLang's ``bench_serving`` from PyPI's wheel, with each backend that Setpoint has routes for."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from checks import MODEL, URL, check, report, run, tokenizer

LAUNCH = Path(__file__).parent / "launch.py"


def bench(backend: str, *more: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "result.jsonl"
        run(
            "python",
            str(LAUNCH),
            "--backend",
            backend,
            "--base-url",
            URL,
            "--model",
            MODEL,
            "--tokenizer",
            tokenizer(),
            "--dataset-name",
            "random-ids",
            "--num-prompts",
            "8",
            "--random-input-len",
            "32",
            "--random-output-len",
            "16",
            "--random-range-ratio",
            "1.0",
            "--output-file",
            str(written),
            *more,
        )
        (line,) = written.read_text().splitlines()
    result = json.loads(line)
    assert result["completed"] == 8, result
    assert result["total_output_tokens"] == 8 * 16, result
    return result


@check("sglang (/generate), with --flush-cache and a rate")
def native() -> None:
    bench("sglang", "--flush-cache", "--request-rate", "20")


@check("sglang-oai (/v1/completions)")
def completions() -> None:
    bench("sglang-oai")


@check("sglang-oai-chat (/v1/chat/completions)")
def chat() -> None:
    bench("sglang-oai-chat")


@check("vllm (/v1/completions), not streamed")
def whole() -> None:
    bench("vllm", "--disable-stream")


@check("generated-shared-prefix with --cache-report")
def shared() -> None:
    bench("sglang", "--cache-report", "--return-logprob")


report()
