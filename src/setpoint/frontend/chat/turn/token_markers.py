"""Markers that are tokens of the model. The same characters, written as ordinary text by other
tokens, are no marker: they are guarded from the parser, which sees only text, and come out as they
were written (decision 0087)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from setpoint.frontend.chat.deltas import Delta, ToolCallDelta
from setpoint.frontend.chat.formats.scanning import Markers
from setpoint.frontend.chat.formats.tool_format import ReasoningFormat, ToolFormat
from setpoint.frontend.chat.parser import DeltaParser
from setpoint.frontend.text.detokenizer import REPLACEMENT
from setpoint.frontend.text.tokenizer import Tokenizer

_GUARD = "\ufdd0"
"""Stands behind the first character of guarded text while the parser reads it. Unicode keeps this
code point for such uses within a program; where a model writes it, it becomes U+FFFD."""
_MIN_CHARS = 3
"""Shorter tokens ("[", "</") are no markers."""


def token_markers(
    tokenizer: Tokenizer | None, form: ToolFormat | ReasoningFormat | None
) -> tuple[str, ...]:
    """The tokens in a format's markers."""
    if tokenizer is None or form is None:
        return ()
    whole = "\0".join(form.markers)
    return tuple(
        token
        for token in tokenizer.added_tokens.values()
        if len(token) >= _MIN_CHARS and not token[0].isalnum() and token.strip() and token in whole
    )


class AnswerParser:
    """Parses the text of one sequence, and is told where in it the text of added tokens begins."""

    def __init__(self, parser: DeltaParser, tokens: Sequence[str]) -> None:
        """tokens: the markers that are tokens; text rules hold for all others."""
        self._parser = parser
        self._markers = Markers(*tokens)
        self._held = ""
        """The end of the text so far, which may be the beginning of a marker."""
        self._at = 0
        """The index of ``_held`` in the answer."""
        self._has_guards = False

    def feed(self, text: str, marks: Collection[int]) -> Sequence[Delta]:
        """More of the text. marks: the indices in the answer where the text of an added token
        begins (``SequenceOutput.marks``)."""
        if not self._held and not self._markers.may_begin_in(text) and _GUARD not in text:
            self._at += len(text)
            return self._unguarded(self._parser.feed(text))
        self._held += text.replace(_GUARD, REPLACEMENT)
        return self._unguarded(self._parser.feed(self._take(marks, ended=False)))

    def end(self, marks: Collection[int]) -> Sequence[Delta]:
        """The deltas of the text that was held back."""
        deltas = [*self._parser.feed(self._take(marks, ended=True)), *self._parser.end()]
        return self._unguarded(deltas)

    def whole(self, text: str, marks: Collection[int]) -> list[Delta]:
        """The deltas of a whole answer."""
        return [*self.feed(text, marks), *self.end(marks)]

    def _take(self, marks: Collection[int], *, ended: bool) -> str:
        """The held text whose markers are known, guarded."""
        text, at, parts = self._held, 0, []
        while (found := self._markers.find(text, at)) is not None:
            inside = found.start() + 1
            is_token = self._at + found.start() in marks
            parts += [text[at:inside], "" if is_token else _GUARD, text[inside : found.end()]]
            self._has_guards |= not is_token
            at = found.end()
        stop = len(text) if ended else self._markers.cut(text, at)
        self._held = text[stop:]
        self._at += stop
        return "".join([*parts, text[at:stop]])

    def _unguarded(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        return [_unguarded(delta) for delta in deltas] if self._has_guards else deltas


def _unguarded(delta: Delta) -> Delta:
    if isinstance(delta, ToolCallDelta):
        arguments = delta.arguments.replace(_GUARD, "")
        return msgspec.structs.replace(
            delta, name=delta.name.replace(_GUARD, ""), arguments=arguments
        )
    return msgspec.structs.replace(delta, text=delta.text.replace(_GUARD, ""))
