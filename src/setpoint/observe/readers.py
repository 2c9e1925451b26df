"""All readers of a serving engine's records: figures, log lines, moments, and the metrics if they
are enabled."""

from __future__ import annotations

import sys

import msgspec

from setpoint.core.control import (
    EngineReport,
    ExpertLoads,
    MemoryUsage,
    Moments,
    RecordingState,
    TierState,
)
from setpoint.observe.engine_metrics import EngineMetrics
from setpoint.observe.figures import Figures
from setpoint.observe.logline import LogLines
from setpoint.observe.moment_keeper import MomentKeeper
from setpoint.observe.tee import Tee
from setpoint.observe.work import WorkMeter, WorkModel


class EngineReaders(Tee):
    def __init__(
        self,
        *,
        device: str,
        decode_log_interval: int,
        request_times: bool,
        metrics: bool,
        epoch: float = 0.0,
        work: WorkModel | None = None,
    ) -> None:
        """request_times: log a line for each request that ends. epoch: when the engine's clock
        showed 0, in seconds since 1970. work: also estimate the work of steps."""
        self._figures = Figures(decode_log_interval=decode_log_interval)
        meter = None if work is None else WorkMeter(work, self._figures)
        self.moments = MomentKeeper(epoch=epoch)
        self._metrics = EngineMetrics(self._figures, meter) if metrics else None
        lines = LogLines(
            self._figures,
            device=device,
            request_times=request_times,
            work=meter,
            is_short=sys.stderr.isatty(),
        )
        readers = (self._figures, meter, lines, self.moments, self._metrics)
        super().__init__(*(each for each in readers if each is not None))

    def told(self, since: int, tiers: TierState | None) -> Moments:
        """The moments from this number on, and what the cache tiers have done."""
        return msgspec.structs.replace(self.moments.since(since), tiers=tiers)

    def report(
        self,
        memory: MemoryUsage,
        recording: RecordingState | None,
        experts: ExpertLoads | None = None,
        tiers: TierState | None = None,
    ) -> EngineReport:
        """The readers' reports as one, with the engine's memory, the state of its recording, the
        loads of its experts and what its cache tiers have done."""
        return EngineReport(
            figures=self._figures.report(),
            turn_times=self._figures.turns,
            metrics=None if self._metrics is None else self._metrics.report(),
            memory_usage=memory,
            recording=recording,
            experts=experts,
            tiers=tiers,
        )
