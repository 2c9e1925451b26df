"""The real application on a fake engine: in process, no sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import httpx
import openai
import pytest
import uvloop
from starlette.applications import Starlette
from tokenizers import AddedToken

from setpoint.batch.worker import BatchWorker
from setpoint.frontend.apis.dialects import DIALECTS
from setpoint.frontend.composition import ServerParts, compose
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.http.app import MakeDialect, create_app
from setpoint.frontend.http.port import bind_socket
from setpoint.frontend.http.serve import make_server
from setpoint.frontend.live_options import FrontendSettings, LiveOptions
from setpoint.frontend.service import Service
from setpoint.frontend.storage.storage import Storage
from setpoint.frontend.text.processor import TextProcessor
from setpoint.frontend.text.template import ChatTemplate
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint.ipc.client import EngineClient
from setpoint.ipc.line import EngineLine
from setpoint_testing.byte_tokenizer import CHAT_TEMPLATE, EOS_ID, VOCAB_SIZE, make_byte_tokenizer
from setpoint_testing.fake_engine import FakeEngine, FixedOptions

PARTS = ("checkpoints", "book", "readers", "make_doctor")
"""The arguments of ``compose`` that tests give."""


@dataclass
class Server:
    app: Starlette
    service: Service
    line: EngineLine
    engine: FakeEngine
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI

    async def generate(self, **body: Any) -> Any:
        response = await self.http.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return response.json()


def make_service(
    engine: FakeEngine,
    live: LiveOptions | None = None,
    storage: Storage | None = None,
    made: list[Service] | None = None,
    **options: Any,
) -> Service:
    """``options``: fields of FrontendConfig, ``api_key`` for its one key, fields of
    FrontendSettings without ``live``, and ``tokens``, texts that are one token each, from the id
    VOCAB_SIZE on. ``PARTS`` and made: gets the service."""
    names = [each.name for each in fields(FrontendSettings) if each.name in options]
    template_source = options.pop("chat_template", CHAT_TEMPLATE)
    tokenizer = make_byte_tokenizer()
    tokens = [AddedToken(each, normalized=False) for each in options.pop("tokens", ())]
    tokenizer.add_tokens(tokens)
    if (key := options.pop("api_key", None)) is not None:
        options["api_keys"] = (key,)
    parts = {name: options.pop(name) for name in PARTS if name in options}
    own = FrontendSettings(**{name: options.pop(name) for name in names})
    config = FrontendConfig(
        **{
            "model_path": "org/tiny",
            "served_model_name": "org/tiny",
            "tokenizer_path": "/models/tiny",
            "context_len": engine.context_len,
            "max_req_input_len": engine.context_len - 5,
            "vocab_size": VOCAB_SIZE + len(tokens),
            "health_timeout_s": 0.2,
            **options,
        }
    )
    template = ChatTemplate(template_source, special_tokens={"eos_token": "<|eos|>"})
    text = TextProcessor(Tokenizer(tokenizer), template)
    service = compose(
        config,
        EngineClient(),
        text,
        live or FixedOptions(own),
        of_server=ServerParts.of(storage),
        **parts,
    )
    if made is not None:
        made.append(service)
    return service


@asynccontextmanager
async def working(app: Starlette, service: Service) -> AsyncIterator[None]:
    """The workers of the service work in this block, and that of its batches, if it keeps any."""
    tasks = [asyncio.create_task(work()) for work in app.state.workers]
    if service.storage is not None:
        tasks.append(asyncio.create_task(BatchWorker(service.answering, service.storage).run()))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def serving(
    engine: FakeEngine | None = None,
    *,
    local_only: bool = False,
    dialects: Sequence[MakeDialect] = DIALECTS,
    **options: Any,
) -> AsyncIterator[Server]:
    engine = engine or FakeEngine(eos_ids=frozenset({EOS_ID}))
    service = make_service(engine, **options)
    line = EngineLine(engine)
    service.engine.attach(line)
    app = create_app(service, dialects, local_only=local_only)
    transport = httpx.ASGITransport(app)
    key = options.get("api_key") or "none"
    async with (
        working(app, service),
        httpx.AsyncClient(transport=transport, base_url="http://test") as http,
    ):
        client = openai.AsyncOpenAI(
            base_url="http://test/v1", api_key=key, http_client=http, max_retries=0
        )
        yield Server(app, service, line, engine, http, client)
    assert not engine.running or engine.silent, "requests left behind"
    assert service.engine.num_open == 0
    service.engine.close()


@pytest.fixture
def serve() -> Callable[..., None]:
    """``serve(scenario, engine, **config)`` runs ``async scenario(server)`` against a fresh
    application."""

    def run(
        scenario: Callable[[Server], Awaitable[None]],
        engine: FakeEngine | None = None,
        **options: Any,
    ) -> None:
        async def main() -> None:
            async with serving(engine, **options) as server:
                await scenario(server)

        try:
            asyncio.run(main())
        finally:
            if (storage := options.get("storage")) is not None:
                storage.close()

    return run


@contextmanager
def _on_a_port(
    engine: FakeEngine, *, dialects: Sequence[MakeDialect] = DIALECTS, **options: Any
) -> Iterator[str]:
    ready, base_url, server = threading.Event(), "", None

    async def main() -> None:
        nonlocal base_url, server
        service = make_service(engine, **options)
        service.engine.attach(EngineLine(engine))
        app = create_app(service, dialects)
        server = make_server(app)
        serving = asyncio.create_task(server.serve(sockets=[bind_socket("127.0.0.1", 0)]))
        while not server.started:
            await asyncio.sleep(0.005)
        base_url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        ready.set()
        async with working(app, service):
            await serving
        service.engine.close()

    thread = threading.Thread(target=uvloop.run, args=(main(),))
    thread.start()
    try:
        assert ready.wait(20)
        yield base_url
    finally:
        assert server is not None
        server.end(1.0)
        thread.join()


@pytest.fixture
def http_url() -> Iterator[Callable[..., str]]:
    """``http_url(engine, **config)`` serves a fresh application on a real port, in a thread;
    returns its base URL."""
    with ExitStack() as stack:
        yield lambda engine, **options: stack.enter_context(_on_a_port(engine, **options))
