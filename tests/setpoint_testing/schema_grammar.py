"""The grammar of a JSON schema, walked byte by byte: which texts it accepts."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from setpoint.core.errors import RequestError
from setpoint.grammar.guidance import LIMITS
from setpoint.grammar.schema import llguidance_schema
from setpoint.schemas.reading import checked_schema
from setpoint.schemas.report import LossReport
from setpoint.schemas.rewriting import rewritten

_BYTES = LLTokenizer("byte")


class SchemaGrammar:
    """Raises RequestError for a schema that is refused."""

    def __init__(self, schema: Any) -> None:
        found = rewritten(checked_schema(schema))
        self.schema = found.schema
        self.report: LossReport = found.report
        definition = json.dumps(llguidance_schema(found.schema))
        self._matcher = LLMatcher(
            _BYTES,
            LLMatcher.grammar_from_json_schema(definition),
            log_level=0,
            limits=LLParserLimits(verbose_errors=False, **LIMITS),
        )
        if not self._matcher.is_error():
            self._matcher.compute_bitmask()  # a grammar that can match nothing fails here
        if self._matcher.is_error():
            raise RequestError(self._matcher.get_error().split("\n")[0])

    def accepts(self, value: Any) -> bool:
        """Whether an output may be this value, as compact JSON."""
        return self.accepts_text(json.dumps(value, separators=(",", ":"), ensure_ascii=False))

    def accepts_text(self, text: str) -> bool:
        """Whether an output may be this JSON text."""
        tokens, matcher = list(text.encode()), self._matcher.deep_copy()
        return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())
