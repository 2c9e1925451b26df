"""An executor that reports how much work the parts of its steps do and how long they take: linear
layers, attention, the other operations, the head, sampling.

Its eager steps run through timed wrappers of the operations (``layers.context.Backends``); the
times of replayed steps come from their program. No timer counts what lies between the parts
(Python, views). Timing adds about 1 µs to each eager call.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from setpoint.core.plan import StepPlan, TokenMasks
from setpoint.core.result import StepResult
from setpoint.core.work import Work
from setpoint.engine.attention.attention_backend import AttentionBatch, AttentionVariant
from setpoint.engine.executor.inproc import InprocExecutor, InprocStep
from setpoint.engine.layers.context import Backends
from setpoint.engine.quant.grouped import GroupedWeight
from setpoint.engine.quant.linear_method import PackedWeight
from setpoint.engine.runner.eager_way import EagerWay
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint.engine.runner.way import TimedWay

PROGRAM_KINDS = {
    "norm": "elementwise",
    "rope": "elementwise",
    "activation": "elementwise",
    "embedding": "elementwise",
}
"""Kind of a program's kernels -> kind in this module, where the two differ."""

Works = defaultdict[str, Work]
"""Work and time by kind."""


class MeasuredExecutor:
    """Implements ``core.executor.Executor`` on a runner that others may also use between its
    steps."""

    def __init__(self, runner: ModelRunner, *, eager: bool) -> None:
        """eager: replay no step, so that all work is counted; otherwise replayed steps report only
        times."""
        self._works: Works = defaultdict(Work)
        self._replay = None if eager else _replay_of(runner)
        layers, head = (_timed(runner, self._works, kind) for kind in ("linear", "head"))
        timed = EagerWay(runner.forward_pass, layers, head)
        if self._replay is not None:
            self._replay.start_timing()
            self._replay.take_times()
        self._inner = InprocExecutor(runner, (timed,) if eager else (*runner.ways[:-1], timed))

    def submit(self, plan: StepPlan) -> MeasuredStep:
        return MeasuredStep(self._inner.submit(plan), self._works)

    def take(self) -> dict[str, Work]:
        """Kind -> work and time, over the steps since the last call."""
        times = {} if self._replay is None else self._replay.take_times()
        for kind, seconds in times.items():
            if seconds:
                self._works[PROGRAM_KINDS.get(kind, kind)].seconds += seconds
        works = dict(self._works)
        self._works.clear()
        return works

    def idle(self) -> bool:
        return self._inner.idle()

    def shutdown(self) -> None:
        self._inner.shutdown()


class MeasuredStep:
    """Implements ``core.executor.PendingStep``."""

    def __init__(self, step: InprocStep, works: Works) -> None:
        self._step = step
        self._works = works

    def finish(self, masks: TokenMasks | None) -> None:
        """Time sampling, without the head, which runs inside it when many rows sample."""
        began, head = time.perf_counter(), self._works["head"].seconds
        self._step.finish(masks)
        work = self._works["sampling"]
        work.seconds += time.perf_counter() - began - (self._works["head"].seconds - head)
        work.num_calls += 1

    def result(self) -> StepResult:
        return self._step.result()


def _replay_of(runner: ModelRunner) -> TimedWay | None:
    return next((way for way in runner.ways if isinstance(way, TimedWay)), None)


def _timed(runner: ModelRunner, works: Works, kind: str) -> Backends:
    """The runner's backends in timing wrappers; products count as ``kind``."""
    backends = runner.backends
    # Gate and up are two products, but only their combined result is returned.
    gated = {
        id(module.packed)
        for module in runner.model.modules()
        if getattr(module, "activates", False)
    }

    def count(
        began: float, weight: Any, num_bytes: int, num_products: int, x: torch.Tensor
    ) -> None:
        work = works[kind]
        work.seconds += time.perf_counter() - began
        work.num_calls += 1
        work.num_bytes += num_bytes
        work.flops += 2 * num_products * (2 if id(weight) in gated else 1)
        work.product = getattr(weight, "product", _name(x.dtype))

    def multiply(weight: PackedWeight, x: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        out = backends.multiply(weight, x)
        count(began, weight, weight.num_bytes, x.numel() * out.shape[-1], x)
        if kind == "head":
            works["sampling"].num_bytes += out.nbytes  # logits
        return out

    def multiply_grouped(weight: GroupedWeight, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        out = backends.multiply_grouped(weight, x, ids)
        read = weight.num_bytes * len(ids.unique()) // weight.num_experts
        count(began, weight, read, x.shape[1] * out.numel(), x)
        return out

    return Backends(
        _TimedOps(backends.ops, works),
        _TimedAttention(backends.attention, works),
        multiply,
        multiply_grouped,
        backends.group,
        backends.data,
    )


class _TimedOps:
    """Times every operation of an ``Ops`` as "elementwise"."""

    def __init__(self, ops: Any, works: Works) -> None:
        for name in dir(ops):
            if not name.startswith("_") and callable(getattr(ops, name)):
                setattr(self, name, self._timed(getattr(ops, name), works))

    @staticmethod
    def _timed(operation: Callable[..., Any], works: Works) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            out = operation(*args, **options)
            work = works["elementwise"]
            work.seconds += time.perf_counter() - began
            work.num_calls += 1
            results = out if isinstance(out, tuple) else (out,)
            rows = len(results[0])
            work.num_bytes += sum(
                _bytes_of_rows(each, rows)
                for each in (*args, *results)
                if isinstance(each, torch.Tensor)
            )
            return out

        return timed


def _bytes_of_rows(tensor: torch.Tensor, rows: int) -> int:
    """Size in bytes of the first ``rows`` rows of the tensor, or of all if it has fewer: no step
    touches more of a cache or a table."""
    return tensor.nbytes // max(len(tensor), 1) * min(len(tensor), rows)


class _TimedAttention:
    """Implements ``attention.attention_backend.AttentionBackend``."""

    def __init__(self, backend: Any, works: Works) -> None:
        self._backend = backend
        self._works = works

    def prepare(self, batch: AttentionBatch) -> None:
        began = time.perf_counter()
        self._backend.prepare(batch)
        self._works["attention"].seconds += time.perf_counter() - began

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        began = time.perf_counter()
        out = self._backend.forward(q, k_cache, v_cache, batch, variant)
        work = self._works["attention"]
        work.seconds += time.perf_counter() - began
        work.num_calls += 1
        pairs, keys = num_visible(
            np.diff(batch.cu_q_host).astype(np.int64),
            batch.kv_lens_host.astype(np.int64),
            variant.window,
        )
        parts = 1 if v_cache.data_ptr() == k_cache.data_ptr() else 2
        work.num_bytes += parts * keys * k_cache[0, 0].nbytes
        work.flops += 2 * pairs * (q[0].numel() + out[0].numel())
        work.product = _name(q.dtype)
        return out


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def num_visible(counts: np.ndarray, kv_lens: np.ndarray, window: int | None) -> tuple[int, int]:
    """(number of pairs of a token and a key that it sees, number of keys, counted once per row) for
    rows that compute the last ``counts`` [n] of their ``kv_lens`` [n] positions."""
    starts = kv_lens - counts
    if window is None:
        return int((counts * starts + counts * (counts + 1) // 2).sum()), int(kv_lens.sum())
    growing = np.clip(window - starts, 0, counts)  # tokens that see every position before them
    pairs = growing * starts + growing * (growing + 1) // 2 + (counts - growing) * window
    return int(pairs.sum()), int(np.minimum(kv_lens, counts + window - 1).sum())
