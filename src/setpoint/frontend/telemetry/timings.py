"""Where the time of a request went, from what its outputs know: in SGLang's words and clocks, and
in llama.cpp's."""

from __future__ import annotations

import time
from collections.abc import Sequence

from setpoint.frontend.telemetry.measured_sequence import MeasuredSequence


def timings_of(output: MeasuredSequence) -> dict[str, float]:
    """The timings of a sequence that has ended, for ``meta_info``: names with ``_ts`` or ``_time``
    are Unix times, but for queue_time, which is seconds like the latency. What did not happen is
    left out."""
    offset = time.time() - time.perf_counter()
    found = {"request_received_ts": output.arrived_at + offset}
    if output.submitted_at is not None:
        found["api_server_dispatch_finish_ts"] = output.submitted_at + offset
        if output.timing is not None:
            entry = output.submitted_at + output.held_s + output.timing.waiting_s
            found["queue_time"] = output.timing.waiting_s
            found["forward_entry_time"] = entry + offset
            found["prefill_finished_time"] = entry + output.timing.prefill_s + offset
    if output.first_token_at is not None:
        found["first_token_latency"] = output.first_token_at - output.arrived_at
        found["response_sent_to_client_ts"] = output.first_token_at + offset
    if output.finished_at is not None:
        found["request_finished_ts"] = output.finished_at + offset
        decoding_s = output.finished_at - (output.first_token_at or output.finished_at)
        if decoding_s > 0:
            found["decode_throughput"] = output.num_outputs / decoding_s
    return found


def phase_timings(outputs: Sequence[MeasuredSequence]) -> dict[str, float]:
    """``timings`` as llama.cpp's server gives them, of the outputs of one request so far; and
    ``queue_ms``, for which it has no name. Times are in milliseconds. Of several outputs: sums of
    tokens, the longest times. A rate over no tokens or no time is 0.
    """
    timings = [output.timing for output in outputs if output.timing is not None]
    prompt_ms = max((each.prefill_s for each in timings), default=0.0) * 1e3
    predicted_ms = max(map(_decode_s, outputs)) * 1e3
    num_cached = sum(output.num_cached for output in outputs)
    num_prompt = sum(output.num_prompt for output in outputs) - num_cached
    num_outputs = sum(output.num_outputs for output in outputs)
    return {
        "cache_n": num_cached,
        "prompt_n": num_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, num_prompt),
        "prompt_per_second": _ratio(num_prompt, prompt_ms / 1e3),
        "predicted_n": num_outputs,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, num_outputs),
        "predicted_per_second": _ratio(num_outputs, predicted_ms / 1e3),
        "queue_ms": max((each.waiting_s for each in timings), default=0.0) * 1e3,
    }


def _decode_s(output: MeasuredSequence) -> float:
    """Seconds since the first token."""
    if output.first_token_at is None:
        return 0.0
    return (output.finished_at or time.perf_counter()) - output.first_token_at


def _ratio(amount: float, of: float) -> float:
    return amount / of if of > 0 else 0.0
