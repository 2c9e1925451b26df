"""The new-token ratio: the share of the outputs still allowed that admission expects to be
generated (docs/sglang/scheduling.md#new-token-ratio). It decays with every decode step, each
retraction recomputes it, and an idle engine resets it."""

from __future__ import annotations

from setpoint.scheduler.scheduler_config import RatioConfig


class NewTokenRatio:
    """``current`` is in [0, 1]; at 1, admission reserves every token that running requests may
    still generate. Calls get the present setting of ``conservativeness``."""

    def __init__(self, config: RatioConfig, conservativeness: float) -> None:
        self._config = config
        self.current = self._init(conservativeness)

    def _init(self, conservativeness: float) -> float:
        return min(self._config.init * conservativeness, 1.0)

    def decay(self, conservativeness: float) -> None:
        """Lower the ratio after a decode step without retraction."""
        init = self._init(conservativeness)
        least = init * self._config.min_factor
        self.current = max(self.current - (init - least) / self._config.decay_steps, least)

    def set_after_retraction(self, num_outputs: int, max_new_tokens: int, num_kept: int) -> None:
        """Set the ratio to what the remaining requests turned out to need.

        num_outputs, max_new_tokens: sums over the ``num_kept`` requests that still run.
        """
        expected = num_outputs + self._config.retract_decode_steps * num_kept
        self.current = min(1.0, expected / (max_new_tokens + 1))

    def reset(self, conservativeness: float) -> None:
        """Return to the initial ratio; called when the engine is idle."""
        self.current = self._init(conservativeness)

    def rescale(self, before: float, after: float) -> None:
        """Follow a change of the conservativeness: the ratio keeps its proportion to the initial
        ratio."""
        old, new = self._init(before), self._init(after)
        self.current = min(self.current * new / old, 1.0) if old > 0 else new
