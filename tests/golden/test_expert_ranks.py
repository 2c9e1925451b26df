"""Ranks with whole experts (--ep-size) have the bits of one process, wherever the experts lie and
while they are placed anew."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import ConfigError, RequestError
from setpoint.core.expert_placement import Placement, rank_loads
from setpoint.core.operations import RecordExperts
from setpoint.core.weightfiles import identities
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.expert_balancing import ExpertBalancer, expert_loads
from setpoint.engine.parallel.split import mixtures
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.conversion import converted_under
from setpoint_testing.gguf_families import mixed, write_model
from setpoint_testing.gloo_groups import gloo_groups
from setpoint_testing.goldens import GOLDENS, tiny_config
from setpoint_testing.plans import Driver
from setpoint_testing.ranks import ranks

CONTEXT = 128
ROWS = {"num_rows": 512, "max_slots": 8, "context_len": CONTEXT}
RNG = np.random.default_rng(7)
PROMPTS = {
    slot: RNG.integers(3, 131, length).tolist() for slot, length in enumerate((37, 1, 16, 50))
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": tiny_config(
        "MixtralForCausalLM",
        "mixtral",
        **HEADS,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
    "mixtral with one expert for all tokens": tiny_config(
        "MixtralForCausalLM",
        "mixtral",
        **HEADS,
        num_local_experts=4,
        num_experts_per_tok=1,
        sliding_window=None,
    ),
    "qwen2 with a shared expert and a dense layer": tiny_config(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        **HEADS,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=96,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
    "qwen3": tiny_config(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        **HEADS,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    ),
}


def config_of(folder: Path, **fields: Any) -> EngineConfig:
    given = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "page_size": 4, "num_threads": 1}
    return EngineConfig(str(folder), read_spec(folder), **(given | fields))


def written(folder: Path, name: str, change: Callable[[torch.Tensor], object] = id) -> Path:
    """A tiny model, and a change of its routers' weights [E, C]."""
    folder = write_tiny(folder, MODELS[name])
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for tensor, value in tensors.items():
        if tensor.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight")):
            change(value)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def prefer_the_first_half(router: torch.Tensor) -> None:
    """Two of the first four experts, which rank 0 has, always are among the chosen three."""
    router[1], router[3] = -router[0], -router[2]
    router[:4] *= 20


def tie(router: torch.Tensor) -> None:
    """All experts get the same score, so the first ones are chosen and the others have no
    tokens."""
    router[:] = router[0].clone()


def outcome(
    config: EngineConfig, size: int, groups: Any = (), *, chunk: int = 1 << 30
) -> tuple[Any, ...]:
    with ranks(config, size, groups, **ROWS) as executor:
        runner = executor.executor.runner
        driver = Driver(executor, 4, CONTEXT // 4, len(runner.pool.layout.groups))
        found = driver.generate(PROMPTS, 12, chunk=chunk)
        loads = expert_loads(runner, None)
        assert loads is not None
        return found, executor.checksums, loads.num_tokens, loads.num_unused


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("change", [id, tie])
def test_whole_experts_on_ranks(
    tmp_path: Path, name: str, change: Callable[[torch.Tensor], object]
) -> None:
    config = config_of(written(tmp_path, name, change))
    alone = outcome(config, 1)
    mixture = config.spec.mixture
    assert alone[2] > 0
    if change is tie:
        assert alone[3] == len(mixture.layers) * (mixture.num_experts - mixture.num_chosen)
    for size in (2, 4):
        assert outcome(replace(config, ep_size=size), size) == alone, size


FAMILIES = {
    golden.name: golden.config
    for golden in GOLDENS
    if "num_experts_per_tok" in golden.config and golden.model_impl == "setpoint"
}


@pytest.mark.cases(8)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(tmp_path: Path, name: str) -> None:
    config = config_of(write_tiny(tmp_path, FAMILIES[name]))
    if 2 not in config.spec.rank_counts:
        pytest.skip("its attention cannot be divided")
    more = config.spec.mixture.num_experts % 2
    found = outcome(replace(config, ep_size=2, ep_num_redundant_experts=more), 2)
    assert found == outcome(config, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"quantization": "w8a8_int8"},
        {"dtype": "float32", "kv_dtype": "float32"},
        {"capture": False},
        {"moe_dense_tp_size": 1},
        {"ep_num_redundant_experts": 4},
    ],
    ids=str,
)
def test_whole_experts_in_every_precision(tmp_path: Path, fields: dict[str, Any]) -> None:
    config = config_of(written(tmp_path, "qwen2 with a shared expert and a dense layer"), **fields)
    for chunk in (5, 1 << 30):
        alone = outcome(config, 1, chunk=chunk)[:3]
        assert outcome(replace(config, ep_size=2), 2, chunk=chunk)[:3] == alone


