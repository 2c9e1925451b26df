"""On a device that is not the host, a step reads nothing back before its result is taken, and
copies nothing to it that waits.

No GPU is needed: torch's meta device has shapes and no values, so that whatever reads a value
raises. The runner takes the same path on it as on a GPU, whose preferences the registries lend it
here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from setpoint.checkpoint.spec import read_spec
from setpoint.core.plan import OWN_LENGTH, StepPlan, TokenMasks
from setpoint.core.request import SAMPLING_MASK, LogprobOptions, RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.engine.attention import attention_backend as attention
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.kernels import device as devices
from setpoint.engine.kernels import kernel_registry as kernels
from setpoint.engine.kernels.device_sampling import DeviceMasks, DeviceRows, Draws
from setpoint.engine.kernels.ref import RefOps
from setpoint.engine.quant import linear_method as quant
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint.engine.sampling.columns import NUM_WORDS
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.goldens import GOLDENS
from setpoint_testing.plans import Driver, allocate_rows

PAGE, PAGES = 4, 16
VOCAB = 4096
"""More than the sampler's head, so that its shortcut would be worth taking."""
ALLOWED = {"copy to the device that waits": 0, "devices mixed": 0, "copy to the host": 0}
ONE_OF_A_KIND = {
    (golden.config["model_type"], bool(golden.config.get("sliding_window"))): golden
    for golden in GOLDENS
}
"""The last golden model of each family, with and without windows."""
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=0.7),
    "top-k": SamplingParams(top_k=5),
    "top-p": SamplingParams(top_p=0.9),
    "min-p": SamplingParams(min_p=0.1, top_p=0.9, top_k=40),
    "penalties": SamplingParams(
        frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.2
    ),
    "minimum length": SamplingParams(min_new_tokens=4, stop_token_ids=(5,), temperature=0.0),
    "bias": SamplingParams(logit_bias=((3, 1.5), (7, -2.0))),
}


class Waits(TorchDispatchMode):
    """Counts what makes the host wait but raises nothing on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is torch.ops.aten.copy_.default and given[0].device != given[1].device:
            self._copied(given[0], given[1], bool(args[2:] and args[2]))
        elif len({tensor.device.type for tensor in given if tensor.dim()}) > 1:
            self.counts["devices mixed"] += 1
        elif (
            len(given) == 1
            and isinstance(result, torch.Tensor)
            and result.device.type != given[0].device.type
        ):
            named = {
                argument.name: value
                for argument, value in zip(func._schema.arguments, args, strict=False)
            } | kwargs
            self._copied(result, given[0], bool(named.get("non_blocking")))
        return result

    def _copied(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        self.num_copies += 1
        if to.device.type == "cpu":
            self.counts["copy to the host"] += 1
        elif not (non_blocking and source.untyped_storage().data_ptr() in PINNED):
            self.counts["copy to the device that waits"] += 1


PINNED: set[int] = set()


def pretend_to_pin(tensor: torch.Tensor) -> torch.Tensor:
    pinned = tensor.clone()
    PINNED.add(pinned.untyped_storage().data_ptr())
    return pinned


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A device that is not the host."""
    # Triton's kernels are counted where a driver stands in for the GPU's (tests/gpu_kernels).
    for table in (attention, kernels):
        monkeypatch.setitem(table.PREFERENCE, "meta", table.PREFERENCE["cuda"][-1:])
    monkeypatch.setitem(quant.PREFERENCE, ("meta", "unquant"), quant.PREFERENCE["cuda", "unquant"])
    monkeypatch.setattr(torch.Tensor, "pin_memory", pretend_to_pin)
    monkeypatch.setattr(devices, "PINNED", {"meta"})
    yield torch.device("meta")
    PINNED.clear()


