"""Compiles the kernels of a configuration without a GPU: runs its steps on one that is absent
(``kernels.triton.absent_gpu``), each at the sizes at which kernels differ.

Steps, graphs and sampling are those of a server, on torch's meta device. Values do not exist there,
so sequences are of one token over and over, and pages are not mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from setpoint.core.errors import ConfigError
from setpoint.core.graph_sizes import NO_GRAPHS
from setpoint.core.plan import Admit, PlanBuilder, TokenMasks
from setpoint.core.request import SAMPLING_MASK, LogprobOptions, RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.engine.attention import attention_backend
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.kernels import graphs, kernel_registry
from setpoint.engine.models.model_registry import is_native
from setpoint.engine.parallel.distributed_group import DistributedGroup
from setpoint.engine.parallel.group import ALONE, Group
from setpoint.engine.quant import grouped, linear_method
from setpoint.engine.runner import way
from setpoint.engine.runner.model_runner import ModelRunner

if TYPE_CHECKING:
    from setpoint.engine.kernels.triton.absent_gpu import AbsentGpu, Variant

META = "meta"
GREEDY = SamplingParams(temperature=0.0)
DRAWS = (GREEDY, SamplingParams(), SamplingParams(top_p=0.9, top_k=20, min_p=0.01))
"""Draws of every kind (``kernels.device_sampling.Draws``)."""
CHANGES: tuple[dict[str, object], ...] = (
    {},
    {"frequency_penalty": 1.0, "repetition_penalty": 1.1},
    {"logit_bias": ((0, 1.0),)},
)
"""What changes logits: nothing, penalties, single tokens."""
REPORTS = RequestOptions(logprobs=LogprobOptions(top=2, ids=(0,)), token_facts=(SAMPLING_MASK,))
PAGES = 2
"""Pages of the pool, on whose size no kernel depends."""


@dataclass(slots=True, frozen=True)
class Limits:
    """How large steps become."""

    max_slots: int
    """Most rows of a step."""
    context_len: int
    step_tokens: int
    """Most prompt tokens of a step."""


def use_absent_gpu(gpu: AbsentGpu, tell: Callable[[Variant], None] | None = None) -> None:
    """From now on, this process takes the meta device for a GPU. It chooses the best
    implementations only: if they cannot run, there is nothing to compile. tell: see
    ``AbsentGpu.install``."""
    gpu.install(tell)
    for table in (kernel_registry.PREFERENCE, attention_backend.PREFERENCE):
        table[META] = table["cuda"][:1]
    methods = linear_method.PREFERENCE
    of_gpus = {name: methods.get(("cuda", name), ()) for _, name in methods}
    methods.update({(META, name): best[:1] for name, best in of_gpus.items() if best})
    linear_method.BLOCK_METHODS[META] = linear_method.BLOCK_METHODS["cuda"]
    grouped.PLAIN[META] = grouped.PLAIN["cuda"]
    way.CAPTURED[META] = way.CAPTURED["cuda"]
    graphs.GRAPHS[META] = graphs.LaunchedGraphs


def run_steps(config: EngineConfig, limits: Limits, num_ranks: int) -> None:
    """Have the kernels compiled that an engine with this configuration launches, on every rank.
    ``use_absent_gpu`` comes before. Raises ConfigError for what cannot run on this GPU or cannot be
    compiled ahead."""
    if config.model_impl == "transformers" or not is_native(config.spec):
        raise ConfigError(
            f"{config.spec.architecture} runs on the transformers library's model, whose kernels"
            " cannot be compiled ahead; the server compiles them at its first start."
        )
    for rank in range(num_ranks):
        group = absent_group(rank, num_ranks, sums=not config.invariant)
        runner = build_runner(replace(config, device=META, weights_folder=""), group)
        runner.allocate(num_pages=PAGES, max_slots=limits.max_slots, context_len=limits.context_len)
        if runner.why_eager and config.graph_sizes != NO_GRAPHS:
            raise ConfigError(f"The steps cannot be captured: {runner.why_eager}.")
        _Steps(runner, limits).run()


@dataclass(slots=True)
class _Steps:
    runner: ModelRunner
    limits: Limits
    number: int = field(default=0, init=False)

    def run(self) -> None:
        for rows, tokens in step_sizes(self.limits):
            self._step(rows, tokens)
        if self.runner.spec.pooling is not None or self.runner.backends.group.rank:
            return
        for rows in {1, min(3, self.limits.max_slots)}:
            self._step(rows, 4 * rows, options=REPORTS, logprob_start=1)
            for draws in DRAWS:
                for changes in CHANGES:
                    sampling = SamplingParams(**{**_given(draws), **changes})
                    for options in (RequestOptions(), REPORTS):
                        for masked in (False, True):
                            self._step(rows, rows, sampling, options, masked=masked)

    def _step(
        self,
        rows: int,
        tokens: int,
        sampling: SamplingParams = GREEDY,
        options: RequestOptions | None = None,
        *,
        masked: bool = False,
        logprob_start: int = -1,
    ) -> None:
        """A step that computes so many tokens, all of sequences that it admits."""
        self.number += 1
        runner, plan = self.runner, PlanBuilder(self.number, self.runner.num_groups)
        pooling = runner.spec.pooling
        if options is None:
            options = RequestOptions(pooling=pooling)
        for slot, count in enumerate(_divided(tokens, rows)):
            ids = np.zeros(count, np.int32)
            admit = Admit(slot, slot, ids, count, sampling, 0, options=options)
            plan.admits.append(replace(admit, logprob_start=logprob_start))
            plan.add_row(slot, slot, 0, count, int(pooling is None))
        if runner.backends.group.rank:
            runner.follow(plan.build())
        else:
            words = np.full((1, -(-runner.spec.vocab_size // 32)), -1, np.int32)
            forward = runner.forward(plan.build())
            runner.sample(forward, TokenMasks(np.zeros(1, np.int32), words) if masked else None)
            if forward.failures:
                raise ConfigError(next(iter(forward.failures.values())))
        runner.slots.release(range(rows))


def step_sizes(limits: Limits) -> Iterator[tuple[int, int]]:
    """(rows, tokens) of the steps at whose sizes kernels may differ: where a size reaches a power
    of two, is a multiple of 16, or is 1, and at the largest."""
    most_rows, most = limits.max_slots, limits.step_tokens
    yield from ((rows, rows) for rows in _sizes(most_rows))
    for tokens in _sizes(most):
        least = -(-tokens // limits.context_len)
        for rows in {least, min(tokens // 2, most_rows)}:
            if least <= rows < tokens:
                yield rows, tokens
    least = -(-most // limits.context_len)
    yield from ((rows, most) for rows in _sizes(min(most_rows, most // 2)) if rows >= least)


def _sizes(most: int) -> list[int]:
    """The powers of two and what follows them, up to ``most``, which is one of them."""
    powers = [1 << number for number in range(most.bit_length())]
    return sorted({each for power in powers for each in (power, power + 1) if each < most} | {most})


def _divided(tokens: int, rows: int) -> list[int]:
    """The tokens of each row."""
    return [tokens * (row + 1) // rows - tokens * row // rows for row in range(rows)]


def _given(sampling: SamplingParams) -> dict[str, object]:
    return {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}


class _Exchanged:
    def wait(self) -> None:
        """Nothing was sent."""


class _AbsentRanks:
    """Stands in for a process group of torch; exchanges nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allgather(self, *tensors: Sequence[object]) -> _Exchanged:
        return _Exchanged()

    gather = allreduce = allgather


class _AbsentGroup(DistributedGroup):
    """The ranks of GPUs that are not there, of which each does as this one."""

    def __init__(self, rank: int, size: int, *, sums: bool) -> None:
        super().__init__(_AbsentRanks(rank, size), sums=sums, is_capturable=True)
        self.before_logits = lambda hidden: None

    def numbers(self, own: int, device: torch.device) -> list[int]:
        return [own] * self.size


def absent_group(rank: int, size: int, *, sums: bool) -> Group:
    """The group of a rank whose model is divided among absent GPUs. sums: see ``Group``."""
    return ALONE if size == 1 else _AbsentGroup(rank, size, sums=sums)
