"""The Ray Serve application: ``serve run rayserve.app:app model_path=…`` (deploy/ray).

A replica is a whole server without a port: the frontend runs in the replica's process, and the
engine is its child process, supervised as by ``setpoint serve``. The ingress reads a request, asks
a replica for the token ids of its prompts, and passes the request to the replica that the router
chooses by these ids.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from contextvars import Context
from dataclasses import dataclass, fields
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from rayserve.embedded import hosted
from rayserve.exchange import HttpRequest, Start, answer
from rayserve.prompts import Prompt, PromptReader
from rayserve.router import HELD, CacheAwareRouter
from rayserve.routes import PROMPTS, refusal
from rayserve.scaling import QUEUE, USAGE, QueueAndUsage
from setpoint.config.commandline import parse_keywords
from setpoint.config.commands import SERVE
from setpoint.config.environment import read_environment
from setpoint.config.keywords import naming_keywords
from setpoint.core.errors import ConfigError, EngineDeadError
from setpoint.observe.logline import setup_logging

logger = logging.getLogger(__name__)

MOST_OPEN = 4096
"""Maximum requests that Ray gives one replica. The number is high because the engine has its own
queue and computes in batches."""
REPORT_S = 1.0
"""Seconds between two reports of a replica's cache."""
MOST_BODY_BYTES = 64 << 20
"""The largest body that the ingress reads. The limit of a replica is lower."""
MOST_TRIES = 3
"""Maximum number of replicas that get a request, if one after the other dies before it answers."""
END_S = 5.0
"""How long the end of a replica may take after its requests have ended or run out of time."""
NOT_HERE = {
    "config": "give its options one by one",
    "dp_size": "a replica has one engine; use min_replicas and max_replicas",
    "file_storage_path": "files and batches are kept by one server",
    "host": "Ray Serve listens",
    "port": "Ray Serve listens",
}
"""Options of ``setpoint serve`` that a replica cannot have -> why."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Arguments:
    """The application's own arguments. All others are options of ``setpoint serve``."""

    num_cpus: int = 1
    """Cores of a replica, and threads of its engine unless num_threads says otherwise."""
    min_replicas: int = 1
    max_replicas: int = 1
    queue_target: float = 4.0
    """The number of waiting requests per replica at which autoscaling aims."""
    usage_target: float = 0.8
    """The share of the KV pool in use at which autoscaling aims."""
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    router: str = "cache_aware"
    """"cache_aware", or "ray": Ray Serve's own router, which chooses the less busy of two
    replicas."""


