"""Turns that belong to decode alone: after a prefill step, and between two looks at the queue."""

from __future__ import annotations

from setpoint.scheduler.config import CadenceConfig


class Cadence:
    """Counts decode steps that are still due before prefill is considered again; chunks of a prompt
    wait too."""

    def __init__(self, config: CadenceConfig) -> None:
        self._config = config
        self._left = 0

    def decode_only(self, num_decoding: int) -> bool:
        """Whether prefill must wait this turn. It never waits for nobody: ``num_decoding``
        sequences could use the turn."""
        return self._left > 0 and num_decoding > 0

    def planned(self, *, prefill: bool, piece: bool, num_decoding: int) -> None:
        """A step was planned; ``num_decoding`` sequences are past their prompt after it.

        piece: it reads nothing but a piece of one prompt that goes on, so that it brings nobody a
        first token.
        """
        config = self._config
        if prefill:
            interval = config.prefill_decode_interval if num_decoding >= config.min_decoding else 0
            self._left = max(interval, config.decode_after_piece if piece else 0)
        elif self._left:
            self._left -= 1
        else:
            self._left = self._config.continuous_decode_steps - 1
