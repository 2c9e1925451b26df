"""``setpoint serve``: the parent process. It owns the port and the HTTP side, and supervises the engine process.

Order of start: port, engine process (imports torch), model on disk, configuration, engine told, HTTP parts, engine ready,
listening, warm-up. Order of end: no new requests, open ones, engine, sockets.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from asyncio import Task
from collections.abc import Coroutine, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from setpoint import __version__
from setpoint.checkpoint.source import ModelSource, locate
from setpoint.checkpoint.spec import read_spec
from setpoint.config.check import model_overrides
from setpoint.config.environment import EnvSettings, unread_variables
from setpoint.config.hardware import probe_hardware
from setpoint.config.options import Options
from setpoint.config.resolve import ResolvedConfig, resolve
from setpoint.core.errors import EngineDeadError, SetpointError
from setpoint.core.model import ModelSpec
from setpoint.ipc import Endpoints
from setpoint.launch.job import EngineJob, encode_job
from setpoint.observe.logline import setup_logging

if TYPE_CHECKING:
    import uvicorn

    from setpoint.frontend.ipc.client import EngineClient
    from setpoint.frontend.service import Service
    from setpoint.frontend.text.processor import TextProcessor

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
READY_TIMEOUT_S = 600.0
DRAIN_S = 5
"""How long open requests may go on after a signal to end."""
CLOSE_S = 5
"""How long connections may then take to close."""
ENGINE_EXIT_S = 10.0
OPENMP_SPINS = "10000"
"""Rounds, some tenths of a millisecond, that an OpenMP thread of the engine spins for its next piece of work before it sleeps.

The default of 300,000 keeps a core busy while the thread that has the work waits for one: with other busy processes on two cores a stream
decoded several times slower. Fewer rounds than this do better still under load; what they cost on an idle machine is in docs/notebook.md.
"""
LAST_WORDS_S = 0.2
"""How long messages of an engine process that has ended may still be on their way."""


class StartupError(SetpointError):
    """The engine process ended, or never got ready; its own words are in the message."""


class Phases:
    """Where the time from process start to ready went."""

    def __init__(self) -> None:
        self._last = time.time()
        self.seconds: dict[str, float] = {"interpreter": max(self._last - _process_started_at(), 0.0)}

    def mark(self, name: str) -> None:
        now = time.time()
        self.seconds[name] = now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s from process start ({parts})"


def serve(options: Options, env: EnvSettings, *, given: Set[str] = frozenset()) -> int:
    """Serve until a signal; returns the exit code. Raises SetpointError for a start that fails."""
    from setpoint.frontend.http.serve import bind_socket

    phases = Phases()
    setup_logging(options.log_level, milliseconds=env.log_ms)
    sock = bind_socket(options.host, options.port)
    process = _spawn_engine()
    try:
        source = locate(options.model_path, revision=options.revision, load_format=options.load_format, log=logger.info)
        spec = read_spec(source.folder, overrides=model_overrides(options))
        config = _resolve(options, env, given, spec, source)
        phases.mark("model and configuration")
        endpoints, folder = Endpoints.in_private_folder()
        with folder:
            job = EngineJob(config, spec, str(source.folder), endpoints)
            _hand_over(process, job)
            import uvloop

            with sock:
                code: int = uvloop.run(_serve(config, spec, source, process, sock, endpoints, phases))
                return code
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _process_started_at() -> float:
    import psutil

    return float(psutil.Process().create_time())


def _spawn_engine() -> subprocess.Popen[bytes]:
    """The engine with SIGINT and SIGTERM blocked from its first instruction: it ends when this process says so, or ends itself."""
    command = [sys.executable, "-m", "setpoint.launch.engine_process"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, env=_engine_environment())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _engine_environment() -> dict[str, str]:
    """Ours, with OPENMP_SPINS unless the user has said how OpenMP's threads wait."""
    given = os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    return dict(os.environ) if given else {**os.environ, "GOMP_SPINCOUNT": OPENMP_SPINS}


