"""Reads what a server says about itself while it starts (``Facts``).

Formats: SGLang's start-up lines since 2024 ("Load weight end. type=…, avail mem=…", "KV Cache is
allocated. #tokens: …", "Memory pool end", "Capture cuda graph …" and, in 2026, "Capture target
decode CUDA graph …"; sglang#4826, #11830, #12978, #27537) and those of Setpoint. Sizes are in GB
as printed, which is 2^30 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from setpoint.doctor.observations import Evidence, Facts
from setpoint.doctor.readers.log.server_args import options_of, without_secrets

_AROUND = 160
"""About how many characters before and after an option evidence from a long line shows."""
_NUMBER = r"(-?\d+(?:\.\d+)?)"
_PAIR = re.compile(
    r"\b(max_total_num_tokens?|chunked_prefill_size|max_prefill(?:_num)?_tokens?|"
    r"max_running_requests|context_len|available_[cg]pu_mem)=" + _NUMBER
)
_AVAILABLE = re.compile(r"avail mem=" + _NUMBER)
_USED = re.compile(r"mem usage=" + _NUMBER)
_SIZES = re.compile(r"\b(?:K|V|KV) size: " + _NUMBER)
_TOKENS = re.compile(r"#tokens: (\d+)")
_LIST = re.compile(r"\bbs[ =]\[([\d, ]+)\]")
_REDUCED = re.compile(r"(?:from the requested|from) (\d+) to (\d+)")
_MODEL = re.compile(r"Model: (.+) \(.*\)$")
_FIELDS = {
    "max_total_num_token": "max_total_num_tokens",
    "max_prefill_num_token": "max_prefill_tokens",
    "max_prefill_num_tokens": "max_prefill_tokens",
}


def is_ready_line(text: str) -> bool:
    """Whether this is the line that sums up the memory. Messages about leaks have some of its
    words."""
    return re.search(r"\bmax_total_num_tokens?=\d+, ", text) is not None and (
        "max_prefill" in text or "context_len" in text
    )


def learn(facts: Facts, text: str, said: Evidence) -> None:
    """Add the facts that one line states. The first statement of a fact holds, except for free
    memory, where the last one does."""
    if is_ready_line(text):
        _ready(facts, text, said)
    for words, learner in _LEARNERS.items():
        if words in text:
            learner(facts, text, said)


def put(facts: Facts, name: str, value: Any, said: Evidence, *, again: bool = False) -> None:
    if value is not None and (again or getattr(facts, name) in (None, [])):
        setattr(facts, name, value)
        facts.said[name] = said


def learn_options(facts: Facts, text: str, said: Evidence) -> None:
    """Add the options of a line. text: all options; ``said`` may show only the first."""
    text = without_secrets(text)
    found = options_of(text)
    facts.options = {name: value for name, (value, _) in found.items()}
    about = {name: _about(place, said, text) for name, (_, place) in found.items()}
    facts.said = {**about, **facts.said}
    names = {"model_path": "model", "context_length": "context_len"}
    for name in ("model_path", "context_length", "chunked_prefill_size", "max_prefill_tokens"):
        put(facts, names.get(name, name), facts.options.get(name), about.get(name, said))
    device = facts.options.get("device")
    if isinstance(device, str):
        put(facts, "device", "cpu" if device == "cpu" else "gpu", about["device"])


def _about(place: int, said: Evidence, text: str) -> Evidence:
    """The part of the line around an option, unchanged."""
    if place < len(said.text) - _AROUND:
        return said
    start = text.rfind(", ", 0, max(place - _AROUND, 0))
    part = text[start + 2 if start >= 0 else 0 :]
    return Evidence(said.line, f"{part[: 2 * _AROUND]}…" if len(part) > 2 * _AROUND else part)


def _ready(facts: Facts, text: str, said: Evidence) -> None:
    for name, number in _PAIR.findall(text):
        if name.startswith("available"):
            put(facts, "available_gb", float(number), said, again=True)
            put(facts, "device", "cpu" if "cpu" in name else "gpu", said, again=True)
        else:
            # Data-parallel ranks say the same; the resolved value counts more than the option.
            put(facts, _FIELDS.get(name, name), int(float(number)), said, again=True)


def _first(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.search(text)
    return float(found[1]) if found else None


def _weights_begin(facts: Facts, text: str, said: Evidence) -> None:
    # What --mem-fraction-static is a fraction of: the memory that is free before the weights.
    put(facts, "total_gb", _first(_AVAILABLE, text), said)


def _weights_end(facts: Facts, text: str, said: Evidence) -> None:
    used, left = _first(_USED, text), _first(_AVAILABLE, text)
    if used is None and left is not None and facts.total_gb is not None:
        used = round(facts.total_gb - left, 2)
    put(facts, "weights_gb", used, said)


def _cache(facts: Facts, text: str, said: Evidence) -> None:
    sizes = [float(size) for size in _SIZES.findall(text)]
    put(facts, "kv_gb", round(sum(sizes), 2) if sizes else None, said)
    tokens = _first(_TOKENS, text)
    put(facts, "max_total_num_tokens", None if tokens is None else int(tokens), said)


def _pool_end(facts: Facts, text: str, said: Evidence) -> None:
    put(facts, "left_after_pool_gb", _first(_AVAILABLE, text), said)
    if facts.options.get("disable_cuda_graph") is True:
        put(facts, "available_gb", facts.left_after_pool_gb, said)


def _capture(facts: Facts, text: str, said: Evidence) -> None:
    sizes = _LIST.search(text)
    if sizes:
        numbers = sorted(int(size) for size in sizes[1].split(",") if size.strip())
        put(facts, "graph_batch_sizes", numbers, said)
    if "end" in text:
        put(facts, "graph_gb", _first(_USED, text), said)
        put(facts, "available_gb", _first(_AVAILABLE, text), said, again=True)


def _model(facts: Facts, text: str, said: Evidence) -> None:
    found = _MODEL.search(text)
    put(facts, "model", found[1] if found else None, said)


def _reduced(facts: Facts, text: str, said: Evidence) -> None:
    found = _REDUCED.search(text)
    if found and "max_running_requests" in text:
        put(facts, "max_running_requests", int(found[2]), said)


_LEARNERS: dict[str, Callable[[Facts, str, Evidence], None]] = {
    "Load weight begin": _weights_begin,
    "oad weight end": _weights_end,
    "KV Cache is allocated": _cache,
    "Memory pool end": _pool_end,
    "Capture ": _capture,
    "Model: ": _model,
    "reduced from": _reduced,
}
