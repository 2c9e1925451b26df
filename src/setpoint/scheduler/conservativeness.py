"""The new-token ratio: which share of the outputs still allowed admission counts on
(docs/sglang/scheduling.md#new-token-ratio).

Optimistic while all goes well (it decays step by step), corrected by every retraction, reset when
the engine is idle.
"""

from __future__ import annotations

from setpoint.scheduler.config import RatioConfig


class NewTokenRatio:
    """``current`` is in [0, 1]; 1 reserves every token that running requests may still generate."""

    def __init__(self, config: RatioConfig) -> None:
        self._config = config
        self._init = min(config.init * config.conservativeness, 1.0)
        self._min = min(self._init * config.min_factor, 1.0)
        self._decay = (self._init - self._min) / config.decay_steps
        self.current = self._init

    def decay(self) -> None:
        """A decode step passed without retraction."""
        self.current = max(self.current - self._decay, self._min)

    def retracted(self, num_outputs: int, max_new_tokens: int, num_kept: int) -> None:
        """Set the ratio to what the kept requests turned out to need.

        num_outputs, max_new_tokens: sums over the ``num_kept`` requests that still run.
        """
        expected = num_outputs + self._config.retract_decode_steps * num_kept
        self.current = min(1.0, expected / (max_new_tokens + 1))

    def reset(self) -> None:
        """The engine is idle: the history is over."""
        self.current = self._init
