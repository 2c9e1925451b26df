"""Where the time of a request went, in SGLang's words and clocks, from what its output knows."""

from __future__ import annotations

import time

from setpoint.frontend.jobs import SequenceOutput


def timings_of(output: SequenceOutput) -> dict[str, float]:
    """The timings of a sequence that has ended, for ``meta_info``: names with ``_ts`` or ``_time``
    are Unix times, but for queue_time, which is seconds like the latency. What did not happen is
    left out."""
    offset = time.time() - time.perf_counter()
    found = {"request_received_ts": output.arrived_at + offset}
    if output.submitted_at is not None:
        found["api_server_dispatch_finish_ts"] = output.submitted_at + offset
        if output.timing is not None:
            entry = output.submitted_at + output.timing.waiting_s
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
