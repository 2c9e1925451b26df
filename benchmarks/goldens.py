"""The golden table: every supported architecture and variant against transformers, in fp32 on the
CPU.

    python benchmarks/goldens.py [--only NAME] [--tokens 24] [--no-default-model]

Tiny random models of ``setpoint_testing.goldens`` and the default model. Each model answers prompts
of several lengths greedily through scheduler, radix cache and runner: in chunks, all together, then
once more from the cache. Every sampled position is compared with transformers: the largest
difference of a logit (also divided by the spread of the logits), and whether the token is the one
that transformers would have chosen. A near tie is another token where transformers preferred its
own by less than 1e-3 of a logit. The exit code is 1 if anything disagrees.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import environment
from transformers import AutoTokenizer
from transformers.utils import logging

from setpoint.checkpoint.source import DEFAULT_MODEL, locate
from setpoint.frontend.text.template_source import find_chat_template
from setpoint_testing.against_transformers import (
    TOLERANCES,
    Agreement,
    measure,
    template_differences,
    write_tiny,
)
from setpoint_testing.chat_templates import TEMPLATES
from setpoint_testing.goldens import GOLDENS
from setpoint_testing.library_goldens import THROUGH_TRANSFORMERS

DEFAULT_PROMPTS = (1, 17, 64, 200)
COLUMNS = (
    "model",
    "implementation",
    "max logit error",
    "relative",
    "greedy tokens equal",
    "near ties",
    "from cache",
    "template",
)


@dataclass(frozen=True)
class Row:
    name: str
    found: Agreement
    templates_differ: list[str]

    @property
    def agrees(self) -> bool:
        return (
            self.found.relative < TOLERANCES["float32"]
            and not self.found.wrong
            and not self.templates_differ
        )

    def __str__(self) -> str:
        found = self.found
        equal = found.num_tokens - found.wrong - found.near_ties
        cells = (
            self.name,
            found.implementation,
            f"{found.max_error:.1e}",
            f"{found.relative:.1e}",
            f"{equal} of {found.num_tokens} over {found.num_prompts} prompts",
            str(found.near_ties),
            f"{found.num_cached} tokens",
            "differs" if self.templates_differ else "equal",
        )
        return f"| {' | '.join(cells)} |" + ("" if self.agrees else " **DISAGREES**")


def rows(only: str, num_tokens: int, default_model: bool) -> Iterator[Row]:
    for golden in GOLDENS + THROUGH_TRANSFORMERS:
        if only in golden.name:
            with tempfile.TemporaryDirectory() as folder:
                write_tiny(Path(folder), golden.config)
                found = measure(
                    Path(folder),
                    context_len=golden.context_len,
                    prompt_lengths=golden.prompt_lengths,
                    num_new=num_tokens,
                    model_impl=golden.model_impl,
                )
            yield Row(golden.name, found, template_differences(TEMPLATES[golden.template]))
    if default_model and only in DEFAULT_MODEL:
        folder = locate(None, log=lambda line: print(line, file=sys.stderr)).folder
        found = measure(
            folder,
            context_len=512,
            prompt_lengths=DEFAULT_PROMPTS,
            num_new=num_tokens,
            num_threads=torch.get_num_threads(),
        )
        template = find_chat_template(folder)
        assert template is not None
        yield Row(
            DEFAULT_MODEL,
            found,
            template_differences(template, tokenizer=AutoTokenizer.from_pretrained(folder)),
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="NAME", help="models whose name contains this"
    )
    parser.add_argument("--tokens", type=int, default=24, help="greedy tokens per prompt")
    parser.add_argument("--no-default-model", action="store_true", help="tiny models only")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(environment("torch", "transformers", times=False))
    print(f"\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    agree = True
    for row in rows(arguments.only, arguments.tokens, not arguments.no_default_model):
        print(row, flush=True)
        agree &= row.agrees
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
