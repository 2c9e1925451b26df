"""The frontend's one shared object: configuration, engine, text work and request bookkeeping, as
the routes use them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from setpoint.core.awake import timeout_awake
from setpoint.core.control import EngineFacts, InternalState, OperationDone
from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.core.excerpt import excerpt
from setpoint.core.operations import LoadWeights
from setpoint.core.request import Request, RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.arrival import arrival
from setpoint.frontend.bodies import parse
from setpoint.frontend.checkpoint_names import Checkpoint, Checkpoints, NoCheckpoints
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.drain import Drain, without_weights
from setpoint.frontend.enforcement import Enforcement
from setpoint.frontend.health import Health
from setpoint.frontend.hidden_states import check_hidden_states
from setpoint.frontend.intake import Intake, new_rid
from setpoint.frontend.jobs import Job, SequenceOutput
from setpoint.frontend.live_options import LiveOptions
from setpoint.frontend.live_settings import LiveSettings
from setpoint.frontend.pairing import KnownServers, Pairing
from setpoint.frontend.residence import AlwaysLoaded, Residence
from setpoint.frontend.routing import routed
from setpoint.frontend.sessions import Sessions, Turn
from setpoint.frontend.shared_rooms import names_room, with_rooms
from setpoint.frontend.storage.background import BackgroundBook
from setpoint.frontend.storage.responses import ResponseStore
from setpoint.frontend.storage.storage import Storage
from setpoint.frontend.supervision import NoSupervisor, Supervisor
from setpoint.frontend.telemetry.book import RequestBook
from setpoint.frontend.telemetry.latencies import Latencies
from setpoint.frontend.telemetry.metrics.metering import MetricsConfig, make_metrics, page_of
from setpoint.frontend.telemetry.request_log import RequestLog
from setpoint.frontend.telemetry.roster import Roster
from setpoint.frontend.telemetry.watching import Watch
from setpoint.frontend.text.processor import TextProcessor
from setpoint.frontend.unknown_keys import unknown_keys
from setpoint.frontend.unread import Unread
from setpoint.ipc.client import EngineClient
from setpoint.ipc.line import EngineLine

if TYPE_CHECKING:
    from setpoint.frontend.telemetry.metrics.exposition import Metrics

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

WARM_UP_IDS = 6
"""Tokens of the warm-up request on a server without a tokenizer."""


class Service:
    def __init__(
        self,
        config: FrontendConfig,
        engine: EngineClient,
        text: TextProcessor,
        live: LiveOptions,
        storage: Storage | None = None,
        checkpoints: Checkpoints | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        """storage: where files and batches are kept, and responses in the background; None: files
        and batches are refused, and responses end with the server."""
        self.config = config
        """Replaced by ``loaded``: keep no part of it that this changes."""
        self.checkpoints = checkpoints or NoCheckpoints()
        self.supervisor: Supervisor = supervisor or NoSupervisor()
        self.checkpoint: Checkpoint | None = None
        """The checkpoint whose weights the engines have; None: the one of the start."""
        self.models: Sequence[Service] = (self,)
        """All models of the server, in their order; the same in each. Replaced at the start if
        there are several."""
        self.residence: Residence = AlwaysLoaded()
        """Replaced at the start if there are several models."""
        self.live = LiveSettings(engine, live)
        self.storage = storage
        self.responses = ResponseStore()
        self.background = BackgroundBook() if storage is None else storage.background
        self.engine = engine
        self.text = text
        self.health = Health(engine, config)
        self.book = RequestBook()
        self.intake = Intake(config, text, self.book)
        self.enforcement = Enforcement(self.book)
        self._log = RequestLog(lambda: live.frontend)
        self.readers: list[Callable[[SequenceOutput], None]] = []
        """Called with every sequence of a client that has ended; filled at the start."""
        self.workers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """Run while the server serves, and cancelled when it begins to end; filled at the start."""
        self.drain = Drain()
        self.unread = Unread("the main port")
        self.pairing: Pairing | None = None
        """Finds prefill servers for requests without a room; set at the start."""
        self.prefill_servers: KnownServers | None = None
        """The prefill servers that a decode server knows."""
        self.at_end: list[Callable[[], None]] = []
        """Called once, in a thread, when all requests have ended: what waits to be sent elsewhere.
        They may block, and are not waited for for ever."""
        self.roster = Roster()
        self.sessions = Sessions()
        self._latencies = Latencies()
        self.watch = Watch(engine, self._latencies)
        """Watches only while somebody runs it."""
        self.metrics = self._make_metrics(config.metrics)

    def _make_metrics(self, config: MetricsConfig | None) -> Metrics | None:
        if config is None:
            return None
        return make_metrics(
            config,
            self.engine,
            self.book,
            self.watch.news,
            model_name=self.config.served_model_name,
            context_len=self.config.context_len,
            of_server=self._figures,
        )

    def _figures(self) -> dict[str, Any]:
        """Series of /metrics -> labels -> value."""
        found: dict[str, Any] = {
            "setpoint:engine_restarts_left": {(): self.engine.lives.restarts.left},
            "setpoint:unread_answers": {(): self.unread.num_closed},
            "setpoint:unread_bytes": {(): self.unread.num_bytes},
        }
        if self.pairing is not None:
            up = self.pairing.up()
            found["setpoint:prefill_server_up"] = {(url,): value for url, value in up.items()}
            found["setpoint:prompts_without_prefill_server"] = {(): self.pairing.num_alone}
        if self.residence.is_shared:
            found["setpoint:model_loaded"] = {(): self.residence.state == "loaded"}
            found["setpoint:model_waiting_requests"] = {(): self.engine.num_waiting}
            found["setpoint:model_loads"] = {(): self.residence.num_loads}
            found["setpoint:model_load_seconds"] = {(): self.residence.load_s}
        return found

    async def metrics_page(self, accept: str) -> tuple[bytes, str]:
        """The page of ``/metrics`` with the series of all models, and its content type. accept: the
        client's header. Raises RequestError (404) if the server has no metrics."""
        metrics = [each.metrics for each in self.models if each.metrics is not None]
        if not metrics:
            raise RequestError(
                "Metrics are disabled; start the server with --enable-metrics.", status_code=404
            )
        return await page_of(metrics, accept)

    def job(
        self,
        requests: Sequence[Request],
        *,
        received: dict[str, Any],
        api: str = "",
        no_logs: bool = False,
        turn: Turn | None = None,
        tool_schema: str = "",
    ) -> Job:
        """The job of the requests of one client body, ``received``. api: the API of the body, for
        the request log. no_logs: keep the requests out of that log. turn: the turn of a session
        that the one request is. tool_schema: see Job. Raises RequestError: 400 if together they ask
        for too much, 503 if the server drains or its weights are lost.
        """
        self.drain.check()
        if self.engine.orders.why_no_weights:
            raise RequestError(without_weights(self.engine), status_code=503)
        paired = None
        if self.pairing is not None and not names_room(received, self.config.sharing):
            paired = self.pairing.pair(arrival().path, requests, received)
            received = received if paired is None else paired.body
        requests = routed(
            with_rooms(requests, received, self.config.sharing, self.prefill_servers),
            received,
            num_ranks=len(self.engine.lines),
            by_room=self.config.follows_bootstrap_room,
        )
        self.intake.check_logprobs(requests)
        check_hidden_states(requests, self.config)
        metrics = None if self.metrics is None else self.metrics.requests
        make = partial(
            Job,
            self.engine,
            self.text.known_tokenizer,
            requests,
            metrics=metrics,
            latencies=self._latencies,
            tool_schema=tool_schema,
        )
        is_logged = not no_logs and self._log.received(requests, received, api)
        started, finished = self._started, partial(self._finished, is_logged=is_logged)
        if paired is not None:
            return make(on_start=paired.noting(started), on_finish=paired.recording(finished))
        if turn is not None:
            return make(on_start=turn.noting(started), on_finish=turn.recording(finished))
        return make(on_start=started, on_finish=finished)

    def _started(self, job: Job) -> None:
        self.roster.started(job.outputs)

    def read(
        self, body: dict[str, Any], kind: type[T], *, route: str, unsupported: Iterable[str] = ()
    ) -> tuple[T, list[str]]:
        """A client's body as ``kind``, and warnings for the client about it. Raises RequestError
        for a body that cannot be honoured."""
        parsed = parse(body, kind, unsupported=unsupported)
        refuse = self.config.refuse_unknown_keys
        # Of several models, ``http.model_choice`` has read which one the body names.
        known = (*unsupported, "model") if self.residence.is_shared else unsupported
        warnings = unknown_keys(body, parsed, route=route, unsupported=known, refuse=refuse)
        self.book.warned_bodies += bool(warnings)
        return parsed, warnings

    async def states(self) -> list[tuple[EngineLine, InternalState]]:
        """What each engine that takes requests says of itself, in the order of ranks. Raises
        EngineDeadError without one."""

        async def ask(line: EngineLine) -> tuple[EngineLine, InternalState]:
            return line, await line.get_state()

        return await self.engine.on_all(ask)

    async def server_info(self) -> dict[str, Any]:
        """The resolved options, what the first engine reported when it was ready, the states of
        all engines now, and how requests ended. Raises EngineDeadError."""
        found = await self.states()
        return {
            "kv_events": None,
            **self.known_info(found[0][0]),
            "internal_states": [
                _entry(state, line.facts) | {"dp_rank": line.rank} for line, state in found
            ],
            "standby": self.engine.lives.standby,
            "standby_death": self.engine.lives.standby_death,
            "restarts_left": self.engine.lives.restarts.left,
            "ranks": [asdict(each) for each in self.engine.standings()],
            "requests": self.book.info(),
        }

    def known_info(self, line: EngineLine) -> dict[str, Any]:
        """The part of ``server_info`` that the engine of this line need not be asked for.
        start_values: what the options that have changed since were at the start."""
        options, live = self.config.server_info, self.live.frontend
        engine = msgspec.to_builtins(line.facts)
        decisions = *options.get("decisions", ()), *engine["decisions"], *live.decisions
        changed = {
            name: options[name]
            for name, value in live.options.items()
            if name in options and options[name] != value
        }
        return {
            **options,
            **engine,
            **live.options,
            "start_values": changed,
            "decisions": list(decisions),
        }

    async def load(
        self,
        checkpoint: Checkpoint,
        *,
        model_path: str | None = None,
        weight_version: str | None = None,
        flush_cache: bool,
        aborts: bool,
        keep_pause: bool = False,
    ) -> list[OperationDone]:
        """Have all engines compute with other weights. aborts: end all requests, and pause the
        engines meanwhile. keep_pause: see ``Orders.held``. Raises RequestError, with nothing
        changed, and EngineDeadError."""
        operation = LoadWeights(checkpoint.folder, checkpoint.load_format, flush_cache=flush_cache)
        orders = self.engine.orders
        async with (
            orders.held(keep_pause=keep_pause)
            if aborts
            else orders.at_rest(flushes=flush_cache, keep_pause=keep_pause)
        ):
            done = await orders.load(operation)
            # Before anything else may happen: an engine that starts now has these weights.
            self.set_model_metadata(
                model_path=model_path, weight_version=weight_version, checkpoint=checkpoint
            )
        return done

    def set_model_metadata(
        self,
        *,
        model_path: str | None = None,
        weight_version: str | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Tell from now on that the engines' weights are these; None: what was reported before."""
        config = self.config
        self.checkpoint = checkpoint or self.checkpoint
        self.config = replace(
            config,
            model_path=config.model_path if model_path is None else model_path,
            weight_version=config.weight_version if weight_version is None else weight_version,
        )

    async def warm_up(self, *, timeout_s: float = 600.0) -> None:
        """Serve one real request before the server is announced as ready. Raises EngineDeadError or
        RequestError."""
        if self.text.known_tokenizer is None:
            prompt = np.arange(min(WARM_UP_IDS, self.config.vocab_size), dtype=np.int32)
        else:
            prompt = await self.intake.encode("The capital city of France is")
        prompt = prompt[: self.config.max_req_input_len - 1]
        rid, sampling = f"WARM_UP_{new_rid()}", SamplingParams(max_new_tokens=8, temperature=0.0)
        if self.config.pooling is None:
            requests = self.intake.requests(prompt, sampling, RequestOptions(), rid=rid)
        else:
            requests = [self.intake.embedding_request(prompt, rid=rid)]
        tokenizer = self.text.known_tokenizer
        with Job(self.engine, tokenizer, requests, on_finish=lambda output: None) as job:
            try:
                async with timeout_awake(timeout_s):
                    await job.wait()
            except TimeoutError:
                raise EngineDeadError(
                    f"The warm-up request was not answered within {timeout_s:g} s."
                ) from None

    def _finished(self, output: SequenceOutput, *, is_logged: bool) -> None:
        self.roster.ended(output)
        book = self.book
        book.num_sequences += 1
        book.num_aborted += not output.is_complete
        book.prompt_tokens += output.num_prompt
        book.cached_tokens += output.num_cached
        book.output_tokens += output.num_outputs
        if is_logged:
            self._log.finished(output)
        for reader in self.readers:
            try:
                reader(output)
            except Exception:
                logger.exception("Cannot log the end of request %s.", excerpt(output.rid))


def _entry(state: InternalState, facts: EngineFacts) -> dict[str, Any]:
    """The entry of an engine in SGLang's ``internal_states``: what it says of itself, with SGLang's
    names for what it has elsewhere."""
    entry: dict[str, Any] = msgspec.to_builtins(state)
    for key in ("type", "report"):
        del entry[key]
    report = msgspec.to_builtins(state.report)
    capacity = {"token_capacity": facts.max_total_num_tokens}
    return {
        **entry,
        **report.pop("figures"),
        **{name: value for name, value in report.items() if value is not None},
        "effective_max_running_requests_per_dp": state.settings.max_running_requests,
        "memory_usage": {**report["memory_usage"], **capacity},
    }
