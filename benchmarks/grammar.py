"""Structured output: what becomes of every schema of tests/schemas, how long compiling and masks
take, and what masks add to a decode step.

    python benchmarks/grammar.py [--samples 3] [--only schemas|steps]
        [--backend llguidance|xgrammar]

Schemas: random outputs over the default model's vocabulary, validated with jsonschema. Steps: the
default model decodes 64 requests with and without grammars, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from machine import environment

from setpoint import Engine
from setpoint.checkpoint.source import locate
from setpoint.testing.constrained import SchemaJudge, read_schemas

SCHEMAS = Path(__file__).parents[1] / "tests" / "schemas"
NUM_REQUESTS, NUM_TURNS = 64, 5
SHORT, LONG = 8, 56
"""Tokens of each request. The difference is decode steps alone, without prompts and compiling."""
LIST = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
                "required": ["name", "count"],
            },
        }
    },
    "required": ["items"],
}


def schemas(samples: int, backend: str) -> None:
    folder = locate(None, log=print).folder
    judge = SchemaJudge(str(folder), vocab_size=49152, ends=(0, 2), backend=backend)
    judge.verdict({}, samples=1)  # reads the tokenizer
    counts: Counter[str] = Counter()
    compile_s, mask_s = [], []
    for name, schema in read_schemas(SCHEMAS).items():
        verdict = judge.verdict(schema, samples=samples)
        counts[verdict.outcome] += 1
        compile_s.append(verdict.compile_s)
        mask_s += verdict.mask_s
        if verdict.outcome != "passed":
            print(f"{verdict.outcome:10} {name:45} {verdict.why}")
    print(dict(counts))
    print("compile", quantiles(compile_s))
    print("mask   ", quantiles(mask_s), f"mean {statistics.mean(mask_s) * 1e3:.3f} ms")


def quantiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    last = len(ordered) - 1
    found = {name: ordered[min(int(len(ordered) * share), last)] for name, share in shares.items()}
    return " ".join(f"{name} {value * 1e3:.2f} ms" for name, value in found.items())


def steps(backend: str) -> None:
    """Tokens take the same number of steps in each variant, so that the times compare."""
    variants: dict[str, dict[str, Any]] = {
        "without": {},
        "any text": {"regex": r"(.|\n)*"},
        "a list": {"json_schema": LIST},
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    with Engine(
        log_level="warning", max_running_requests=NUM_REQUESTS, grammar_backend=backend
    ) as engine:
        for turn in range(NUM_TURNS + 1):
            for name, constraint in variants.items():
                short_s = decode_s(engine, constraint, SHORT)
                long_s = decode_s(engine, constraint, LONG)
                if turn:  # the first compiles
                    seconds[name].append((long_s - short_s) / (LONG - SHORT))
    base = statistics.median(seconds["without"])
    for name, each in seconds.items():
        step_s = statistics.median(each)
        print(
            f"{name:9} {step_s * 1e3:.2f} ms per decode step ({step_s / base:.3f}),"
            f" from {min(each) * 1e3:.2f} to {max(each) * 1e3:.2f}"
        )


def decode_s(engine: Engine, constraint: dict[str, Any], num_tokens: int) -> float:
    prompts = [f"Item {index}, as JSON:" for index in range(NUM_REQUESTS)]
    sampling = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True, **constraint}
    began = time.perf_counter()
    engine.generate(prompts, sampling_params=sampling)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--only", choices=("schemas", "steps"))
    parser.add_argument("--backend", choices=("llguidance", "xgrammar"), default="llguidance")
    options = parser.parse_args()
    print(json.dumps(environment()))
    if options.only != "steps":
        schemas(options.samples, options.backend)
    if options.only != "schemas":
        steps(options.backend)


if __name__ == "__main__":
    main()