def _hand_over(process: subprocess.Popen[bytes], job: EngineJob) -> None:
    """Tell the engine its job. The pipe stays open: its end tells the engine that this process is gone."""
    assert process.stdin is not None
    try:
        process.stdin.write(encode_job(job))
        process.stdin.flush()
    except BrokenPipeError:
        raise StartupError(f"The engine process {_ending(process.wait())}.") from None


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}; its output above says why"
    name = signal.Signals(-code).name
    advice = "; if nobody did that, memory ran out: lower --max-total-tokens or --mem-fraction-static" if name == "SIGKILL" else ""
    return f"was ended by {name}{advice}"


def _resolve(options: Options, env: EnvSettings, given: Set[str], spec: ModelSpec, source: ModelSource) -> ResolvedConfig:
    """Resolve and print every decision: chosen ones with their reason, plain defaults on one line."""
    if options.model_path is None:
        options = msgspec.structs.replace(options, model_path=source.name)
    if options.tokenizer_path is None:
        options = msgspec.structs.replace(options, tokenizer_path=str(source.folder))
    config = resolve(options, probe_hardware(), spec, given=given, env=env, drawn_seed=secrets.randbelow(1 << 30))
    values = {decision.field: decision.value for decision in config.decisions}
    logger.info("server_args=ServerArgs(%s)", ", ".join(f"{name}={value!r}" for name, value in values.items()))
    for decision in config.decisions:
        if decision.why != "default":
            logger.log(logging.WARNING if decision.warn else logging.INFO, "Decision: %s", decision)
    plain = ", ".join(f"{decision.field}={decision.value}" for decision in config.decisions if decision.why == "default")
    logger.info("Decision: default for %s", plain)
    for name in unread_variables(os.environ):
        logger.warning("The environment variable %s is set but not used by this version of Setpoint.", name)
    logger.info("Model: %s (%s)", source.name, source.origin)
    return config


async def _serve(
    config: ResolvedConfig,
    spec: ModelSpec,
    source: ModelSource,
    process: subprocess.Popen[bytes],
    sock: socket.socket,
    endpoints: Endpoints,
    phases: Phases,
) -> int:
    from setpoint.frontend.http.app import create_app
    from setpoint.frontend.http.serve import make_server
    from setpoint.frontend.ipc.client import EngineClient
    from setpoint.frontend.ipc.link import SocketLink
    from setpoint.frontend.text.processor import TextProcessor

    stop = asyncio.Event()
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopped = asyncio.create_task(stop.wait())
    client = EngineClient(SocketLink(endpoints))
    client.start()
    watcher = asyncio.create_task(_watch(process, client))
    try:
        text = TextProcessor.from_folder(config.options.tokenizer_path or source.folder, chat_template=config.options.chat_template)
        phases.mark("HTTP and tokenizer")
        ready = asyncio.create_task(client.wait_ready(timeout_s=READY_TIMEOUT_S))
        await _first(ready, stopped)
        if stop.is_set():
            process.kill()  # it does not listen while it loads
            return 0
        if not ready.result():
            raise StartupError(client.death or f"The engine was not ready after {READY_TIMEOUT_S:g} s.")
        phases.mark("waiting for the engine")
        service = _service(config, spec, source, client, text, phases)
        log_level = config.options.log_level_http or config.options.log_level
        server = make_server(create_app(service), log_level=log_level, drain_s=DRAIN_S + CLOSE_S)
        await _answer(service, server, sock, _open(config, service, phases), [stopped, watcher])
        if not stop.is_set():
            raise EngineDeadError(client.death)
        return 0
    finally:
        client.shutdown()
        await asyncio.wait([watcher], timeout=ENGINE_EXIT_S)
        process.kill()
        await watcher
        client.close()


