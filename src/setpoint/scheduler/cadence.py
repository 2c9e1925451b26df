"""Turns that belong to decode alone: after a prefill step, and between two looks at the queue."""

from __future__ import annotations

from setpoint.core.settings import CadenceSettings


class Cadence:
    """Remembers the last step from which decode steps are counted, and how many there were since:
    while more are due, prefill is not considered; chunks of a prompt wait too."""

    def __init__(self) -> None:
        self._after_prefill = True
        self._after_piece = False
        self._num_decoding = -1
        """After that step; fewer than any rule asks for, as long as there was none."""
        self._num_since = 0

    def decode_only(self, num_decoding: int, settings: CadenceSettings) -> bool:
        """Whether prefill must wait this turn. It never waits for nobody: ``num_decoding``
        sequences could use the turn."""
        return num_decoding > 0 and self._is_due(settings)

    def planned(
        self, *, prefill: bool, piece: bool, num_decoding: int, settings: CadenceSettings
    ) -> None:
        """A step was planned; ``num_decoding`` sequences are past their prompt after it.

        piece: it reads nothing but a piece of one prompt that goes on, so that it brings nobody a
        first token.
        """
        if not prefill and self._is_due(settings):
            self._num_since += 1
            return
        self._after_prefill, self._after_piece = prefill, piece
        self._num_decoding, self._num_since = num_decoding, 0

    def _is_due(self, settings: CadenceSettings) -> bool:
        """Whether another decode step belongs to those since the last step that counts."""
        if not self._after_prefill:
            return self._num_since < settings.continuous_decode_steps - 1
        wanted = settings.decode_after_piece if self._after_piece else 0
        if self._num_decoding >= settings.min_decoding:
            wanted = max(wanted, settings.prefill_decode_interval)
        return self._num_since < wanted
