"""Delays admission until enough requests can be admitted together, because every running request
must wait for a prefill step (SGLang: prefill delayer)."""

from __future__ import annotations

from dataclasses import dataclass

from setpoint.core.settings import DelaySettings


@dataclass(slots=True, frozen=True)
class DelayView:
    """The numbers that the rules read, at the start of a pass in which some sequence waits and none
    is in mid-prefill."""

    num_running: int
    num_free_slots: int
    num_queued: int
    usage: float
    """Share of the KV pool in use."""
    now: float
    """Clock seconds."""


class AdmissionDelay:
    """Remembers how long the present delay has lasted and how large prefill batches get."""

    def __init__(self) -> None:
        self._largest_batch = 0
        self._num_passes = 0
        self._since = 0.0

    def holds(self, view: DelayView, settings: DelaySettings) -> bool:
        """Whether this pass must admit no sequence. False if no request runs, and once the delay
        has lasted for the passes or the time in the settings."""
        if not (self._is_wanted(view, settings) and self._may_continue(view, settings)):
            self._num_passes = 0
            return False
        if self._num_passes == 0:
            self._since = view.now
        self._num_passes += 1
        return True

    def record_admissions(self, num_seqs: int) -> None:
        """Record that a step that admits this many sequences was planned."""
        self._largest_batch = max(self._largest_batch, num_seqs)

    def _is_wanted(self, view: DelayView, settings: DelaySettings) -> bool:
        if view.num_running == 0:
            return False
        if settings.min_free_slots is not None and view.num_free_slots < settings.min_free_slots:
            return True
        if not settings.enabled:
            return False
        if settings.low_usage is not None and view.usage < settings.low_usage:
            return False
        if view.num_free_slots < self._largest_batch:
            return True
        return settings.queue_ratio is not None and view.num_queued < min(
            int(view.num_running * settings.queue_ratio), self._largest_batch
        )

    def _may_continue(self, view: DelayView, settings: DelaySettings) -> bool:
        if self._num_passes == 0:
            return True
        return (
            self._num_passes < settings.max_passes and view.now - self._since < settings.max_delay_s
        )
