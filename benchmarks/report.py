"""Makes a Markdown table and a JSON file from samples: medians, ranges, and ratios, which count as
a result only if the ranges do not overlap."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contenders import Sample
from workloads import Workload


@dataclass(slots=True, frozen=True)
class Metric:
    name: str
    unit: str
    higher_is_better: bool
    of: Callable[[Workload, Sample], float | None]


def _ttft_ms(workload: Workload, sample: Sample) -> float | None:
    return None if sample.ttft_s is None else sample.ttft_s * 1e3


def _decode_rate(workload: Workload, sample: Sample) -> float | None:
    return None if not sample.decode_s else (workload.output_tokens - 1) / sample.decode_s


def _hit_share(workload: Workload, sample: Sample) -> float | None:
    return (
        None if sample.cached_tokens is None else 100 * sample.cached_tokens / workload.input_tokens
    )


TTFT = Metric("TTFT", "ms", False, _ttft_ms)
DECODE = Metric("decode", "tok/s", True, _decode_rate)
WALL = Metric("wall", "s", False, lambda workload, sample: sample.wall_s)
OUTPUT = Metric(
    "output", "tok/s", True, lambda workload, sample: workload.num_outputs / sample.wall_s
)
PREFILL = Metric(
    "prefill", "tok/s", True, lambda workload, sample: workload.input_tokens / sample.wall_s
)
HITS = Metric("prefix hits", "% of prompt tokens", True, _hit_share)


@dataclass(slots=True, frozen=True)
class Comparison:
    """Medians and ranges of one metric of two contenders."""

    ours: Sequence[float]
    theirs: Sequence[float]
    higher_is_better: bool

    @property
    def ratio(self) -> float:
        """How many times as good ours is, by the medians; infinite if theirs is 0."""
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        better, worse = (ours, theirs) if self.higher_is_better else (theirs, ours)
        return better / worse if worse else math.inf

    @property
    def in_the_noise(self) -> bool:
        """Whether the ranges overlap, or are not known, so that no winner may be named."""
        if min(len(self.ours), len(self.theirs)) < 2:
            return True
        return min(self.ours) <= max(self.theirs) and min(self.theirs) <= max(self.ours)

    def __str__(self) -> str:
        return f"{self.ratio:.2f} ×" + (" (within the noise)" if self.in_the_noise else "")


Results = dict[str, dict[str, list[Sample]]]
"""Name of a workload -> name of a contender -> its samples, one per repetition."""


class Report:
    def __init__(self, workloads: Sequence[Workload], results: Results) -> None:
        self._workloads = workloads
        self._results = results

    def values(self, workload: Workload, contender: str, metric: Metric) -> list[float]:
        """The metric of every repetition; an empty list if any had an error."""
        samples = self._results[workload.name].get(contender, [])
        if any(sample.errors for sample in samples):
            return []
        found = [metric.of(workload, sample) for sample in samples]
        return [value for value in found if value is not None]

    def cpu_table(self) -> str:
        """A table in Markdown of the CPU seconds per process and the share of the machine that
        other programs used; medians of the repetitions."""
        lines = [
            "| workload | contender | wall s | CPU s by process | used by others |",
            "|---|---|---|---|---|",
        ]
        for workload in self._workloads:
            for contender, samples in self._results[workload.name].items():
                if not samples or any(sample.errors for sample in samples):
                    continue
                wall = statistics.median(sample.wall_s for sample in samples)
                spent = [
                    f"{name} {statistics.median(sample.cpu_s[name] for sample in samples):.2f}"
                    for name in samples[0].cpu_s
                ]
                foreign = statistics.median(sample.foreign_share for sample in samples)
                lines.append(
                    f"| {workload.name} | {contender} | {wall:.2f} | {', '.join(spent)} |"
                    f" {foreign:.0%} |"
                )
        return "\n".join(lines)


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
