"""Grammars of the xgrammar library, behind ``core.grammar``."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import xgrammar

from setpoint.core.constraint import Constraint, ConstraintKind
from setpoint.core.errors import RequestError
from setpoint.core.plan import forbid
from setpoint.core.request import Ids
from setpoint.engine.grammar.xgrammar_schema import check_expression, enforced_schema
from setpoint.grammar.cache import CompiledCache
from setpoint.grammar.factory import CachingFactory
from setpoint.grammar.lookahead import Automaton
from setpoint.grammar.masks import NOTHING_ALLOWED, MaskBudget, forbid_while_others, stuck
from setpoint.grammar.refusal import not_compiled
from setpoint.grammar.schema import MAX_WHITESPACE, read_schema
from setpoint.grammar.tags import parsed
from setpoint.grammar.vocabulary import Vocabulary

MAX_CACHED_BYTES = 512 << 20
"""Most memory of all cached grammars together. That of a usual schema takes 8 MB for 49,000
tokens."""

_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
"""What xgrammar writes before an error: the time, and the place in its own code."""

_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
"""Control characters but the line breaks, which are possible between the parts of a JSON text."""


@dataclass(slots=True, frozen=True)
class Compiled:
    grammar: xgrammar.CompiledGrammar
    possible: Ids
    """[ceil(vocab / 32)] bits of the tokens that a mask may have."""


@dataclass(slots=True, frozen=True)
class _Tokens:
    """What is made of a tokenizer once."""

    compiler: xgrammar.GrammarCompiler
    in_json: npt.NDArray[np.uint8]
    """[vocab] 1 for the tokens that JSON may contain."""


class XgrammarGrammar:
    """Implements Automaton. Once it is made, only the loop calls it."""

    def __init__(self, compiled: Compiled, vocabulary: Vocabulary, *, ignore_eos: bool) -> None:
        """ignore_eos: where the grammar allows more tokens, it does not allow the end."""
        self._matcher = xgrammar.GrammarMatcher(compiled.grammar)
        self._possible = compiled.possible
        self._ends = vocabulary.eos_token_ids
        self._ignores_eos = ignore_eos
        self._budget = MaskBudget()
        self._mask = np.zeros((1, len(compiled.possible)), np.int32)
        self._is_current = False
        """Whether ``_mask`` has the tokens that may come next."""
        self._terminated = False

    def accept(self, token: int) -> None:
        began = time.thread_time()
        if not self._matcher.accept_token(token):
            raise RequestError(f"The grammar does not allow token {token}.")
        self._is_current = False
        self._terminated = self._matcher.is_terminated()
        if not self._terminated and self._matcher.is_completed():
            # xgrammar waits for an end token even where nothing else may follow.
            self._look()
            others = self._mask[0].copy()
            forbid(others, self._ends)
            self._terminated = not others.any()
        self._budget.spend(time.thread_time() - began)

    def fill_mask(self, words: Ids) -> None:
        if not self._is_current:
            began = time.thread_time()
            self._look()
            self._budget.spend(time.thread_time() - began)
        words[:] = self._mask[0]
        if self._ignores_eos:
            forbid_while_others(words, self._ends)
        if not words.any():
            raise stuck(NOTHING_ALLOWED)

    def allows_something(self) -> bool:
        """Whether any token may come next."""
        self._look()
        return bool(self._mask.any())

    def _look(self) -> None:
        self._matcher.fill_next_token_bitmask(self._mask)
        self._mask[0] &= self._possible
        self._is_current = True

    @property
    def terminated(self) -> bool:
        return self._terminated


class XgrammarFactory(CachingFactory[Compiled]):
    """Grammars of xgrammar. It releases the interpreter's lock while it compiles."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(
            vocabulary,
            CompiledCache(
                lambda _, compiled: compiled.grammar.memory_size_bytes, max_size=MAX_CACHED_BYTES
            ),
        )
        self._lock = threading.Lock()
        self._made: _Tokens | None = None

    def _tokens(self) -> _Tokens:
        """Made by the first grammar: most servers never need it."""
        with self._lock:
            if self._made is None:
                vocabulary = self._vocabulary
                texts = vocabulary.token_bytes
                info = xgrammar.TokenizerInfo(
                    texts,
                    xgrammar.VocabType.RAW,
                    vocab_size=vocabulary.size,
                    stop_token_ids=list(vocabulary.eos_token_ids),
                )
                # One thread for each grammar, and no second cache.
                compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
                in_json = np.array([_CONTROL.search(each) is None for each in texts], np.uint8)
                self._made = _Tokens(compiler, in_json)
            return self._made

    def _compile(self, constraint: Constraint) -> Compiled:
        compiler = self._tokens().compiler
        try:
            definition = _definition(constraint)
            match constraint.kind:
                case "json_schema":
                    grammar = compiler.compile_json_schema(
                        definition, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE
                    )
                case "regex":
                    grammar = compiler.compile_regex(definition)
                case "ebnf":
                    grammar = compiler.compile_grammar(definition)
                case "structural_tag":
                    grammar = compiler.compile_structural_tag(definition)
        except RequestError as error:
            raise not_compiled(constraint, error.message) from None
        except (RuntimeError, ValueError) as error:
            raise not_compiled(constraint, _PLACE.sub("", str(error))) from None
        compiled = Compiled(grammar, self._possible(constraint.kind, definition))
        if not XgrammarGrammar(compiled, self._vocabulary, ignore_eos=False).allows_something():
            raise not_compiled(constraint, NOTHING_ALLOWED)
        return compiled

    def _possible(self, kind: ConstraintKind, definition: str) -> Ids:
        """The bits of the tokens that a mask may have: not special ones, except those that end an
        output, and those that a structural tag spells; in JSON no control characters, which
        xgrammar lets through where a string has a length."""
        vocabulary = self._vocabulary
        bits = np.zeros(-(-vocabulary.size // 32) * 32, np.uint8)
        bits[: vocabulary.size] = self._tokens().in_json if kind == "json_schema" else 1
        for name, token in vocabulary.special_tokens.items():
            if token < vocabulary.size:
                is_spelt = kind == "structural_tag" and json.dumps(name)[1:-1] in definition
                bits[token] = is_spelt or token in vocabulary.eos_token_ids
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _start(self, compiled: Compiled, *, ignore_eos: bool) -> Automaton:
        return XgrammarGrammar(compiled, self._vocabulary, ignore_eos=ignore_eos)


def _definition(constraint: Constraint) -> str:
    """What xgrammar compiles. Raises RequestError (400) for what it would ignore."""
    match constraint.kind:
        case "json_schema":
            return json.dumps(enforced_schema(read_schema(constraint.text)))
        case "regex":
            check_expression(constraint.text)
            return constraint.text
        case "ebnf":
            return constraint.text
        case "structural_tag":
            return _structural_tag(constraint.text)


def _structural_tag(text: str) -> str:
    """Either form of a structural tag in xgrammar's own. Raises RequestError (400)."""
    tag = msgspec.to_builtins(parsed(text))
    _check_schemas(tag)
    return json.dumps({"type": "structural_tag", "format": tag})


def _check_schemas(node: object) -> None:
    """Raise RequestError (400) if a schema of a structural tag has what would be ignored."""
    if isinstance(node, list):
        for each in node:
            _check_schemas(each)
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "json_schema":
                enforced_schema(value)
            elif key == "pattern":
                check_expression(value)
            else:
                _check_schemas(value)