async def _answer(
    service: Service, server: uvicorn.Server, sock: socket.socket, opening: Coroutine[Any, Any, None], over: Sequence[Task[Any]]
) -> None:
    """Listen, do what ``opening`` does, and serve until one of ``over`` is done; then open requests have DRAIN_S to end."""
    from setpoint.frontend.http.serve import listen

    serving, opened = asyncio.create_task(listen(server, sock)), asyncio.create_task(opening)
    try:
        await _first(opened, serving, *over)
        if opened.done():
            opened.result()
            await _first(serving, *over)
    finally:
        opened.cancel()
        server.should_exit = True
        deadline = time.monotonic() + DRAIN_S
        while service.engine.num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        service.engine.shutdown()
        await serving


async def _open(config: ResolvedConfig, service: Service, phases: Phases) -> None:
    if not config.options.skip_server_warmup:
        await service.warm_up()
    phases.mark("warm-up")
    logger.info("The server is fired up and ready to roll!")
    logger.info("Start-up took %s; engine: %s", phases, _seconds(service.engine.info.get("phases", {})))
    _invite(config)


async def _first(*tasks: asyncio.Future[Any]) -> None:
    """Returns when one of the tasks is done."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def _seconds(phases: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())


async def _watch(process: subprocess.Popen[bytes], client: EngineClient) -> None:
    from setpoint.frontend.ipc.client import EngineState

    code = await asyncio.to_thread(process.wait)
    await asyncio.sleep(LAST_WORDS_S)
    if client.state is not EngineState.STOPPING:
        client.engine_died(f"The engine process {_ending(code)}.")


def _service(
    config: ResolvedConfig, spec: ModelSpec, source: ModelSource, client: EngineClient, text: TextProcessor, phases: Phases
) -> Service:
    from setpoint.frontend.config import FrontendConfig
    from setpoint.frontend.service import Service

    options = config.options
    shown = msgspec.to_builtins(options) | {name: value for name, value in client.info.items() if name != "phases"}
    shown["api_key"] = None if options.api_key is None else "********"
    frontend = FrontendConfig(
        model_path=options.model_path or source.name,
        served_model_name=options.served_model_name or source.name,
        tokenizer_path=options.tokenizer_path or str(source.folder),
        context_len=config.context_len,
        max_req_input_len=client.info["max_req_input_len"],
        vocab_size=spec.vocab_size,
        api_key=options.api_key,
        allow_auto_truncate=options.allow_auto_truncate,
        incremental_streaming_output=options.incremental_streaming_output,
        enable_cache_report=options.enable_cache_report,
        stream_include_usage=options.stream_response_default_include_usage,
        sampling_defaults=_sampling_defaults(options.sampling_defaults, source.folder),
        log_requests=options.log_requests,
        log_requests_level=options.log_requests_level,
        model_info={"model_type": spec.model_type, "architectures": [spec.architecture], "load_format": options.load_format},
        server_info={
            **shown,
            "version": __version__,
            "startup_time": sum(phases.seconds.values()),
            "decisions": [asdict(decision) for decision in config.decisions],
        },
        health_generates=config.env.health_endpoint_generation,
        health_timeout_s=config.env.health_check_timeout_s,
    )
    return Service(frontend, client, text)


def _sampling_defaults(source: str, folder: Path) -> dict[str, float]:
    """With ``--sampling-defaults model``: what generation_config.json recommends, for the OpenAI routes."""
    path = folder / "generation_config.json"
    if source != "model" or not path.is_file():
        return {}
    given = json.loads(path.read_text())
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: given[name] for name in names if given.get(name) is not None}


def _invite(config: ResolvedConfig) -> None:
    """Two things to paste into another terminal."""
    host = "127.0.0.1" if config.options.host in ("0.0.0.0", "::") else config.options.host
    url = f"http://{host}:{config.options.port}"
    key = "" if config.options.api_key is None else " -H 'Authorization: Bearer '$API_KEY"
    print(
        f"""
Try it:

  curl {url}/v1/completions -H 'Content-Type: application/json'{key} \\
    -d '{{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  for chunk in client.chat.completions.create(model="default", stream=True, messages=[{{"role": "user", "content": "Who are you?"}}]):
      print(chunk.choices[0].delta.content or "", end="", flush=True)
""",
        flush=True,
    )
