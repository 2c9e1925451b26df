"""The group of options "Parallelism"."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.groups.declare import Option

GROUP = "Parallelism"


class ParallelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks and replicas, and what happens when an engine dies."""

    tp_size: Annotated[
        int, Option(GROUP, "Tensor parallel ranks; only 1 so far.", choices=(1,))
    ] = 1
    dp_size: Annotated[
        int,
        Option(
            GROUP,
            "Data parallel replicas: engines with the whole model, each with its share of the"
            " machine's cores and memory, behind one server. On NVIDIA GPUs each has one GPU.",
            low=1,
            high=64,
        ),
    ] = 1
    load_balance_method: Annotated[
        str,
        Option(
            GROUP,
            "How the engine of a request is chosen: where the cache holds its beginning, unless"
            " that engine has much more to do (cache_aware), in turn (round_robin), or the one with"
            " the fewest requests (total_requests) or tokens (total_tokens), or as the router says:"
            " bootstrap_room modulo --dp-size (follow_bootstrap_room). auto: cache_aware.",
            choices=(
                "auto",
                "cache_aware",
                "follow_bootstrap_room",
                "round_robin",
                "total_requests",
                "total_tokens",
            ),
        ),
    ] = "auto"
    max_engine_restarts: Annotated[
        int,
        Option(
            GROUP,
            "How many engines that have died may be started again within an hour. Their requests"
            " go on where they were. A standby that is ready takes over even if none is left. When"
            " no engine is left, the server ends.",
            low=0,
        ),
    ] = 10
    engine_standby: Annotated[
        bool,
        Option(
            GROUP,
            "Keep a second engine loaded, without requests, that takes the place of the engine when"
            " it dies. It needs memory for the weights once more. It is started again as often as"
            " --max-engine-restarts says, counted apart. For one engine on a CPU.",
        ),
    ] = False
    use_ray: Annotated[
        bool,
        Option(
            GROUP,
            "Run each engine as an actor of Ray, all of them on this machine: in the cluster of"
            " RAY_ADDRESS, or in a Ray that is started here. For CPUs; needs 'setpoint[ray]'.",
            server_only=True,
        ),
    ] = False
    pp_size: Annotated[int, Option(GROUP, "Pipeline stages; only 1 so far.", choices=(1,))] = 1
    ep_size: Annotated[
        int, Option(GROUP, "Expert parallel ranks; only 1 so far.", choices=(1,))
    ] = 1

    @property
    def follows_bootstrap_room(self) -> bool:
        """Whether requests name their engines by rooms."""
        return self.dp_size > 1 and self.load_balance_method == "follow_bootstrap_room"
