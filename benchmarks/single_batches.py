"""The speed of one sequence without a server: llama-bench of llama.cpp and ik_llama.cpp, and
`setpoint bench one-batch`.

Each program loads the file, computes a prompt and generates tokens, and ends. All use the same
number of threads. A prompt of n tokens multiplies n rows at once, a generated token one row.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 1800
START_TOKENS = 8
"""The prompt before the tokens that Setpoint generates. llama-bench has none: there the context of
a step is that much shorter."""


class BatchError(RuntimeError):
    """A program did not end well; the message says how."""


@dataclass(slots=True, frozen=True)
class Rates:
    """Tokens per second, one value for each time that they were measured."""

    prompt: list[float]
    generated: list[float]


Measure = Callable[[int, int], Rates]
"""Starts a program and returns the rates of a prompt of so many tokens, and of so many generated
tokens. Raises BatchError."""


def llama_bench(folder: Path, model: Path, *, num_threads: int) -> Measure:
    """The llama-bench of an installation of llama.cpp or ik_llama.cpp."""

    def measure(prompt: int, generated: int) -> Rates:
        command = [
            *(str(folder / "build" / "bin" / "llama-bench"), "--model", str(model)),
            *("--threads", str(num_threads), "--flash-attn", "1", "--output", "json"),
            *("--n-prompt", str(prompt), "--n-gen", str(generated), "--repetitions", "2"),
        ]
        return read_llama_bench(_output(command, {}))

    return measure


def read_llama_bench(text: str) -> Rates:
    """What llama-bench printed as JSON. Raises BatchError if it lacks one of the two tests."""
    rates: dict[bool, list[float]] = {}
    for test in json.loads(text):
        rates.setdefault(test["n_prompt"] > 0, []).extend(test["samples_ts"])
    if rates.keys() != {True, False}:
        raise BatchError(f"llama-bench printed {text[:500]}")
    return Rates(rates[True], rates[False])


def one_batch(
    model: Path, arguments: Sequence[str], environment: Mapping[str, str], *, num_threads: int
) -> Measure:
    """`setpoint bench one-batch` with these further arguments."""

    def measure(prompt: int, generated: int) -> Rates:
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results.jsonl"
            command = [
                *(sys.executable, "-m", "setpoint.cli", "bench", "one-batch"),
                *("--model-path", str(model), "--dtype", "bfloat16"),
                *("--num-threads", str(num_threads), "--batch-size", "1"),
                *("--input-len", str(START_TOKENS), str(prompt), "--output-len", str(generated)),
                *("--output-file", str(results), *arguments),
            ]
            _output(command, environment)
            lines = [json.loads(line) for line in results.read_text().splitlines()]
        by_length = {line["input_len"]: line for line in lines}
        return Rates(
            [prompt / by_length[prompt]["prefill_latency"]],
            [1 / by_length[START_TOKENS]["median_decode_latency"]],
        )

    return measure


def _output(command: Sequence[str], environment: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BatchError(str(error)) from None
    if done.returncode != 0:
        raise BatchError(f"{command[0]} ended with code {done.returncode}: {done.stderr[-500:]}")
    return done.stdout