class Replica:
    """A server with its engine."""

    async def __init__(self, options: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        with naming_keywords():
            line = parse_keywords(SERVE, options)
        env = read_environment(os.environ)
        setup_logging(line.options.logs.log_level, milliseconds=env.log_ms)
        self._stack = AsyncExitStack()
        self._hosted = await self._stack.enter_async_context(
            hosted(line.options, env, given=line.given)
        )
        self._reader = PromptReader(self._hosted.service)

    async def prompts(self, request: HttpRequest) -> list[Prompt]:
        """The prompts of a request, for the router's choice of a replica."""
        return await self._reader.read(request)

    async def http(
        self, request: HttpRequest, prompts: list[Prompt]
    ) -> AsyncIterator[Start | bytes]:
        """The answer to a request. prompts: for the router."""
        async for part in answer(self._hosted.app, request):
            yield part

    async def check_health(self) -> None:
        """Raise an error if the engine is gone for good; Ray then replaces the replica."""
        if self._hosted.session.over.done():
            raise EngineDeadError(self._hosted.session.death)

    def record_routing_stats(self) -> dict[str, bytes]:
        return {HELD: self._hosted.service.engine.held_prefixes()}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        info = self._hosted.service.info
        client = info.engine
        try:
            ((_, state),) = await info.states()
        except EngineDeadError:  # no engine is ready at the moment, and everything waits
            return {QUEUE: float(client.num_open), USAGE: 0.0}
        return {QUEUE: float(state.num_queued + client.num_waiting), USAGE: state.pool.usage}

    async def __del__(self) -> None:
        """Ray Serve calls this when the replica has answered its requests."""
        if hasattr(self, "_hosted"):
            await self._stack.aclose()


class Ingress:
    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas

    async def __call__(self, request: Request) -> Response:
        if (why := refusal(request.url.path)) is not None:
            return _refused(501, why)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BODY_BYTES:
                return _refused(413, f"The body is larger than {MOST_BODY_BYTES} bytes.")
        call = HttpRequest(
            request.method,
            request.url.path,
            request.scope["query_string"],
            list(request.scope["headers"]),
            bytes(body),
            None if request.client is None else (request.client.host, request.client.port),
        )
        for left in reversed(range(MOST_TRIES)):
            try:
                return await self._ask(call)
            except RayActorError as error:
                logger.warning("A replica died before it answered %s: %s", call.path, error)
                if not left:
                    raise
        raise AssertionError

    async def _ask(self, call: HttpRequest) -> Response:
        """The answer of one replica. Raises RayActorError if the replica dies before a stream
        begins, or before an answer of known length is complete."""
        prompts: list[Prompt] = []
        if call.path in PROMPTS:
            # A separate context makes Ray give the call its own id, by which the router counts
            # calls.
            prompts = await Context().run(self._replicas.prompts.remote, call)
        parts = self._replicas.options(stream=True).http.remote(call, prompts)
        start = await anext(parts)
        response: Response
        if any(name == b"content-length" for name, _ in start.headers):
            response = Response(b"".join([part async for part in parts]), start.status)
        else:
            response = StreamingResponse(_rest(parts, call.path), start.status)
        response.raw_headers = start.headers
        return response


def _refused(status: int, why: str) -> Response:
    return JSONResponse({"error": {"message": why, "type": "ingress", "code": status}}, status)


async def _rest(parts: Any, path: str) -> AsyncIterator[bytes]:
    is_over = False
    try:
        async for part in parts:
            yield part
        is_over = True
    except RayActorError as error:
        is_over = True
        logger.error(
            "A replica died while it answered %s, and the answer is incomplete: %s", path, error
        )
        raise
    finally:
        if not is_over:  # the client has disconnected
            parts.cancel()


def app(arguments: dict[str, Any]) -> Any:
    """Builds the application. arguments: fields of Arguments, and options of ``setpoint serve`` as
    keywords. Raises ConfigError."""
    own: dict[str, Any] = {each.name: each.default for each in fields(Arguments)}
    options = {name: value for name, value in arguments.items() if name not in own}
    for name in own.keys() & arguments.keys():
        try:  # on a command line, every value is text
            own[name] = type(own[name])(arguments[name])
        except (TypeError, ValueError):
            raise ConfigError(f"{name} must be a number, got {arguments[name]!r}.") from None
    wanted = Arguments(**own)
    for name in options.keys() & NOT_HERE.keys():
        raise ConfigError(f"A replica does not have the option {name}: {NOT_HERE[name]}.")
    options.setdefault("num_threads", wanted.num_cpus)
    with naming_keywords():
        line = parse_keywords(SERVE, options)
    scaling = AutoscalingConfig(
        min_replicas=wanted.min_replicas,
        max_replicas=wanted.max_replicas,
        upscale_delay_s=wanted.upscale_delay_s,
        downscale_delay_s=wanted.downscale_delay_s,
        metrics_interval_s=REPORT_S,
        look_back_period_s=5 * REPORT_S,
        policy=AutoscalingPolicy(
            policy_function=QueueAndUsage,
            policy_kwargs={
                "queue_target": wanted.queue_target,
                "usage_target": wanted.usage_target,
            },
        ),
    )
    routing: dict[str, Any] = {"request_routing_stats_period_s": REPORT_S}
    if wanted.router == "cache_aware":
        routing["request_router_class"] = CacheAwareRouter
    elif wanted.router != "ray":
        raise ConfigError(f"router must be cache_aware or ray, got {wanted.router!r}.")
    drain_s = line.options.server.drain_timeout + END_S
    replicas = (
        serve.deployment(Replica)
        .options(
            ray_actor_options={"num_cpus": wanted.num_cpus},
            max_ongoing_requests=MOST_OPEN,
            graceful_shutdown_timeout_s=drain_s,
            graceful_shutdown_wait_loop_s=0.5,
            autoscaling_config=scaling,
            request_router_config=RequestRouterConfig(**routing),
        )
        .bind(options)
    )
    return (
        serve.deployment(Ingress)
        .options(
            ray_actor_options={"num_cpus": 0},
            max_ongoing_requests=16 * MOST_OPEN,
            # An update replaces it, too, and the streams that pass through it are the replicas'.
            graceful_shutdown_timeout_s=drain_s,
        )
        .bind(replicas)
    )
