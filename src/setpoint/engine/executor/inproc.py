"""Runs the engine in the scheduler's own process. Implements ``core.executor.Executor`` for one
device.

On CUDA, ``submit`` and ``finish`` only enqueue work: results are copied to pinned memory after
sampling, and ``result`` waits for that copy alone. On the CPU the same calls do the work at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from setpoint.core.control import ExpertLoads
from setpoint.core.errors import StepOutOfMemoryError
from setpoint.core.lack import Lack
from setpoint.core.plan import StepPlan, TokenMasks
from setpoint.core.request import Ids, pack_ids
from setpoint.core.result import EAGER, HiddenStates, PositionLogprobs, StepResult, one_each
from setpoint.engine.executor.expert_balancing import ExpertBalancer, expert_loads
from setpoint.engine.executor.profiling import Profiler
from setpoint.engine.kernels.device import (
    Mark,
    lack_of,
    marker,
    seconds_between,
    to_host,
    wait,
)
from setpoint.engine.runner.model_runner import Forward, ModelRunner
from setpoint.engine.runner.way import Way
from setpoint.engine.sampling.facts import UNUSED
from setpoint.engine.sampling.logprobs import Logprobs


class InprocExecutor:
    def __init__(self, runner: ModelRunner, ways: Sequence[Way] | None = None) -> None:
        """ways: the ways to choose from instead of the runner's own."""
        self.runner = runner
        self._ways = ways
        self._mark = marker(runner.device)
        self.profiler = Profiler(runner.device)
        self.balancer: ExpertBalancer | None = None
        """Set if experts are balanced."""
        self.is_alone = runner.backends.data.size == 1
        """Whether no other process computes in step with this one."""

    def submit(self, plan: StepPlan) -> InprocStep:
        try:
            return self._begin(plan)
        except torch.OutOfMemoryError as error:
            lack = lack_of(error, self.runner.device)
        raise self.lost(lack)  # here the exception, which holds the step's tensors, is gone

    def _begin(self, plan: StepPlan) -> InprocStep:
        return InprocStep(self, plan, self._ways, self._mark)

    def lost(self, lack: Lack) -> StepOutOfMemoryError:
        """The error for a step of which nothing is left but the memory that the allocator keeps;
        that is given back."""
        self.runner.give_back()
        return StepOutOfMemoryError(lack, is_final=not self.is_alone)

    def idle(self) -> bool:
        return self.runner.claim_ahead.advance()

    def expert_loads(self) -> ExpertLoads | None:
        """What ``expert_balancing.expert_loads`` says now."""
        return expert_loads(self.runner, self.balancer)

    def shutdown(self) -> None:
        """Does nothing: the engine has no other process to end."""


