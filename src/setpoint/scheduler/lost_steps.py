"""What follows when the device has too little memory for a step: once, the scheduler goes on with
smaller chunks; a second time, the engine ends and says what would fit.

The step is void, and nothing knows which of its keys and values were written. So every sequence
that runs goes back to the queue, with the outputs that it has, and the prefix cache, in which other
sequences could already match the prompts of the step, is emptied.
"""

from __future__ import annotations

from setpoint.core.errors import OutOfMemoryError, StepOutOfMemoryError
from setpoint.core.records import Fallback, Observer
from setpoint.scheduler.state import State


class LostSteps:
    def __init__(self, state: State, observer: Observer) -> None:
        self._state = state
        self._observer = observer

    def take(self, error: StepOutOfMemoryError) -> None:
        """Give up the newest step in flight, which must be the only one, and from now on compute
        half as many prompt tokens in a step. Raises OutOfMemoryError if that has not helped."""
        state, page = self._state, self._state.cache.page_size
        lack = error.lack
        kind = "Prefill" if state.inflight[-1].num_prefill_rows else "Decode"
        what = f"{kind} out of memory: {lack.why}"  # the doctor knows SGLang's first words
        if error.is_final or state.largest_chunk is not None:
            raise OutOfMemoryError(
                f"{what}. What would fit: a --mem-fraction-static that is {lack.less_static} lower,"
                f" a smaller --chunked-prefill-size (now {state.chunk or 'off'}) or"
                f" --max-running-requests (now {state.settings.max_running_requests}), or a smaller"
                " --cuda-graph-max-bs."
            )
        half = (state.chunk or state.settings.max_prefill_tokens) // 2
        state.largest_chunk = max(half // page * page, page)
        state.lose_newest_step()
        self._observer.on(
            Fallback(
                f"a step computes at most {state.largest_chunk} prompt tokens",
                f"{what}; a start with a --mem-fraction-static that is {lack.less_static} lower"
                " leaves more free, as does a smaller --chunked-prefill-size or"
                " --max-running-requests. The next time the engine ends",
            )
        )
