"""About how fast a model would be on this machine, without the model: products with weights of its
kinds and sizes are timed, and the rest of a step is bounded as in ``bench.breakdown``, by the work
that ``observe.work`` counts.

It does not know what a scheduler and a frontend add.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from setpoint.bench.breakdown import PeakRates, bound_s
from setpoint.core.model import ModelSpec
from setpoint.core.pool import PoolStats
from setpoint.core.records import StepDone
from setpoint.core.work import Work
from setpoint.launch.parent.model_report import ModelExamination, Pace
from setpoint.launch.parent.process import engine_environment
from setpoint.observe.work import WorkModel
from setpoint.planning.pace import Curve, Stored, products_s, rising

PROMPT_TOKENS = 512
"""Length of the prompt whose first token is estimated; half of the context if that is shorter."""
STREAMS = 16
"""If the user names no number of requests, and the pool has room for them."""
PRODUCTS_OF_A_LAYER = 4
"""q, k and v; the output; gate and up; down."""


@dataclass(slots=True, frozen=True)
class Machine:
    """What was measured."""

    limits: PeakRates
    times: Mapping[str, Curve]


@dataclass(slots=True, frozen=True)
class ModelSteps:
    """The steps of a model."""

    work: WorkModel
    """Its weights count as nothing: products are timed, not bounded."""
    stored: Sequence[Stored]
    dtype: str

    def seconds(
        self, machine: Machine, *, new: int = 0, decoded: int = 0, behind: int = 0
    ) -> float:
        """Seconds of a step that computes ``new`` tokens of one prompt, the last of which is
        sampled, or one more token of ``decoded`` sequences. behind: tokens of each before
        these."""
        tokens = new + decoded
        pairs = new * behind + new * (new + 1) // 2 + decoded * (behind + 1)
        step = _step(new, decoded, pairs, behind * max(decoded, 1))
        whole = self.work.of(step)
        products = self.work.of(msgspec.structs.replace(step, num_pairs=0))
        rest = Work(
            num_bytes=round(whole.read_bytes + whole.write_bytes),
            flops=round(whole.flops - products.flops),
            product=self.dtype,
        )
        return products_s(
            self.stored,
            machine.times,
            self.work.spec.mixture,
            num_tokens=tokens,
            num_sampled=max(decoded, 1),
        ) + bound_s(rest, rest.num_bytes, machine.limits)


def _step(new: int, decoded: int, pairs: int, behind: int) -> StepDone:
    return StepDone(
        step_id=0,
        finished_at=0.0,
        num_prefill_rows=int(new > 0),
        num_decode_rows=decoded,
        num_new_tokens=new,
        num_cached_tokens=0,
        num_new_seqs=0,
        num_running=0,
        num_queued=0,
        num_preparing=0,
        num_pending_tokens=0,
        num_sampled=0,
        pool=PoolStats(total=0, free=0, evictable=0, locked=0, held=0),
        new_token_ratio=0.0,
        num_pairs=pairs,
        num_behind=behind,
    )


def pace_of(
    steps: ModelSteps, machine: Machine, *, prompt_tokens: int, streams: int, chunk_tokens: int
) -> Pace:
    first_s = sum(
        steps.seconds(machine, new=min(chunk_tokens, prompt_tokens - done), behind=done)
        for done in range(0, prompt_tokens, chunk_tokens)
    )
    return Pace(
        prompt_tokens=prompt_tokens,
        first_token_s=first_s,
        decode_tokens_per_s=1 / steps.seconds(machine, decoded=1, behind=prompt_tokens),
        streams=streams,
        streams_tokens_per_s=streams
        / steps.seconds(machine, decoded=streams, behind=prompt_tokens),
    )


def measure_pace(examined: ModelExamination) -> None:
    """Write the pace into the report on a model that can be served, or why it is not known."""
    report, config, spec = examined.report, examined.config, examined.spec
    assert config is not None
    assert spec is not None
    assert report.memory is not None
    report.pace_unknown = _unknown(examined)
    if report.pace_unknown:
        return
    os.environ.update(engine_environment())  # OpenMP reads it when torch is loaded
    from setpoint.engine.executor.product_times import product_times
    from setpoint.engine.kernels.cpu.peak_rates import machine_limits
    from setpoint.launch.child.mapping import work_model

    limits = machine_limits("cpu", threads=config.num_threads)
    if limits is None:
        report.pace_unknown = "the C++ kernels do not run on this machine"
        return
    times, report.disturbed = product_times(
        [each.kind for each in examined.stored],
        dtype=report.dtype,
        shape=_usual_shape(spec, examined.stored),
        step_bytes=examined.step_bytes,
        threads=config.num_threads,
    )
    work = work_model(config, spec)
    steps = ModelSteps(_without_weights(work), examined.stored, report.dtype)
    prompt = max(min(PROMPT_TOKENS, config.context_len // 2), 1)
    pool = report.memory.pool
    fitting = pool.pool_tokens // (prompt + 1) if pool else 1
    wanted = config.options.scheduling.max_running_requests or STREAMS
    report.pace = pace_of(
        steps,
        Machine(limits, {kind: rising(curve) for kind, curve in times.items()}),
        prompt_tokens=prompt,
        streams=max(min(wanted, fitting, report.memory.running), 1),
        chunk_tokens=config.step_tokens,
    )


def _unknown(examined: ModelExamination) -> str:
    config, report = examined.config, examined.report
    assert config is not None
    parallel = config.options.parallel
    if config.options.execution.device != "cpu":
        return "only CPUs are measured"
    if report.served_by != "setpoint":
        return "it runs on the transformers library's model, whose layers are not measured"
    if parallel.ranks_per_engine > 1 or parallel.dp_size > 1:
        return "only one process is measured; leave --tp-size and --dp-size out"
    return ""


def _without_weights(work: WorkModel) -> WorkModel:
    return WorkModel(work.spec, 0, 0.0, work.dtype_bytes, work.kv_bytes)


def _usual_shape(spec: ModelSpec, stored: Sequence[Stored]) -> tuple[int, int]:
    """(outputs, inputs) of a matrix as large as the products of a layer are on average; those of
    the experts that a token uses are one product."""
    used = sum(each.layers for each in stored)
    if mixture := spec.mixture:
        experts = sum(each.experts for each in stored)
        used += experts * mixture.num_chosen // mixture.num_experts
    each = used // (spec.num_layers * PRODUCTS_OF_A_LAYER)
    return max(each // spec.hidden_size, 1), spec.hidden_size
