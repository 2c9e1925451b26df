"""The reasoning in an answer: where it begins and ends, and how many tokens it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from setpoint.core.errors import RequestError
from setpoint.frontend.chat.deltas import Delta
from setpoint.frontend.chat.formats.format_registry import reasoning_format
from setpoint.frontend.chat.formats.tool_format import ToolFormat
from setpoint.frontend.chat.parser import DeltaParser, PlainParser, parse_answer
from setpoint.frontend.chat.prompt import Prompt
from setpoint.frontend.jobs import SequenceOutput
from setpoint.frontend.text.processor import TextProcessor


class Reasoning:
    """How a model writes its reasoning."""

    def __init__(self, form: str, text: TextProcessor) -> None:
        """Raises ConfigError for a format that does not exist."""
        self._tokenizer = text.tokenizer
        self.form = reasoning_format(form)
        self._begin = tuple(self._ids(self.form.begin))
        self._end = tuple(self._ids(self.form.end))

    @classmethod
    def of(cls, form: str, text: TextProcessor) -> Reasoning | None:
        """The reasoning of the model of these texts; None if it does not mark any."""
        return None if form == "none" else cls(form, text)

    def behind(self, prompt: Prompt, calls: ToolFormat | None) -> Thinking:
        """The reasoning in the answer to a prompt. calls: see Thinking."""
        form = self.form
        starts_inside = form.starts_inside(prompt.rendered, started=prompt.started)
        may_begin = not prompt.started and not prompt.rendered.rstrip().endswith(form.end)
        return Thinking(self, starts_inside, may_begin, calls)

    def end_ids(self) -> tuple[int, ...]:
        """The token ids after which the answer itself begins. Raises RequestError (400) if they are
        not certain, because the tokenizer writes the end of the reasoning as ordinary text."""
        if not self._is_certain():
            raise RequestError(
                "A constraint cannot begin after the reasoning, because this model can write"
                f" {self.form.end!r} in different tokens. Turn the reasoning off, or remove the"
                " constraint."
            )
        return self._end

    def _is_certain(self) -> bool:
        """Whether ``form.end`` is always the same tokens: one token, or special tokens with at most
        one token of text between two of them."""
        is_text = [each not in self._tokenizer.special_ids for each in self._end]
        return len(self._end) == 1 or not (
            is_text[0] or is_text[-1] or any(map(all, pairwise(is_text)))
        )

    def num_tokens(
        self, output: SequenceOutput, *, starts_inside: bool, calls: ToolFormat | None
    ) -> int:
        """How many of an output's tokens are reasoning, its markers included. calls: see
        ``ReasoningFormat.parser``."""
        if not starts_inside and not output.text.lstrip().startswith(self.form.begin):
            return 0
        ids = output.output_ids
        if not starts_inside and len(self._begin) == 1 and self._begin[0] not in ids:
            return 0  # the marker's text, but not the marker
        if len(self._end) == 1 and self._end[0] in ids:
            return ids.index(self._end[0]) + 1
        text = output.text
        stop = text.find(self.form.end)
        if stop >= 0 and len(self._end) > 1:
            stop += len(self.form.end)
        else:
            stop = self._call_in(text, starts_inside=starts_inside, calls=calls)
        if stop == len(text):
            return output.num_outputs
        # A marker of ordinary text may share tokens with the text before it: encode and count.
        return min(len(self._ids(text[:stop])), output.num_outputs)

    def _call_in(self, text: str, *, starts_inside: bool, calls: ToolFormat | None) -> int:
        """The index of the call that ends reasoning that was left open, or the text's length."""
        behind = _Sink()
        parser = self.form.parser(behind, starts_inside=starts_inside, separate=False, calls=calls)
        parse_answer(parser, text)
        return len(text) - behind.num_chars

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).tolist()
        return ids


class _Sink(PlainParser):
    """Counts the characters that it is given."""

    num_chars = 0

    def feed(self, text: str) -> Sequence[Delta]:
        self.num_chars += len(text)
        return ()


@dataclass(slots=True, frozen=True)
class Thinking:
    """The reasoning in the answer to one prompt."""

    reasoning: Reasoning
    starts_inside: bool
    """Whether the output begins in the reasoning."""
    may_begin: bool
    """Whether reasoning may begin in the output: the prompt has not ended it, and does not end in
    an answer."""
    calls: ToolFormat | None = None
    """The format of calls that end reasoning that is left open; None: only its own end does."""

    def parser(self, after: DeltaParser, *, separate: bool) -> DeltaParser:
        """A parser for one answer; see ``ReasoningFormat.parser``."""
        return self.reasoning.form.parser(
            after, starts_inside=self.starts_inside, separate=separate, calls=self.calls
        )

    def constrained(self) -> Thinking:
        """The same, if a constraint begins where the reasoning itself ends."""
        return replace(self, calls=None)

    def opened(self) -> Thinking:
        """The reasoning in the answer to the same prompt with ``opening`` at its end."""
        return replace(self, starts_inside=True)

    @property
    def is_certain(self) -> bool:
        """Whether reasoning, or at least the marker of its end, comes whatever the prompt says
        about it."""
        return self.starts_inside or (self.may_begin and self.reasoning.form.always_ends)

    @property
    def may_be_skipped(self) -> bool:
        """Whether the model could answer without ever writing the end of the reasoning."""
        return not (self.starts_inside or self.reasoning.form.always_ends)

    @property
    def opening(self) -> str:
        """The beginning of an answer, which makes a model reason that might otherwise skip it."""
        return f"{self.reasoning.form.begin}\n"

    def num_tokens(self, output: SequenceOutput) -> int:
        return self.reasoning.num_tokens(output, starts_inside=self.starts_inside, calls=self.calls)
