"""What --ep-size and the options around it refuse, and the files of --init-expert-location."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from resolving import decide

from setpoint.config.check import check_options
from setpoint.config.options import Options
from setpoint.config.pool import memory_model
from setpoint.core.errors import ConfigError
from setpoint.core.expert_placement import FILE_MIB, first_placements, trivial
from setpoint.core.model import Mixture
from setpoint_testing.specs import tiny_spec

MIXTURE = tiny_spec(
    num_heads=8, num_kv_heads=8, mixture=Mixture(10, 2, 64, frozenset({0, 1}), shared_size=0)
)
FOUR = {"tp_size": 4, "ep_size": 4, "ep_num_redundant_experts": 2}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp_size": 4, "ep_size": 2}, "--ep-size 2 must be 1 or the number of ranks, --tp-size 4"),
        ({"ep_size": 2}, "--ep-size 2 must be 1 or the number of ranks, --tp-size 1"),
        (
            {"tp_size": 4, "ep_size": 4},
            "--ep-size 4 cannot divide 10 experts evenly; --ep-num-redundant-experts 2 would fit.",
        ),
        (
            FOUR | {"ep_num_redundant_experts": 3},
            "10 experts and 3 redundant ones evenly; --ep-num-redundant-experts 6 would fit.",
        ),
        ({"tp_size": 2, "enable_eplb": True}, "--enable-eplb is about ranks that hold whole"),
        (FOUR | {"init_expert_location": "/nowhere.json"}, "/nowhere.json cannot be read"),
        ({"ep_num_redundant_experts": 2}, "--ep-num-redundant-experts 2 is about ranks that hold"),
        ({"moe_dense_tp_size": 1}, "--moe-dense-tp-size 1 is about ranks that hold whole experts"),
        ({"init_expert_location": "a.json"}, "--init-expert-location a.json is about ranks that"),
    ],
)
def test_what_does_not_fit_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decide(Options.of(**values), spec=MIXTURE)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--ep-size 2 divides experts, and .* has none"):
        decide(Options.of(tp_size=2, ep_size=2), spec=tiny_spec(num_heads=8, num_kv_heads=8))


def test_heads_that_are_normalised_together_run_on_one_rank() -> None:
    words = "--tp-size 2: this model normalises all heads together, .*; it runs on one rank"
    with pytest.raises(ConfigError, match=words):
        decide(Options.of(tp_size=2), spec=tiny_spec(whole_norms=True))


def test_a_missing_backend_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"--moe-a2a-backend deepep is not supported .* no all-to-all is needed"
    ):
        check_options(Options.of(moe_a2a_backend="deepep"))


def test_copies_of_experts_take_memory() -> None:
    plain, more = (
        memory_model(decide(Options.of(**values), spec=MIXTURE), MIXTURE).weights()
        for values in (
            FOUR | {"ep_num_redundant_experts": 2},
            FOUR | {"ep_num_redundant_experts": 6},
        )
    )
    assert more - plain == 4 * 2 * 3 * MIXTURE.hidden_size * 64 * 2  # bf16


PLACES = {"num_layers": 2, "num_experts": 3, "num_slots": 4, "num_ranks": 2}


def first(tmp_path: Path, content: object) -> Any:
    path = tmp_path / "experts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return first_placements(str(path), **PLACES)


def test_first_placements(tmp_path: Path) -> None:
    assert first_placements("trivial", **PLACES) == [trivial(3, 4)] * 2
    given = {"physical_to_logical_map": [[2, 1, 0, 2], [0, 1, 2, 0]]}
    assert first(tmp_path, given) == [(2, 1, 0, 2), (0, 1, 2, 0)]
    by_count = first(tmp_path, {"logical_count": [[0, 90, 10], [1, 1, 1]]})
    assert sorted(by_count[0]) == [0, 1, 1, 2]
    assert 1 in by_count[0][:2]
    assert 1 in by_count[0][2:]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "must have either physical_to_logical_map or logical_count"),
        ({"logical_count": [[1, 2, 3]]}, "for each of the 2 layers"),
        ({"logical_count": [[1, 2, 3], [1, 2, -3]]}, "numbers from 0 to"),
        ({"logical_count": [[1, 2, 3], [1, 2]]}, "row 1 of logical_count has 2 numbers, but .* 3"),
        ({"logical_count": [[10**30 - 1] * 3] * 2}, "numbers from 0 to 1125899906842624 for"),
        ({"logical_count": [[2**50 + 1, 0, 0]] * 2}, "numbers from 0 to 1125899906842624 for"),
        ("[" * 100_000, "cannot be read: .* nested too deeply"),
        ({"physical_to_logical_map": [[0, 1, 2, 3]] * 2}, "each expert from 0 to 2"),
        ({"physical_to_logical_map": [[0, 1, 1, 0]] * 2}, "each expert from 0 to 2"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        first(tmp_path, content)


def test_a_file_that_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"--init-expert-location /nowhere\.json cannot be read"):
        first_placements("/nowhere.json", **PLACES)


def test_files_of_other_kinds_and_huge_ones(tmp_path: Path) -> None:
    fifo, huge = tmp_path / "fifo", tmp_path / "huge"
    os.mkfifo(fifo)
    with huge.open("wb") as file:
        file.truncate((FILE_MIB << 20) + 1)
    for path in (fifo, huge, Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match=f"{path} cannot be read: .* at most 64 MiB"):
            first_placements(str(path), **PLACES)
