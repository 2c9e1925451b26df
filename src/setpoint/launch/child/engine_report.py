"""What a running engine tells of itself when it is asked."""

from __future__ import annotations

from dataclasses import dataclass

from setpoint.core.control import EngineReport, MemoryUsage, Moments, TierState
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.launch.child.cache_tiers import CacheTiers
from setpoint.observe.readers import EngineReaders
from setpoint.recording.writer import RecordingWriter
from setpoint.scheduler.scheduler import Scheduler

GIB = 1 << 30


@dataclass(slots=True, frozen=True)
class EngineReporter:
    """Asks the parts of an engine for their figures."""

    readers: EngineReaders
    executor: InprocExecutor
    scheduler: Scheduler
    tiers: CacheTiers | None
    recording: RecordingWriter | None
    counts_experts: bool
    """Engines that compute the experts together count the same tokens, so one of them tells."""

    def report(self) -> EngineReport:
        return self.readers.report(
            self._memory_usage(),
            None if self.recording is None else self.recording.state(),
            self.executor.expert_loads() if self.counts_experts else None,
            self._tier_state(),
        )

    def moments(self, since: int) -> Moments:
        """The moments from this number on."""
        return self.readers.told(since, self._tier_state())

    def _tier_state(self) -> TierState | None:
        return None if self.tiers is None else self.tiers.state(self.scheduler.state.tiers)

    def _memory_usage(self) -> MemoryUsage:
        runner = self.executor.runner
        return MemoryUsage(
            weight=(0 if runner.model is None else runner.report.weight_bytes) / GIB,
            kvcache=runner.pool.num_bytes / GIB,
            graph=sum(way.num_bytes for way in runner.ways) / GIB,
        )
