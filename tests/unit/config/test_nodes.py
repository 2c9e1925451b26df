"""Several nodes: which combinations of options there are, torchrun's variables, and what share of a
model falls to the memory of one node."""

from __future__ import annotations

from dataclasses import replace

import pytest
from resolving import decide

from setpoint.config.check import check_options
from setpoint.config.hardware import Hardware
from setpoint.config.nodes import (
    check_rendezvous,
    ranks_of_nodes,
    rendezvous_address,
    with_torchrun_ranks,
)
from setpoint.config.options import Options
from setpoint.config.pool import memory_model
from setpoint.core.errors import ConfigError
from setpoint_testing.specs import tiny_spec

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"}
TWO = {"tp_size": 4, "nnodes": 2}
CPU = Hardware(device="cpu", num_cores=8, available_bytes=1 << 34)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"node_rank": 1},
            "--node-rank 1 does not exist with --nnodes 1: the only node is number 0",
        ),
        (TWO | {"node_rank": 2}, "--node-rank 2 does not exist with --nnodes 2"),
        ({"tp_size": 3, "nnodes": 2}, "--tp-size 3 cannot be divided evenly among --nnodes 2"),
        ({"nnodes": 2}, "--tp-size 1 cannot be divided evenly among --nnodes 2"),
        (TWO | {"dp_size": 2}, "--dp-size 2 cannot be combined with --nnodes 2"),
        (TWO | {"engine_standby": True}, "--engine-standby cannot be combined with --nnodes 2"),
        ({"dist_init_addr": "10.0.0.1"}, "--dist-init-addr must be HOST:PORT, .*; got '10.0.0.1'"),
        ({"dist_init_addr": ":5000"}, "must be HOST:PORT"),
        ({"dist_init_addr": "a:70000"}, "must be HOST:PORT"),
        ({"dist_timeout": 0}, "--dist-timeout must be at least 1"),
    ],
)
def test_refused(values: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_options(Options.of(**values))


def test_several_nodes_need_an_address() -> None:
    options = Options.of(**TWO)
    check_options(options)
    with pytest.raises(ConfigError, match="--nnodes 2 needs --dist-init-addr HOST:PORT"):
        check_rendezvous(options)
    check_rendezvous(Options.of(**TWO, dist_init_addr="node-0:5000"))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("node-0:5000", ("node-0", 5000)),
        ("tcp://10.0.0.1:5000", ("10.0.0.1", 5000)),
        ("[fe80::1]:5000", ("fe80::1", 5000)),
    ],
)
def test_addresses(text: str, place: tuple[str, int]) -> None:
    assert rendezvous_address(Options.of(dist_init_addr=text).parallel) == place


def test_ranks_are_divided_evenly() -> None:
    assert ranks_of_nodes(6, 3) == [range(2), range(2, 4), range(4, 6)]


def test_torchruns_variables() -> None:
    parallel = with_torchrun_ranks(Options.of(tp_size=4), set(), TORCHRUN).parallel
    assert (parallel.nnodes, parallel.node_rank) == (2, 1)
    assert parallel.dist_init_addr == "10.0.0.1:5000"
    agent = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    taken = with_torchrun_ranks(Options.of(tp_size=4), set(), agent).parallel
    assert taken.dist_init_addr == "10.0.0.1:5001", "torchrun itself listens on MASTER_PORT"


@pytest.mark.parametrize(
    ("values", "given", "environ"),
    [
        ({}, (), TORCHRUN),  # one rank: the variables are another program's
        ({"tp_size": 2}, (), {}),
        ({"tp_size": 2}, (), TORCHRUN | {"WORLD_SIZE": "1"}),
        ({"tp_size": 2}, ("nnodes",), TORCHRUN),  # what is given counts
    ],
)
def test_torchruns_variables_do_not_matter(values: dict, given: tuple, environ: dict) -> None:
    options = Options.of(**values)
    assert with_torchrun_ranks(options, set(given), environ) is options


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"MASTER_PORT": ""}, "RANK is set in the environment, but MASTER_PORT not"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number, got 'two'"),
        ({"WORLD_SIZE": "3"}, "--tp-size 4 cannot be divided evenly among --nnodes 3"),
        ({"RANK": "2"}, "--node-rank 2 does not exist"),
        ({"LOCAL_WORLD_SIZE": "2"}, "started 2 processes on this machine.*--nproc-per-node 1"),
    ],
)
def test_torchruns_variables_that_do_not_fit(change: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        with_torchrun_ranks(Options.of(tp_size=4), set(), TORCHRUN | change)


def test_a_node_has_the_cores_for_its_ranks() -> None:
    config = decide(Options.of(**TWO), CPU, replace(tiny_spec(), num_heads=8, num_kv_heads=4))
    assert config.num_threads == 4


@pytest.mark.parametrize(
    ("values", "kv_heads"),
    [
        ({"tp_size": 4}, 4),  # all ranks share the memory
        (TWO, 2),
        ({"tp_size": 2, "nnodes": 2}, 2),
        ({"tp_size": 3, "nnodes": 3}, 2),  # 1, 1 and 2 of 4: the largest part counts
    ],
)
def test_the_memory_of_a_node_holds_its_share(values: dict, kv_heads: int) -> None:
    spec = replace(tiny_spec(), num_heads=8, num_kv_heads=4)
    config = decide(Options.of(**values), CPU, spec)
    share = memory_model(config, spec).spec
    assert (share.num_heads, share.num_kv_heads) == (2 * kv_heads, kv_heads)
    assert share.num_parameters == -(-spec.num_parameters * kv_heads // 4)
