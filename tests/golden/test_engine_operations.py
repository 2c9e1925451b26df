"""Memory that is given back and taken again, and other weights, on a real runner: the same tokens
before and after."""

from __future__ import annotations

import gc
import gzip
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from setpoint.checkpoint.spec import read_spec
from setpoint.core.control import OperationDone, PauseMode, Refused
from setpoint.core.errors import CheckpointError, OutOfMemoryError, RequestError
from setpoint.core.operations import (
    FreezeGarbage,
    LoadWeights,
    MemoryPart,
    ReleaseMemory,
    RestoreMemory,
    StartProfile,
    StopProfile,
)
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.engine_operations import EngineOperator
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint_testing.harness import Harness
from setpoint_testing.tiny_models import write_tiny_llama

KV, WEIGHTS, GRAPH = MemoryPart.KV_CACHE, MemoryPart.WEIGHTS, MemoryPart.CUDA_GRAPH
PROMPTS = {"a": [5, 6, 7, 8], "b": [9, 10, 11, 12, 13, 14]}
SHAPE: dict[str, Any] = {"max_position_embeddings": 128}
PAGES = 200


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of the same shapes."""
    parent = tmp_path_factory.mktemp("weights")
    return tuple(write_tiny_llama(parent / str(seed), seed=seed, **SHAPE) for seed in (0, 1))  # type: ignore[return-value]


class Engine:
    def __init__(self, folder: Path, **config: Any) -> None:
        self.config = EngineConfig(
            str(folder),
            read_spec(folder),
            **{"dtype": "float32", "kv_dtype": "float32", "num_threads": 1, **config},
        )
        self.runner: ModelRunner = build_runner(self.config)
        self.runner.allocate(num_pages=PAGES, max_slots=4, context_len=128)
        self.free = 1 << 40
        self.executor = InprocExecutor(self.runner)
        self.operator = EngineOperator(
            self.runner,
            self.executor.profiler,
            self.config,
            available_bytes=lambda: self.free,
            heartbeat=lambda: None,
        )

    def harness(self) -> Harness:
        return Harness(
            num_pages=PAGES,
            executor=self.executor,
            operator=self.operator,
            vocab_size=131,
            max_req_len=127,
            max_req_input_len=120,
            max_running_requests=4,
        )


@pytest.fixture
def quick_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that gives memory back unfreezes all objects and collects garbage. In this process
    these are those of all tests, too, which takes most of a second, dozens of times here: they stay
    frozen (``tests/conftest.py``)."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)


@pytest.fixture(params=[True, False], ids=["captured", "eager"])
def engine(
    folders: tuple[Path, Path], request: pytest.FixtureRequest, quick_collections: None
) -> Engine:
    return Engine(folders[0], capture=request.param)


def outputs(h: Harness) -> dict[str, list[int]]:
    for rid, prompt in PROMPTS.items():
        h.submit(rid, prompt, max_new_tokens=12, temperature=0.0)
    h.drain()
    return {rid: h.outcomes[rid].ids for rid in PROMPTS}


def refusal(h: Harness) -> str:
    answer = h.replies[-1].answer
    assert isinstance(answer, Refused)
    return answer.error


def done(h: Harness) -> None:
    h.turn()
    assert isinstance(h.replies[-1].answer, OperationDone), h.replies[-1].answer


@pytest.mark.parametrize("parts", [[KV], [WEIGHTS], [GRAPH], [KV, WEIGHTS, GRAPH]])
def test_outputs_are_the_same_before_and_after(engine: Engine, parts: list[MemoryPart]) -> None:
    h = engine.harness()
    before = outputs(h)
    h.operate(ReleaseMemory(parts))
    done(h)
    assert not engine.runner.ways
    assert (engine.runner.model is None) == (WEIGHTS in parts)
    assert (engine.runner.pool.num_bytes == 0) == (KV in parts)
    for part in parts:
        h.operate(RestoreMemory([part]))
        done(h)
    assert outputs(h) == before


def test_paused_in_place_requests_go_on_with_their_memory(engine: Engine) -> None:
    before = outputs(engine.harness())
    h = engine.harness()
    for rid, prompt in PROMPTS.items():
        h.submit(rid, prompt, max_new_tokens=12, temperature=0.0)
    h.turn(5)
    h.pause(PauseMode.IN_PLACE)
    h.operate(ReleaseMemory([WEIGHTS, GRAPH]))
    h.operate(RestoreMemory([WEIGHTS, GRAPH]))
    h.resume()
    h.drain()
    assert {rid: h.outcomes[rid].ids for rid in PROMPTS} == before
    assert {outcome.num_retractions for outcome in h.outcomes.values()} == {0}


def test_other_weights_answer_like_an_engine_started_on_them(
    engine: Engine, folders: tuple[Path, Path]
) -> None:
    h = engine.harness()
    old = outputs(h)
    new = outputs(Engine(folders[1]).harness())
    assert old != new
    h.operate(LoadWeights(str(folders[1]), "auto", flush_cache=True))
    done(h)
    assert outputs(h) == new
    h.operate(ReleaseMemory([WEIGHTS]))
    h.operate(RestoreMemory([WEIGHTS]))
    done(h)
    assert outputs(h) == new, "what was loaded last comes back"
    h.operate(ReleaseMemory([WEIGHTS]))
    h.operate(LoadWeights(str(folders[0]), "auto", flush_cache=True))
    done(h)
    assert outputs(h) == old


def test_weights_that_cannot_be_loaded_leave_the_old_ones(
    engine: Engine, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    h = engine.harness()
    old = outputs(h)
    other = write_tiny_llama(tmp_path / "other", **SHAPE | {"intermediate_size": 96})
    cut = write_tiny_llama(tmp_path / "cut", **SHAPE)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    for folder, words in (
        (other, "shape"),
        (cut, "model.safetensors"),
        (tmp_path / "nowhere", "nowhere"),
    ):
        h.operate(LoadWeights(str(folder), "auto", flush_cache=True))
        h.turn()
        assert words in refusal(h)
        assert outputs(h) == old
    engine.free = 1000
    with pytest.raises(OutOfMemoryError, match="do not fit next to the old ones"):
        engine.operator.operate(1, LoadWeights(str(folders[1]), "auto", flush_cache=True))
    assert outputs(h) == old


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_weights_that_are_no_numbers_are_refused_by_name(
    engine: Engine, tmp_path: Path, name: str, number: float
) -> None:
    """Red before: the update was a success, and every answer after it an error 500."""
    h = engine.harness()
    old = outputs(h)
    folder = write_tiny_llama(tmp_path / "bad", seed=1, **SHAPE)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[-1] = number
    save_file(tensors, file, {"format": "pt"})
    h.operate(LoadWeights(str(folder), "auto", flush_cache=True))
    h.turn()
    assert f"Tensor {name!r} in {file} has 1 of " in refusal(h)
    assert outputs(h) == old
    with pytest.raises(CheckpointError, match=re.escape(name)):  # nor does a server start with it
        Engine(folder)


def test_a_failed_restore_can_be_tried_again(
    engine: Engine, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    h = engine.harness()
    old = outputs(h)
    h.operate(ReleaseMemory([KV, WEIGHTS]))
    done(h)
    h.operate(LoadWeights(str(tmp_path), "auto", flush_cache=True))
    h.turn()
    refusal(h)
    h.operate(RestoreMemory([KV, WEIGHTS]))
    done(h)
    assert outputs(h) == old


def test_compiled_code_is_not_lost(engine: Engine) -> None:
    engine.runner.prefer(engine.runner.ways[-1])
    with pytest.raises(RequestError, match="--enable-torch-compile"):
        engine.operator.operate(1, ReleaseMemory([KV]))


def test_memory_goes_back_to_the_system(tmp_path: Path) -> None:
    """Measured from outside: most of what the weights and the pool take."""
    folder = write_tiny_llama(
        tmp_path / "big", hidden_size=512, intermediate_size=2048, num_hidden_layers=4, **SHAPE
    )
    big = Engine(folder)
    big.runner.allocate(num_pages=50_000, max_slots=4, context_len=128)
    big.runner.pool.memory.zero_()
    h = big.harness()
    before = outputs(h)
    rss = psutil.Process().memory_info().rss
    sizes = {WEIGHTS: big.runner.report.weight_bytes, KV: big.runner.pool.num_bytes}
    assert min(sizes.values()) > 40 << 20
    for part in (KV, WEIGHTS):
        h.operate(ReleaseMemory([part]))
        done(h)
        now = psutil.Process().memory_info().rss
        assert rss - now > 0.9 * sizes[part]
        rss = now
    h.operate(RestoreMemory([WEIGHTS, KV]))
    done(h)
    assert outputs(h) == before
    with pytest.raises(CheckpointError):
        big.operator.operate(1, LoadWeights(str(tmp_path), "auto", flush_cache=True))


def refused(h: Harness, words: str) -> None:
    h.turn()
    assert words in refusal(h)


def trace(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def is_written(path: Path) -> bool:
    """Whether a profile is there, once the threads that write have ended."""
    for thread in threading.enumerate():
        if thread.name == "profile":
            thread.join()
    return path.exists()


def test_a_profile_does_not_load_the_compiler(tmp_path: Path) -> None:
    """Red before: its import froze all streams for a second and more at the first profile."""
    code = (
        "import sys, torch; from setpoint.core.operations import StartProfile;"
        "from setpoint.engine.executor.profiling import Profiler;"
        "p = Profiler(torch.device('cpu')); p.start(StartProfile(sys.argv[1])); torch.ones(2) + 1;"
        "p.stop(); print(sum(name.startswith(('torch._inductor', 'torch._dynamo'))"
        " for name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run.json.gz")], capture_output=True, check=True
    )
    assert done.stdout.split() == [b"0"]
    assert trace(tmp_path / "run.json.gz")


def test_a_profile_of_some_steps(engine: Engine, tmp_path: Path) -> None:
    """It may begin while requests run, skips steps, ends by itself, and changes no token."""
    before = outputs(engine.harness())
    h = engine.harness()
    path = tmp_path / "new" / "run.trace.json.gz"
    h.submit("a", PROMPTS["a"], max_new_tokens=12, temperature=0.0)
    h.turn(2)
    h.operate(StartProfile(str(path), start_step=2, num_steps=3, record_shapes=True))
    h.turn(2)
    assert isinstance(h.replies[-1].answer, OperationDone)
    h.operate(StartProfile(str(tmp_path / "other.json.gz")))
    refused(h, "A profile is already running")
    assert not path.exists()
    h.turn(2)
    assert is_written(path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert any(event.get("ph") == "X" for event in trace(path))
    h.drain()
    assert h.outcomes["a"].ids == before["a"]
    h.operate(StopProfile())
    refused(h, "No profile is running")


def test_a_profile_that_is_stopped(engine: Engine, tmp_path: Path) -> None:
    h = engine.harness()
    path = tmp_path / "run.trace.json.gz"
    h.operate(StartProfile(str(path), with_stack=True, memory=True))
    h.submit("a", PROMPTS["a"], max_new_tokens=3, temperature=0.0)
    h.drain()
    h.operate(StopProfile())
    done(h)
    assert h.replies[-1].answer == OperationDone(0, str(path))
    assert is_written(path)
    assert trace(path)
    h.operate(StartProfile(str(path)))
    refused(h, "already exists")
    h.operate(StartProfile(str(tmp_path / "never.json.gz"), start_step=5))
    h.operate(StopProfile())
    refused(h, "before its first step")


def test_a_folder_that_cannot_be_written(engine: Engine, tmp_path: Path) -> None:
    h = engine.harness()
    (tmp_path / "file").write_text("")
    h.operate(StartProfile(str(tmp_path / "file" / "run.json.gz")))
    refused(h, "cannot be created")
    folder = tmp_path / "gone"
    h.operate(StartProfile(str(folder / "run.json.gz")))
    done(h)
    folder.rmdir()
    h.operate(StopProfile())
    refused(h, "cannot be written")
    h.submit("a", PROMPTS["a"], max_new_tokens=3, temperature=0.0)
    h.drain()


def test_a_profile_without_limit_ends(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("setpoint.engine.executor.profiling.MAX_STEPS", 4)
    h = engine.harness()
    h.operate(StartProfile(str(tmp_path / "run.json.gz")))
    outputs(h)
    assert is_written(tmp_path / "run.json.gz")


def test_garbage_is_frozen(folders: tuple[Path, Path]) -> None:
    h = Engine(folders[0]).harness()
    gc.unfreeze()
    h.operate(FreezeGarbage())
    done(h)
    assert gc.get_freeze_count() > 1000


@pytest.mark.parametrize("error", [RecursionError("deep"), MemoryError(), OSError("disk")])
@pytest.mark.parametrize("where", ["_begin", "stop", "_trace"])
def test_a_profile_that_raises_ends_no_step(
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: Exception,
) -> None:
    """Red before: an exception after a step ended the engine."""
    before = outputs(engine.harness())
    h, profiler = engine.harness(), engine.executor.profiler

    def raising(*arguments: Any, **keywords: Any) -> None:
        raise error

    if where == "_trace":
        monkeypatch.setattr("setpoint.engine.executor.profiling.tempfile.mkdtemp", raising)
    else:
        monkeypatch.setattr(profiler, where, raising)
    h.operate(StartProfile(str(tmp_path / "run.json.gz"), start_step=1, num_steps=1))
    done(h)
    assert outputs(h) == before
    monkeypatch.undo()
    h.operate(StartProfile(str(tmp_path / "next.json.gz"), num_steps=1))
    done(h)
    h.submit("next", PROMPTS["a"], max_new_tokens=2, temperature=0.0)
    h.drain()
    assert is_written(tmp_path / "next.json.gz")


@pytest.mark.parametrize("where", ["give_back", "_assemble", "_make_ways"])
@pytest.mark.parametrize(
    "parts", [pytest.param([KV], marks=pytest.mark.full), [KV, WEIGHTS], [GRAPH]]
)
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.full)])
def test_an_operation_that_raises_halfway_leaves_an_engine_that_can_be_restored(
    engine: Engine,
    folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    parts: list[MemoryPart],
    times: int,
) -> None:
    """Red before: the engine ended, or ran a step without the memory that it had given back.
    ``times``: with 2, what is done in place of the failed operation fails, too."""
    before = outputs(engine.harness())
    for operation in (
        LoadWeights(str(folders[1]), "auto", flush_cache=True),
        ReleaseMemory(parts),
        RestoreMemory(parts),
    ):
        h, left = engine.harness(), times
        h.scheduler.state.released = set(engine.operator.released)
        if isinstance(operation, RestoreMemory):
            assert engine.operator.released >= set(parts)
        else:
            assert not engine.operator.released
        method = getattr(engine.runner, where)

        def raising(method: Any = method, **options: Any) -> None:
            nonlocal left
            left -= 1
            if left >= 0:
                raise MemoryError
            method(**options)

        monkeypatch.setattr(engine.runner, where, raising)
        h.operate(operation)
        h.turn()
        monkeypatch.setattr(engine.runner, where, method)
        answer = h.replies[-1].answer
        assert isinstance(answer, OperationDone) or "MemoryError" in refusal(h)
        if not isinstance(operation, ReleaseMemory):
            if released := sorted(engine.operator.released):
                h.operate(RestoreMemory(released))
                done(h)
            if isinstance(operation, LoadWeights):
                h.operate(LoadWeights(str(folders[0]), "auto", flush_cache=True))
                done(h)
            assert outputs(h) == before
