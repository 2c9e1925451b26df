"""Engines with DP attention have the bits of one engine, whatever the others do meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from setpoint.checkpoint.spec import read_spec
from setpoint.engine.executor.build_runner import EngineConfig
from setpoint.engine.runner import replay_way
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.data_ranks import together
from setpoint_testing.goldens import GOLDENS
from setpoint_testing.plans import Driver
from setpoint_testing.ranks import CheckedExecutor, ranks

CONTEXT, PAGE = 128, 4
ROWS = {"num_rows": 4 * CONTEXT // PAGE, "max_slots": 4, "context_len": CONTEXT}
MIXTURES = {
    golden.config["model_type"]: golden.config
    for golden in reversed(GOLDENS)
    if "num_experts_per_tok" in golden.config
}
Work = Callable[[CheckedExecutor], Any]


def work_of(config: EngineConfig, rank: int, lengths: tuple[int, ...], steps: int) -> Work:
    """Prompts of these lengths in chunks beside decoding rows; none is an engine that is idle."""
    rng = np.random.default_rng(rank)
    prompts = {slot: rng.integers(3, 131, length).tolist() for slot, length in enumerate(lengths)}

    def work(executor: CheckedExecutor) -> Any:
        if not prompts:
            return {}
        groups = len(executor.executor.runner.pool.layout.groups)
        driver = Driver(executor, PAGE, CONTEXT // PAGE, groups)
        return driver.generate(prompts, steps, chunk=9 + rank)

    return work


LOADS = {
    2: [((37, 1, 16, 50), 6), ((5,), 12)],
    4: [((37, 16), 6), ((), 0), ((70,), 3), ((1, 1, 1), 9)],
}
"""Number of engines -> the lengths of each one's prompts and the number of its decode steps."""


def assert_same(configs: list[EngineConfig]) -> None:
    """The tokens are those of one engine alone, and, where rows do not depend on each other, the
    logits."""
    loads = enumerate(zip(configs, LOADS[len(configs)], strict=True))
    works = [work_of(config, rank, *load) for rank, (config, load) in loads]
    for config, work, found in zip(configs, works, together(configs, works, **ROWS), strict=True):
        with ranks(replace(config, ep_size=1), 1, **ROWS) as executor:
            assert found[0] == work(executor)
            assert found[1] == executor.checksums or config.dtype == "float64"


def config_of(folder: Path, **fields: Any) -> EngineConfig:
    given = {"page_size": PAGE, "num_threads": 1}
    return EngineConfig(str(folder), read_spec(folder), **(given | fields))


@pytest.mark.cases(5)
@pytest.mark.parametrize("size", LOADS)
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("quantization", [None, "w8a8_int8"])
def test_engines_have_the_bits_of_one(
    tmp_path: Path, name: str, size: int, quantization: str | None
) -> None:
    folder = write_tiny(tmp_path, MIXTURES[name])
    assert_same([config_of(folder, quantization=quantization)] * size)


@pytest.mark.cases(4)
@pytest.mark.parametrize("size", LOADS)
@pytest.mark.parametrize("name", MIXTURES)
def test_whole_experts_on_engines(tmp_path: Path, name: str, size: int) -> None:
    folder = write_tiny(tmp_path, MIXTURES[name])
    config = config_of(folder)
    redundant = -config.spec.mixture.num_experts % size or size
    assert_same([replace(config, ep_size=size, ep_num_redundant_experts=redundant)] * size)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "float64", "kv_dtype": "float64"},
        {},
        {"ep_size": 2, "ep_num_redundant_experts": 2},
    ],
    ids=str,
)
def test_captured_beside_eager_steps(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = write_tiny(tmp_path, next(iter(MIXTURES.values())))
    config = config_of(folder, **fields)
    assert_same([config, replace(config, capture=False)])


def test_captured_steps_only_up_to_what_they_have_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of all engines decide, so an engine with one row runs eagerly beside a long
    prompt."""
    monkeypatch.setattr(replay_way, "CAPTURED_TOKENS", 5)
    folder = write_tiny(tmp_path, next(iter(MIXTURES.values())))
    assert_same([config_of(folder)] * 2)
