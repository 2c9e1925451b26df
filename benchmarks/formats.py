"""What the formats of tool calls and reasoning cost: for each piece of a stream, in addition to a
parser that passes text on, and for a megabyte of arguments.

    python benchmarks/formats.py [--pieces 100000]

Aim: 2 µs for a piece of plain text, and well under a second for the megabyte with one token in each
piece.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

from machine import environment

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.formats.format_registry import REASONING_FORMATS, TOOL_FORMATS
from setpoint.frontend.chat.parser import DeltaParser, PlainParser

TOOLS = (Tool("look"),)
REPETITIONS = 5
WORDS = (" the", " quick", " fox", "\n\n", " over", " a < b [1]", " dog", ".")
BEGUN = {
    "deepseekv31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"a": "',
    "gemma4": '<|tool_call>call:look{a:<|"|>',
    "glm45": "<tool_call>look<arg_key>a</arg_key><arg_value>",
    "gpt-oss": '<|channel|>commentary to=functions.look<|message|>{"a": "',
    "hermes": '<tool_call>{"name": "look", "arguments": {"a": "',
    "pythonic": '[look(a="',
    "qwen3_coder": "<function=look><parameter=a>",
}
"""The beginning of a call, up to a string."""


def seconds(make: Callable[[], DeltaParser], pieces: Sequence[str]) -> float:
    """The time of the fastest of several runs."""
    best = float("inf")
    for _ in range(REPETITIONS):
        parser = make()
        began = time.perf_counter()
        for piece in pieces:
            parser.feed(piece)
        parser.end()
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pieces", type=int, default=100_000)
    asked = parser.parse_args()
    print(environment())
    texts = {
        "words": [" word"] * asked.pieces,
        "mixed": [WORDS[index % len(WORDS)] for index in range(asked.pieces)],
    }
    plain = {name: seconds(PlainParser, pieces) for name, pieces in texts.items()}
    makers: dict[str, Callable[[], DeltaParser]] = {
        f"calls: {name}": lambda form=form: form.parser(TOOLS)
        for name, form in {form.name: form for form in TOOL_FORMATS.values()}.items()
    }
    for name in ("qwen3", "gpt-oss"):
        form = REASONING_FORMATS[name]
        makers[f"reasoning: {name}"] = lambda form=form: form.parser(
            PlainParser(), starts_inside=True
        )
    print(
        f"{'microseconds a piece, beyond plain text':44}" + "".join(f"{each:>8}" for each in texts)
    )
    for name, make in makers.items():
        costs = [
            (seconds(make, pieces) - plain[text]) / asked.pieces * 1e6
            for text, pieces in texts.items()
        ]
        print(f"{name:44}" + "".join(f"{cost:8.2f}" for cost in costs))
    print(f"{'a megabyte of arguments, 4 characters a piece':52}{'s':>8}")
    for name, begun in BEGUN.items():
        raw = begun + "some words, 12 " * (1_000_000 // 15)
        pieces = [raw[at : at + 4] for at in range(0, len(raw), 4)]
        took = seconds(lambda name=name: TOOL_FORMATS[name].parser(TOOLS), pieces)
        print(f"{name:52}{took:8.2f}")


if __name__ == "__main__":
    main()
