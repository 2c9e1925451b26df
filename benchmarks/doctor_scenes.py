"""Loads for the default model on a CPU, each of which makes one limit bind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from workloads import VOCAB

END = "2"
"""The default model's token that ends an answer."""
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
    """Number of random ids; 0: a short question in the model's chat format, to which the model
    writes an answer that ends by itself."""
    output_tokens: int = 64
    """The limit of the request."""
    ends_early: bool = False
    """Whether answers may end before the limit. If not, min_new_tokens prevents it, which the
    scheduler does not take into account."""
    ends_from: int = 0
    """Answers end at a length between this and the limit, which the server cannot know; 0: as
    ``ends_early`` says."""
    think_s: float = 0.0

    def body(self, number: int) -> dict[str, Any]:
        sampling: dict[str, Any] = {"max_new_tokens": self.output_tokens, "temperature": 0.7}
        rng = np.random.default_rng([15, number])
        if self.ends_from:
            # The end is forbidden until then, and certain afterwards.
            length = int(rng.integers(self.ends_from, self.output_tokens))
            sampling |= {"min_new_tokens": length, "logit_bias": {END: 100.0}}
        elif not self.ends_early:
            sampling["min_new_tokens"] = self.output_tokens
        asked: dict[str, Any] = {"sampling_params": sampling, "stream": True}
        if self.prompt_tokens:
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


OFTEN = ("--decode-log-interval", "10")
"""So that the log of a slow machine has decode lines, too."""
SMALL_POOL = ("--max-total-tokens", "5000", "--schedule-conservativeness", "0.3", *OFTEN)
"""A pool for about 40 requests of FILLING. The reserve for outputs is small, as the guides advise
for requests whose outputs end early, so that it keeps no request out."""
FILLING = Load(96, 48, ends_from=4)
"""Requests of 96 to 144 tokens, which hold more memory than they may still ask for, so that a pool
can be full of them. Their ends are spread out from the beginning."""

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
    Scene("kv-full", "kv-full", FILLING, 240, SMALL_POOL),
    Scene(
        "prefill-budget",
        "prefill-budget",
        Load(192, 4),
        64,
        ("--chunked-prefill-size", "128", "--max-prefill-tokens", "128"),
    ),
    # The weights and 2000 to 6000 tokens, with 12 to 20 GB of memory free before the start.
    Scene(
        "mem-underused",
        "mem-underused",
        FILLING,
        80,
        ("--mem-fraction-static", "0.011", "--schedule-conservativeness", "0.3", *OFTEN),
    ),
    Scene("healthy", "healthy", FILLING, 72, SMALL_POOL),
)