class InprocStep:
    """Implements ``core.executor.PendingStep``. The constructor enqueues the forward pass."""

    def __init__(
        self,
        executor: InprocExecutor,
        plan: StepPlan,
        ways: Sequence[Way] | None,
        mark: Callable[[], Mark],
    ) -> None:
        self.executor = executor
        self.runner = runner = executor.runner
        self.profiler = executor.profiler
        self.mark = mark
        self.begin = mark()
        self.forward: Forward = runner.forward(plan, ways)
        self.forward_done = mark()

    def finish(self, masks: TokenMasks | None) -> None:
        try:
            return self._sample(masks)
        except torch.OutOfMemoryError as error:
            lack = lack_of(error, self.runner.device)
        del self.forward
        raise self.executor.lost(lack)

    def _sample(self, masks: TokenMasks | None) -> None:
        self.sample_begin = self.mark()
        sampled = self.runner.sample(self.forward, masks)
        self.sampled_ids = (
            None if sampled is None else sampled.ids.fetch(len(self.forward.batch.sample_slots))
        )
        self.output = (
            None if sampled is None or sampled.logprobs is None else sampled.logprobs.map(to_host)
        )
        self.prompt = {
            row: logprobs.map(to_host) for row, logprobs in self.forward.prompt_logprobs.items()
        }
        pooled = self.forward.pooled
        self.embeddings = None if pooled is None else to_host(pooled.vectors)
        self.hidden_states = {
            seq_id: (start, to_host(states))
            for seq_id, (start, states) in self.forward.hidden_states.items()
        }
        facts = () if sampled is None else sampled.facts
        self.facts = [(fact, to_host(fact.numbers)) for fact in facts]
        self.sample_done = self.mark()

    def result(self) -> StepResult:
        wait(self.sample_done)
        self.profiler.after_step()
        plan = self.forward.plan
        sampled = self.sampled_ids
        token_ids, offsets = _with_forced(
            np.zeros(0, np.int32) if sampled is None else sampled.astype(np.int32), plan
        )
        return StepResult(
            step_id=plan.step_id,
            seq_ids=plan.rows.seq_ids[plan.rows.sampling],
            token_ids=token_ids,
            offsets=offsets,
            output_logprobs=self._output_logprobs(plan),
            prompt_logprobs={
                int(plan.rows.seq_ids[row]): self._position_logprobs(row, logprobs, slice(None))
                for row, logprobs in self.prompt.items()
            },
            embeddings=(
                {}
                if self.embeddings is None
                else dict(zip(self.forward.pooled.seq_ids, self.embeddings.numpy(), strict=True))
            ),
            hidden_states={
                seq_id: HiddenStates(start, states.numpy())
                for seq_id, (start, states) in self.hidden_states.items()
            },
            token_facts=self._token_facts(plan),
            failures=self.forward.failures,
            forward_s=seconds_between(self.begin, self.forward_done),
            sample_s=seconds_between(self.sample_begin, self.sample_done),
            way=EAGER if self.forward.way is None else self.forward.way.name,
        )

    def _output_logprobs(self, plan: StepPlan) -> dict[int, PositionLogprobs]:
        if self.output is None:
            return {}
        wanted = plan.rows.sampling & self.runner.slots.columns["logprobs"][plan.rows.slots]
        found = enumerate(np.flatnonzero(wanted).tolist())
        return {
            int(plan.rows.seq_ids[row]): self._position_logprobs(
                row, self.output, slice(at, at + 1)
            )
            for at, row in found
        }

    def _token_facts(self, plan: StepPlan) -> dict[int, dict[str, bytes]]:
        seq_ids = plan.rows.seq_ids[plan.rows.sampling]
        found: dict[int, dict[str, bytes]] = {}
        for fact, numbers in self.facts:
            for row, values in zip(fact.rows.tolist(), numbers.numpy(), strict=True):
                about = found.setdefault(int(seq_ids[row]), {})
                about[fact.name] = pack_ids(values[values != UNUSED])
        return found

    def _position_logprobs(
        self, row: int, logprobs: Logprobs, positions: slice
    ) -> PositionLogprobs:
        """These positions of ``logprobs``, in the widths that the plan's row asked for.

        The slot still belongs to the row's sequence: a plan's slots are not given to other
        sequences before its result is taken.
        """
        num_top, num_picked = self.runner.slots.logprob_widths(
            int(self.forward.plan.rows.slots[row])
        )
        return PositionLogprobs(
            values=logprobs.values[positions].numpy(),
            ids=logprobs.ids[positions].numpy(),
            top_values=logprobs.top_values[positions, :num_top].numpy(),
            top_ids=logprobs.top_ids[positions, :num_top].numpy(),
            picked=logprobs.picked[positions, :num_picked].numpy(),
        )


def _with_forced(sampled: Ids, plan: StepPlan) -> tuple[Ids, Ids]:
    """The tokens of the sampling rows, each row's forced ones before its sampled one, and their
    offsets. Every row with forced tokens samples."""
    offsets = one_each(len(sampled))
    if not len(plan.forced_ids):
        return sampled, offsets
    offsets[1:] += np.cumsum(plan.rows.num_forced[plan.rows.sampling])
    token_ids = np.empty(offsets[-1], np.int32)
    is_sampled = np.zeros(len(token_ids), np.bool_)
    is_sampled[offsets[1:] - 1] = True
    token_ids[is_sampled], token_ids[~is_sampled] = sampled, plan.forced_ids
    return token_ids, offsets
