"""The group of options "Prefill and decode apart"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import msgspec

from setpoint.config.groups.declare import Option

if TYPE_CHECKING:
    from setpoint.core.handover import Role

GROUP = "Prefill and decode apart"


class DisaggregationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options about two servers that compute the prompt and the rest of each request
    (docs/disaggregation.md)."""

    disaggregation_mode: Annotated[
        str,
        Option(
            GROUP,
            "What this server does of a request. null: all of it. prefill: the prompt and the first"
            " token. decode: what follows, with the keys and values of the prompt from a prefill"
            " server. A router in front sends each request to one server of either kind, or the"
            " decode server does (--disaggregation-prefill-servers).",
            choices=("null", "prefill", "decode"),
            server_only=True,
        ),
    ] = "null"
    disaggregation_transfer_backend: Annotated[
        str,
        Option(
            GROUP,
            "What moves keys and values between the servers. setpoint: shared memory within a"
            " machine, TCP between machines. mooncake, SGLang's default, and mooncake_tcp mean the"
            " same here.",
            choices=("setpoint", "mooncake", "mooncake_tcp"),
            server_only=True,
        ),
    ] = "setpoint"
    disaggregation_bootstrap_port: Annotated[
        int,
        Option(
            GROUP,
            "Port of a prefill server at which decode servers ask where its engines are. A decode"
            " server uses it for requests that name a bootstrap_host without a bootstrap_port.",
            low=1,
            high=65535,
            server_only=True,
        ),
    ] = 8998
    disaggregation_enable_kv_checksum: Annotated[
        bool,
        Option(
            GROUP,
            "Send a checksum with keys and values, and check it on arrival. It is enough to give it"
            " on one of the two servers.",
            server_only=True,
        ),
    ] = False
    num_reserved_decode_tokens: Annotated[
        int,
        Option(
            GROUP,
            "Tokens of the pool that a decode server keeps free for each running request when it"
            " takes pages for another prompt.",
            low=0,
            server_only=True,
        ),
    ] = 512
    disaggregation_decode_polling_interval: Annotated[
        int,
        Option(
            GROUP,
            "Steps of a decode server after which it tries again to take pages for waiting"
            " prompts.",
            low=1,
            high=1000,
            server_only=True,
        ),
    ] = 1
    disaggregation_prefill_servers: Annotated[
        tuple[str, ...],
        Option(
            GROUP,
            "Prefill servers (http://HOST:PORT of each) to which a decode server sends its clients'"
            " requests by itself, so that no router is needed. It takes prompts from no others,"
            " whatever a request or a router says.",
            metavar="URL",
            server_only=True,
        ),
    ] = ()
    disaggregation_decode_enable_radix_cache: Annotated[
        bool,
        Option(
            GROUP,
            "Keep a prefix cache on a decode server.",
            no_effect="a decode server always has one, and fetches only what is missing in it",
            server_only=True,
        ),
    ] = False
    disaggregation_decode_enable_offload_kvcache: Annotated[
        bool,
        Option(
            GROUP,
            "Have a decode server write the keys and values of outputs to the storage of"
            " --hicache-storage-backend, where a prefill server finds them in the next turn.",
            server_only=True,
        ),
    ] = False

    @property
    def role(self) -> Role:
        """What a server with these options does of a request."""
        return cast("Role", self.disaggregation_mode)
