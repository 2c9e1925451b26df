"""How far apart two models' predictions are, as figures and as a table (``quality`` has the
definitions)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

PROMPT = 64
"""Number of tokens before a greedy continuation."""
NUM_PROMPTS = 24


@dataclass(slots=True, frozen=True)
class TextWindows:
    """The texts as ids, divided into one window per request."""

    kinds: list[str]
    """The kind of text of each window."""
    ids: list[list[int]]

    def prompts(self, prefix: int) -> list[list[int]]:
        """Beginnings of greedy continuations, at equal distances. Each starts with the first
        ``prefix`` ids of its window, which do not come from the text."""
        starts = np.cumsum([0, *(len(ids) - prefix for ids in self.ids)])
        count = min(NUM_PROMPTS, max(int(starts[-1]) // PROMPT, 1))
        found = []
        for place in (np.arange(count) * starts[-1] // count).tolist():
            window = int(np.searchsorted(starts, place, side="right")) - 1
            ids = self.ids[window]
            begin = max(min(prefix + place - int(starts[window]), len(ids) - PROMPT), prefix)
            found.append(ids[:prefix] + ids[begin : begin + PROMPT])
        return found


@dataclass(slots=True, frozen=True)
class Predictions:
    """What one engine predicted."""

    logprobs: list[npt.NDArray[np.float64]]
    """For each window, the logprobs of its tokens except the first."""
    likeliest: list[npt.NDArray[np.int64]]
    """For each window, the ids that the model found likeliest at the same positions."""
    answers: list[list[int]]
    about: dict[str, Any]
    """Data types and kernels, for the result."""


def compare(windows: TextWindows, reference: Predictions, candidate: Predictions) -> dict[str, Any]:
    """The figures of the whole set, and those of each kind of text under ``by_text``."""
    kinds = list(dict.fromkeys(windows.kinds))
    of_kind = {
        kind: [index for index, each in enumerate(windows.kinds) if each == kind] for kind in kinds
    }
    pairs = list(zip(reference.answers, candidate.answers, strict=True))
    agreed = [
        sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*pair, strict=True)))
        for pair in pairs
    ]
    return {
        **_figures(range(len(windows.ids)), reference, candidate),
        "greedy_agreement": sum(agreed) / sum(len(answer) for answer in reference.answers),
        "identical_answers": sum(ours == theirs for ours, theirs in pairs),
        "num_answers": len(pairs),
        "by_text": {
            kind: _figures(indices, reference, candidate) for kind, indices in of_kind.items()
        },
        "reference": reference.about,
        "candidate": candidate.about,
    }


def _figures(
    indices: Sequence[int], reference: Predictions, candidate: Predictions
) -> dict[str, Any]:
    before = np.concatenate([reference.logprobs[index] for index in indices])
    after = np.concatenate([candidate.logprobs[index] for index in indices])
    same = np.concatenate(
        [reference.likeliest[index] == candidate.likeliest[index] for index in indices]
    )
    lost = before - after
    return {
        "num_tokens": len(before),
        "reference_perplexity": _exp(-before.mean()),
        "perplexity": _exp(-after.mean()),
        "perplexity_change": _exp(lost.mean()) - 1,
        "perplexity_change_error": float(lost.std() / math.sqrt(len(lost))),
        "mean_abs_logprob_change": float(np.abs(lost).mean()),
        "top1_agreement": float(same.mean()),
    }


def table(result: Mapping[str, Any]) -> str:
    """The table in Markdown."""
    lines = [
        f"{result['reference']['model']}",
        f"reference: {_engine_text(result['reference'])}",
        f"candidate: {_engine_text(result['candidate'])}",
        "",
        (
            "| text | tokens | reference perplexity | candidate | change | mean abs Δ ln p | top-1"
            " agreement |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in {**result["by_text"], "all": result}.items():
        change = f"{row['perplexity_change']:+.2%} ± {row['perplexity_change_error']:.2%}"
        lines.append(
            f"| {name} | {row['num_tokens']:,} | {row['reference_perplexity']:.3f} |"
            f" {row['perplexity']:.3f} | {change} | {row['mean_abs_logprob_change']:.4f} |"
            f" {row['top1_agreement']:.2%} |"
        )
    same, total = result["identical_answers"], result["num_answers"]
    return "\n".join(
        [
            *lines,
            "",
            (
                f"Greedy: {result['greedy_agreement']:.1%} of the tokens before the first"
                f" difference; {same} of {total} answers identical."
            ),
        ]
    )


def _engine_text(about: Mapping[str, Any]) -> str:
    quantization = about["quantization"] or "as in the checkpoint"
    types = (
        f"dtype {about['dtype']}, quantization {quantization}, KV cache {about['kv_cache_dtype']}"
    )
    return (
        f"{types}, linear layers {about['linear_layers']}, weights"
        f" {about['weight_bytes'] / 1e6:.1f} MB"
    )


def _exp(value: float) -> float:
    return float(np.exp(min(value, 700.0)))  # exp of a larger number would not fit in a float
