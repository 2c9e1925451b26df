"""Rewrites the engine's log lines into the formats of other generations of SGLang. Fields are taken
by name; what a generation does not print is left out."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from simulate import Line

Generation = Literal["sglang-2024", "sglang-2025", "sglang-0.5.23", "setpoint"]
_FIELD = re.compile(r"(#[\w-]+|[a-z][a-z ()/]*): ([^,]+)")
_RETRACTION = re.compile(
    r"#retracted_reqs: (\d+), #new_tokens_gained: (\d+), #new_token_ratio: (\S+) -> (\S+)"
)


@dataclass(slots=True, frozen=True)
class Style:
    """How a log looks, besides its generation."""

    stamps: Literal["date", "time", "none"] = "date"
    rank: str = " TP0"
    """The rank in the prefix of the engine's lines. The lines of each data-parallel rank have their
    own."""
    trailing_comma: bool = False
    """Versions of the middle of 2025 end batch lines with a comma."""
    access: float = 0.0
    """Probability of an access line after a batch line."""
    wrapper: Literal["none", "docker", "kubernetes", "json", "ansi"] = "none"
    oldest_retraction: bool = False
    """The retraction message of 2024's first half."""
    begin: str = "2025-06-12 09:00:00"


class Writer:
    """Writes one log."""

    def __init__(self, generation: Generation, style: Style, seed: int) -> None:
        self._generation = generation
        self._style = style
        self._rng = random.Random(seed)
        self._begin = datetime.fromisoformat(style.begin).replace(tzinfo=UTC)
        self._prompt_tokens: dict[str, list[int]] = {}
        """Rank -> prompt tokens so far: cached, all."""

    def lines(self, lines: Iterable[Line]) -> Iterator[str]:
        for line in lines:
            yield self.stamped(line.at, self._rank_of(line), self._level(line) + self._text(line))
            if self._style.access and self._rng.random() < self._style.access:
                yield self.access(line.at)

    def stamped(self, at: float, rank: str, message: str) -> str:
        """``at``: seconds since ``begin``; a start-up line has a negative one."""
        when = self._begin + timedelta(seconds=at)
        match self._style.stamps:
            case "date":
                prefix = f"[{when:%Y-%m-%d %H:%M:%S}{rank}] "
            case "time":
                prefix = f"[{when:%H:%M:%S}{rank}] "
            case "none":
                prefix = f"[{rank.strip()}] " if rank else ""
        return self._wrapped(prefix + message, when)

    def bare(self, at: float, message: str) -> str:
        """A line without the prefix of the logger."""
        return self._wrapped(message, self._begin + timedelta(seconds=at))

    def access(self, at: float, path: str = "/v1/chat/completions", status: int = 200) -> str:
        port = self._rng.randint(32768, 60999)
        level = "\x1b[32mINFO\x1b[0m" if self._style.wrapper == "ansi" else "INFO"
        words = {200: "OK", 500: "Internal Server Error", 503: "Service Unavailable"}[status]
        message = f'{level}:     127.0.0.1:{port} - "POST {path} HTTP/1.1" {status} {words}'
        return self.stamped(at, "", message) if self._style.stamps != "none" else message

    def _wrapped(self, text: str, when: datetime) -> str:
        match self._style.wrapper:
            case "docker":
                return f"{when:%Y-%m-%dT%H:%M:%S}.{self._rng.randrange(10**9):09d}Z {text}"
            case "kubernetes":
                return f"{when:%Y-%m-%dT%H:%M:%S}.{self._rng.randrange(10**9):09d}Z stderr F {text}"
            case "json":
                escaped = text.replace("\\", "\\\\").replace('"', '\\"')
                return (
                    f'{{"log":"{escaped}\\n","stream":"stderr","time":"{when:%Y-%m-%dT%H:%M:%S}Z"}}'
                )
            case _:
                return text

    def _rank_of(self, line: Line) -> str:
        return f" {line.rank}" if line.rank else self._style.rank

    def _level(self, line: Line) -> str:
        shown = self._generation == "setpoint" and line.level != "INFO"
        return f"{line.level}: " if shown else ""

    def _text(self, line: Line) -> str:
        message = line.message
        if self._generation in ("setpoint", "sglang-0.5.23"):
            return message
        if found := _RETRACTION.search(message):
            number, _, before, after = found.groups()
            counts = f"#retracted_reqs: {number}, #new_token_ratio: {before} -> {after}"
            if self._generation == "sglang-2025":
                return f"KV cache pool is full. Retract requests. {counts}"
            if self._style.oldest_retraction:
                return f"decode out of memory happened, {counts}"
            return f"Decode out of memory happened. {counts}"
        fields = dict(_FIELD.findall(message))
        if message.startswith("Prefill batch"):
            return self._prefill(fields, line.rank)
        if message.startswith("Decode batch"):
            return self._decode(fields)
        return message

    def _prefill(self, fields: dict[str, str], rank: str) -> str:
        begin = (
            f"Prefill batch. #new-seq: {fields['#new-seq']}, #new-token: {fields['#new-token']},"
            f" #cached-token: {fields['#cached-token']}, "
        )
        end = (
            f"token usage: {fields['token usage']}, #running-req: {fields['#running-req']},"
            f" #queue-req: {fields['#queue-req']}"
        )
        if self._generation == "sglang-2025":
            return begin + end + self._comma
        # The hit rate of 2024 is that of all prompt tokens since the start.
        sums = self._prompt_tokens.setdefault(rank, [0, 0])
        sums[0] += int(fields["#cached-token"])
        sums[1] += int(fields["#cached-token"]) + int(fields["#new-token"])
        return f"{begin}cache hit rate: {100 * sums[0] / max(sums[1], 1):.2f}%, {end}"

    def _decode(self, fields: dict[str, str]) -> str:
        graph = f"cuda graph: {fields.get('cuda graph', 'False')}, "
        throughput = fields.get("gen throughput (token/s)", "0.00")
        return (
            f"Decode batch. #running-req: {fields['#running-req']}, #token: {fields['#token']},"
            f" token usage: {fields['token usage']},"
            f" {graph if self._generation == 'sglang-2025' else ''}gen throughput (token/s):"
            f" {throughput}, #queue-req: {fields['#queue-req']}{self._comma}"
        )

    @property
    def _comma(self) -> str:
        return ", " if self._style.trailing_comma and self._generation == "sglang-2025" else ""
