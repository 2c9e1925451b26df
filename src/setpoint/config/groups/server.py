"""The group of options "Server"."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.groups.declare import Option

GROUP = "Server"


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options about the server's address and access, its start and its end."""

    host: Annotated[str, Option(GROUP, "Address to listen on.", server_only=True)] = "127.0.0.1"
    port: Annotated[
        int, Option(GROUP, "Port to listen on.", low=1, high=65535, server_only=True)
    ] = 30000
    api_key: Annotated[
        str | None,
        Option(
            GROUP,
            "Key that clients must send ('Authorization: Bearer KEY'). If not given, every"
            " client is served.",
            metavar="KEY",
            secret=True,
            server_only=True,
        ),
    ] = None
    extra_api_keys: Annotated[
        tuple[str, ...],
        Option(
            GROUP,
            "Further keys with the same rights as --api-key. With a key for each client, you can"
            " withdraw one without the others.",
            metavar="KEY",
            secret=True,
            server_only=True,
        ),
    ] = ()
    admin_api_key: Annotated[
        str | None,
        Option(
            GROUP,
            "Key for the routes that change the server (flush, abort, pause, memory, weights,"
            " …). If not given, --api-key opens these routes.",
            metavar="KEY",
            secret=True,
            server_only=True,
        ),
    ] = None
    update_weights_folder: Annotated[
        str | None,
        Option(
            GROUP,
            "Folder below which /update_weights_from_disk may read checkpoints. If not given,"
            " the route can only reload the served model.",
            metavar="FOLDER",
            server_only=True,
        ),
    ] = None
    max_body_bytes: Annotated[
        int | None,
        Option(
            GROUP,
            "Maximum size of a request body; larger ones are answered 413. If not given, 16"
            " bytes for each token of the context length, but at least 4Mi, which holds long"
            " lists of prompts. While the server reads a large body, other clients wait.",
            metavar="BYTES",
            low=1024,
            human=True,
            server_only=True,
        ),
    ] = None
    skip_server_warmup: Annotated[
        bool,
        Option(
            GROUP,
            "Do not send a warm-up request before the server reports ready.",
            server_only=True,
        ),
    ] = False
    watchdog_timeout: Annotated[
        float,
        Option(
            GROUP,
            "Seconds that an engine may take for one step before it is considered stuck and is"
            " killed. Time in which the machine or the processes are paused does not count.",
            metavar="SECONDS",
            low=5,
            high=1e9,
        ),
    ] = 300.0
    drain_timeout: Annotated[
        float,
        Option(
            GROUP,
            "Seconds after SIGTERM or Ctrl-C until running requests are aborted. The process"
            " ends at most two seconds later.",
            metavar="SECONDS",
            low=0,
            high=1e6,
            live=True,
            server_only=True,
        ),
    ] = 30.0
    config: Annotated[
        str | None,
        Option(
            GROUP,
            "YAML file with options, named as on the command line but without the leading"
            " dashes. The command line wins.",
            metavar="FILE",
        ),
    ] = None

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys of clients. If it is empty, everybody is served."""
        first = () if self.api_key is None else (self.api_key,)
        return (*first, *self.extra_api_keys)
