"""What a start refuses, and how ranks exchange, if bits must not depend on the batch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from setpoint.config.options import Options
from setpoint.core.errors import ConfigError
from setpoint.core.records import Fallback
from setpoint.engine.executor.build_runner import EngineConfig
from setpoint.engine.runner.model_runner import LoadReport
from setpoint.launch.child import rank_group
from setpoint.launch.child.computation_identity import ComputationIdentity
from setpoint.launch.child.loading import _check_promise
from setpoint_testing.specs import tiny_spec

ON_GPU = LoadReport(
    load_seconds=0.0,
    weight_bytes=0,
    weights="",
    experts="",
    model_impl="setpoint",
    ops="triton",
    linear="plain, invariant",
    attention="triton",
    level="",
    choices="",
    cache_scales="",
    emulated=False,
    fallbacks=(),
)


def check(loaded: LoadReport, device: str, *, asked: bool = True) -> None:
    _check_promise(loaded, Options.of(device=device, enable_deterministic_inference=asked))


def test_what_cannot_be_promised_is_refused_with_the_reason() -> None:
    check(ON_GPU, "cuda")
    why = Fallback("kernels uses ref", "triton: Triton finds no GPU")
    for lacking in (
        replace(ON_GPU, ops="ref", fallbacks=(why,)),
        replace(ON_GPU, attention="torch_ref", fallbacks=(why,)),
    ):
        check(lacking, "cuda", asked=False)
        with pytest.raises(ConfigError, match=r"Triton do not run here \(.*Triton finds no GPU\)"):
            check(lacking, "cuda")
    with pytest.raises(ConfigError, match="transformers library's code"):
        check(replace(ON_GPU, model_impl="transformers"), "cuda")
    check(replace(ON_GPU, ops="cpu", attention="cpu", level="avx2"), "cpu")
    with pytest.raises(ConfigError, match=r"the C\+\+ kernels do not run here"):
        check(replace(ON_GPU, ops="ref", attention="torch_ref"), "cpu")


@pytest.mark.parametrize("invariant", [False, True])
def test_ranks_on_gpus_add_partial_sums_unless_bits_are_promised(
    invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    monkeypatch.setattr(rank_group, "nccl_processes", lambda *args, **named: processes)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    engine = EngineConfig("", tiny_spec(), device="cuda", invariant=invariant)
    computation = ComputationIdentity(engine, Options.of(tp_size=2).parallel)
    group = rank_group._connect(computation, None, 0, "")  # type: ignore[arg-type]
    assert group.sums is not invariant