def test_whole_experts_through_gloo(tmp_path: Path) -> None:
    folder = written(tmp_path, "qwen2 with a shared expert and a dense layer")
    config = config_of(folder, capture=False)
    alone = outcome(config, 1)
    assert outcome(replace(config, ep_size=2), 2, gloo_groups(2)) == alone


def test_whole_experts_beside_partial_sums(tmp_path: Path) -> None:
    """Ranks hold whole experts and add partial sums, as on GPUs; this runs in float64 on the
    reference."""
    folder = written(tmp_path, "qwen2 with a shared expert and a dense layer")
    config = config_of(folder, dtype="float64", kv_dtype="float64", ep_num_redundant_experts=2)
    found = outcome(replace(config, ep_size=2), 2, gloo_groups(2, sums=True))
    assert found[0] == outcome(config, 1)[0]


def test_whole_experts_in_the_blocks_of_a_gguf(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Matrices of several kinds of blocks, while experts move."""
    path, _ = write_model(tmp_path, "llama", mixed)
    config = config_of(converted_under(tmp_path / "cache", path))
    alone = outcome(config, 1)
    caplog.set_level(logging.INFO)
    with ranks(replace(config, ep_size=2, ep_num_redundant_experts=2), 2, **ROWS) as executor:
        balancer = executor.executor.balancer = ExpertBalancer(
            runner_of(executor), executor.operator.place_experts, every=2
        )
        driver = Driver(executor, 4, CONTEXT // 4, 1)
        assert (driver.generate(PROMPTS, 12), executor.checksums) == alone[:2]
    assert re.search(
        r"anew in (1 layer|\d+ layers)\. .* 2 steps: [\d.]+; with the new", caplog.text
    )
    assert balancer.num_rebalances > 0


def test_a_rank_holds_its_share_of_the_experts(tmp_path: Path) -> None:
    config = config_of(written(tmp_path, "qwen3"))
    layers = mixtures(build_runner(config).model)
    whole = sum(mixture.gate_up.packed.num_bytes for mixture in layers)
    with ranks(replace(config, ep_size=2, ep_num_redundant_experts=2), 2, **ROWS) as executor:
        held = mixtures(executor.executor.runner.model)
    assert sum(mixture.gate_up.packed.num_bytes for mixture in held) == whole * 5 // 8
    assert all(
        matrix.is_elsewhere and not hasattr(matrix, "packed")
        for mixture in held
        for expert in list(mixture.experts)[5:]
        for matrix in (expert.gate_up_proj, expert.down)
    )


@pytest.mark.parametrize("quantization", [None, "w8a8_int8"])
@pytest.mark.parametrize("capture", [True, False])
def test_experts_move_between_steps(
    tmp_path: Path, quantization: str | None, capture: bool
) -> None:
    """Random placements in the middle of a generation, one layer before each step."""
    folder = written(tmp_path, "qwen3")
    config = config_of(folder, quantization=quantization, capture=capture)
    rng = np.random.default_rng(3)

    def random_placement() -> Placement:
        slots = [*range(8), *rng.integers(0, 8, 4).tolist()]
        return tuple(rng.permutation(slots).tolist())

    with ranks(config, 1, **ROWS) as executor:
        driver = Driver(executor, 4, CONTEXT // 4, 1)
        alone = driver.generate(PROMPTS, 24, chunk=5), executor.checksums
        tokens = [
            m.expert_slots.expert_load().tolist() for m in mixtures(runner_of(executor).model)
        ]
    config = replace(config, ep_size=2, ep_num_redundant_experts=4)
    with ranks(config, 2, **ROWS) as executor:
        num_layers = len(mixtures(runner_of(executor).model))

        class EveryStep:
            moved = 0

            def before_step(self) -> None:
                executor.operator.place_experts(self.moved % num_layers, random_placement())
                self.moved += 1

        balancer = executor.executor.balancer = EveryStep()
        driver = Driver(executor, 4, CONTEXT // 4, 1)
        found = driver.generate(PROMPTS, 24, chunk=5), executor.checksums
        moved = mixtures(runner_of(executor).model)
        assert [mixture.expert_slots.expert_load().tolist() for mixture in moved] == tokens
        assert all(len(m.expert_slots.placement) == 12 for m in moved)
    assert balancer.moved > 30
    assert found == alone


def test_balancing_evens_a_skewed_load_out(tmp_path: Path) -> None:
    config = config_of(written(tmp_path, "qwen3", prefer_the_first_half))
    with ranks(config, 1, **ROWS) as executor:
        alone = Driver(executor, 4, CONTEXT // 4, 1).generate(PROMPTS, 60)
    with ranks(replace(config, ep_size=2), 2, **ROWS) as executor:
        runner = runner_of(executor)
        balancer = executor.executor.balancer = ExpertBalancer(
            runner, executor.operator.place_experts, every=20
        )
        driver = Driver(executor, 4, CONTEXT // 4, 1)
        found = driver.generate(PROMPTS, 60)
        after = expert_loads(runner, balancer)
    assert found == alone
    with ranks(replace(config, ep_size=2), 2, **ROWS) as executor:
        runner = runner_of(executor)
        idle = executor.executor.balancer = ExpertBalancer(
            runner, executor.operator.place_experts, every=20, at_most=0.5
        )
        Driver(executor, 4, CONTEXT // 4, 1).generate(PROMPTS, 60)
        before = expert_loads(runner, idle)
    assert before is not None
    assert after is not None
    assert (before.num_rebalances, after.num_rebalances > 0) == (0, True)
    assert before.num_tokens == after.num_tokens
    assert before.eplb_balancedness < 0.8 < 0.85 < after.eplb_balancedness


def replaced(file: Path) -> None:
    """Replace the file by one of the same shapes with other weights."""
    content = file.read_bytes()
    begin = len(content) // 2
    new = file.with_suffix(".new")
    new.write_bytes(content[:begin] + content[begin:][::-1])
    new.replace(file)


@pytest.mark.parametrize("is_gguf", [False, True])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replaced, "has changed since the"),
        (Path.unlink, "holds neither|Cannot read"),
    ],
)
def test_experts_stay_where_they_are_if_their_file_has_changed(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Path], object],
    reason: str,
    is_gguf: bool,
) -> None:
    """One warning says so, and another one only after experts could be placed again."""
    if is_gguf:
        file, _ = write_model(tmp_path, "llama", mixed)
        folder = converted_under(tmp_path / "cache", file)
    else:
        folder = written(tmp_path, "qwen3")
        file = folder / "model.safetensors"
    config, kept = config_of(folder), tmp_path / "kept"
    alone = list(outcome(config, 1)[0].values())
    with ranks(replace(config, ep_size=2), 2, **ROWS) as executor:
        runner = runner_of(executor)
        slots = [mixture.expert_slots for mixture in mixtures(runner.model)]
        first = [each.placement for each in slots]
        balancer = ExpertBalancer(runner, executor.operator.place_experts, every=1)
        driver = Driver(executor, 4, CONTEXT // 4, 1)

        def answers(slot: int) -> list[list[int]]:
            return list(driver.generate({slot + at: p for at, p in PROMPTS.items()}, 12).values())

        assert answers(0) == alone
        executor.executor.balancer = balancer
        kept.hardlink_to(file)
        for times in (1, 2):
            change(file)
            before = [each.placement for each in slots], balancer.num_rebalances
            assert answers(4) == alone
            assert ([each.placement for each in slots], balancer.num_rebalances) == before
            warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
            assert len(warnings) == times
            assert re.search(f"The experts stay where they are: .*({reason})", warnings[-1])
            for mixture in mixtures(runner.model):
                held = set(mixture.expert_slots.placement[slice(*mixture.expert_slots.own)])
                experts = enumerate(mixture.experts)
                assert all(e.down.is_elsewhere == (n not in held) for n, e in experts)
            kept.rename(file)
            kept.hardlink_to(file)
            assert answers(0) == alone
            assert balancer.num_rebalances > before[1]
        assert [each.placement for each in slots] != first


def test_a_file_that_is_written_over_is_another_one(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"abc")
    before = identities([file])
    assert identities(before) == before
    os.utime(file, ns=(0, 0))
    assert identities(before) != before
    file.unlink()
    assert identities(before) == {file: None}


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, tiny_config("LlamaForCausalLM", "llama", **HEADS))
    with (
        pytest.raises(ConfigError, match="--ep-size 2 needs a mixture of experts"),
        ranks(replace(config_of(folder), ep_size=2), 2, **ROWS),
    ):
        pass


def test_a_record_of_experts_places_them_at_the_next_start(tmp_path: Path) -> None:
    config = config_of(written(tmp_path, "qwen3", prefer_the_first_half))
    with ranks(replace(config, ep_size=2), 2, **ROWS) as executor:
        driver, operator = Driver(executor, 4, CONTEXT // 4, 1), executor.operator
        with pytest.raises(RequestError, match="No record of experts is running: start one"):
            operator.operate(0, RecordExperts("stop"))
        driver.generate({0: PROMPTS[0]}, 4)
        assert operator.operate(0, RecordExperts("start")) == ""
        driver.generate({1: PROMPTS[3]}, 4)
        operator.operate(0, RecordExperts("stop"))
        driver.generate({2: PROMPTS[2]}, 4)
        path = operator.operate(0, RecordExperts("dump", str(tmp_path / "records" / "a.json")))
        with pytest.raises(RequestError, match="No record"):
            operator.operate(0, RecordExperts("dump", path))
        operator.operate(0, RecordExperts("start"))
        with pytest.raises(RequestError, match=r"Cannot write .* File exists"):
            operator.operate(0, RecordExperts("dump", path))
    counts = json.loads(Path(path).read_text())["logical_count"]
    assert [sum(row) for row in counts] == [3 * (len(PROMPTS[3]) + 3)] * 2
    config = replace(config, ep_size=2, init_expert_location=path)
    with ranks(config, 2, **ROWS) as executor:
        for mixture, row in zip(mixtures(runner_of(executor).model), counts, strict=True):
            found = rank_loads(np.array(row), mixture.expert_slots.placement, 2)
            assert found.max() < rank_loads(np.array(row), tuple(range(8)), 2).max()


def runner_of(executor: Any) -> Any:
    return executor.executor.runner


def test_padding_counts_no_tokens(tmp_path: Path) -> None:
    """The load of a captured step is that of its tokens alone."""
    config = config_of(written(tmp_path, "mixtral"))
    with ranks(config, 1, **ROWS) as executor:
        Driver(executor, 4, CONTEXT // 4, 1).generate({0: PROMPTS[0]}, 5)
        loads = [m.expert_slots.slot_load() for m in mixtures(runner_of(executor).model)]
    tokens = len(PROMPTS[0]) + 4
    assert [int(load.sum()) for load in loads] == [2 * tokens] * len(loads)
