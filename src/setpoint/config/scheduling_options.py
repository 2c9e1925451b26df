"""Options of admission, of its delays, and of the size of steps: how much runs at once. ``options``
says what is common to all declarations."""

from __future__ import annotations

from typing import Annotated

from setpoint.config.declare import Option, Range
from setpoint.config.queue_options import SCHEDULE, QueueOptions


class SchedulingOptions(QueueOptions, frozen=True, kw_only=True):
    """The user's wishes about the scheduler."""

    enable_prefill_delayer: Annotated[
        bool,
        Option(
            SCHEDULE,
            "While requests run, admit none until as many slots are free as the largest prefill"
            " batch so far took. Aligning the prefills of data-parallel ranks, its other use, has"
            " nothing to do here: there is one rank.",
            tunable=(False, True),
            live=True,
        ),
    ] = False
    prefill_delayer_max_delay_passes: Annotated[
        int,
        Option(
            SCHEDULE,
            "Maximum scheduling passes that --enable-prefill-delayer or --min-free-slots-delay"
            " waits.",
            low=1,
            live=True,
        ),
    ] = 30
    prefill_delayer_max_delay_ms: Annotated[
        float | None,
        Option(
            SCHEDULE,
            "Maximum milliseconds that either of them waits; 5000 if not given.",
            metavar="MS",
            low=0,
            live=True,
        ),
    ] = None
    prefill_delayer_token_usage_low_watermark: Annotated[
        float | None,
        Option(
            SCHEDULE,
            "Share of the KV pool in use below which --enable-prefill-delayer does not wait.",
            low=0,
            high=1,
            live=True,
        ),
    ] = None
    prefill_delayer_queue_min_ratio: Annotated[
        float | None,
        Option(
            SCHEDULE,
            "--enable-prefill-delayer also waits until this many requests per running one are"
            " queued, at most as many as the largest prefill batch had. Useful: 0.1 to 0.5.",
            low=0,
            live=True,
        ),
    ] = None
    min_free_slots_delay: Annotated[
        int | None,
        Option(
            SCHEDULE,
            "While requests run, admit none until this many slots are free. The value is limited to"
            " a sixth of all slots, and to 2 to 4. Off at 0 and 1, and with fewer than 8 slots.",
            low=0,
            live=True,
        ),
    ] = None
    schedule_conservativeness: Annotated[
        float,
        Option(
            SCHEDULE,
            "Scales the share of their output limit that running requests are expected to use."
            " Higher: fewer retractions, more queueing.",
            low=0,
            tunable=Range(0.05, 1.5, log=True),
            live=True,
        ),
    ] = 1.0
    max_running_requests: Annotated[
        int | None,
        Option(
            SCHEDULE,
            "Maximum requests running at once; if not given, it follows from the size of the KV"
            " pool.",
            low=1,
            tunable=Range(1, 4096, log=True),
            live=True,
        ),
    ] = None
    max_queued_requests: Annotated[
        int | None,
        Option(
            SCHEDULE,
            "Maximum requests waiting; further ones get 503. No limit if not given.",
            low=1,
            live=True,
            server_only=True,
        ),
    ] = None
    chunked_prefill_size: Annotated[
        int | None,
        Option(
            SCHEDULE,
            "Maximum prompt tokens computed in one step; longer prompts are split. -1 turns"
            " splitting off.",
            low=-1,
            human=True,
            tunable=Range(128, 16384, log=True),
            live=True,
        ),
    ] = None
    max_prefill_tokens: Annotated[
        int,
        Option(
            SCHEDULE,
            "Prompt tokens admitted to one prefill batch; matters mainly without chunking.",
            low=1,
            human=True,
            tunable=Range(1024, 65536, log=True),
            live=True,
        ),
    ] = 16384
    prefill_max_requests: Annotated[
        int | None,
        Option(
            SCHEDULE,
            "Maximum requests in one prefill batch. No limit if not given.",
            low=1,
            tunable=Range(1, 256, log=True),
            live=True,
        ),
    ] = None
    enable_mixed_chunk: Annotated[
        bool,
        Option(
            SCHEDULE,
            "Add the decode rows to prefill steps instead of letting them wait.",
            tunable=(False, True),
            live=True,
        ),
    ] = False
    disable_overlap_schedule: Annotated[
        bool,
        Option(
            SCHEDULE,
            "Wait for each step's result before planning the next (on a CPU this is always so).",
        ),
    ] = False
    strict_accounting: Annotated[
        bool,
        Option(
            SCHEDULE,
            "Check after every step, not only when idle, that no cache page is lost or owned"
            " twice.",
        ),
    ] = False
