"""An engine process and the service that talks to it: what ``serve``, the offline Engine and the
batch runner all start from.

Order of start: engine process (imports torch), model on disk, configuration, engine told,
tokenizer, engine ready. Order of end: engine asked, engine ended, sockets. It knows nothing of
HTTP, batches or terminals.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from setpoint import __version__
from setpoint.checkpoint.end_tokens import tokenizer_end_ids
from setpoint.checkpoint.pooling import read_pooling
from setpoint.checkpoint.source import (
    DEFAULT_MODEL,
    DEFAULT_SAMPLING,
    ModelSource,
    locate,
    tokenizer_folder,
)
from setpoint.checkpoint.spec import GENERATION_NAME, read_spec
from setpoint.config.check import model_overrides
from setpoint.config.environment import EnvSettings
from setpoint.config.hardware import probe_hardware
from setpoint.config.options import Options, server_args
from setpoint.config.resolve import ResolvedConfig, resolve
from setpoint.core.errors import CheckpointError, RequestError, SetpointError
from setpoint.core.jsonfile import read_object
from setpoint.core.model import ModelSpec
from setpoint.core.progress import reported_to
from setpoint.core.sampling import SamplingParams
from setpoint.launch.announce import announce
from setpoint.launch.job import EngineJob, encode_job
from setpoint.launch.preflight import check_room, preflight
from setpoint.observe.waiting import Display, Waiting

if TYPE_CHECKING:
    from setpoint.frontend.ipc.client import EngineClient
    from setpoint.frontend.service import Service
    from setpoint.frontend.text.processor import TextProcessor

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
READY_TIMEOUT_S = 600.0
ENGINE_EXIT_S = 10.0
OPENMP_SPINS = "1000"
"""Rounds, some hundredths of a millisecond, that an OpenMP thread of the engine spins for its next
piece of work before it sleeps.

The default of 300,000 keeps a core busy while the thread that has the work waits for one: with
other busy processes on two cores a stream decoded many times slower. On an idle machine 1,000
rounds cost nothing that could be measured (docs/notebook.md).
"""
LAST_WORDS_S = 0.2
"""How long messages of an engine process that has ended may still be on their way."""


class StartupError(SetpointError):
    """The engine process ended, or never got ready; its own words are in the message."""


class Phases:
    """Where the time from a start to ready went."""

    def __init__(self, started_at: float | None = None) -> None:
        """``started_at``: seconds since the epoch; the start of this process if not given."""
        self._last = time.time()
        self.seconds: dict[str, float] = {
            "interpreter": max(self._last - (started_at or _process_started_at()), 0.0)
        }

    def mark(self, name: str) -> None:
        now = time.time()
        self.seconds[name] = now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s from process start ({parts})"


@dataclass(slots=True, frozen=True)
class Launched:
    """An engine process that has been told its job, and what it was told."""

    process: subprocess.Popen[bytes]
    config: ResolvedConfig
    spec: ModelSpec
    source: ModelSource
    text: TextProcessor
    link: socket.socket
    """Our end of the link to the engine; closed by whoever made this."""
    sampling: dict[str, float]
    """What the model's authors recommend, if that was asked for."""
    waiting: Waiting
    """Says what the start is doing until it is ended."""


@contextmanager
def launched(
    options: Options,
    env: EnvSettings,
    *,
    given: Set[str],
    phases: Phases,
    display: Display | None,
    stderr: int | None = None,
) -> Iterator[Launched]:
    """Start an engine process for these options; when the block ends, so has the process.

    display: how a person is told what takes long. stderr: the descriptor that the engine's log goes
    to, if not ours. Raises SetpointError for a model or configuration that cannot be served.
    """
    preflight(options)
    owner = os.getpid()
    link, theirs = socket.socketpair()
    text: TextProcessor | None = None
    waiting = Waiting(f"Loading {options.model_path or DEFAULT_MODEL}", display)
    with link:
        with theirs:
            descriptor = theirs.fileno()
            process = _spawn_engine(stderr, descriptor)
        try:
            with reported_to(waiting.doing):
                source, spec, config = configured(options, env, given)
                phases.mark("model and configuration")
                check_room(config, spec)
                sampling = sampling_defaults(options.sampling_defaults, source)
                text = _text(options, source)
            phases.mark("tokenizer")
            announce(config, source, os.environ)
            _hand_over(process, EngineJob(config, spec, str(source.folder), descriptor))
            yield Launched(process, config, spec, source, text, link, sampling, waiting)
        finally:
            if os.getpid() == owner:  # a forked child that ends comes here, too
                waiting.end()
                if text is not None:
                    text.close()
                _end(process)


