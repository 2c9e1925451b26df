"""All the text work of the frontend behind one object: prompts to ids, messages to prompts, ids to
text.

It does not know requests or HTTP. Long prompts are tokenized on a thread, so that one client's
book-length prompt does not stall the streams of others. The checkpoint's chat template runs in a
separate process.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from setpoint.core.errors import RequestError
from setpoint.core.request import Ids
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.text.shapes import TemplateShapes
from setpoint.frontend.text.template_process import TemplateProcess
from setpoint.frontend.text.tokenizer import Tokenizer

T = TypeVar("T")

_INLINE = 4096
"""Longest text (characters) or id list that is processed on the event loop itself; takes about a
millisecond."""

IDS_ONLY = (
    "this server was started with --skip-tokenizer-init and works with token ids only: send"
    " input_ids to /generate, and read output_ids."
)
"""Why what needs a tokenizer is refused; the end of a sentence."""

ADVICE = "start the server with --chat-template"
SHARED_ADVICE = (
    "put one into its folder as chat_template.jinja, serve it alone with --chat-template"
)
"""The advice about one of several models, for which that option is refused."""


class Template(Protocol):
    """Renders chats: ``template_process.TemplateProcess``; in tests ``template.ChatTemplate``,
    which does the same without a process."""

    @property
    def source(self) -> str: ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str: ...


class TextProcessor:
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: Template | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        """tokenizer: None if there is no text (--skip-tokenizer-init); requests that need text are
        refused then. is_shared: whether the server has other models, too."""
        self.known_tokenizer = tokenizer
        self._template = template
        self.template_advice = SHARED_ADVICE if is_shared else ADVICE
        """How the model gets a chat template, or another one."""
        self._found: dict[str, bool] = {}
        """Expression -> whether the chat template's source has it; a few fixed ones are asked for
        at every request."""
        self.shapes = TemplateShapes(self.render_chat)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._templates = ThreadPoolExecutor(1, thread_name_prefix="templates")

    @classmethod
    def from_folder(
        cls, folder: str | Path | None, template: str | None = None, *, is_shared: bool = False
    ) -> TextProcessor:
        """Read a checkpoint's tokenizer, and start the process of a chat template, given as its
        source. ``close`` ends that process. folder: None: there is no text. Raises
        CheckpointError."""
        if folder is None:
            return cls(None, is_shared=is_shared)
        tokenizer = Tokenizer.from_folder(folder)
        if template is None:
            return cls(tokenizer, is_shared=is_shared)
        process = TemplateProcess(template, special_tokens=tokenizer.special_tokens)
        return cls(tokenizer, process, is_shared=is_shared)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RequestError (400) if there is none."""
        if self.known_tokenizer is None:
            raise RequestError(f"Text cannot be read or written: {IDS_ONLY}")
        return self.known_tokenizer

    def check_text(self) -> None:
        """Raise RequestError (400) if there is no tokenizer, for a route that is about text alone:
        before its body is read, so that no other fault hides this one."""
        _ = self.tokenizer

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raise RequestError (400) for a parameter that needs a tokenizer if there is none."""
        if self.known_tokenizer is not None:
            return
        constraint = sampling.constraint
        for name, is_asked in (
            ("stop", bool(sampling.stop)),
            ("stop_regex", bool(sampling.stop_regex)),
            ("" if constraint is None else constraint.kind, constraint is not None),
        ):
            if is_asked:
                raise RequestError(f"{name} needs a tokenizer: {IDS_ONLY}")

    def close(self) -> None:
        """End the template's process; nothing can be rendered after that."""
        if isinstance(self._template, TemplateProcess):
            self._template.close()

    def template_exceeds(self) -> str | None:
        """The same as ``TemplateProcess.exceeded``; None without a template."""
        template = self._template
        return template.exceeded() if isinstance(template, TemplateProcess) else None

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template."""
        return None if self._template is None else self._template.source

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def template_mentions(self, word: str) -> bool:
        """Whether a word occurs in the chat template, be it a role or the key of a message."""
        return self._has(rf"\b{re.escape(word)}\b")

    def template_reads(self, variable: str) -> bool:
        """Whether the chat template reads a variable, e.g. "tools". A key of a message
        (``message.tools``, ``message["tools"]``) does not count."""
        return self._has(rf"(?<![\w.'\"]){re.escape(variable)}(?![\w'\"])")

    def _has(self, expression: str) -> bool:
        found = self._found.get(expression)
        if found is None:
            source = "" if self._template is None else self._template.source
            found = self._found[expression] = re.search(expression, source) is not None
        return found

    def min_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of ``text``, which takes no tokenization."""
        return -(-len(text) // self.tokenizer.max_token_chars)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Ids:
        return await self._run(
            len(text), lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return await self._run(
            len(ids), lambda: self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        )

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size > _INLINE:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        await asyncio.sleep(0)  # other streams get a turn between the prompts of a large batch
        return work()

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a chat. Raises RequestError (400) if the model has no chat template or
        tokenizer, or the template refuses the messages."""
        _ = self.tokenizer
        template = self._template
        if template is None:
            raise RequestError(
                f"This model has no chat template; {self.template_advice}, or use /v1/completions."
            )
        return await asyncio.get_running_loop().run_in_executor(
            self._templates,
            lambda: template.render(
                messages, add_generation_prompt=add_generation_prompt, variables=variables
            ),
        )
