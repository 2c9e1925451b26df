"""Compiles constraints with the xgrammar library and matches outputs against them. Runs in the
processes of ``grammar.processes``, because the library's calls have no time limit.
"""

from __future__ import annotations

import json
import re

import msgspec
import numpy as np
import xgrammar

from setpoint.core.constraint import Constraint, ConstraintKind
from setpoint.core.errors import RequestError
from setpoint.core.plan import forbid
from setpoint.core.request import Ids
from setpoint.engine.grammar.xgrammar_schema import enforced_expression, enforced_schema
from setpoint.grammar.tags import parse_tag
from setpoint.grammar.vocabulary import Vocabulary
from setpoint.schemas.reading import read_schema

_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
"""What xgrammar writes before an error message: the time, and the place in its own code."""

_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
"""Control characters except line breaks, which may occur between the parts of a JSON text."""


class XgrammarMatcher:
    """Implements Matcher."""

    def __init__(
        self, grammar: xgrammar.CompiledGrammar, possible: Ids, ends: tuple[int, ...]
    ) -> None:
        """possible: [ceil(vocab / 32)] bits of the tokens that a mask may allow. ends: the tokens
        that end an output."""
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._possible = possible
        self._ends = ends
        self._mask = np.zeros((1, len(possible)), np.int32)
        self._is_current = False
        """Whether ``_mask`` is the mask of the next token."""
        self.terminated = False

    def accept(self, token: int) -> None:
        if not self._matcher.accept_token(token):
            raise RequestError(f"The grammar does not allow token {token}.")
        self._is_current = False
        self.terminated = self._matcher.is_terminated()
        if not self.terminated and self._matcher.is_completed():
            # xgrammar waits for an end token even if nothing else may follow.
            self._update_mask()
            others = self._mask[0].copy()
            forbid(others, self._ends)
            self.terminated = not others.any()

    def fill_mask(self, words: Ids) -> None:
        if not self._is_current:
            self._update_mask()
        words[:] = self._mask[0]

    def _update_mask(self) -> None:
        self._matcher.fill_next_token_bitmask(self._mask)
        self._mask[0] &= self._possible
        self._is_current = True


class XgrammarConstraint:
    """Implements grammar.process_server.CompiledConstraint."""

    def __init__(
        self, grammar: xgrammar.CompiledGrammar, possible: Ids, ends: tuple[int, ...]
    ) -> None:
        self._grammar = grammar
        self._possible = possible
        self._ends = ends
        self.num_bytes: int = grammar.memory_size_bytes

    def start(self) -> XgrammarMatcher:
        return XgrammarMatcher(self._grammar, self._possible, self._ends)


class XgrammarCompiler:
    """Implements grammar.process_server.Compiler. Reads the tokenizer when it is made."""

    def __init__(self, vocabulary: Vocabulary, max_whitespace: int) -> None:
        """max_whitespace: most characters of it between two parts of a JSON text. Raises
        RequestError (400) if the tokenizer cannot be used."""
        self._vocabulary, self._max_whitespace = vocabulary, max_whitespace
        texts = vocabulary.token_bytes
        info = xgrammar.TokenizerInfo(
            texts,
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.eos_token_ids),
        )
        # One thread for each grammar, and no cache.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._in_json = np.array([_CONTROL.search(each) is None for each in texts], np.uint8)
        """[vocab] 1 for the tokens that JSON may contain."""

    def __call__(self, constraint: Constraint) -> XgrammarConstraint:
        compiler = self._compiler
        definition = _definition(constraint)
        try:
            match constraint.kind:
                case "json_schema":
                    most = self._max_whitespace
                    grammar = compiler.compile_json_schema(
                        definition,
                        strict_mode=False,
                        any_whitespace=most > 0,
                        max_whitespace_cnt=most or None,
                        separators=None if most else (",", ":"),
                    )
                case "regex":
                    grammar = compiler.compile_regex(definition)
                case "ebnf":
                    grammar = compiler.compile_grammar(definition)
                case "structural_tag":
                    grammar = compiler.compile_structural_tag(definition)
        except (RuntimeError, ValueError) as error:
            raise RequestError(_PLACE.sub("", str(error))) from None
        return XgrammarConstraint(
            grammar, self._possible(constraint.kind, definition), self._vocabulary.eos_token_ids
        )

    def _possible(self, kind: ConstraintKind, definition: str) -> Ids:
        """The bits of the tokens that a mask may allow. Special tokens are excluded, except those
        that end an output and those that a structural tag contains. In JSON, so are control
        characters, which xgrammar allows in a string with a length limit."""
        vocabulary = self._vocabulary
        bits = np.zeros(-(-vocabulary.size // 32) * 32, np.uint8)
        bits[: vocabulary.size] = self._in_json if kind == "json_schema" else 1
        for name, token in vocabulary.special_tokens.items():
            if token < vocabulary.size:
                is_in_tag = kind == "structural_tag" and json.dumps(name)[1:-1] in definition
                bits[token] = is_in_tag or token in vocabulary.eos_token_ids
        return np.packbits(bits, bitorder="little").view(np.int32)


def _definition(constraint: Constraint) -> str:
    """The text that xgrammar compiles. Raises RequestError (400) for what it would ignore."""
    match constraint.kind:
        case "json_schema":
            return json.dumps(enforced_schema(read_schema(constraint.text)))
        case "regex":
            return enforced_expression(constraint.text)
        case "ebnf":
            return constraint.text
        case "structural_tag":
            return _structural_tag(constraint.text)


def _structural_tag(text: str) -> str:
    """A structural tag of either form, in xgrammar's own form. Raises RequestError (400)."""
    tag = msgspec.to_builtins(parse_tag(text))
    _prepare(tag)
    return json.dumps({"type": "structural_tag", "format": tag})


def _prepare(node: object) -> None:
    """Write the schemas and expressions of a structural tag as xgrammar compiles them, in place.
    Raises RequestError (400) if one contains what xgrammar would ignore."""
    if isinstance(node, list):
        for each in node:
            _prepare(each)
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "json_schema":
                node[key] = enforced_schema(value)
            elif key == "pattern":
                node[key] = enforced_expression(value)
            else:
                _prepare(value)
