"""Describes the machine's NUMA nodes and cores, and reads the description from /sys.

A *CPU* is what the kernel schedules on and numbers; the CPUs of one *core* are its hyperthreads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True, frozen=True)
class NumaNode:
    """A NUMA node that has CPUs."""

    number: int
    cores: tuple[tuple[int, ...], ...]
    """The online CPUs of each core, in order of their first."""
    has_memory: bool = True
    """Whether it has memory that this process may use."""

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(cpu for core in self.cores for cpu in core)

    def allowed(self, cpus: Set[int]) -> NumaNode:
        """The node as a process sees it that may use only these CPUs."""
        kept = (tuple(cpu for cpu in core if cpu in cpus) for core in self.cores)
        return NumaNode(self.number, tuple(core for core in kept if core), self.has_memory)


@dataclass(slots=True, frozen=True)
class Topology:
    nodes: tuple[NumaNode, ...] = ()
    """The NUMA nodes, in order of their numbers; none if nothing is known."""
    allowed: frozenset[int] = frozenset()
    """The CPUs that this process may use, by its affinity."""

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(cpu for node in self.nodes for cpu in node.cpus)

    @property
    def usable(self) -> list[NumaNode]:
        """The nodes on which this process may run, with the CPUs that it may use."""
        nodes = (node.allowed(self.allowed) for node in self.nodes)
        return [node for node in nodes if node.cores]


UNKNOWN = Topology()


def read_topology(root: Path, allowed: Collection[int]) -> Topology:
    """The machine whose /sys and /proc are in the folder ``root``. A kernel that does not know NUMA
    nodes has one, with the number 0. allowed: the CPUs that this process may use."""
    folder = root / "sys/devices/system"
    online = frozenset(parse_cpus(_text(folder / "cpu/online"))) or frozenset(allowed)
    memory = _nodes_with_memory(root)
    nodes = []
    for number in sorted(parse_cpus(_text(folder / "node/online"))):
        cpus = set(parse_cpus(_text(folder / f"node/node{number}/cpulist"))) & online
        if cpus:
            nodes.append(NumaNode(number, _cores(folder / "cpu", cpus), number in memory))
    if not nodes:
        nodes = [NumaNode(0, _cores(folder / "cpu", online), has_memory=False)]
    return Topology(tuple(nodes), frozenset(allowed))


def parse_cpus(text: str) -> tuple[int, ...]:
    """The numbers in a list such as ``0-3,8``, in ascending order. Raises ValueError."""
    numbers: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        begin, end = _number(first), _number(last) if dash else _number(first)
        if begin > end:
            raise ValueError(f"{part!r} runs backwards")
        numbers.update(range(begin, end + 1))
    return tuple(sorted(numbers))


def format_cpus(cpus: Iterable[int]) -> str:
    """The inverse of ``parse_cpus``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{begin}-{end}" if begin < end else str(begin) for begin, end in runs)


MAX_CPU = 1 << 16
"""More than any kernel numbers; a larger number in a list is a mistake."""


def _number(text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit()) or int(text) > MAX_CPU:
        raise ValueError(f"{text!r} is not the number of a CPU")
    return int(text)


def _cores(folder: Path, cpus: Set[int]) -> tuple[tuple[int, ...], ...]:
    """These CPUs by core. A CPU of which nothing is known is a core."""
    left, cores = set(cpus), []
    for cpu in sorted(cpus):
        if cpu in left:
            siblings = parse_cpus(_text(folder / f"cpu{cpu}/topology/thread_siblings_list"))
            core = tuple(each for each in siblings if each in left) or (cpu,)
            cores.append(core)
            left -= set(core)
    return tuple(cores)


def _nodes_with_memory(root: Path) -> set[int]:
    has = set(parse_cpus(_text(root / "sys/devices/system/node/has_memory")))
    for line in _text(root / "proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            return has & set(parse_cpus(value))
    return has


def _text(path: Path) -> str:
    """The file's content, or "" if the kernel has no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
