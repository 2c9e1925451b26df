"""Which GPUs of a machine the ranks of each engine take. Pure.

A GPU has a number among those that are visible, which are those of CUDA_VISIBLE_DEVICES if that is
set. The engines of --dp-size take as many GPUs each as they have ranks, in the order of their
numbers, from --base-gpu-id on in steps of --gpu-id-step. On several nodes, each has numbers of its
own.
"""

from __future__ import annotations

from dataclasses import replace

from setpoint.config.decisions import Book, Decision
from setpoint.config.groups.declare import flag_of
from setpoint.config.groups.parallel import ParallelOptions
from setpoint.config.hardware import Hardware
from setpoint.core.errors import ConfigError

PLACES = ("base_gpu_id", "gpu_id_step")


def gpus_of_engines(parallel: ParallelOptions) -> list[tuple[int, ...]]:
    """For each engine on this machine, the numbers of the GPUs of its ranks."""
    each = parallel.ranks_per_node
    first, step = parallel.base_gpu_id, parallel.gpu_id_step
    return [
        tuple(first + step * (engine * each + rank) for rank in range(each))
        for engine in range(parallel.dp_size)
    ]


def with_own_gpus(hardware: Hardware, parallel: ParallelOptions) -> Hardware:
    """The hardware with the memory of the smallest GPU that a rank takes."""
    taken = (gpu for engine in gpus_of_engines(parallel) for gpu in engine)
    sizes = [hardware.gpus[gpu] for gpu in taken if gpu < len(hardware.gpus)]
    return replace(hardware, gpu_bytes=min(sizes)) if sizes else hardware


def settle_gpus(book: Book, hardware: Hardware, device: str) -> list[Decision]:
    """The decision which GPUs the engines take; none on a CPU. Raises ConfigError if there are too
    few."""
    if device == "cpu":
        for name in PLACES:
            if book.changed(name):
                book.put(name, book.get(name), "given, without effect on a CPU", warn=True)
        return []
    parallel = book.options.parallel
    engines = gpus_of_engines(parallel)
    count, found = sum(map(len, engines)), len(hardware.gpus)
    needed = engines[-1][-1] + 1
    if found and needed > found:
        raise ConfigError(
            f"{_demand(parallel)} needs {_counted(count)} (number {_numbers(engines)}), and only"
            f" {_counted(found)} can be seen here, numbered from 0 (CUDA_VISIBLE_DEVICES decides"
            " which). Ask for less, or make more GPUs visible."
        )
    seen = f"of {found} that can be seen" if found else "how many can be seen is not known"
    ranks = "rank" if len(engines) == 1 else "rank of each engine"
    why = f"a GPU for each {ranks}, {seen}"
    is_news = count > 1 or book.changed("base_gpu_id")
    return [Decision("gpus", _numbers(engines), why, is_news=is_news)]


def _demand(parallel: ParallelOptions) -> str:
    """The options that say how many GPUs are needed, and which."""
    sizes = {"tp_size": parallel.ranks_per_node, "dp_size": parallel.dp_size}
    asked = [f"{flag_of(name)} {size}" for name, size in sizes.items() if size > 1]
    if parallel.nnodes > 1:
        asked = [f"a node's share of --tp-size {parallel.tp_size}"]
    places = [
        f"{flag_of(name)} {value}"
        for name in PLACES
        if (value := getattr(parallel, name)) != getattr(ParallelOptions(), name)
    ]
    return " with ".join(part for part in (" times ".join(asked), " and ".join(places)) if part)


def _numbers(engines: list[tuple[int, ...]]) -> str:
    """The GPUs of each engine, as "0,1|2,3"."""
    return "|".join(",".join(map(str, gpus)) for gpus in engines)


def _counted(number: int) -> str:
    return f"{number} GPU{'s' * (number != 1)}"
