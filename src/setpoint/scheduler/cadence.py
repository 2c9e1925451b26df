"""Decides which turns are reserved for decode: those after a prefill step, and those between two
checks of the queue."""

from __future__ import annotations

from setpoint.core.records import AdmissionRefusal
from setpoint.core.settings import CadenceSettings


class Cadence:
    """Remembers the step from which decode steps are counted, and how many have followed it. While
    more are due, prefill is not considered, not even the next chunk of a prompt."""

    def __init__(self) -> None:
        self._after_prefill = True
        self._after_chunk = False
        self._num_decoding = -1
        """Number of sequences past their prompt after that step; -1 before the first such step,
        which is fewer than any rule asks for."""
        self._num_since = 0

    def refusal(self, num_decoding: int, settings: CadenceSettings) -> AdmissionRefusal | None:
        """Why prefill must wait this turn; None if it need not. It need not if no sequence could
        use the turn for decode (``num_decoding`` is 0)."""
        return self._due(settings) if num_decoding > 0 else None

    def record_step(
        self, *, prefill: bool, chunk_only: bool, num_decoding: int, settings: CadenceSettings
    ) -> None:
        """Record that a step was planned, after which ``num_decoding`` sequences are past their
        prompt.

        chunk_only: the step computes nothing but a chunk of one unfinished prompt, so no request
        gets its first token from it.
        """
        if not prefill and self._due(settings):
            self._num_since += 1
            return
        self._after_prefill, self._after_chunk = prefill, chunk_only
        self._num_decoding, self._num_since = num_decoding, 0

    def _due(self, settings: CadenceSettings) -> AdmissionRefusal | None:
        """Why another decode step is due before prefill may be considered: an option asks for it,
        or the last prefill step was a chunk of an unfinished prompt. None: none is due."""
        asked, since = 0, self._num_since
        if not self._after_prefill:
            asked = settings.continuous_decode_steps - 1
        elif self._num_decoding >= settings.min_decoding:
            asked = settings.prefill_decode_interval
        if since < asked:
            return AdmissionRefusal.DECODE_TURN
        after_chunk = self._after_prefill and self._after_chunk
        return (
            AdmissionRefusal.CHUNK_BUDGET
            if after_chunk and since < settings.decode_after_piece
            else None
        )
