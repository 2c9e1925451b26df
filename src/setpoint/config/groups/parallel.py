"""The group of options "Parallelism"."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.groups.declare import Option

GROUP = "Parallelism"


class ParallelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options about ranks and replicas, and about what happens when an engine dies."""

    tp_size: Annotated[
        int,
        Option(
            GROUP,
            "Number of tensor-parallel ranks: processes that compute one model together, each with"
            " a part of its weights, of its KV cache and of the cores. The answers have the same"
            " bits for every number, on CPUs. Up to the number of the model's K and V heads, or a"
            " multiple of it up to that of its attention heads. On NVIDIA GPUs, each rank has one"
            " GPU (--base-gpu-id); that has not been tried on GPUs yet.",
            low=1,
            high=64,
        ),
    ] = 1
    nnodes: Annotated[
        int,
        Option(
            GROUP,
            "Number of machines (nodes) among which the --tp-size ranks are divided evenly. Start"
            " 'setpoint serve' on each of them, with the same options but for --node-rank.",
            low=1,
            high=64,
            server_only=True,
        ),
    ] = 1
    node_rank: Annotated[
        int,
        Option(
            GROUP,
            "Number of this node, from 0. Node 0 has the server and the first ranks; the others"
            " run ranks only, and end when node 0 does.",
            low=0,
            high=63,
            server_only=True,
        ),
    ] = 0
    dist_init_addr: Annotated[
        str | None,
        Option(
            GROUP,
            "Address of node 0 at which the nodes meet. Required with --nnodes. Without it,"
            " --nnodes and --node-rank, torchrun's variables RANK, WORLD_SIZE, MASTER_ADDR and"
            " MASTER_PORT are used if they are set and --tp-size is above 1.",
            metavar="HOST:PORT",
            server_only=True,
        ),
    ] = None
    dist_timeout: Annotated[
        int,
        Option(
            GROUP,
            "Seconds that nodes wait for one another at the start, and that an exchange between"
            " ranks through torch.distributed may take.",
            low=1,
            high=86400,
            server_only=True,
        ),
    ] = 600
    dist_secret: Annotated[
        str | None,
        Option(
            GROUP,
            "Text that every node must know in order to join. Without it, every program that"
            " reaches --dist-init-addr can join.",
            metavar="TEXT",
            secret=True,
            server_only=True,
        ),
    ] = None
    dp_size: Annotated[
        int,
        Option(
            GROUP,
            "Number of data-parallel ranks: engines behind one server, each with the whole model"
            " and an equal share of the machine's cores and memory. On NVIDIA GPUs, each engine"
            " has a GPU for each of its --tp-size ranks.",
            low=1,
            high=64,
        ),
    ] = 1
    base_gpu_id: Annotated[
        int,
        Option(
            GROUP,
            "Number of the first GPU that is used on this machine, among those that are visible"
            " (CUDA_VISIBLE_DEVICES). The ranks of the first engine take the first ones.",
            low=0,
            high=63,
        ),
    ] = 0
    gpu_id_step: Annotated[
        int,
        Option(
            GROUP,
            "Distance between the numbers of the GPUs that are used: 2 takes every second one.",
            low=1,
            high=63,
        ),
    ] = 1
    enable_dp_attention: Annotated[
        bool,
        Option(
            GROUP,
            "Divide the experts of a mixture among the --dp-size engines: each has the attention"
            " and the cache of its own requests, and all compute the experts together. Needs the"
            " same number as --tp-size. Divides --chunked-prefill-size and --max-running-requests"
            " by it, and multiplies --schedule-conservativeness by 0.3. Only for CPUs yet.",
        ),
    ] = False
    numa_node: Annotated[
        tuple[int, ...],
        Option(
            GROUP,
            "NUMA node of each rank: a number for each, first the ranks of the first engine. A"
            " rank's threads run on the node's cores, and its memory lies there as long as there is"
            " room. Ranks on the same node divide its cores. If not given and the machine has"
            " several nodes, Setpoint chooses; a single rank on a CPU uses all of them.",
            low=0,
        ),
    ] = ()
    load_balance_method: Annotated[
        str,
        Option(
            GROUP,
            "How the server chooses the engine of a request. cache_aware: the engine whose cache"
            " holds the beginning of the prompt, unless it has much more to do than another."
            " round_robin: each engine in turn. total_requests: the engine with the fewest"
            " requests. total_tokens: the engine with the fewest tokens. follow_bootstrap_room:"
            " the engine that the router names, which is bootstrap_room modulo --dp-size. auto"
            " means cache_aware.",
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
            "Maximum number of engines that are restarted within an hour after they have died."
            " Their requests continue where they were. A standby that is ready takes over even"
            " when no restart is left. The server ends when it has no engine left.",
            low=0,
        ),
    ] = 10
    engine_standby: Annotated[
        bool,
        Option(
            GROUP,
            "Keep a second engine loaded, without requests, which replaces the first one when it"
            " dies. It needs a second copy of the weights in memory. --max-engine-restarts"
            " limits the restarts of the standby too, with a count of its own. Only for a server"
            " with one engine on a CPU.",
        ),
    ] = False
    max_loaded_models: Annotated[
        int,
        Option(
            GROUP,
            "With several models (--model-path NAME=MODEL, several times), how many of them are"
            " loaded at the same time. Each gets an equal share of the memory and of the cores.",
            low=1,
            server_only=True,
        ),
    ] = 1
    pp_size: Annotated[
        int, Option(GROUP, "Number of pipeline stages; only 1 is supported yet.", choices=(1,))
    ] = 1

    @property
    def ranks_per_engine(self) -> int:
        """How many ranks compute the steps of one engine: with DP attention, each engine is one of
        the --tp-size ranks."""
        return 1 if self.enable_dp_attention else self.tp_size

    @property
    def ranks_per_node(self) -> int:
        """How many of these ranks run on one machine."""
        return self.ranks_per_engine // self.nnodes

    @property
    def follows_bootstrap_room(self) -> bool:
        """Whether the bootstrap room of a request determines its engine."""
        return self.dp_size > 1 and self.load_balance_method == "follow_bootstrap_room"
