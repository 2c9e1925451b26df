"""Structured output: the outcome of every schema of tests/schemas, how long compiling and masks
take, what masks add to a decode step, and what forced tokens save.

    python benchmarks/grammar.py [--samples 3] [--only schemas|steps|forced]
        [--backend llguidance|xgrammar]

Schemas: random outputs over the default model's vocabulary, validated with jsonschema. Steps: the
default model decodes 64 requests with and without grammars, in turns. Forced: it answers under
common constraints in 1 and in 16 streams, compared with as many tokens without a constraint.
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
from setpoint_testing.constrained import SchemaJudge, read_schemas

SCHEMAS = Path(__file__).parents[1] / "tests" / "schemas"
NUM_REQUESTS, NUM_TURNS = 64, 5
SHORT, LONG = 8, 56
"""Tokens of each request. The difference of their times is that of decode steps only, without
prompts and compiling."""
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
STREAMS = (1, 16)
TEXT = {"type": "string", "maxLength": 30}
ORDER = {
    "type": "object",
    "properties": {
        "customer_identifier": TEXT,
        "shipping_address": {
            "type": "object",
            "properties": {
                "street_name": TEXT,
                "postal_code": TEXT,
                "country": {"enum": ["Germany", "France", "Spain"]},
            },
            "required": ["street_name", "postal_code", "country"],
        },
        "payment_method": {"enum": ["credit_card", "bank_transfer", "invoice"]},
        "is_express_delivery": {"type": "boolean"},
    },
    "required": [
        "customer_identifier",
        "shipping_address",
        "payment_method",
        "is_express_delivery",
    ],
}
WEATHER = {
    "type": "object",
    "properties": {"location": TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["location", "unit"],
}
CALL = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": '<tool_call>\n{"name": "get_current_weather", "arguments": ',
        "content": {"type": "json_schema", "json_schema": WEATHER},
        "end": "}\n</tool_call>",
    },
}
LETTER = (
    r"Dear (Mr|Mrs) [A-Z][a-z]{2,10},\n\nThank you for your order of [a-z]{3,10}\. We will deliver"
    r" it on (Monday|Tuesday|Friday)\.\n\nKind regards,\nThe customer service team"
)
USUAL: dict[str, dict[str, Any]] = {
    "an order": {"json_schema": ORDER},
    "a tool call": {"structural_tag": CALL},
    "a letter": {"regex": LETTER},
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
    """Print the time of a decode step in each variant. All variants take the same number of steps,
    so their times can be compared."""
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


def forced(backend: str) -> None:
    """Print the throughput of requests with a constraint, and of as many tokens without one."""
    with Engine(log_level="warning", grammar_backend=backend) as engine:
        for streams in STREAMS:
            prompts = [f"{index}: the weather for a customer in Paris" for index in range(streams)]
            for name, constraint in USUAL.items():
                seconds: dict[str, list[float]] = {"under it": [], "without": []}
                free: list[dict[str, Any]] = []
                for turn in range(NUM_TURNS + 1):
                    under = {"max_new_tokens": 200, "temperature": 0, **constraint}
                    under_s, answers = timed(engine, prompts, under)
                    free = [
                        {"max_new_tokens": len(answer["output_ids"]), "ignore_eos": True}
                        for answer in answers
                    ]
                    without_s, _ = timed(engine, prompts, free)
                    if turn:  # the first compiles
                        seconds["under it"].append(under_s)
                        seconds["without"].append(without_s)
                num_tokens = sum(each["max_new_tokens"] for each in free)
                rates = {kind: num_tokens / min(each) for kind, each in seconds.items()}
                print(
                    f"{name:12} {streams:3} streams, {num_tokens} tokens:"
                    f" {rates['under it']:.0f} tokens/s, {rates['without']:.0f} without a"
                    f" constraint ({rates['under it'] / rates['without']:.2f})"
                )


def timed(engine: Engine, prompts: list[str], sampling: Any) -> tuple[float, list[Any]]:
    began = time.perf_counter()
    answers = engine.generate(prompts, sampling_params=sampling)
    return time.perf_counter() - began, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--only", choices=("schemas", "steps", "forced"))
    parser.add_argument("--backend", choices=("llguidance", "xgrammar"), default="llguidance")
    options = parser.parse_args()
    print(json.dumps(environment()))
    if options.only in (None, "schemas"):
        schemas(options.samples, options.backend)
    if options.only in (None, "steps"):
        steps(options.backend)
    if options.only in (None, "forced"):
        forced(options.backend)


if __name__ == "__main__":
    main()
