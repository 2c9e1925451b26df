"""The group of options "Scheduling"."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.groups.declare import Option, Range

GROUP = "Scheduling"
MAX_DECODE_STEPS = 1000
"""Most decode steps for which prompts may be made to wait; with more, a queue would not move until
nothing runs any more."""


class SchedulingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Who is served next, and how much runs at once."""

    workload: Annotated[
        str | None,
        Option(
            GROUP,
            "Kind of traffic: takes the defaults that SGLang's tuning guide recommends for it, as"
            " far as they suit this machine. Every explicit option wins; each value is logged with"
            " its reason.",
            choices=("online", "offline", "long-context", "multi-turn"),
        ),
    ] = None
    schedule_policy: Annotated[
        str,
        Option(
            GROUP,
            "Order of the waiting queue: fcfs first come first served; lpm longest cached prefix"
            " first; dfs-weight along the cached tree, the subtree most requests wait for first;"
            " hrrn longest wait in relation to length first; shortest-prefill-first fewest uncached"
            " tokens first; lof longest output limit first; random; routing-key the key most"
            " running requests have first. priority means fcfs with --enable-priority-scheduling."
            " lpm and hrrn act as fcfs while more than 128 requests wait.",
            choices=(
                "fcfs",
                "lpm",
                "dfs-weight",
                "hrrn",
                "shortest-prefill-first",
                "lof",
                "random",
                "routing-key",
                "priority",
            ),
            tunable=("fcfs", "lpm", "dfs-weight", "hrrn"),
            live=True,
        ),
    ] = "fcfs"
    enable_priority_scheduling: Annotated[
        bool,
        Option(
            GROUP,
            "Requests with a higher priority go first, under fcfs and lof; running ones of much"
            " lower priority make room.",
            live=True,
        ),
    ] = False
    schedule_low_priority_values_first: Annotated[
        bool, Option(GROUP, "Requests with lower priority values go first.", live=True)
    ] = False
    default_priority_value: Annotated[
        int | None,
        Option(
            GROUP, "Priority of requests that have none; if not given, they go last.", live=True
        ),
    ] = None
    priority_scheduling_preemption_threshold: Annotated[
        int,
        Option(
            GROUP,
            "A running request makes room for one whose priority is better by more than this.",
            low=0,
            live=True,
        ),
    ] = 10
    disable_priority_preemption: Annotated[
        bool,
        Option(GROUP, "Running requests never make room for those of higher priority.", live=True),
    ] = False
    abort_on_priority_when_disabled: Annotated[
        bool,
        Option(
            GROUP,
            "Answer 503 to a request with a priority while priority scheduling is off, instead of"
            " ignoring the priority.",
            live=True,
        ),
    ] = False
    retraction_policy: Annotated[
        str,
        Option(
            GROUP,
            "Which requests are retracted when the KV pool is full: length takes those with the"
            " fewest output tokens, priority the least urgent first (with"
            " --enable-priority-scheduling).",
            choices=("length", "priority"),
            live=True,
        ),
    ] = "length"
    prefill_decode_interval: Annotated[
        int | None,
        Option(
            GROUP,
            "Decode steps between two prefill steps or chunks while requests decode; 0 lets prefill"
            " always go first. If not given, prefill goes first, but on a CPU without mixed chunks"
            " one decode step follows each step that reads only a piece of one prompt.",
            low=0,
            high=MAX_DECODE_STEPS,
            tunable=Range(0, 32),
            live=True,
        ),
    ] = None
    prefill_decode_interval_min_bs: Annotated[
        int,
        Option(
            GROUP,
            "--prefill-decode-interval applies only while at least this many requests decode.",
            low=0,
            live=True,
        ),
    ] = 0
    num_continuous_decode_steps: Annotated[
        int,
        Option(
            GROUP,
            "Decode steps between two looks at the waiting queue.",
            low=1,
            high=MAX_DECODE_STEPS,
            tunable=Range(1, 16),
            live=True,
        ),
    ] = 1
    enable_prefill_delayer: Annotated[
        bool,
        Option(
            GROUP,
            "While requests run, admit none until as many slots are free as the largest prefill"
            " batch so far took. Aligning the prefills of data-parallel ranks, its other use, has"
            " nothing to do here: no engine waits for another.",
            tunable=(False, True),
            live=True,
        ),
    ] = False
    prefill_delayer_max_delay_passes: Annotated[
        int,
        Option(
            GROUP,
            "Maximum scheduling passes that --enable-prefill-delayer or --min-free-slots-delay"
            " waits.",
            low=1,
            live=True,
        ),
    ] = 30
    prefill_delayer_max_delay_ms: Annotated[
        float | None,
        Option(
            GROUP,
            "Maximum milliseconds that either of them waits; 5000 if not given.",
            metavar="MS",
            low=0,
            live=True,
        ),
    ] = None
    prefill_delayer_token_usage_low_watermark: Annotated[
        float | None,
        Option(
            GROUP,
            "Share of the KV pool in use below which --enable-prefill-delayer does not wait.",
            low=0,
            high=1,
            live=True,
        ),
    ] = None
    prefill_delayer_queue_min_ratio: Annotated[
        float | None,
        Option(
            GROUP,
            "--enable-prefill-delayer also waits until this many requests per running one are"
            " queued, at most as many as the largest prefill batch had. Useful: 0.1 to 0.5.",
            low=0,
            live=True,
        ),
    ] = None
    min_free_slots_delay: Annotated[
        int | None,
        Option(
            GROUP,
            "While requests run, admit none until this many slots are free. The value is limited to"
            " a sixth of all slots, and to 2 to 4. Off at 0 and 1, and with fewer than 8 slots.",
            low=0,
            live=True,
        ),
    ] = None
    schedule_conservativeness: Annotated[
        float,
        Option(
            GROUP,
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
            GROUP,
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
            GROUP,
            "Maximum requests waiting; further ones get 503. No limit if not given.",
            low=1,
            live=True,
            server_only=True,
        ),
    ] = None
    chunked_prefill_size: Annotated[
        int | None,
        Option(
            GROUP,
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
            GROUP,
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
            GROUP,
            "Maximum requests in one prefill batch. No limit if not given.",
            low=1,
            tunable=Range(1, 256, log=True),
            live=True,
        ),
    ] = None
    enable_mixed_chunk: Annotated[
        bool,
        Option(
            GROUP,
            "Add the decode rows to prefill steps instead of letting them wait.",
            tunable=(False, True),
            live=True,
        ),
    ] = False
    disable_overlap_schedule: Annotated[
        bool,
        Option(
            GROUP,
            "Wait for each step's result before planning the next (on a CPU this is always so).",
        ),
    ] = False
    strict_accounting: Annotated[
        bool,
        Option(
            GROUP,
            "Check after every step, not only when idle, that no cache page is lost or owned"
            " twice.",
        ),
    ] = False