class EngineSession:
    """The link to a launched engine, inside a running event loop: an async context manager whose
    exit ends the engine in order."""

    def __init__(self, engine: Launched, phases: Phases) -> None:
        from setpoint.frontend.ipc.client import EngineClient
        from setpoint.frontend.ipc.link import SocketLink

        self.engine = engine
        self.client: EngineClient = EngineClient(
            SocketLink(engine.link), on_progress=engine.waiting.doing
        )
        self._phases = phases

    async def __aenter__(self) -> EngineSession:
        self.client.start()
        self.watcher = asyncio.create_task(_watch(self.engine.process, self.client))
        """Done when the process has ended; the client knows by then."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.shutdown()
        await asyncio.wait([self.watcher], timeout=ENGINE_EXIT_S)
        self.kill()
        await self.watcher
        self.client.close()

    async def service_unless(self, called_off: asyncio.Future[Any]) -> Service | None:
        """As ``service``; if ``called_off`` is done first, None, and the engine is killed."""
        starting = asyncio.create_task(self.service())
        await asyncio.wait([starting, called_off], return_when=asyncio.FIRST_COMPLETED)
        if called_off.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            self.kill()
            return None
        return starting.result()

    def kill(self) -> None:
        """End the process at once; the only way while it loads and does not listen."""
        kill_with_children(self.engine.process)

    async def service(self) -> Service:
        """Wait until the engine can take requests. Raises StartupError if it cannot start."""
        self._phases.mark("HTTP")
        if not await self.client.wait_ready(timeout_s=READY_TIMEOUT_S):
            raise StartupError(
                self.client.death or f"The engine was not ready after {READY_TIMEOUT_S:g} s."
            )
        self.engine.waiting.end()
        self._phases.mark("waiting for the engine")
        return _service(self.engine, self.client, self._phases)


def _text(options: Options, source: ModelSource) -> TextProcessor:
    """Read now, while the engine process imports torch, so that what is wrong with it is said
    before weights are loaded."""
    from setpoint.frontend.text.processor import TextProcessor

    folder = (
        source.folder
        if options.tokenizer_path is None
        else tokenizer_folder(options.tokenizer_path, log=logger.info)
    )
    return TextProcessor.from_folder(folder, chat_template=options.chat_template)


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and all below it: compilers go on without the one who started them."""
    import psutil

    if process.poll() is not None:
        return
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(process.pid)
        top.suspend()  # it starts no more
        for child in top.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()


@contextmanager
def signals_held() -> Iterator[Callable[[], None]]:
    """Around the making of an event loop that handles SIGNALS, which calls what this yields once it
    does.

    Until then they wait: asyncio's own start would answer Ctrl-C by cancelling whatever has just
    begun, with nobody to clean up after it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        yield release
    finally:
        release()


def _process_started_at() -> float:
    import psutil

    return float(psutil.Process().create_time())


def _spawn_engine(stderr: int | None, link: int) -> subprocess.Popen[bytes]:
    """The engine, which inherits the descriptor ``link``, with SIGINT and SIGTERM blocked from its
    first instruction: it ends when this process says so, or ends itself."""
    command = [sys.executable, "-m", "setpoint.launch"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=stderr, env=engine_environment(), pass_fds=[link]
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(process: subprocess.Popen[bytes]) -> None:
    kill_with_children(process)
    process.wait()
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # a job that nobody read
        process.stdin.close()


def engine_environment() -> dict[str, str]:
    """Ours, with OPENMP_SPINS unless the user has said how OpenMP's threads wait."""
    given = os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    return dict(os.environ) if given else {**os.environ, "GOMP_SPINCOUNT": OPENMP_SPINS}


def _hand_over(process: subprocess.Popen[bytes], job: EngineJob) -> None:
    """Tell the engine its job. The pipe stays open: its end tells the engine that this process is
    gone."""
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
    advice = (
        "; if nobody sent that signal, the machine probably ran out of memory: lower"
        " --max-total-tokens or --mem-fraction-static"
        if name == "SIGKILL"
        else ""
    )
    return f"was ended by {name}{advice}"


def configured(
    options: Options, env: EnvSettings, given: Set[str]
) -> tuple[ModelSource, ModelSpec, ResolvedConfig]:
    """The model on disk and the configuration for it. Raises SetpointError for one that cannot be
    served."""
    source = locate(
        options.model_path,
        revision=options.revision,
        load_format=options.load_format,
        log=logger.info,
    )
    spec = read_spec(source.folder, overrides=model_overrides(options))
    ends = dict.fromkeys(
        (*spec.eos_token_ids, *tokenizer_end_ids(Path(options.tokenizer_path or source.folder)))
    )
    # A tokenizer may know more ids than the model, which never chooses those.
    spec = replace(
        spec, eos_token_ids=tuple(token_id for token_id in ends if token_id < spec.vocab_size)
    )
    if options.is_embedding:
        spec = replace(spec, pooling=read_pooling(source.folder, spec))
    found = {
        "model_path": (source.name, "the default model"),
        "tokenizer_path": (str(source.folder), "the model's own"),
    }
    config = resolve(
        options,
        probe_hardware(),
        spec,
        given=given,
        found=found,
        env=env,
        drawn_seed=secrets.randbelow(1 << 30),
    )
    return source, spec, config


