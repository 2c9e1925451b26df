"""Plans on which cores each rank of each engine runs, and near which NUMA node its memory lies.

Pure: options and a description of the machine -> a place for every rank. Ranks are numbered across
engines: those of the first engine come first. ``launch.child.binding`` applies the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from setpoint.config.decisions import Decision
from setpoint.config.environment import EnvSettings
from setpoint.config.hardware import Hardware
from setpoint.config.options import Options
from setpoint.config.topology import NumaNode, Topology, format_cpus, parse_cpus
from setpoint.core.errors import ConfigError

VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"


@dataclass(slots=True, frozen=True)
class RankPlacement:
    """Where a rank runs."""

    cpus: tuple[int, ...]
    """The CPUs that its threads may use; a few more than threads if cores have hyperthreads."""
    num_threads: int
    node: int | None
    """The NUMA node whose memory it prefers; None: each page is near the thread that first writes
    it."""

    def __str__(self) -> str:
        where = f"CPU{'s' * (len(self.cpus) > 1)} {format_cpus(self.cpus)}"
        return where if self.node is None else f"{where} and memory of NUMA node {self.node}"


@dataclass(slots=True, frozen=True)
class Placement:
    """The places of all ranks, or none if nothing is bound."""

    why: str
    places: tuple[RankPlacement, ...] = ()
    warn: bool = False
    is_news: bool = False

    @property
    def decision(self) -> Decision:
        value = "|".join(format_cpus(place.cpus) for place in self.places) or None
        return Decision("placement", value, self.why, self.warn, is_news=self.is_news)


@dataclass(slots=True, frozen=True)
class _Demand:
    """What is to be placed."""

    engines: int
    ranks: int
    """Number of ranks that each engine has on this machine."""
    num_threads: int | None
    """Threads of each rank, if the user has given the number."""
    quota: int | None
    """CPUs whose time all ranks together get."""

    @property
    def count(self) -> int:
        return self.engines * self.ranks

    def __str__(self) -> str:
        sizes = (("--dp-size", self.engines), ("--tp-size", self.ranks))
        why = " times ".join(f"{flag} {size}" for flag, size in sizes if size > 1)
        return f"{_counted(self.count, 'rank')}{why and f' ({why})'}"

    def place(self, cores: Sequence[tuple[int, ...]], node: int | None) -> RankPlacement:
        """A rank on these cores: a thread for each core, as far as the time suffices."""
        threads = self.num_threads
        if threads is None:
            threads = len(cores)
            if self.quota is not None:
                threads = max(min(threads, self.quota // self.count), 1)
        return RankPlacement(tuple(sorted(cpu for core in cores for cpu in core)), threads, node)


def place_ranks(
    options: Options, env: EnvSettings, hardware: Hardware, *, device: str
) -> Placement:
    """The place of every rank. Raises ConfigError for a value that does not fit the machine or the
    number of ranks."""
    topology, nodes, lists = hardware.topology, options.parallel.numa_node, env.threads_bind.strip()
    asked = _Demand(
        options.parallel.dp_size,
        options.parallel.ranks_per_node,
        options.execution.num_threads,
        hardware.quota_cores,
    )
    has_lists = device == "cpu" and lists.lower() != "all"
    if has_lists and nodes:
        raise ConfigError(
            f"--numa-node and the environment variable {VARIABLE} both say where ranks run; leave"
            " one of them out."
        )
    if has_lists:
        return _by_lists(asked, topology, lists)
    if nodes:
        return _by_nodes(asked, topology, nodes)
    if device != "cpu":
        return Placement("only --numa-node binds an engine on a GPU")
    return _by_machine(asked, topology)


def _by_machine(asked: _Demand, topology: Topology) -> Placement:
    """Ranks on whole nodes or on parts of them, never across the nodes of another rank."""
    nodes = topology.usable
    if len(nodes) <= 1:
        several = len(topology.nodes) > 1
        return Placement(
            f"this process may run only on NUMA node {nodes[0].number}, so nothing is bound"
            if several and nodes
            else "the machine has one NUMA node, so nothing is bound",
            is_news=asked.count > 1,
        )
    if asked.count == 1:
        return Placement(
            f"one rank has the cores of all {len(nodes)} NUMA nodes, so nothing is bound;"
            f" --tp-size {len(nodes)} gives each node a rank, with the same answers",
            is_news=True,
        )
    if asked.count > (cpus := sum(len(node.cpus) for node in nodes)):
        return Placement(f"{asked} are more than the {cpus} CPUs, so nothing is bound", warn=True)
    each = len(nodes) // asked.count
    if each > 1:
        used = nodes[: each * asked.count]
        runs = (used[i : i + each] for i in range(0, len(used), each))
        places = [asked.place([core for node in run for core in node.cores], None) for run in runs]
        why = f"{each} NUMA nodes for each rank"
    else:
        counts = _shares(nodes, asked.count)
        used = [node for node, count in zip(nodes, counts, strict=True) if count]
        places = [
            asked.place(cores, _memory(node))
            for node, count in zip(nodes, counts, strict=True)
            for cores in _split(node, count)
        ]
        most = max(counts)
        why = "a NUMA node for each rank" if most == 1 else f"up to {most} ranks on a NUMA node"
    if unused := [node.number for node in nodes if node not in used]:
        why += (
            f"; NUMA node{'s' * (len(unused) > 1)} {format_cpus(unused)} of {len(nodes)} would be"
            f" unused by {asked}, so give a number of ranks that divides {len(nodes)}"
        )
    return Placement(why, tuple(places), warn=bool(unused), is_news=True)


def _by_nodes(asked: _Demand, topology: Topology, numbers: Sequence[int]) -> Placement:
    """--numa-node."""
    usable = {node.number: node for node in topology.usable}
    possible = f"possible: {', '.join(map(str, usable))}"
    for number in numbers:
        if number not in {node.number for node in topology.nodes}:
            raise ConfigError(f"--numa-node {number} is not a NUMA node with cores; {possible}.")
        if number not in usable:
            raise ConfigError(
                f"--numa-node {number}: this process may run on none of the node's CPUs, because"
                f" its affinity is {format_cpus(topology.allowed)}; {possible}."
            )
    if len(numbers) != asked.count:
        raise ConfigError(
            f"--numa-node has {_counted(len(numbers), 'node')} for {asked}; give one for each rank."
        )
    counts, parts = Counter(numbers), {}
    for number, count in counts.items():
        node = usable[number]
        if count > len(node.cpus):
            raise ConfigError(
                f"--numa-node puts {count} ranks on node {number}, of which this process may use"
                f" {_counted(len(node.cpus), 'CPU')}; put them on several nodes."
            )
        parts[number] = _split(node, count)
    places = [asked.place(next(parts[number]), _memory(usable[number])) for number in numbers]
    return Placement("--numa-node", tuple(places), is_news=True)


def _by_lists(asked: _Demand, topology: Topology, text: str) -> Placement:
    """SGLANG_CPU_OMP_THREADS_BIND: the CPUs of each rank, one thread on each."""
    named = f"environment variable {VARIABLE}"
    owner: dict[int, int] = {}
    lists = [_cpus(part, text, topology) for part in text.split("|")]
    if len(lists) != asked.count:
        raise ConfigError(
            f"{named} has {_counted(len(lists), 'list')} for {asked}, got {text!r}; give one for"
            " each rank, separated by |."
        )
    for rank, cpus in enumerate(lists):
        for cpu in cpus:
            if owner.setdefault(cpu, rank) != rank:
                raise ConfigError(
                    f"{named} gives CPU {cpu} to ranks {owner[cpu]} and {rank}, which would wait"
                    f" for each other, got {text!r}; give each rank CPUs of its own."
                )
    places = []
    for cpus in lists:
        near = [node for node in topology.nodes if node.cpus & set(cpus)]
        threads = asked.num_threads or len(cpus)
        places.append(RankPlacement(cpus, threads, _memory(near[0]) if len(near) == 1 else None))
    why, quota = VARIABLE, asked.quota
    if exceeds := quota is not None and len(owner) > quota:
        why += f", but the container's quota is {_counted(quota or 0, 'CPU')}, so threads will wait"
    return Placement(why, tuple(places), warn=exceeds, is_news=True)


def _cpus(part: str, text: str, topology: Topology) -> tuple[int, ...]:
    named = f"environment variable {VARIABLE}"
    try:
        cpus = parse_cpus(part)
    except ValueError as error:
        raise ConfigError(
            f"{named} must be all, or lists of CPUs such as 0-15|16-31, got {text!r}: {error}."
        ) from None
    if not cpus:
        raise ConfigError(f"{named} has an empty list of CPUs, got {text!r}.")
    possible = f"possible: {format_cpus(topology.allowed & topology.cpus)}"
    if unknown := set(cpus) - topology.cpus:
        raise ConfigError(
            f"{named} names CPU {format_cpus(unknown)}, which does not exist, got {text!r};"
            f" {possible}."
        )
    if forbidden := set(cpus) - topology.allowed:
        raise ConfigError(
            f"{named} names CPU {format_cpus(forbidden)}, which is not in the affinity of this"
            f" process, got {text!r}; {possible}."
        )
    return cpus


def _shares(nodes: Sequence[NumaNode], ranks: int) -> list[int]:
    """The number of ranks for each node, so that the rank with the fewest cores has as many as
    possible."""
    sizes = [len(node.cores) for node in nodes]
    if sum(sizes) < ranks:
        sizes = [len(node.cpus) for node in nodes]
    counts = [0] * len(nodes)
    for _ in range(ranks):
        best = max(range(len(nodes)), key=lambda i: (sizes[i] / (counts[i] + 1), -i))
        counts[best] += 1
    return counts


def _split(node: NumaNode, count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The cores of each of ``count`` ranks on a node: neighbours, as equally many as possible. If
    there are too few cores, their hyperthreads are divided."""
    cores = node.cores
    if len(cores) < count:
        cores = tuple((cpu,) for core in cores for cpu in core)
    for i in range(count):
        yield cores[len(cores) * i // count : len(cores) * (i + 1) // count]


def _memory(node: NumaNode) -> int | None:
    return node.number if node.has_memory else None


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
