"""The group of options "Events"."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from setpoint.config.groups.declare import Option
from setpoint.core.conversion import convert
from setpoint.core.errors import ConfigError
from setpoint.core.jsonfile import parse_json
from setpoint.core.kv_events import PublisherConfig

GROUP = "Events"
FLAG = "--kv-events-config"
PUBLISHERS = ("zmq", "null")
MAX_COUNT = (1 << 31) - 1
"""ZeroMQ counts in 32 bits."""


class EventOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options about the events that other programs receive."""

    kv_events_config: Annotated[
        str | None,
        Option(
            GROUP,
            "JSON object. Publishes every change of the prefix caches, for cache-aware routers, as"
            """ SGLang does (docs/routing.md), e.g. '{"publisher": "zmq", "endpoint":"""
            """ "tcp://127.0.0.1:5557", "bind": true}'. Needs the extra 'kv-events'.""",
            metavar="JSON",
            server_only=True,
        ),
    ] = None


def publisher_config(options: EventOptions, *, num_ranks: int = 1) -> PublisherConfig | None:
    """``--kv-events-config`` parsed; None if nothing is to be published. Raises ConfigError, also
    if the ports are not enough for this many ranks."""
    if options.kv_events_config is None:
        return None
    try:
        config = convert(parse_json(options.kv_events_config), PublisherConfig)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(PublisherConfig))
        raise ConfigError(f"{FLAG}: {error}. Its keys are {known}.") from None
    except ValueError as error:
        raise ConfigError(f"{FLAG} is not valid JSON: {error}.") from None
    if config.publisher not in PUBLISHERS:
        raise ConfigError(f"{FLAG}: publisher must be zmq or null, got {config.publisher!r}.")
    for key in ("buffer_steps", "hwm"):
        if not 1 <= getattr(config, key) <= MAX_COUNT:
            raise ConfigError(
                f"{FLAG}: {key} must be from 1 to {MAX_COUNT}, got {getattr(config, key)}."
            )
    if config.publisher == "null":
        return None
    ranges = list(_ports(config, num_ranks))
    for (key, first), (other, second) in combinations(ranges, 2):
        if abs(first - second) < num_ranks:
            raise ConfigError(
                f"{FLAG}: the ports of {key} and {other} overlap. Each needs {num_ranks} ports of"
                f" its own, beginning with {first} and {second}; choose ports further apart."
            )
    return config


def publisher_info(
    config: PublisherConfig, *, page_size: int, num_ranks: int
) -> dict[str, Any] | None:
    """What ``/server_info`` says about the publisher, so that routers find it; None if it has no
    TCP address."""
    ports = dict(_ports(config, num_ranks))
    if "endpoint" not in ports:
        return None
    host = config.endpoint.removeprefix("tcp://").rpartition(":")[0]
    found: dict[str, Any] = {
        "publisher": config.publisher,
        "endpoint_host": host,
        "endpoint_port_base": ports["endpoint"],
        "topic": config.topic,
        "block_size": page_size,
        "dp_size": num_ranks,
    }
    if "replay_endpoint" in ports:
        found["replay_endpoint_port_base"] = ports["replay_endpoint"]
    return found


def _ports(config: PublisherConfig, num_ranks: int) -> Iterator[tuple[str, int]]:
    """The key and the first port of each endpoint that has a port. Raises ConfigError."""
    for key in ("endpoint", "replay_endpoint"):
        endpoint = getattr(config, key)
        if endpoint is None or (endpoint.startswith("ipc://") and num_ranks == 1):
            continue
        try:
            parts = urlsplit(endpoint)
            port = parts.port if parts.scheme == "tcp" and parts.hostname else None
        except ValueError:
            port = None
        if port is None or not 1 <= port <= 65536 - num_ranks:
            raise ConfigError(
                f"{FLAG}: {key} must be tcp://HOST:PORT"
                + (", or ipc://PATH" if num_ranks == 1 else f" with {num_ranks} ports from PORT on")
                + f"; got {endpoint!r}."
            )
        yield key, port
