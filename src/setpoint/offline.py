"""The Engine of a script, a notebook or an asyncio program: a model in a process of its own, called
as Python.

Works on prompts, conversations and token ids; answers are the dicts of ``/generate``
(docs/decisions/0013 has the reasons). Scheduling, text work and checks are the server's own; this
only carries calls to the service's event loop and back.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import Any, Generic, TypedDict, TypeVar, Unpack

from setpoint.config.commandline import parse_keywords
from setpoint.config.commands import ENGINE
from setpoint.config.environment import EnvSettings, read_environment
from setpoint.config.keywords import naming_keywords
from setpoint.config.options import Options
from setpoint.core.errors import EngineDeadError
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.calls import Calls
from setpoint.launch.background import BackgroundService

T = TypeVar("T")

Sampling = SamplingParams | Mapping[str, Any]
Samplings = Sampling | Sequence[Sampling]
"""For all prompts, or one for each."""
Prompts = str | Sequence[str]
Message = Mapping[str, Any]
"""``role`` and ``content``, as in OpenAI's API."""
Conversations = Sequence[Message] | Sequence[Sequence[Message]]


class Generation(TypedDict):
    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]
    """id, finish_reason, prompt_tokens, completion_tokens, cached_tokens, …; logprobs if asked
    for."""


class Piece(Generation, total=False):
    """What is new of an answer; the counts of ``meta_info`` cover the whole so far,
    ``finish_reason`` is None until the end."""

    index: int
    """Of the answer, where there are several."""


class Embedding(TypedDict):
    embedding: list[float]
    meta_info: dict[str, Any]


class AnyRequest(TypedDict, total=False):
    """What a call may say besides its main arguments, as in a ``/generate`` body; lists have one
    entry per prompt."""

    rid: str | list[str]
    priority: int
    routing_key: str
    extra_key: str
    cache_salt: str


class ChatRequest(AnyRequest, total=False):
    return_logprob: bool | list[bool]
    logprob_start_len: int | list[int]
    top_logprobs_num: int | list[int]
    token_ids_logprob: list[int] | list[list[int]]
    return_text_in_logprobs: bool


class PromptRequest(ChatRequest, total=False):
    input_ids: list[int] | list[list[int]]
    """Instead of a prompt: its ids, or a list of such lists."""


class EncodeRequest(AnyRequest, total=False):
    input_ids: list[int] | list[list[int]]
    dimensions: int


