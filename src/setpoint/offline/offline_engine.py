"""The Engine for scripts, notebooks and asyncio programs: a model in a separate process that Python
code calls.

It takes prompts, conversations and token ids, and returns the dicts of ``/generate``
(docs/decisions/0013 gives the reasons). Scheduling, text processing and checks are the server's;
this module only carries calls to the service's event loop, and results back.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import Any, Generic, TypedDict, TypeVar, Unpack

from setpoint.config.check import check_has_text
from setpoint.config.commandline import parse_keywords
from setpoint.config.commands import ENGINE
from setpoint.config.environment import EnvSettings, read_environment
from setpoint.config.keywords import naming_keywords
from setpoint.config.options import Options
from setpoint.core.errors import EngineDeadError
from setpoint.core.sampling import SamplingParams
from setpoint.offline.background import BackgroundService
from setpoint.offline.program_calls import Calls

T = TypeVar("T")

Sampling = SamplingParams | Mapping[str, Any]
Samplings = Sampling | Sequence[Sampling]
"""Sampling parameters for all prompts, or a list with one set for each prompt."""
Prompts = str | Sequence[str]
Message = Mapping[str, Any]
"""``role`` and ``content``, as in OpenAI's API."""
Conversations = Sequence[Message] | Sequence[Sequence[Message]]


class Generation(TypedDict):
    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]
    """id, finish_reason, prompt_tokens, completion_tokens, cached_tokens, …; also logprobs if they
    were asked for."""


class GenerationChunk(Generation, total=False):
    """The new part of an answer. The counts in ``meta_info`` cover the whole answer so far;
    ``finish_reason`` is None until the end."""

    index: int
    """Index of the answer, if there are several."""


class Embedding(TypedDict):
    embedding: list[float]
    meta_info: dict[str, Any]


class AnyRequest(TypedDict, total=False):
    """Further arguments of a call, as in the body of ``/generate``; lists have one entry per
    prompt."""

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
    """Token ids in place of a prompt, or several lists of token ids."""
    return_hidden_states: bool | list[bool]
    """Needs an Engine with ``enable_return_hidden_states``."""


class EncodeRequest(AnyRequest, total=False):
    input_ids: list[int] | list[list[int]]
    dimensions: int


