"""Outputs of a grammar without a model: tokens drawn at random from those that its masks allow."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jsonschema import Draft202012Validator, FormatChecker, ValidationError
from jsonschema.validators import validator_for

from setpoint.core.errors import RequestError
from setpoint.core.grammar import Grammar, GrammarFactory, NotReady
from setpoint.core.request import Ids, Request, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint.grammar.schema import FORMATS
from setpoint.launch.child.grammars import grammar_factory
from setpoint.schemas.reading import checked_schema
from setpoint.schemas.rewriting import rewritten

MAX_TOKENS = 3000
PATIENCE = 60
"""Number of tokens after which ``random_output`` prefers tokens that bring an end nearer."""
CLOSING = frozenset('"]},>.@')
"""Texts of the tokens that bring the end of an output nearer."""


@dataclass(slots=True)
class Output:
    ids: list[int] = field(default_factory=list)
    is_whole: bool = False
    """Whether the grammar ended it, or let it end."""
    mask_s: list[float] = field(default_factory=list)
    """Seconds that each mask took."""


class Patient:
    """A grammar whose caller waits for it, which a loop must not do."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        grammar.make_ready()

    def accept(self, token: int) -> None:
        self._grammar.accept(token)
        self._grammar.make_ready()

    def allows(self, token: int) -> bool:
        return self._grammar.allows(token)

    def forced(self, most: int) -> list[int]:
        while True:
            try:
                return list(self._grammar.forced(most))
            except NotReady:
                self._grammar.make_ready()

    def fill_mask(self, words: Ids, num_forced: int) -> None:
        self._grammar.fill_mask(words, num_forced)

    @property
    def terminated(self) -> bool:
        return self._grammar.terminated

    def make_ready(self) -> None:
        """Do nothing: it is always ready."""


def allowed_tokens(grammar: Grammar, vocab_size: int) -> list[int]:
    """The tokens that the grammar allows next, in order."""
    words = np.zeros(-(-vocab_size // 32), np.int32)
    grammar.fill_mask(words, 0)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


def random_output(
    grammar: Grammar,
    draw: random.Random,
    *,
    vocab_size: int,
    ends: Collection[int],
    closers: Collection[int],
) -> Output:
    """Draw tokens until the output ends; returns it. ends: the tokens that end an output. closers:
    tokens that bring an end nearer, which a long output prefers."""
    output = Output()
    while len(output.ids) < MAX_TOKENS:
        began = time.perf_counter()
        allowed = allowed_tokens(grammar, vocab_size)
        output.mask_s.append(time.perf_counter() - began)
        assert allowed, "a mask without a token"
        is_long = len(output.ids) > PATIENCE
        if not set(ends).isdisjoint(allowed):
            if is_long or len(allowed) == len(ends) or draw.random() < 0.3:
                output.is_whole = True
                return output
            allowed = [token for token in allowed if token not in ends]
        if draw.random() < (0.9 if is_long else 0.2):
            allowed = [token for token in allowed if token in closers] or allowed
        token = draw.choice(allowed)
        grammar.accept(token)
        output.ids.append(token)
        if grammar.terminated:
            output.is_whole = True
            return output
    return output


@dataclass(slots=True)
class Verdict:
    """What became of one schema."""

    outcome: Literal["passed", "warned", "refused", "failed", "unfinished"]
    """warned: the schema is not enforced as a whole, and clients are told so. failed: an output
    does not satisfy the schema. unfinished: a random output found no end."""
    why: str = ""
    compile_s: float = 0.0
    mask_s: list[float] = field(default_factory=list)


class SchemaJudge:
    """Draws outputs under schemas over a real vocabulary, and validates them with jsonschema."""

    def __init__(
        self,
        folder: str,
        *,
        vocab_size: int,
        ends: Collection[int],
        backend: str = "llguidance",
    ) -> None:
        """folder: has the tokenizer. ends: the tokens that end an output. backend: a value of
        ``--grammar-backend``."""
        self._tokenizer = Tokenizer.from_folder(folder)
        self._vocab_size = vocab_size
        self._ends = tuple(ends)
        self.make: GrammarFactory = grammar_factory(
            backend, folder, vocab_size=vocab_size, eos_token_ids=self._ends
        )
        known = range(self._tokenizer.vocab_size)
        self._closers = {each for each in known if self._tokenizer.token_text(each) in CLOSING}

    def verdict(self, schema: Any, *, samples: int) -> Verdict:
        began = time.perf_counter()
        try:
            found = rewritten(checked_schema(schema))
            request = request_under(json_schema=found.schema)
            self.make(request)
        except RequestError as error:
            return Verdict("refused", error.message, time.perf_counter() - began)
        seconds = time.perf_counter() - began
        if found.report.unenforced:
            return Verdict("warned", found.report.unenforced, seconds)
        verdict = Verdict("passed", compile_s=seconds)
        kind = validator_for(schema, default=Draft202012Validator)
        # The other formats are annotations: an output need not conform to them.
        checker = FormatChecker(FORMATS & set(kind.FORMAT_CHECKER.checkers))
        validator = kind(schema, format_checker=checker)
        for seed in range(samples):
            output = random_output(
                Patient(self.make(request)),
                random.Random(seed),
                vocab_size=self._vocab_size,
                ends=self._ends,
                closers=self._closers,
            )
            verdict.mask_s += output.mask_s
            if not output.is_whole:
                verdict.outcome = "unfinished"
                continue
            text = self._tokenizer.decode(output.ids, skip_special_tokens=False)
            try:
                validator.validate(json.loads(text))
            except (ValueError, ValidationError) as error:
                verdict.outcome, verdict.why = "failed", f"{text[:200]!r}: {str(error)[:200]}"
                break
        return verdict


def request_under(**constraint: Any) -> Request:
    sampling = SamplingParams(**constraint)
    return Request(rid="constrained", prompt_ids=pack_ids([1]), sampling=sampling, seed=0)


def read_schemas(folder: Path) -> dict[str, Any]:
    """The schemas of all files in the folder, by "file: name"."""
    return {
        f"{path.stem}: {name}": schema
        for path in sorted(folder.glob("*.json"))
        for name, schema in json.loads(path.read_text(encoding="utf-8")).items()
    }
