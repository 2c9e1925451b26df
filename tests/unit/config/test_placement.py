"""Ranks are placed on the cores of the machine; on made-up /sys trees."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from resolving import SPEC, decide, reason

from setpoint.config.environment import EnvSettings, read_environment
from setpoint.config.hardware import Hardware, probe_hardware
from setpoint.config.options import Options
from setpoint.config.placement import Placement, place_ranks
from setpoint.config.topology import Topology, format_cpus, parse_cpus, read_topology
from setpoint.core.errors import ConfigError
from setpoint.launch.job import EngineJob, decode_job, encode_job
from setpoint.planning.memory import GIB

VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"


def paint(
    root: Path,
    nodes: Sequence[str],
    *,
    siblings: int = 0,
    memory: str | None = None,
    mems_allowed: str | None = None,
) -> Path:
    """A machine with these CPUs on its nodes. siblings: the distance between the two hyperthreads
    of a core; 0: one each."""
    online = sorted(cpu for node in nodes for cpu in parse_cpus(node))
    every = f"0-{len(nodes) - 1}"
    files = {
        "cpu/online": format_cpus(online),
        "node/online": every,
        "node/has_memory": every if memory is None else memory,
        **{f"node/node{i}/cpulist": cpus for i, cpus in enumerate(nodes)},
    }
    for cpu in online:
        core = {cpu, cpu + siblings, cpu - siblings} & set(online)
        files[f"cpu/cpu{cpu}/topology/thread_siblings_list"] = format_cpus(core)
    for name, text in files.items():
        path = root / "sys/devices/system" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    if mems_allowed is not None:
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/status").write_text(f"Name:\tx\nMems_allowed_list:\t{mems_allowed}\n")
    return root


def machine(root: Path, *nodes: str, allowed: str | None = None, siblings: int = 0) -> Topology:
    cpus: Collection[int] = parse_cpus(",".join(nodes) if allowed is None else allowed)
    return read_topology(paint(root, nodes, siblings=siblings), cpus)


def place(
    topology: Topology,
    dp: int = 1,
    tp: int = 1,
    lists: str = "all",
    nodes: tuple[int, ...] = (),
    *,
    device: str = "cpu",
    quota: int | None = None,
    threads: int | None = None,
) -> Placement:
    hardware = Hardware("cpu", len(topology.allowed), GIB, topology=topology, quota_cores=quota)
    options = Options.of(dp_size=dp, tp_size=tp, numa_node=nodes, num_threads=threads)
    return place_ranks(options, EnvSettings(threads_bind=lists), hardware, device=device)


def summary(placement: Placement) -> list[str]:
    return [f"{format_cpus(each.cpus)}@{each.node}x{each.num_threads}" for each in placement.places]


FOUR = ("0-7", "8-15", "16-23", "24-31")


@pytest.mark.parametrize(
    ("nodes", "dp", "tp", "expected"),
    [
        (("0-15", "16-31"), 1, 2, ["0-15@0x16", "16-31@1x16"]),
        (("0-15", "16-31"), 2, 1, ["0-15@0x16", "16-31@1x16"]),
        # Cores as they are numbered on many machines of two sockets.
        (("0,2,4,6", "1,3,5,7"), 1, 2, ["0,2,4,6@0x4", "1,3,5,7@1x4"]),
        # Holes, and nodes of different sizes.
        (("0-2", "8-10", "20-21"), 1, 3, ["0-2@0x3", "8-10@1x3", "20-21@2x2"]),
        (FOUR, 2, 2, ["0-7@0x8", "8-15@1x8", "16-23@2x8", "24-31@3x8"]),
        # Fewer ranks than nodes: whole nodes, neighbours.
        (FOUR, 1, 2, ["0-15@Nonex16", "16-31@Nonex16"]),
        # More ranks than nodes: neighbours share one.
        (("0-7", "8-15"), 2, 2, ["0-3@0x4", "4-7@0x4", "8-11@1x4", "12-15@1x4"]),
        (("0-7", "8-15"), 1, 3, ["0-3@0x4", "4-7@0x4", "8-15@1x8"]),
    ],
)
def test_ranks_are_placed_on_whole_nodes_or_on_parts_of_one(
    tmp_path: Path, nodes: Sequence[str], dp: int, tp: int, expected: list[str]
) -> None:
    placement = place(machine(tmp_path, *nodes), dp, tp)
    assert summary(placement) == expected
    assert placement.is_news
    assert not placement.warn


def test_eight_nodes(tmp_path: Path) -> None:
    topology = machine(tmp_path, *(f"{8 * i}-{8 * i + 7}" for i in range(8)))
    assert summary(place(topology, 1, 8)) == [f"{8 * i}-{8 * i + 7}@{i}x8" for i in range(8)]
    assert summary(place(topology, 2, 2)) == [
        *("0-15@Nonex16", "16-31@Nonex16", "32-47@Nonex16", "48-63@Nonex16")
    ]


@pytest.mark.parametrize(("ranks", "unused"), [(3, "node 3 of 4"), (5, "")])
def test_a_node_without_a_rank_is_named(tmp_path: Path, ranks: int, unused: str) -> None:
    placement = place(machine(tmp_path, *FOUR), 1, ranks)
    assert placement.warn == bool(unused)
    assert unused in placement.why
    assert len(placement.places) == ranks


def test_hyperthreads_stay_with_their_core_and_get_no_thread(tmp_path: Path) -> None:
    topology = machine(tmp_path, "0-3,8-11", "4-7,12-15", siblings=8)
    assert summary(place(topology, 1, 2)) == ["0-3,8-11@0x4", "4-7,12-15@1x4"]
    assert summary(place(topology, 1, 4)) == [
        *("0-1,8-9@0x2", "2-3,10-11@0x2", "4-5,12-13@1x2", "6-7,14-15@1x2")
    ]
    # More ranks than cores: each has one hyperthread.
    sixteen = place(topology, 1, 16)
    assert sorted(cpu for each in sixteen.places for cpu in each.cpus) == list(range(16))
    assert {each.num_threads for each in sixteen.places} == {1}


def test_only_cores_of_the_affinity_are_used(tmp_path: Path) -> None:
    topology = machine(tmp_path, *FOUR, allowed="4-7,10-15")
    assert summary(place(topology, 1, 2)) == ["4-7@0x4", "10-15@1x6"]
    # The node with more cores gets more ranks.
    assert summary(place(topology, 1, 5)) == [
        "4-5@0x2",
        "6-7@0x2",
        "10-11@1x2",
        *("12-13@1x2", "14-15@1x2"),
    ]


@pytest.mark.parametrize(
    ("nodes", "allowed", "ranks", "why"),
    [
        (("0-7",), "0-7", 2, "the machine has one NUMA node"),
        (("0-7", "8-15"), "9-11", 2, "may run only on NUMA node 1"),
        (("0-7", "8-15"), "0-15", 1, "--tp-size 2 gives each node a rank"),
        (("0-7", "8-15"), "7-8", 3, "3 ranks (--tp-size 3) are more than the 2 CPUs"),
    ],
)
def test_where_nothing_is_bound_the_reason_is_said(
    tmp_path: Path, nodes: Sequence[str], allowed: str, ranks: int, why: str
) -> None:
    placement = place(machine(tmp_path, *nodes, allowed=allowed), 1, ranks)
    assert placement.places == ()
    assert why in placement.why
    assert placement.is_news or placement.warn


def test_a_kernel_without_numa_has_one_node(tmp_path: Path) -> None:
    (node,) = read_topology(tmp_path, {0, 1, 5}).nodes
    assert (node.number, node.cpus, node.has_memory) == (0, {0, 1, 5}, False)
    assert place(read_topology(tmp_path, {0, 1, 5}), 1, 2).places == ()


def test_a_node_of_memory_alone_gets_no_rank_and_one_without_memory_no_policy(
    tmp_path: Path,
) -> None:
    topology = read_topology(paint(tmp_path, ("0-3", "4-7", ""), memory="0,2"), range(8))
    assert summary(place(topology, 1, 2)) == ["0-3@0x4", "4-7@Nonex4"]


def test_memory_that_the_container_may_not_use_is_not_asked_for(tmp_path: Path) -> None:
    root = paint(tmp_path, ("0-3", "4-7"), mems_allowed="0")
    assert summary(place(read_topology(root, range(8)), 1, 2)) == ["0-3@0x4", "4-7@Nonex4"]


def test_a_quota_of_the_container_limits_the_threads_and_not_the_cores(tmp_path: Path) -> None:
    topology = machine(tmp_path, "0-15", "16-31")
    assert summary(place(topology, 1, 2, quota=9)) == ["0-15@0x4", "16-31@1x4"]
    assert summary(place(topology, 1, 2, quota=9, threads=16)) == ["0-15@0x16", "16-31@1x16"]
    listed = place(topology, 1, 2, "0-7|16-23", quota=9)
    assert summary(listed) == ["0-7@0x8", "16-23@1x8"]
    assert listed.warn


@pytest.mark.parametrize(
    ("lists", "tp", "expected"),
    [
        ("0-7|16-23", 2, ["0-7@0x8", "16-23@1x8"]),
        (" 0,2-3 | 4 ", 2, ["0,2-3@0x3", "4@0x1"]),
        ("8-23", 1, ["8-23@Nonex16"]),
        ("ALL", 2, ["0-15@0x16", "16-31@1x16"]),
    ],
)
def test_lists_of_cores(tmp_path: Path, lists: str, tp: int, expected: list[str]) -> None:
    topology = machine(tmp_path, "0-15", "16-31")
    assert summary(place(topology, 1, tp, lists)) == expected
    assert summary(place(topology, tp, 1, lists)) == expected


def test_numa_nodes_by_number(tmp_path: Path) -> None:
    topology = machine(tmp_path, *FOUR)
    assert summary(place(topology, 2, 1, nodes=(3, 0))) == ["24-31@3x8", "0-7@0x8"]
    assert summary(place(topology, 1, 3, nodes=(1, 2, 1))) == ["8-11@1x4", "16-23@2x8", "12-15@1x4"]
    assert summary(place(topology, nodes=(2,))) == ["16-23@2x8"]
    assert summary(place(topology, nodes=(2,), device="cuda")) == ["16-23@2x8"]
    assert place(topology, 2, 1, device="cuda").places == ()
    assert place(topology, 2, 1, "0|1", device="cuda").places == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lists": "0-3|x"}, "got '0-3|x': 'x' is not the number of a CPU."),
        ({"lists": "3-0|4"}, "got '3-0|4': '3-0' runs backwards."),
        ({"lists": "0--3|4"}, "'-3' is not the number of a CPU."),
        ({"lists": "0-99999999999|4"}, "'99999999999' is not the number of a CPU."),
        ({"lists": "0-3|"}, "has an empty list of CPUs, got '0-3|'."),
        (
            {"lists": "0-3|30-35"},
            "names CPU 34-35, which does not exist, got '0-3|30-35'; possible: 0-15,17-31.",
        ),
        (
            {"lists": "0-3|16"},
            "names CPU 16, which is not in the affinity of this process, got '0-3|16';"
            " possible: 0-15,17-31.",
        ),
        ({"lists": "0-3"}, "has 1 list for 2 ranks (--tp-size 2), got '0-3'; give one for each"),
        ({"lists": "0|1|2"}, "has 3 lists for 2 ranks (--tp-size 2)"),
        ({"lists": "0-3|3-6"}, "gives CPU 3 to ranks 0 and 1"),
        ({"lists": "0-3|4-7", "nodes": (0, 1)}, "--numa-node and the environment variable"),
        ({"nodes": (0, 4)}, "--numa-node 4 is not a NUMA node with cores; possible: 0, 1, 2."),
        (
            {"nodes": (0, 3)},
            "--numa-node 3: this process may run on none of the node's CPUs, because its affinity"
            " is 0-15,17-31; possible: 0, 1, 2.",
        ),
        ({"nodes": (0,)}, "--numa-node has 1 node for 2 ranks (--tp-size 2); give one for each"),
        ({"nodes": (0, 1, 2), "dp": 2}, "3 nodes for 4 ranks (--dp-size 2 times --tp-size 2)"),
        ({"nodes": (2, 2)}, "puts 2 ranks on node 2, of which this process may use 1 CPU;"),
    ],
)
def test_values_that_do_not_fit_are_refused_in_one_line(
    tmp_path: Path, given: dict[str, object], message: str
) -> None:
    topology = machine(tmp_path, "0-16", "17-30", "31", "32-33", allowed="0-15,17-31")
    with pytest.raises(ConfigError) as error:
        place(topology, **{"tp": 2, **given})  # type: ignore[arg-type]
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert VARIABLE in str(error.value) or "--numa-node" in str(error.value)


def test_the_configuration_has_places_and_threads(tmp_path: Path) -> None:
    topology = machine(tmp_path, "0-2", "3-4")
    hardware = Hardware("cpu", 5, 20 * GIB, topology=topology)
    config = decide(Options.of(tp_size=2), hardware)
    assert (config.num_threads, [each.num_threads for each in config.places]) == (3, [3, 2])
    assert "the ranks have 3, 2" in reason(config, "num_threads").why
    assert str(reason(config, "placement")) == "placement=0-2|3-4 (a NUMA node for each rank)"
    asked = decide(Options.of(tp_size=2, num_threads=3), hardware)
    assert [each.num_threads for each in asked.places] == [3, 3]
    assert reason(asked, "num_threads").warn
    alone = decide(Options(), hardware)
    assert (alone.num_threads, alone.places) == (5, ())
    job = EngineJob(config, SPEC, "/model", None, 0, None, False)
    assert decode_job(encode_job(job)) == job


def test_the_variable_is_read() -> None:
    assert read_environment({VARIABLE: "0-1|2-3"}).threads_bind == "0-1|2-3"
    assert read_environment({}).threads_bind == "all"


def test_this_machine_is_read() -> None:
    topology = probe_hardware().topology
    assert topology.allowed == os.sched_getaffinity(0)
    assert topology.allowed <= topology.cpus
    assert all(node.cores for node in topology.nodes)
