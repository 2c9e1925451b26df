"""graph-miss: decode batches run without a captured graph."""

from __future__ import annotations

from setpoint.core.moments import Moment
from setpoint.doctor.case import Case
from setpoint.doctor.checks.check import Check
from setpoint.doctor.checks.common import (
    change,
    confidence,
    counted,
    estimate,
    lines_on,
    percent,
    quote,
)
from setpoint.doctor.checks.memory import scaled, total_gb
from setpoint.doctor.findings import Action, Finding, RuledOut
from setpoint.doctor.load import Load

MIN_SHARE = 0.3
MIN_BATCHES = 3
MOST = 1024
MB_PER_SIZE = 2.0
"""Memory of a graph for each request of the largest batch, as SGLang reserves it."""
BEST = 0.8
"""The highest confidence: a limit that keeps requests waiting is more certain."""


def find(case: Case) -> Finding | None:
    if case.facts.device == "cpu" or not case.has_load:
        return None
    switched_off = case.option("disable_cuda_graph") is True
    missed = _missed(case)
    share = share_missed(case)
    if switched_off and not _has_figures(case):
        share = 1.0 if len(case.decoding) >= MIN_BATCHES else 0.0
    if share < MIN_SHARE or (len(missed) < MIN_BATCHES and not switched_off):
        return None
    running = missed.quantile(_running, 0.95) or 0.0
    largest = max(case.facts.graph_batch_sizes, default=None) or _asked(case)
    if largest is not None and running <= largest and not switched_off:
        return None
    load = missed if len(missed) else case.decoding
    return Finding(
        cause="graph-miss",
        confidence=confidence(case, share, load, BEST),
        summary=_summary(share, running, largest, switched_off),
        evidence=lines_on(case, "disable_cuda_graph" if switched_off else "graph_batch_sizes")
        + lines_on(case, *(() if switched_off else ("cuda_graph_max_bs",)))
        + quote(load),
        action=_action(case, running, switched_off),
        effect=estimate(
            "time between tokens",
            0.6,
            0.85,
            1.0,
            "without a graph, the kernels of every layer are launched one by one; what that costs "
            "depends on the model and shrinks as batches grow",
        ),
        ruled_out=_alternatives(case),
        risk="Graphs take memory outside the KV pool: check the free memory in the ready line "
        "(available_gpu_mem).",
        verify='Decode lines say "cuda graph: True" with as many running requests as before.',
        falsify="The time between tokens is the same with graphs. Then the batch is large enough "
        "to hide the kernel launches.",
        share=round(share, 3),
    )


def _running(moment: Moment) -> float | None:
    return moment.missed_running if moment.missed_running is not None else moment.running


def _has_figures(case: Case) -> bool:
    return any(moment.graph_hits or moment.graph_misses for moment in case.load.moments)


def _missed(case: Case) -> Load:
    return case.load.where(lambda moment: moment.graph_misses > moment.graph_hits)


def share_missed(case: Case) -> float:
    """Share of the decode batches under load that ran without a graph."""
    hits = sum(moment.graph_hits for moment in case.load.moments)
    misses = sum(moment.graph_misses for moment in case.load.moments)
    return misses / (hits + misses) if misses else 0.0


def _asked(case: Case) -> int | None:
    asked = case.number("cuda_graph_max_bs")
    return None if asked is None else int(asked)


def _summary(share: float, running: float, largest: int | None, switched_off: bool) -> str:
    if switched_off:
        return (
            "Decode batches run without a CUDA graph: --disable-cuda-graph switches graphs off, so "
            "every step launches its kernels one by one."
        )
    covered = "" if largest is None else f", but the largest captured graph is for {largest:,}"
    return (
        f"Decode batches run without a CUDA graph: {percent(share)} of them did, with up to "
        f"{counted(round(running), 'request')} in the batch{covered}."
    )


def _action(case: Case, running: float, switched_off: bool) -> Action:
    if switched_off:
        return Action(
            "Remove --disable-cuda-graph from the command line and restart. If memory runs out "
            "while graphs are captured, lower --mem-fraction-static by 0.02.",
            "--disable-cuda-graph",
            "set",
            False,
        )
    value = 1
    while value < min(running, MOST):
        value *= 2
    slots = case.facts.max_running_requests
    if slots is not None and running <= slots < value:
        value = slots
    free, needed = case.facts.available_gb, value * MB_PER_SIZE / 1024
    tight = free is not None and free - needed < scaled(5.0, total_gb(case))
    warning = (
        " The graphs take memory outside the KV pool, and little is free: lower "
        "--mem-fraction-static by 0.02 as well."
        if tight
        else " The graphs take memory outside the KV pool; enough is free."
        if free is not None
        else " The graphs take memory outside the KV pool: if the ready line then shows less than "
        "5 GB free, lower --mem-fraction-static by 0.02."
    )
    return Action(
        f"{change('increase', '--cuda-graph-max-bs', value, _asked(case))}.{warning}",
        "--cuda-graph-max-bs",
        "increase",
        value,
    )


def _alternatives(case: Case) -> tuple[RuledOut, ...]:
    return (
        RuledOut(
            "batch-too-large",
            "Graphs would also cover a smaller batch, but output throughput would be lower.",
        ),
    )


CHECK = Check(
    cause="graph-miss",
    title="Decode batches run without a CUDA graph",
    find=find,
    meaning="A decode step launches hundreds of small kernels. A CUDA graph launches all of them "
    "at once. When the server starts, it captures graphs for batches of up to --cuda-graph-max-bs "
    "requests; the default depends on the device's memory (8 to 512). Larger batches run without a "
    "graph, so each step waits while the CPU launches kernel after kernel.",
    rule="At least 30 % of the decode lines under load say that no graph was used, with more "
    "running requests than the largest captured graph covers; or graphs are switched off.",
    counter_evidence="Prefill batches usually have no graph and do not count. If fewer requests "
    "run than the largest graph covers, something else prevents graphs (a feature that some "
    "requests use, or another rank in prefill), and a larger value does not help. On a CPU the "
    "option has no effect.",
    advice="Raise --cuda-graph-max-bs, with the value, or remove the option that switches "
    "graphs off.",
    guide="SGLang's tuning guides of 2025 and 2026: for some models, graphs help up to batches of "
    "512 or 768; raise --cuda-graph-max-bs and lower --mem-fraction-static at the same time. "
    "sglang#33483: a batch that outgrows the largest graph gets slower, and therefore grows "
    "further.",
    equation="value = the running requests of batches without a graph, rounded up to a power of "
    "two, but at most max_running_requests; memory for graphs: about 2 MB x value",
    picture="""\
captured for    1 2 4 8 16 24 32 requests
running         165 -> no graph: the CPU launches kernel by kernel""",
)
