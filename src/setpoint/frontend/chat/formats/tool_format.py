"""What a format of tool calls or of reasoning offers to the code that prepares a chat. A format is
how one family of models writes them; ``format_registry`` finds it by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.parser import DeltaParser
from setpoint.frontend.new_ids import new_hex


class ToolFormat(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def needs_special_tokens(self) -> bool:
        """Whether its markers are special tokens of the model: the parser sees them only if
        ``skip_special_tokens`` is off."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts around the names and values of calls; where the tokenizer has one of them, or a
        part, as a token, the same characters in other tokens are no marker."""
        ...

    @property
    def openings(self) -> tuple[str, ...]:
        """The markers with which calls begin; where one of them may be missing, its absence opens
        nothing."""
        ...

    def parser(self, tools: Sequence[Tool]) -> DeltaParser:
        """A parser for one answer to a request with these tools."""
        ...

    def structure(
        self, tools: Sequence[Tool], *, required: bool, parallel: bool
    ) -> dict[str, Any] | None:
        """A structural tag that constrains how the tools are called; None if this format cannot be
        described by one.

        required: the answer is one call or more and nothing else, each with arguments that satisfy
        its tool's schema. Otherwise text is free, and once a call has begun it names one of the
        tools; the arguments of ``strict`` tools satisfy their schemas, those of others are any
        object. parallel: whether a second call may follow.
        """
        ...


class ReasoningFormat(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def needs_special_tokens(self) -> bool:
        """The same as in ToolFormat."""
        ...

    @property
    def begin(self) -> str:
        """The text before the reasoning."""
        ...

    @property
    def end(self) -> str:
        """The text between the reasoning and the answer: a constraint on the answer holds from
        here."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """The same as in ToolFormat, for the texts around reasoning."""
        ...

    @property
    def always_ends(self) -> bool:
        """Whether the model writes ``end`` before every answer, even if it has not reasoned."""
        ...

    def starts_inside(self, prompt: str = "", *, started: str = "") -> bool:
        """Whether the output begins in the reasoning, without ``begin``. prompt: the text that the
        chat template rendered. started: the beginning of the answer that the client supplied after
        it."""
        ...

    def parser(
        self,
        after: DeltaParser,
        *,
        starts_inside: bool,
        separate: bool = True,
        calls: ToolFormat | None = None,
    ) -> DeltaParser:
        """A parser for one answer. after: parses what follows the reasoning. separate: False makes
        the reasoning text, markers included. calls: how the model writes calls; a call ends
        reasoning whose ``end`` is missing. None: only ``end`` does."""
        ...


def plain(header: re.Pattern[str]) -> str:
    """The pattern of a header with its markers as a model writes them."""
    return header.pattern.replace("\\", "")


def new_call_id() -> str:
    return f"call_{new_hex('call')[:24]}"