class Remote:
    """Stands in for an executor: runs forward and sampling, and never takes a result."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.waits = Waits()

    def step(self, plan: StepPlan, masks: TokenMasks | None = None) -> None:
        with self.waits:
            forward = self.runner.forward(plan)
            self.runner.sample(forward, masks)
        # The runner turns what sampling raises, also a read of a value, into a row's failure.
        assert forward.failures == {}


def remote_of(config: dict[str, Any], folder: Path, device: torch.device) -> tuple[Remote, Driver]:
    write_tiny(folder, {**config, "vocab_size": VOCAB})
    runner = build_runner(
        EngineConfig(
            str(folder), read_spec(folder), device=device.type, page_size=PAGE, load_format="dummy"
        )
    )
    groups = allocate_rows(runner, num_rows=20 * PAGES, max_slots=20, context_len=PAGE * PAGES)
    remote = Remote(runner)
    return remote, Driver(remote, PAGE, PAGES, groups)  # type: ignore[arg-type]


def run_everything(remote: Remote, driver: Driver) -> None:
    """Whole prompts and chunks, shared pages, a larger slot table, decode rows, every kind of
    sampling, logprobs, masks, pooling."""
    prompts = {slot: [7] * (3 + 5 * slot) for slot in range(len(SAMPLINGS))}
    plan = driver.plan()
    for slot, sampling in enumerate(SAMPLINGS.values()):
        more = {
            "stop_ids": sampling.stop_token_ids,
            "options": RequestOptions(
                logprobs=LogprobOptions(top=slot, ids=(3, 4)) if slot % 2 == 0 else None,
                token_facts=(SAMPLING_MASK,) if slot % 3 == 0 else (),
            ),
        }
        driver.admit(
            plan,
            slot,
            prompts[slot],
            sampling=sampling,
            seed=slot,
            logprob_start=1 if slot == 2 else -1,
            **more,
        )
        plan.add_row(slot, slot, 0, len(prompts[slot]), 1)
    driver.admit(plan, 18, [9] * 30, share=(7, 2))
    plan.add_row(18, 18, 8, 6, 0)
    driver.admit(plan, 19, [5] * 12, options=RequestOptions(pooling="mean"))
    plan.add_row(19, 19, 0, 12, 0)
    remote.step(plan.build())
    for number in range(3):
        plan = driver.plan()
        for slot in prompts:
            plan.add_row(slot, slot, OWN_LENGTH, 1, 1)
        masks = (
            TokenMasks(np.array([1, 3], np.int32), np.full((2, VOCAB // 32), 5, np.int32))
            if number == 1
            else None
        )
        remote.step(plan.build(), masks)


@pytest.mark.cases(8)
@pytest.mark.parametrize("golden", ONE_OF_A_KIND.values(), ids=lambda golden: golden.name)
def test_a_step_waits_for_nothing(elsewhere: torch.device, tmp_path: Path, golden: Any) -> None:
    remote, driver = remote_of(golden.config, tmp_path, elsewhere)
    run_everything(remote, driver)
    assert {name: remote.waits.counts[name] for name in ALLOWED} == ALLOWED
    assert remote.waits.num_copies > 30, "the copies were not seen"


def test_a_step_of_greedy_rows_is_copied_at_once(elsewhere: torch.device, tmp_path: Path) -> None:
    """Also one that admits sequences; the pages and tokens of long prompts take one copy for each
    block of them."""
    golden = next(iter(ONE_OF_A_KIND.values()))
    remote, driver = remote_of(golden.config, tmp_path, elsewhere)
    copies = []
    for number in range(4):
        plan = driver.plan()
        if number in (0, 2):
            for slot in range(number, number + 2):
                driver.admit(plan, slot, [7] * 9, sampling=SamplingParams(temperature=0.0))
                plan.add_row(slot, slot, 0, 9, 1)
        if number:
            for slot in range(2 if number < 3 else 4):
                plan.add_row(slot, slot, OWN_LENGTH, 1, 1)
        before = remote.waits.num_copies
        remote.step(plan.build())
        copies.append(remote.waits.num_copies - before)
    assert copies == [1, 1, 1, 1]
    assert not any(remote.waits.counts.values())


class Kernels:
    """Stand in for the kernels of a device that sample; a meta tensor has no values anyway."""

    @staticmethod
    def edit(
        logits: torch.Tensor, rows: DeviceRows, masks: DeviceMasks | None, *, in_place: bool
    ) -> torch.Tensor:
        return logits if in_place else logits.float()

    @staticmethod
    def choose(logits: torch.Tensor, rows: DeviceRows, draws: Draws) -> torch.Tensor:
        assert rows.parameters.shape == (len(logits), NUM_WORDS)
        return torch.empty(len(logits), dtype=torch.int64, device=logits.device)

    @staticmethod
    def place(ids: torch.Tensor, rows: DeviceRows) -> None:
        assert len(ids) == len(rows.places)


def test_every_kind_of_sampling_is_in_the_step_s_one_copy(
    elsewhere: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only masks, which are known later, take another one. Reports about tokens are torch's, with
    copies of their own."""
    monkeypatch.setattr(RefOps, "sampling", Kernels)
    golden = next(iter(ONE_OF_A_KIND.values()))
    remote, driver = remote_of(golden.config, tmp_path, elsewhere)
    masks = TokenMasks(np.array([1, 2], np.int32), np.full((2, VOCAB // 32), 5, np.int32))
    kinds = [{name} for name in SAMPLINGS] + [set(SAMPLINGS)]
    copies = []
    for kind in kinds:
        for number in range(3):
            plan = driver.plan()
            for slot, name in enumerate([*sorted(kind), *["greedy"] * 3]):
                if number:
                    plan.add_row(slot, slot, OWN_LENGTH, 1, 1)
                    continue
                sampling = SAMPLINGS[name]
                driver.admit(
                    plan, slot, [7] * 5, sampling=sampling, stop_ids=sampling.stop_token_ids
                )
                plan.add_row(slot, slot, 0, 5, 1)
            before = remote.waits.num_copies
            remote.step(plan.build(), masks if number == 2 else None)
            copies.append(remote.waits.num_copies - before)
    assert copies == [1, 1, 2] * len(kinds)
    assert not any(remote.waits.counts.values())


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda x: x.argmax().item(), RuntimeError),
        (lambda x: x.tolist(), NotImplementedError),
        (lambda x: bool(x.any()), RuntimeError),
        (lambda x: x[x > 0], NotImplementedError),
        (lambda x: x[torch.zeros((), dtype=torch.int64, device="meta")], RuntimeError),
        (lambda x: x.cpu(), NotImplementedError),
    ],
)
def test_a_read_is_noticed(read: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        read(torch.zeros(4, device="meta"))


def test_a_copy_that_waits_and_mixed_devices_are_counted() -> None:
    there = torch.zeros(4, device="meta")
    with Waits() as waits:
        torch.ones(4).to("meta")
        there[torch.tensor([1, 2])]
    assert waits.counts == {"copy to the device that waits": 1, "devices mixed": 1}
