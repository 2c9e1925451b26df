"""Loads for the default model on a CPU, each of which makes one limit bind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from workloads import VOCAB

QUESTIONS = (
    "What is the capital of {}?",
    "Name two rivers in {}.",
    "In one sentence, what is {} known for?",
)
PLACES = [
    "France",
    "Italy",
    "Spain",
    "Norway",
    "Japan",
    "Brazil",
    "Kenya",
    "Egypt",
    "India",
    "Peru",
    "Canada",
    "Chile",
]


@dataclass(slots=True, frozen=True)
class Load:
    """What a user asks, again and again."""

    prompt_tokens: int = 64
    """Random ids; 0: a short question in the model's chat format, which the model answers and
    ends."""
    output_tokens: int = 64
    """The limit of the request."""
    ends_early: bool = False
    """Whether answers may end before the limit. If not, they cannot, although the scheduler is not
    told so (min_new_tokens)."""
    exact: bool = False
    """Whether the scheduler knows the length (ignore_eos)."""
    think_s: float = 0.0

    def body(self, number: int) -> dict[str, Any]:
        sampling: dict[str, Any] = {"max_new_tokens": self.output_tokens, "temperature": 0.7}
        if self.exact:
            sampling["ignore_eos"] = True
        elif not self.ends_early:
            sampling["min_new_tokens"] = self.output_tokens
        asked: dict[str, Any] = {"sampling_params": sampling, "stream": True}
        if self.prompt_tokens:
            rng = np.random.default_rng([15, number])
            return asked | {"input_ids": rng.integers(*VOCAB, self.prompt_tokens).tolist()}
        question = QUESTIONS[number % len(QUESTIONS)].format(PLACES[number % len(PLACES)])
        turns = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return asked | {"text": turns}


@dataclass(slots=True, frozen=True)
class Scene:
    name: str
    expected: str
    """The cause."""
    load: Load
    users: int
    arguments: tuple[str, ...] = ()
    memory_mib: int | None = None
    """What the server and its files may use together."""


SCENES = (
    Scene("client-bound", "client-bound", Load(64, 128), users=2),
    Scene("seq-cap", "seq-cap", Load(64, 96), 24, ("--max-running-requests", "4")),
    Scene(
        "kv-conservative",
        "kv-conservative",
        Load(0, 1024, ends_early=True),
        32,
        ("--max-total-tokens", "6000"),
    ),
    Scene(
        "kv-optimistic",
        "kv-optimistic",
        Load(64, 512),
        32,
        ("--max-total-tokens", "6000", "--schedule-conservativeness", "0.1"),
    ),
    Scene(
        "kv-full",
        "kv-full",
        Load(400, 96, exact=True),
        48,
        ("--chunked-prefill-size", "2048"),
        memory_mib=1300,
    ),
    Scene(
        "prefill-budget",
        "prefill-budget",
        Load(192, 4),
        64,
        ("--chunked-prefill-size", "128", "--max-prefill-tokens", "128"),
    ),
    Scene(
        "mem-underused",
        "mem-underused",
        Load(400, 96, exact=True),
        64,
        ("--mem-fraction-static", "0.014", "--chunked-prefill-size", "2048"),
    ),
    Scene(
        "healthy",
        "healthy",
        Load(256, 32, exact=True),
        64,
        ("--chunked-prefill-size", "2048"),
        memory_mib=1500,
    ),
)
