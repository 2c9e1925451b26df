"""Which GPUs the ranks of each engine take, and what is said if there are too few."""

from __future__ import annotations

from dataclasses import replace

import pytest
from resolving import CPU, GPU, SPEC, decide, reason

from setpoint.config.commandline import parse
from setpoint.config.commands import SERVE
from setpoint.config.devices import gpus_of_engines, with_own_gpus
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError
from setpoint.planning.memory import GIB

SPEC_8 = replace(SPEC, num_heads=8, num_kv_heads=8)
EIGHT = replace(GPU, gpus=(80 * GIB,) * 8)


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("", "0"),
        ("--tp-size 4", "0,1,2,3"),
        ("--dp-size 3", "0|1|2"),
        ("--tp-size 2 --dp-size 3", "0,1|2,3|4,5"),
        ("--base-gpu-id 5", "5"),
        ("--base-gpu-id 2 --tp-size 2 --dp-size 2", "2,3|4,5"),
        ("--gpu-id-step 2 --tp-size 4", "0,2,4,6"),
        ("--gpu-id-step 2 --tp-size 2 --dp-size 2 --base-gpu-id 1", "1,3|5,7"),
        ("--tp-size 8 --nnodes 2 --dist-init-addr h:1 --base-gpu-id 4", "4,5,6,7"),
        ("--tp-size 8 --nnodes 2 --node-rank 1 --dist-init-addr h:1", "0,1,2,3"),
    ],
)
def test_each_rank_has_a_gpu(text: str, gpus: str) -> None:
    line = parse(SERVE, text.split())
    config = decide(line.options, EIGHT, SPEC_8, given=line.given)
    decision = reason(config, "gpus")
    assert decision.value == gpus
    assert decision.why.endswith(", of 8 that can be seen")
    assert decision.is_news == bool(text)
    engines = gpus_of_engines(config.options.parallel)
    assert "|".join(",".join(map(str, each)) for each in engines) == gpus


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--tp-size 8 --dp-size 2", "--tp-size 8 times --dp-size 2 needs 16 GPUs (number 0,1,2,"),
        ("--dp-size 9", "--dp-size 9 needs 9 GPUs (number 0|1|2|3|4|5|6|7|8), and only 8 GPUs can"),
        ("--base-gpu-id 8", "--base-gpu-id 8 needs 1 GPU (number 8), and only 8 GPUs can be seen"),
        (
            "--tp-size 2 --base-gpu-id 4 --gpu-id-step 4",
            "--tp-size 2 with --base-gpu-id 4 and --gpu-id-step 4 needs 2 GPUs (number 4,8), and",
        ),
    ],
)
def test_too_few_gpus_are_an_error_that_names_both_numbers(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES") as refused:
        decide(parse(SERVE, text.split()).options, EIGHT, SPEC_8)
    assert words in str(refused.value)


def test_a_node_counts_its_own_gpus() -> None:
    options = Options.of(tp_size=8, nnodes=2, dist_init_addr="h:1")
    with pytest.raises(ConfigError, match="a node's share of --tp-size 8 needs 4 GPUs"):
        decide(options, replace(GPU, gpus=(80 * GIB,) * 3), SPEC_8)


def test_where_the_driver_does_not_say_how_many_there_are() -> None:
    decision = reason(decide(Options.of(tp_size=4), GPU, SPEC_8), "gpus")
    assert (decision.value, decision.why) == (
        "0,1,2,3",
        "a GPU for each rank, how many can be seen is not known",
    )


def test_memory_is_planned_for_the_smallest_gpu_that_is_used() -> None:
    hardware = replace(GPU, gpus=(80 * GIB, 24 * GIB, 16 * GIB, 48 * GIB))
    for asked, gib in (
        ({}, 80),
        ({"tp_size": 2}, 24),
        ({"base_gpu_id": 3}, 48),
        ({"base_gpu_id": 1, "gpu_id_step": 2, "dp_size": 2}, 24),
        ({"base_gpu_id": 4}, 80),  # which is refused later
    ):
        assert with_own_gpus(hardware, Options.of(**asked).parallel).gpu_bytes == gib * GIB


def test_on_a_cpu_they_have_no_effect() -> None:
    line = parse(SERVE, ["--base-gpu-id", "1", "--gpu-id-step", "2"])
    config = decide(line.options, CPU, given=line.given)
    assert not any(decision.field == "gpus" for decision in config.decisions)
    for name in ("base_gpu_id", "gpu_id_step"):
        assert reason(config, name).warn
        assert reason(config, name).why == "given, without effect on a CPU"
