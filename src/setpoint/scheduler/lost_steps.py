"""What follows when the device has too little memory for a step: once, the scheduler goes on with
smaller chunks; a second time, the engine ends and says what would fit.

The step is void, and nothing knows which of its keys and values were written. So every sequence
that runs goes back to the queue, with the outputs that it has, and the prefix cache, in which other
sequences could already match the prompts of the step, is emptied.
"""

from __future__ import annotations

import math

from setpoint.core.errors import OutOfMemoryError, StepOutOfMemoryError
from setpoint.core.records import Fallback, Observer
from setpoint.scheduler.state import State

MIB = 1 << 20


class LostSteps:
    def __init__(self, state: State, observer: Observer) -> None:
        self._state = state
        self._observer = observer

    def take(self, error: StepOutOfMemoryError) -> None:
        """Give up the newest step in flight, which must be the only one, and from now on compute
        half as many prompt tokens in a step. Raises OutOfMemoryError if that has not helped."""
        state, page = self._state, self._state.cache.page_size
        wanted = _share(error)
        if error.is_final or state.largest_chunk is not None:
            raise OutOfMemoryError(
                f"The device has too little memory for a step: {error.why}. What would fit: a"
                f" --mem-fraction-static that is {wanted} lower, a smaller --chunked-prefill-size"
                f" (now {state.chunk or 'off'}) or --max-running-requests (now"
                f" {state.settings.max_running_requests}), or a smaller --cuda-graph-max-bs."
            )
        half = (state.chunk or state.settings.max_prefill_tokens) // 2
        state.largest_chunk = max(half // page * page, page)
        state.lose_newest_step()
        self._observer.on(
            Fallback(
                f"a step computes at most {state.largest_chunk} prompt tokens",
                f"the device had too little memory for a step ({error.why}); a start with a"
                f" --mem-fraction-static that is {wanted} lower leaves more free, as does a smaller"
                " --chunked-prefill-size or --max-running-requests. The next time the engine ends",
            )
        )


def _share(error: StepOutOfMemoryError) -> str:
    """How much smaller the share for weights and KV cache must be to leave room for what the step
    asked for: "0.03 (2048 MiB)"."""
    if not error.wanted_bytes or not error.total_bytes:
        return "0.05"
    share = math.ceil(100 * error.wanted_bytes / error.total_bytes) / 100
    return f"{share:g} ({math.ceil(error.wanted_bytes / MIB)} MiB)"