class Engine:
    """A model that is ready to answer. Use it as a context manager, or end it with
    :meth:`shutdown`.

    All methods may be called from any thread, and the ``async_`` methods from any event loop. A
    KeyboardInterrupt or a cancelled task aborts its requests; the engine stays usable. An Engine
    does not work in a forked child. Creating one takes seconds; in an asyncio program, use ``await
    asyncio.to_thread(Engine, …)``.

    Raises ConfigError, CheckpointError, OutOfMemoryError or StartupError when created; RequestError
    for a request that cannot be honoured (for a list of prompts it names the prompt's index, and
    none of them has run); EngineDeadError when the engine has ended.
    """

    _words: Callable[[], AbstractContextManager[None]]
    """A context in which errors name options as keywords or, for commands, as flags."""

    def __init__(self, model_path: str | None = None, **options: Any) -> None:
        """``options``: the options of ``setpoint serve`` that do not concern HTTP (docs/flags.md),
        e.g. ``max_total_tokens="32k"``.

        Without a model path, the default model is used. The engine process logs to stderr, from
        ``log_level`` (warning) upwards. This process logs to the loggers under ``setpoint``, which
        this class does not configure.
        """
        line = parse_keywords(
            ENGINE, options if model_path is None else {"model_path": model_path, **options}
        )
        self._words = naming_keywords
        self._start(line.options, read_environment(os.environ), line.given)

    @classmethod
    def from_options(cls, options: Options, env: EnvSettings, *, given: frozenset[str]) -> Engine:
        """Create an Engine for a command that has parsed its command line; ``given`` names the
        options that the user wrote. Also raises ConfigError for --skip-tokenizer-init, because such
        commands read and write text."""
        check_has_text(options, "this command")
        engine = cls.__new__(cls)
        engine._words = nullcontext
        engine._start(options, env, given)
        return engine

    def _start(self, options: Options, env: EnvSettings, given: frozenset[str]) -> None:
        with self._words():
            self._background = BackgroundService(options, env, given=given)
        self._calls = Calls(self._background.service.answering)
        # This runs when the object is garbage-collected and when the interpreter exits.
        weakref.finalize(self, self._background.close)

    @property
    def pid(self) -> int:
        """Process id of the engine process."""
        return self._background.pid

    @property
    def chat_defaults(self) -> dict[str, Any]:
        """Sampling parameters of a chat that sets none: those that the model's authors recommend,
        with no limit of the output except the context."""
        return self._calls.chat_defaults

    def generate(
        self,
        prompt: Prompts | None = None,
        sampling_params: Samplings | None = None,
        **request: Unpack[PromptRequest],
    ) -> Any:
        """A :class:`Generation` for one prompt; for a list of prompts, of any length, a list of
        Generations in the same order.

        With n > 1 the result is always a list: the n answers for the first prompt, then those for
        the second, and so on.
        """
        return self._call(self._calls.generate(prompt, sampling_params, request))

    async def async_generate(
        self,
        prompt: Prompts | None = None,
        sampling_params: Samplings | None = None,
        **request: Unpack[PromptRequest],
    ) -> Any:
        """Like :meth:`generate`."""
        return await self._acall(self._calls.generate(prompt, sampling_params, request))

    def stream(
        self,
        prompt: Prompts | None = None,
        sampling_params: Samplings | None = None,
        **request: Unpack[PromptRequest],
    ) -> Generator[GenerationChunk, None, None]:
        """Yields the answers in chunks as they arrive. Closing the generator aborts the rest."""
        return self._each(self._calls.stream(prompt, sampling_params, request))

    def async_stream(
        self,
        prompt: Prompts | None = None,
        sampling_params: Samplings | None = None,
        **request: Unpack[PromptRequest],
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Like :meth:`stream`."""
        return self._aeach(self._calls.stream(prompt, sampling_params, request))

    def chat(
        self,
        messages: Conversations,
        sampling_params: Samplings | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **request: Unpack[ChatRequest],
    ) -> Any:
        """Like :meth:`generate`, for a conversation or a list of conversations, with the model's
        chat template.

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
        """Like :meth:`chat`."""
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
    ) -> Generator[GenerationChunk, None, None]:
        """Yields the answers of :meth:`chat`, in chunks like those of :meth:`stream`."""
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
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Like :meth:`stream_chat`."""
        return self._aeach(
            self._calls.stream_chat(messages, sampling_params, chat_template_kwargs, request)
        )

    def encode(self, prompt: Prompts | None = None, **request: Unpack[EncodeRequest]) -> Any:
        """An :class:`Embedding` for one prompt; a list of Embeddings for a list of prompts. Needs
        ``is_embedding=True``."""
        return self._call(self._calls.encode(prompt, request))

    async def async_encode(
        self, prompt: Prompts | None = None, **request: Unpack[EncodeRequest]
    ) -> Any:
        """Like :meth:`encode`."""
        return await self._acall(self._calls.encode(prompt, request))

    def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        """End the requests whose rid begins with ``rid``, or all of them. Their answers end with
        finish_reason ``abort``."""
        self._call(self._calls.abort(rid, abort_all=abort_all))

    def flush_cache(self) -> bool:
        """Empty the prefix cache. If requests are running, does nothing and returns False."""
        return self._call(self._calls.flush_cache())

    def get_server_info(self) -> dict[str, Any]:
        """The fields of ``/server_info``: resolved options, the reasons for start-up decisions, the
        size of the pool, and the current load."""
        return self._call(self._background.service.info.now())

    def shutdown(self) -> None:
        """End the engine. Waiting calls in other threads raise EngineDeadError. Does nothing the
        second time, and nothing in a forked child."""
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

    # -- carry calls from the caller's thread or loop to the service's loop, and results back

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
    """An async generator of the service's loop that another thread or loop advances step by
    step."""

    def __init__(self, items: AsyncGenerator[T, None]) -> None:
        self._items = items
        self._lock = asyncio.Lock()
        """Held during a step, so that an interrupted step ends before the generator is closed."""

    async def next(self) -> T | None:
        async with self._lock:
            return await anext(self._items, None)

    async def close(self) -> None:
        async with self._lock:
            await self._items.aclose()
