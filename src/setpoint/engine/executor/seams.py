"""Timers at the seams of a runner: linear layers, attention, the other operations, the head,
sampling.

Works on a runner whose model calls ``Ops``, ``AttentionBackend`` and ``PackedWeight`` objects, as
every model here does, and takes the times of replayed steps from their program. What is between the
seams (Python, views) is in no timer. Enter it for measurements only: each eager call gets about a
µs slower.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from setpoint.core.work import Work
from setpoint.engine.attention.base import AttentionBatch, AttentionVariant
from setpoint.engine.quant.base import PackedWeight
from setpoint.engine.runner.model_runner import ModelRunner

PROGRAM_KINDS = {
    "norm": "elementwise",
    "rope": "elementwise",
    "activation": "elementwise",
    "embedding": "elementwise",
}
"""Kind of a program's kernels -> ours, where it is another."""


class Seams:
    """Counts while entered; ``take`` gives what has come together since it was last called."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._works: defaultdict[str, Work] = defaultdict(Work)
        self._products = "linear"
        """What a product of a weight counts as now."""

    @contextmanager
    def entered(self, *, eager: bool) -> Iterator[None]:
        """eager: no step is replayed, so that everything is counted; else replayed steps have times
        only."""
        runner = self._runner
        with ExitStack() as stack:
            if eager:
                stack.enter_context(_replaced(runner, "captured", None))
            else:
                runner.start_timing()
                runner.take_times()
            stack.enter_context(_replaced(runner, "ops", _TimedOps(runner.ops, self._works)))
            stack.enter_context(
                _replaced(runner, "attention", _TimedAttention(runner.attention, self._works))
            )
            for module in runner.model.modules():
                if "multiply" in module.__dict__:
                    factors = (
                        2 if getattr(module, "activates", False) else 1
                    )  # gate and up, of which only the product comes out
                    stack.enter_context(
                        _replaced(module, "multiply", self._timed_product(module.multiply, factors))
                    )
            stack.enter_context(_replaced(runner, "logits", self._head(runner.logits)))
            stack.enter_context(_replaced(runner, "sample", self._sampling(runner.sample)))
            self._works.clear()
            yield

    def take(self) -> dict[str, Work]:
        for kind, seconds in self._runner.take_times().items():
            if seconds:
                self._works[PROGRAM_KINDS.get(kind, kind)].seconds += seconds
        works = dict(self._works)
        self._works.clear()
        return works

    def _timed_product(
        self, weight: PackedWeight, factors: int
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        def multiply(x: torch.Tensor) -> torch.Tensor:
            began = time.perf_counter()
            out = weight(x)
            work = self._works[self._products]
            work.seconds += time.perf_counter() - began
            work.num_calls += 1
            work.num_bytes += weight.num_bytes
            work.flops += 2 * x.numel() * out.shape[1] * factors
            work.product = getattr(weight, "product", _name(x.dtype))
            return out

        return multiply

    def _head(
        self, logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        def project(hidden: torch.Tensor) -> torch.Tensor:
            self._products = "head"
            out = logits(hidden)
            self._products = "linear"
            self._works["sampling"].num_bytes += out.nbytes
            return out

        return project

    def _sampling(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        """Without the head, which runs inside where many rows sample."""

        def timed(*args: Any) -> Any:
            began, head = time.perf_counter(), self._works["head"].seconds
            sampled = sample(*args)
            work = self._works["sampling"]
            work.seconds += time.perf_counter() - began - (self._works["head"].seconds - head)
            work.num_calls += 1
            return sampled

        return timed


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` inside. Instance attributes only: a method comes back when its
    stand-in is deleted."""
    had, before = name in owner.__dict__, getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


class _TimedOps:
    """Every operation of an ``Ops``, as "elementwise"."""

    def __init__(self, ops: Any, works: defaultdict[str, Work]) -> None:
        for name in dir(ops):
            if not name.startswith("_") and callable(getattr(ops, name)):
                setattr(self, name, self._timed(getattr(ops, name), works))

    @staticmethod
    def _timed(operation: Callable[..., Any], works: defaultdict[str, Work]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            out = operation(*args)
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
    """At most one row of the tensor per row of the step: of a cache or a table no more is
    touched."""
    return tensor.nbytes // max(len(tensor), 1) * min(len(tensor), rows)


class _TimedAttention:
    """Implements ``attention.base.AttentionBackend``."""

    def __init__(self, backend: Any, works: defaultdict[str, Work]) -> None:
        self._backend = backend
        self._works = works

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
        pairs, keys = visible(
            np.diff(batch.cu_q_host).astype(np.int64),
            batch.kv_lens_host.astype(np.int64),
            variant.window,
        )
        work.num_bytes += 2 * keys * k_cache[0, 0].nbytes
        work.flops += 4 * pairs * out[0].numel()
        work.product = _name(q.dtype)
        return out


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def visible(counts: np.ndarray, kv_lens: np.ndarray, window: int | None) -> tuple[int, int]:
    """Of rows with ``counts`` last tokens in ``kv_lens`` positions: how many (token, key) pairs
    there are, and how many keys, each row's counted once."""
    starts = kv_lens - counts
    if window is None:
        return int((counts * starts + counts * (counts + 1) // 2).sum()), int(kv_lens.sum())
    growing = np.clip(window - starts, 0, counts)  # tokens that see every position before them
    pairs = growing * starts + growing * (growing + 1) // 2 + (counts - growing) * window
    return int(pairs.sum()), int(np.minimum(kv_lens, counts + window - 1).sum())
