"""Several machines (nodes) that serve one model together: which ranks each of them has, and where
they meet. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Set

from setpoint.config.groups.parallel import ParallelOptions
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError

FIELDS = ("nnodes", "node_rank", "dist_init_addr")
"""The options that torchrun's variables stand for."""
AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set to True by a torchrun whose own process listens on MASTER_PORT."""


def check_nodes(options: Options) -> None:
    """Raise ConfigError for options about nodes that contradict each other."""
    parallel = options.parallel
    if parallel.node_rank >= parallel.nnodes:
        raise ConfigError(
            f"--node-rank {parallel.node_rank} does not exist with --nnodes {parallel.nnodes}: "
            + (
                "the only node is number 0."
                if parallel.nnodes == 1
                else f"the nodes are numbered from 0 to {parallel.nnodes - 1}."
            )
        )
    if parallel.dist_init_addr is not None:
        rendezvous_address(parallel)
    if parallel.nnodes == 1:
        if parallel.dist_init_addr is not None:
            raise ConfigError(
                "--dist-init-addr is where several nodes meet, but --nnodes is 1; give --nnodes,"
                " or leave --dist-init-addr out."
            )
        return
    if parallel.tp_size % parallel.nnodes:
        raise ConfigError(
            f"--tp-size {parallel.tp_size} cannot be divided evenly among --nnodes"
            f" {parallel.nnodes}; make it a multiple of {parallel.nnodes}."
        )
    for is_given, flag in (
        (parallel.dp_size > 1, f"--dp-size {parallel.dp_size}"),
        (parallel.engine_standby, "--engine-standby"),
    ):
        if is_given:
            raise ConfigError(
                f"{flag} cannot be combined with --nnodes {parallel.nnodes}, which is about the"
                " ranks of one engine; leave one of them out."
            )


def check_rendezvous(options: Options) -> None:
    """Raise ConfigError if there are several nodes and they do not know where to meet."""
    if options.parallel.nnodes > 1:
        rendezvous_address(options.parallel)


def rendezvous_address(parallel: ParallelOptions) -> tuple[str, int]:
    """Host and port of --dist-init-addr. Raises ConfigError if they are missing or malformed."""
    text = parallel.dist_init_addr
    if text is None:
        raise ConfigError(
            f"--nnodes {parallel.nnodes} needs --dist-init-addr HOST:PORT: an address of node 0"
            " that the other nodes can reach, the same on every node."
        )
    host, colon, port = text.removeprefix("tcp://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(
            f"--dist-init-addr must be HOST:PORT, for example 192.168.1.10:5000; got {text!r}."
        )
    return host, int(port)


def with_torchrun_ranks(options: Options, given: Set[str], environ: Mapping[str, str]) -> Options:
    """The options with --nnodes, --node-rank and --dist-init-addr from torchrun's variables, if
    there is more than one rank and none of the three is given. Each process of torchrun is a node,
    which starts its ranks itself. Raises ConfigError if the variables do not fit."""
    if options.parallel.tp_size == 1 or given & set(FIELDS) or "RANK" not in environ:
        return options
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if not environ.get(name)]:
        raise ConfigError(
            f"RANK is set in the environment, but {' and '.join(missing)} not: torchrun sets"
            f" {', '.join(names)} together. Unset RANK, or give --nnodes, --node-rank and"
            " --dist-init-addr."
        )
    rank, count, port = (_number(environ, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if count == 1:
        return options
    if (of_machine := environ.get("LOCAL_WORLD_SIZE", "1")) != "1":
        raise ConfigError(
            f"torchrun has started {of_machine} processes on this machine, but 'setpoint serve'"
            " starts all ranks of a machine itself: use --nproc-per-node 1, and --tp-size for the"
            " number of all ranks."
        )
    if environ.get(AGENTS_STORE) == "True":
        port += 1
    options = options.replace(
        nnodes=count, node_rank=rank, dist_init_addr=f"{environ['MASTER_ADDR']}:{port}"
    )
    check_nodes(options)
    return options


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"environment variable {name} must be a whole number, got {text!r}.")
    return int(text)


def ranks_of_nodes(tp_size: int, nnodes: int) -> list[range]:
    """For each node, its ranks; their number is a multiple of that of the nodes."""
    each = tp_size // nnodes
    return [range(node * each, (node + 1) * each) for node in range(nnodes)]
