"""All the text work of the frontend behind one object: prompts to ids, messages to prompts, ids to text.

It does not know requests or HTTP. Long prompts are tokenized on a thread, so that one client's book does not stall the
streams of the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setpoint.core.errors import RequestError
from setpoint.core.request import Ids
from setpoint.frontend.text.template import ChatTemplate, find_chat_template
from setpoint.frontend.text.tokenizer import Tokenizer

_INLINE_CHARS = 4096
"""Longest text tokenized on the event loop (about a millisecond)."""


class TextProcessor:
    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @classmethod
    def from_folder(cls, folder: str | Path, *, chat_template: str | None = None) -> TextProcessor:
        """Read a checkpoint's tokenizer and chat template; ``chat_template`` is the path of a file that replaces the latter.

        Raises CheckpointError or ConfigError.
        """
        tokenizer = Tokenizer.from_folder(folder)
        source = find_chat_template(folder, override=chat_template)
        template = None if source is None else ChatTemplate(source, special_tokens=tokenizer.special_tokens)
        return cls(tokenizer, template)

    def min_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of ``text`` that costs nothing to compute."""
        return -(-len(text) // self.tokenizer.max_token_chars)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Ids:
        if len(text) <= _INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, variables: Mapping[str, Any] | None = None
    ) -> str:
        """Raises RequestError (400) if the model has no chat template or the template refuses the messages."""
        if self._template is None:
            raise RequestError("This model has no chat template; start the server with --chat-template, or use /v1/completions.")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)
