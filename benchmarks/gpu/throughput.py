"""Tokens per second of whole engines that get all requests at once, without HTTP."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from gpu.models import LLAMA_8B, QWEN3_0_6B, write_model
from gpu.results import Results
from gpu.roofline import BF16, CHIPS, FP8, Form, offline_rate, spec_of
from gpu.timing import device

from setpoint.offline.offline_engine import Engine

H200 = next(chip for chip in CHIPS if chip.name == "H200")
EVERY_S = 5.0
"""Seconds after which what was reached so far is noted, in case the part is cut."""
EVERY_TOKENS = 50
Requests = Sequence[tuple[int, int]]
"""(tokens in, tokens out) of each."""


def offline_name(model: str, count: int) -> str:
    return f"{model} bf16, {count} requests"


def many_rows_name(count: int, tokens: int) -> str:
    return f"{LLAMA_8B} fp8, {count:,} requests of {tokens:,} in and out"


def offline(out: Results) -> None:
    """256 requests of 100 to 1,024 tokens in and out, with and without overlap of steps."""
    rng = np.random.default_rng(0)
    count, least, most = (4, 4, 12) if out.rehearsal else (256, 100, 1024)
    requests = [(int(a), int(b)) for a, b in rng.integers(least, most + 1, (count, 2))]
    for name in (QWEN3_0_6B,) if out.rehearsal else (QWEN3_0_6B, LLAMA_8B):
        label = offline_name(name, count)
        for suffix, options in (("", {}), (", no overlap", {"disable_overlap_schedule": True})):
            out.attempt(
                label + suffix,
                lambda name=name, label=label + suffix, options=options: _measure(
                    out, name, label, requests, BF16, options
                ),
            )


def many_rows(out: Results) -> None:
    """Llama-3.1-8B with weights and cache in fp8: 1,024 requests of 1,000 tokens in and out."""
    count, tokens = (4, 8) if out.rehearsal else (1024, 1000)
    options: dict[str, Any] = {
        "quantization": "fp8",
        "kv_cache_dtype": "fp8_e4m3",
        "max_running_requests": count,
        "cuda_graph_max_bs": count,
    }
    label = many_rows_name(count, tokens)
    _measure(out, LLAMA_8B, label, [(tokens, tokens)] * count, FP8, options)


def _measure(
    out: Results, name: str, label: str, requests: Requests, form: Form, options: dict[str, Any]
) -> None:
    spec = spec_of(name, tiny=out.rehearsal)
    folder = write_model(out.folder / "models", name, tiny=out.rehearsal)
    began = time.perf_counter()
    with Engine(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        device=device().type,
        context_length=2048,
        stream_interval=EVERY_TOKENS,
        log_level="info",
        **({"max_total_tokens": 4096} if out.rehearsal else {}),
        **options,
    ) as engine:
        out.add(f"{label}: start", time.perf_counter() - began, "s")
        _answer(engine, spec.vocab_size, [(16, 8)] * 4)
        predicted = offline_rate(spec, form, H200, requests)

        def note(rate: float, tokens: int) -> None:
            out.add(label, rate, "tok/s", predicted=predicted, tokens=tokens)

        note(*_answer(engine, spec.vocab_size, requests, note))


def _answer(
    engine: Engine, vocabulary: int, requests: Requests, note: Any = None
) -> tuple[float, int]:
    """(output tokens per second, output tokens) of these requests. note: is told from time to time
    what has been reached."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, vocabulary, size).tolist() for size, _ in requests]
    sampling = [
        {"temperature": 0.0, "max_new_tokens": out, "ignore_eos": True} for _, out in requests
    ]
    tokens, began = 0, time.perf_counter()
    noted = began
    for chunk in engine.stream(None, sampling, input_ids=prompts):
        tokens += len(chunk["output_ids"])
        now = time.perf_counter()
        if note is not None and now - noted > EVERY_S:
            noted = now
            note(tokens / (now - began), tokens)
    assert tokens == sum(out for _, out in requests), "every request is answered in full"
    return tokens / (time.perf_counter() - began), tokens
