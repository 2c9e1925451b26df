"""Decides which turns are reserved for decode: those after a prefill step, and those between two
looks at the queue."""

from __future__ import annotations

from setpoint.core.settings import CadenceSettings


class Cadence:
    """Remembers the step from which decode steps are counted, and how many have followed it. While
    more are due, prefill is not considered; the chunks of a prompt wait too."""

    def __init__(self) -> None:
        self._after_prefill = True
        self._after_piece = False
        self._num_decoding = -1
        """Sequences past their prompt after that step; before the first such step, fewer than any
        rule asks for."""
        self._num_since = 0

    def decode_only(self, num_decoding: int, settings: CadenceSettings) -> bool:
        """Whether prefill must wait this turn. Never if no sequence could use the turn for decode
        (``num_decoding`` is 0)."""
        return num_decoding > 0 and self._is_due(settings)

    def planned(
        self, *, prefill: bool, piece: bool, num_decoding: int, settings: CadenceSettings
    ) -> None:
        """Record that a step was planned, after which ``num_decoding`` sequences are past their
        prompt.

        piece: the step computes only a part of one unfinished prompt, so no request gets its first
        token from it.
        """
        if not prefill and self._is_due(settings):
            self._num_since += 1
            return
        self._after_prefill, self._after_piece = prefill, piece
        self._num_decoding, self._num_since = num_decoding, 0

    def _is_due(self, settings: CadenceSettings) -> bool:
        """Whether another decode step is due before prefill may be considered."""
        if not self._after_prefill:
            return self._num_since < settings.continuous_decode_steps - 1
        wanted = settings.decode_after_piece if self._after_piece else 0
        if self._num_decoding >= settings.min_decoding:
            wanted = max(wanted, settings.prefill_decode_interval)
        return self._num_since < wanted
