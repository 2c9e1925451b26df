"""Blocks are never read or written under the name of weights that the engine does not have."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from setpoint.config.groups.parallel import ParallelOptions
from setpoint.core.errors import CheckpointError, RequestError
from setpoint.core.operations import LoadWeights, MemoryPart, Operation, RestoreMemory
from setpoint.engine.executor.build_runner import EngineConfig
from setpoint.launch.child import cache_tiers
from setpoint.launch.child.cache_tiers import CacheTiers
from setpoint.launch.child.computation_identity import ComputationIdentity
from setpoint.tiers.identity import TierIdentity, TierOperator, Work
from setpoint_testing.operators import ScriptedOperator
from setpoint_testing.specs import tiny_spec
from setpoint_testing.tiny_models import write_tiny_llama


class Served:
    """What a mover is told, and work that waits until a test does it."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.waiting: list[Work] = []
        self.weights = b"first"
        self.identity = TierIdentity(self.names.append, lambda: self.weights, self.waiting.append)


def test_a_digest_that_comes_late_is_not_used() -> None:
    served = Served()
    served.identity.begin()
    served.identity.forget()
    served.waiting.pop()()
    assert served.names[-1] == b""
    served.identity.begin()
    served.weights = b"second"
    served.identity.begin()
    for work in served.waiting[::-1]:
        work()
    assert served.names == [b"", b"", b"", b"", b"second"]


def test_weights_that_cannot_be_read_have_no_name() -> None:
    def find() -> bytes:
        raise CheckpointError("they are gone")

    names: list[bytes] = []
    TierIdentity(names.append, find, lambda work: work()).begin()
    assert names == [b""]


def tiers_of(folder: Path, served: Served, monkeypatch: pytest.MonkeyPatch) -> CacheTiers:
    """Tiers without a runner."""
    tiers = object.__new__(CacheTiers)
    tiers._computation = ComputationIdentity(
        EngineConfig(str(folder), tiny_spec()), ParallelOptions()
    )
    tiers._setup = SimpleNamespace(weight_version="")  # type: ignore[assignment]
    tiers._runner, tiers._rank, tiers._is_mixed = None, 0, False  # type: ignore[assignment]
    tiers._files = tiers._coming = tiers._computation.noted_weights()
    tiers.identity = served.identity
    monkeypatch.setattr(cache_tiers, "rank_facts", lambda *parts: {})
    return tiers


def test_files_that_have_changed_since_they_were_loaded_name_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: a trainer that wrote the next checkpoint while the digest was found gave the
    weights in use the name of the next ones."""
    tiers = tiers_of(write_tiny_llama(tmp_path), Served(), monkeypatch)
    assert tiers._identity()
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="have changed"):
        tiers._identity()


@pytest.mark.parametrize(
    ("error", "ends_known"), [(None, True), (RequestError("no"), True), (OSError("half"), False)]
)
def test_the_engine_is_known_again_after_each_operation_that_leaves_whole_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, ends_known: bool
) -> None:
    """Red before: after an update that was refused nothing was found or kept any more, without a
    word."""
    served = Served()
    served.names.append(b"first")
    tiers = tiers_of(write_tiny_llama(tmp_path), served, monkeypatch)
    names_meanwhile = []

    def error_of(call_id: int, operation: Operation) -> Exception | None:
        names_meanwhile.append(served.names[-1])
        return error

    operator = TierOperator(ScriptedOperator(error_of), tiers)
    with nullcontext() if error is None else pytest.raises(type(error)):
        operator.operate(1, LoadWeights(str(tmp_path), "auto", flush_cache=True))
    for work in served.waiting:
        work()
    assert names_meanwhile == [b""]
    assert served.names[-1] == (b"first" if ends_known else b"")


def test_weights_that_were_replaced_while_they_were_released_mix_with_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: what the pool still had of the first weights was saved under the new name."""
    served = Served()
    tiers = tiers_of(write_tiny_llama(tmp_path), served, monkeypatch)
    operator = TierOperator(ScriptedOperator(), tiers)
    operator.operate(1, RestoreMemory([MemoryPart.WEIGHTS]))
    assert served.waiting
    served.waiting.clear()
    write_tiny_llama(tmp_path, seed=3)
    operator.operate(2, RestoreMemory([MemoryPart.WEIGHTS]))
    assert not served.waiting
    assert served.names[-1] == b""
    operator.operate(3, LoadWeights(str(tmp_path), "auto", flush_cache=True))
    assert served.waiting
