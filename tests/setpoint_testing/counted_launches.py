"""What a decode step of a small model launches on a GPU, in order: kernels in Triton, and operations
of torch, of which each is at least one kernel.

    PYTHONPATH=tests python -m setpoint_testing.counted_launches FOLDER FAMILY QUANTIZATION [invariant]

The step runs on meta tensors with the driver of an absent GPU. FOLDER gets the model, a golden one of
the family. invariant: with the kernels of --enable-deterministic-inference.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils._python_dispatch import TorchDispatchMode

from setpoint.checkpoint.spec import read_spec
from setpoint.core.plan import TokenMasks
from setpoint.core.sampling import SamplingParams
from setpoint.engine.executor.ahead_of_time import use_absent_gpu
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint_testing.absent_gpu import Launch, NotingGpu
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.goldens import GOLDENS
from setpoint_testing.plans import Driver, allocate_rows

PAGE, PAGES, ROWS = 16, 4, 3
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = {
    "greedy": (GREEDY, False),
    "greedy, masked": (GREEDY, True),
    "whole": (SamplingParams(), False),
    "cut": (SamplingParams(top_p=0.9, top_k=20, min_p=0.01), False),
    "edited": (SamplingParams(top_p=0.9, frequency_penalty=1.0, logit_bias=((3, 1.0),)), False),
    "edited, masked": (SamplingParams(top_p=0.9, frequency_penalty=1.0), True),
}
"""Kinds of sampling, and whether a row has a mask."""
FREE = ("empty", "new_empty", "detach", "lift_fresh")
"""Operations of torch that launch nothing, besides views."""


class TorchLaunches(TorchDispatchMode):
    """Adds operations of torch to a list of launches."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        result = func(*args, **(kwargs or {}))
        is_view = result is args[0] if name == "to" else func.is_view
        if not is_view and not name.startswith(FREE):
            self._launches.append(Launch(name, (0, 0, 0)))
        return result


def decode_launches(
    folder: Path, family: str, quantization: str, *, invariant: bool
) -> tuple[dict[str, list[str]], int]:
    """The launches of a decode step's forward pass, those of each kind of sampling, and the number
    of layers."""
    gpu = NotingGpu(90)
    use_absent_gpu(gpu)
    (config, *_) = (g.config for g in GOLDENS if g.config["model_type"] == family)
    write_tiny(folder, config)
    runner = build_runner(
        EngineConfig(
            str(folder), read_spec(folder), device="meta", dtype="bfloat16", kv_dtype="bfloat16",
            page_size=PAGE, load_format="dummy", quantization=quantization, invariant=invariant,
        )
    )  # fmt: skip
    groups = allocate_rows(runner, num_rows=ROWS * PAGES, max_slots=ROWS, context_len=PAGE * PAGES)
    driver = Driver(None, PAGE, PAGES, groups)  # type: ignore[arg-type]
    forward, _ = _decode(runner, driver, gpu, SamplingParams(temperature=0.0), masked=False)
    found = {"forward": forward}
    for name, (sampling, masked) in SAMPLINGS.items():
        _, found[name] = _decode(runner, driver, gpu, sampling, masked=masked)
    return found, config["num_hidden_layers"]


def _decode(
    runner: ModelRunner, driver: Driver, gpu: NotingGpu, sampling: SamplingParams, *, masked: bool
) -> tuple[list[str], list[str]]:
    """The launches of a decode step's forward pass, and of its sampling."""
    plan = driver.plan()
    for slot in range(ROWS):
        driver.admit(plan, slot, [7] * 5, sampling=sampling)
        plan.add_row(slot, slot, 0, 5, 1)
    runner.sample(runner.forward(plan.build()), None)
    plan = driver.plan()
    for slot in range(ROWS):
        plan.add_row(slot, slot, 5, 1, 1)
    words = np.full((1, runner.spec.vocab_size // 32 + 1), -1, np.int32)
    found = []
    with TorchLaunches(gpu.launches):
        del gpu.launches[:]
        forward = runner.forward(plan.build())
        found.append([launch.kernel for launch in gpu.launches])
        del gpu.launches[:]
        runner.sample(forward, TokenMasks(np.zeros(1, np.int32), words) if masked else None)
        found.append([launch.kernel for launch in gpu.launches])
    assert forward.failures == {}
    return found[0], found[1]


if __name__ == "__main__":
    where, *what = sys.argv[1:4]
    print(json.dumps(decode_launches(Path(where), *what, invariant="invariant" in sys.argv[4:])))