class Engine:
    """A model, ready to answer. Use it as a context manager, or end it with :meth:`shutdown`.

    All methods may be called from any thread, the ``async_`` ones from any event loop. A
    KeyboardInterrupt or a cancelled task aborts its requests, and the engine stays usable. An
    Engine does not work in a forked child. Building one takes seconds; in an asyncio program:
    ``await asyncio.to_thread(Engine, …)``.

    Raises ConfigError, CheckpointError, OutOfMemoryError or StartupError when built; RequestError
    for a request that cannot be honoured (of a list it names the prompt's index, and nothing of the
    list has run); EngineDeadError when the engine is gone.
    """

    _words: Callable[[], AbstractContextManager[None]]
    """How errors name options: as keywords, or as flags for whoever wrote a command line."""

    def __init__(self, model_path: str | None = None, **options: Any) -> None:
        """``options``: those of ``setpoint serve`` that are not about HTTP (docs/flags.md), e.g.
        ``max_total_tokens="32k"``.

        Without a model path: the default model. The engine process writes its log to stderr, from
        ``log_level`` (warning) up; what happens in this process goes to the loggers under
        ``setpoint``, which nothing here configures.
        """
        line = parse_keywords(
            ENGINE, options if model_path is None else {"model_path": model_path, **options}
        )
        self._words = naming_keywords
        self._start(line.options, read_environment(os.environ), line.given)

    @classmethod
    def from_options(cls, options: Options, env: EnvSettings, *, given: frozenset[str]) -> Engine:
        """For a command that has read its line; ``given`` names the options the user wrote."""
        engine = cls.__new__(cls)
        engine._words = nullcontext
        engine._start(options, env, given)
        return engine

    def _start(self, options: Options, env: EnvSettings, given: frozenset[str]) -> None:
        with self._words():
            self._background = BackgroundService(options, env, given=given)
        self._calls = Calls(self._background.service)
        # When this object is collected, and when the interpreter exits.
        weakref.finalize(self, self._background.close)

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._background.pid

    @property
    def chat_defaults(self) -> dict[str, Any]:
        """Sampling of a chat that says nothing of it: what the model's authors recommend, to the
        end of the context."""
        return self._calls.chat_defaults

    def generate(
        self,
        prompt: Prompts | None = None,
        sampling_params: Samplings | None = None,
        **request: Unpack[PromptRequest],
    ) -> Any:
        """A :class:`Generation` for one prompt; a list of them, in order, for a list of prompts of
        any length.

        With n > 1 the answer is a list, too: n for each prompt, one after the other.
        """
        return self._call(self._calls.generate(prompt, sampling_params, request))

    async def async_generate(
        self,
        prompt: Prompts | None = None,
        sampling_params: Samplings | None = None,
        **request: Unpack[PromptRequest],
    ) -> Any:
        """As :meth:`generate`."""
        return await self._acall(self._calls.generate(prompt, sampling_params, request))

    def stream(
        self,
        prompt: Prompts | None = None,
        sampling_params: Samplings | None = None,
        **request: Unpack[PromptRequest],
    ) -> Generator[Piece, None, None]:
        """The answers in pieces, as they come. Closing the generator aborts what is left."""
        return self._each(self._calls.stream(prompt, sampling_params, request))

    def async_stream(
        self,
        prompt: Prompts | None = None,
        sampling_params: Samplings | None = None,
        **request: Unpack[PromptRequest],
    ) -> AsyncGenerator[Piece, None]:
        """As :meth:`stream`."""
        return self._aeach(self._calls.stream(prompt, sampling_params, request))

    def chat(
        self,
        messages: Conversations,
        sampling_params: Samplings | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **request: Unpack[ChatRequest],
    ) -> Any:
        """As :meth:`generate`, for a conversation or a list of them, through the model's chat
        template.

        Without ``sampling_params``: :attr:`chat_defaults`.
        """
        return self._call(
            self._calls.chat(messages, sampling_params, chat_template_kwargs, request)
        )

    async def async_chat(
        self,
        messages: Conversations,
        sampling_params: Samplings | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **request: Unpack[ChatRequest],
    ) -> Any:
        """As :meth:`chat`."""
        return await self._acall(
            self._calls.chat(messages, sampling_params, chat_template_kwargs, request)
        )

    def stream_chat(
        self,
        messages: Conversations,
        sampling_params: Samplings | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **request: Unpack[ChatRequest],
    ) -> Generator[Piece, None, None]:
        """The answers of :meth:`chat` as :meth:`stream` gives them."""
        return self._each(
            self._calls.stream_chat(messages, sampling_params, chat_template_kwargs, request)
        )

    def async_stream_chat(
        self,
        messages: Conversations,
        sampling_params: Samplings | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **request: Unpack[ChatRequest],
    ) -> AsyncGenerator[Piece, None]:
        """As :meth:`stream_chat`."""
        return self._aeach(
            self._calls.stream_chat(messages, sampling_params, chat_template_kwargs, request)
        )

    def encode(self, prompt: Prompts | None = None, **request: Unpack[EncodeRequest]) -> Any:
        """An :class:`Embedding` for one prompt, a list of them for a list; needs
        ``is_embedding=True``."""
        return self._call(self._calls.encode(prompt, request))

    async def async_encode(
        self, prompt: Prompts | None = None, **request: Unpack[EncodeRequest]
    ) -> Any:
        """As :meth:`encode`."""
        return await self._acall(self._calls.encode(prompt, request))

    def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        """End the requests whose rid begins with ``rid``, or all; their answers end with
        finish_reason ``abort``."""
        self._call(self._calls.abort(rid, abort_all=abort_all))

    def flush_cache(self) -> bool:
        """Forget all cached prefixes. False: requests are running, nothing happened."""
        return self._call(self._calls.flush_cache())

    def get_server_info(self) -> dict[str, Any]:
        """Resolved options with the reasons of the decisions, sizes of pools, what runs now: the
        fields of ``/server_info``."""
        return self._call(self._calls.service.server_info())

    def shutdown(self) -> None:
        """End the engine; calls that wait elsewhere get EngineDeadError. Does nothing the second
        time, and in a forked child."""
        self._background.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    # -- from the caller's thread or loop to the service's, and back

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        with self._words():
            return self._background.call(coroutine)

    async def _acall(self, coroutine: Coroutine[Any, Any, T]) -> T:
        with self._words():
            return await self._background.acall(coroutine)

    def _each(self, groups: AsyncGenerator[list[Any], None]) -> Generator[Any, None, None]:
        steps = _Steps(groups)
        try:
            while (group := self._call(steps.next())) is not None:
                yield from group
        finally:
            with suppress(EngineDeadError):
                self._call(steps.close())

    async def _aeach(self, groups: AsyncGenerator[list[Any], None]) -> AsyncGenerator[Any, None]:
        steps = _Steps(groups)
        try:
            while (group := await self._acall(steps.next())) is not None:
                for item in group:
                    yield item
        finally:
            with suppress(EngineDeadError):
                await self._acall(steps.close())


class _Steps(Generic[T]):
    """An async generator of the service's loop, taken step by step from outside."""

    def __init__(self, items: AsyncGenerator[T, None]) -> None:
        self._items = items
        self._lock = asyncio.Lock()
        """A step that was interrupted ends before the generator is closed."""

    async def next(self) -> T | None:
        async with self._lock:
            return await anext(self._items, None)

    async def close(self) -> None:
        async with self._lock:
            await self._items.aclose()
