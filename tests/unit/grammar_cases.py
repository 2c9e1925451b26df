"""A factory of grammars over the byte tokenizer, and whether it lets a text through."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from setpoint.core.errors import RequestError
from setpoint.core.grammar import Grammar, GrammarFactory
from setpoint.core.request import Request, RequestOptions, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.grammar.schema import USUAL, JsonSpacing
from setpoint.launch.child.grammars import grammar_factory
from setpoint_testing.byte_tokenizer import EOS_ID, IM_END_ID, VOCAB_SIZE, write_byte_tokenizer
from setpoint_testing.constrained import Patient, allowed_tokens

BACKENDS = (
    "llguidance",
    pytest.param(
        "xgrammar",
        marks=pytest.mark.skipif(find_spec("xgrammar") is None, reason="xgrammar is an extra"),
    ),
)
SPECIAL = {"<|bos|>": 256, "<|eos|>": EOS_ID, "<|im_start|>": 258, "<|im_end|>": IM_END_ID}
ENDS = (EOS_ID, IM_END_ID)


@cache
def factory(backend: str = "llguidance", spacing: JsonSpacing = USUAL) -> GrammarFactory:
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(folder)
        make = grammar_factory(backend, folder, spacing, vocab_size=VOCAB_SIZE, eos_token_ids=ENDS)
        make(request(regex="a"))  # reads the tokenizer
        return make


def request(*, constrain_after: tuple[int, ...] = (), **sampling: Any) -> Request:
    return Request(
        rid="r",
        prompt_ids=pack_ids([1]),
        sampling=SamplingParams(**sampling),
        seed=0,
        options=RequestOptions(constrain_after=constrain_after),
    )


def grammar(*, backend: str = "llguidance", spacing: JsonSpacing = USUAL, **wanted: Any) -> Grammar:
    return Patient(factory(backend, spacing)(request(**wanted)))


def allowed(grammar: Grammar, vocab_size: int = VOCAB_SIZE) -> set[int]:
    return set(allowed_tokens(grammar, vocab_size))


def ids_of(text: str) -> list[int]:
    """The text's bytes; the names of special tokens are these tokens."""
    ids: list[int] = []
    for part in re.split(r"(<\|\w+\|>)", text):
        ids += [SPECIAL[part]] if part in SPECIAL else part.encode()
    return ids


def verdict(text: str, **wanted: Any) -> str:
    """What a grammar makes of a text: "no", or "open" if it must go on, "may end", "ends"."""
    found = grammar(**wanted)
    for token in ids_of(text):
        if token not in allowed(found):
            return "no"
        found.accept(token)
    if found.terminated:
        return "ends"
    return "may end" if allowed(found) & set(ENDS) else "open"


def refusal(**wanted: Any) -> str:
    """The words with which a constraint is refused."""
    with pytest.raises(RequestError) as caught:
        grammar(**wanted)
    assert caught.value.status_code == 400
    return caught.value.message