async def _watch(process: subprocess.Popen[bytes], client: EngineClient) -> None:
    from setpoint.frontend.ipc.client import EngineState

    code: Future[int] = Future()
    loop = asyncio.get_running_loop()

    def follow() -> None:
        while (change := _next_change(process.pid)) in (os.CLD_STOPPED, os.CLD_CONTINUED):
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(client.suspended, change == os.CLD_STOPPED)
        code.set_result(process.wait())

    # Not an executor's thread: an interpreter that exits without ending the engine would wait for
    # that one first.
    threading.Thread(target=follow, daemon=True).start()
    await asyncio.wrap_future(code)
    await asyncio.sleep(LAST_WORDS_S)
    if client.state is not EngineState.STOPPING:
        client.engine_died(f"The engine process {_ending(code.result())}.")


def _next_change(pid: int) -> int | None:
    """Wait until the child stops (os.CLD_STOPPED), goes on (os.CLD_CONTINUED) or ends (anything
    else; it is left to be reaped)."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOWAIT)
        if found is not None and found.si_code in (os.CLD_STOPPED, os.CLD_CONTINUED):
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
    except ChildProcessError:  # somebody else has reaped it
        return None
    return None if found is None else found.si_code


def _service(engine: Launched, client: EngineClient, phases: Phases) -> Service:
    from setpoint.frontend.config import FrontendConfig
    from setpoint.frontend.service import Service

    config, options, spec, source = engine.config, engine.config.options, engine.spec, engine.source
    frontend = FrontendConfig(
        pooling=spec.pooling,
        model_path=options.model_path or source.name,
        served_model_name=options.served_model_name or source.name,
        tokenizer_path=options.tokenizer_path or str(source.folder),
        context_len=config.context_len,
        max_req_input_len=client.info["max_req_input_len"],
        vocab_size=spec.vocab_size,
        random_seed=config.random_seed,
        api_key=options.api_key,
        max_body_bytes=config.max_body_bytes,
        allow_auto_truncate=options.allow_auto_truncate,
        refuse_unknown_keys=options.refuse_unknown_keys,
        incremental_streaming_output=options.incremental_streaming_output,
        enable_cache_report=options.enable_cache_report,
        stream_include_usage=options.stream_response_default_include_usage,
        sampling_defaults=engine.sampling,
        log_requests=options.log_requests,
        log_requests_level=options.log_requests_level,
        model_info={
            "model_type": spec.model_type,
            "architectures": [spec.architecture],
            "load_format": options.load_format,
        },
        server_info=server_info(config, client.info, startup_s=sum(phases.seconds.values())),
        health_generates=config.env.health_endpoint_generation,
        health_timeout_s=config.env.health_check_timeout_s,
    )
    return Service(frontend, client, engine.text)


def server_info(
    config: ResolvedConfig, engine: Mapping[str, Any], *, startup_s: float
) -> dict[str, Any]:
    """What ``/server_info`` says for as long as the engine lives; ``engine``: what that said of
    itself when it was ready."""
    return {
        **server_args(config.options),
        **{name: value for name, value in engine.items() if name != "phases"},
        "version": __version__,
        "startup_time": startup_s,
        "decisions": [
            *(asdict(decision) for decision in config.decisions),
            *engine.get("decisions", ()),
        ],
    }


def sampling_defaults(wanted: str, source: ModelSource) -> dict[str, float]:
    """With ``--sampling-defaults model``: what the model's authors recommend, for requests to
    OpenAI's routes and for chats."""
    if wanted != "model":
        return {}
    recommended = dict(DEFAULT_SAMPLING) if source.is_default else {}
    path = source.folder / GENERATION_NAME
    if path.exists():
        given = read_object(path)
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        recommended |= {name: given[name] for name in names if given.get(name) is not None}
        if recommended.get("top_k") == 0:
            recommended["top_k"] = -1  # transformers' word for the whole vocabulary
        try:
            SamplingParams.parse(recommended)
        except RequestError as error:
            raise CheckpointError(
                f"{path}: {error} Correct it, or start with --sampling-defaults openai."
            ) from None
    if recommended:
        logger.debug(
            "Default sampling of chats and of OpenAI's routes: %s",
            ", ".join(f"{name}={value}" for name, value in recommended.items()),
        )
    return recommended
