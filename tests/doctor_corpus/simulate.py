"""Runs a simulated server and keeps what its log readers wrote, and what its records say of it."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from setpoint.core.records import Record, Refusal, RequestDone, Retraction, StepDone
from setpoint.observe import logline
from setpoint.observe.figures import Figures
from setpoint.observe.logline import LogLines
from setpoint.observe.tee import Tee
from setpoint_testing.simulated import Engine, Simulation
from setpoint_testing.traffic import Arrivals, Load, Traffic


@dataclass(slots=True, frozen=True)
class Line:
    at: float
    """Seconds since the server was ready."""
    message: str
    level: str = "INFO"
    rank: str = ""


@dataclass(slots=True)
class Truth:
    """What the engine's records say and a log does not. Labels are checked against it."""

    seconds: float = 0.0
    busy_s: float = 0.0
    queued_s: float = 0.0
    """Time with a queue."""
    usage_s: float = 0.0
    """Usage times seconds, of the time with a queue."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why the head of the queue waited -> seconds."""
    num_retractions: int = 0
    num_steps: int = 0
    num_done: int = 0
    outputs: int = 0
    max_queue: int = 0
    peak_running: int = 0
    _last: float = 0.0

    def on(self, record: Record) -> None:
        match record:
            case StepDone():
                self._step(record)
            case Retraction():
                self.num_retractions += 1
            case RequestDone():
                self.num_done += 1

    def _step(self, step: StepDone) -> None:
        took = step.forward_s
        self.num_steps += 1
        self.seconds = step.finished_at
        self.busy_s += took
        self.outputs += step.num_sampled
        self.max_queue = max(self.max_queue, step.num_queued)
        self.peak_running = max(self.peak_running, step.num_running)
        if step.num_queued:
            self.queued_s += took
            self.usage_s += took * step.pool.usage
        for reason in step.refusals:
            if reason is not Refusal.BLOCKED:
                self.reasons[reason.value] += took

    def words(self) -> str:
        """One sentence with the figures."""
        reasons = ", ".join(
            f"{name} {100 * seconds / max(self.queued_s, 1e-9):.0f} %"
            for name, seconds in self.reasons.most_common(3)
        )
        waited = (
            f"a queue {100 * self.queued_s / self.busy_s:.0f} % of the busy time with mean usage"
            f" {self.usage_s / self.queued_s:.2f}, its head waited because of {reasons}"
            if self.queued_s
            else "never a queue"
        )
        per_minute = 60 * self.num_retractions / max(self.seconds, 1e-9)
        return (
            f"The records say: {self.seconds:.0f} s, busy {100 * self.busy_s / self.seconds:.0f} %,"
            f" {waited}; {per_minute:.1f} retractions a minute, at most {self.peak_running} running"
            f" and {self.max_queue} queued."
        )


class _Capture(logging.Handler):
    def __init__(self, simulation_now: list[float], rank: str) -> None:
        super().__init__()
        self.lines: list[Line] = []
        self._now = simulation_now
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(Line(self._now[0], record.getMessage(), record.levelname, self._rank))


def simulate(
    engine: Engine,
    load: Load,
    arrivals: Arrivals,
    *,
    seed: int,
    seconds: float,
    max_lines: int,
    is_cpu: bool = False,
    rank: str = "",
    decode_log_interval: int = 40,
) -> tuple[list[Line], Truth]:
    """Serve for so long, or until there are so many lines, or until the clients are done."""
    now = [0.0]
    capture, truth = _Capture(now, rank), Truth()
    figures = Figures(decode_log_interval=decode_log_interval)
    traffic = Traffic(load, arrivals, seed)
    lines = LogLines(figures, device="cpu" if is_cpu else "cuda")
    simulation = Simulation(engine, traffic, traffic.num_outputs, Tee(figures, truth, lines))
    logger = logline.logger
    logger.addHandler(capture)
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        while now[0] < seconds and len(capture.lines) < max_lines and not simulation.is_over:
            simulation.turn()
            now[0] = simulation.clock.now()
    finally:
        logger.removeHandler(capture)
        logger.setLevel(level)
        logger.propagate = propagate
    truth.seconds = now[0]
    return capture.lines, truth
