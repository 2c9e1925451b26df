"""The group of options "Scheduling"."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.groups.declare import Option, Range

GROUP = "Scheduling"
MAX_DECODE_STEPS = 1000
"""Maximum number of decode steps for which an option may make prompts wait. With more, the queue
would not move until no request is running."""


class SchedulingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options about the order of requests, and about how many run at once."""

    workload: Annotated[
        str | None,
        Option(
            GROUP,
            "Kind of traffic. Sets the defaults that SGLang's tuning guide recommends for it, as"
            " far as they suit this machine. Explicit options win. Each value is logged with its"
            " reason.",
            choices=("online", "offline", "long-context", "multi-turn"),
        ),
    ] = None
    schedule_policy: Annotated[
        str,
        Option(
            GROUP,
            "Order of the waiting queue. fcfs: first come, first served. lpm: longest cached"
            " prefix first. dfs-weight: depth first through the cached tree, beginning with the"
            " subtree that most requests share. hrrn: longest wait relative to length first."
            " shortest-prefill-first: fewest uncached tokens first. lof: longest output limit"
            " first. random: any order. routing-key: first the requests whose routing key most"
            " running requests have. priority: fcfs with --enable-priority-scheduling. While"
            " more than 128 requests wait, lpm and hrrn act as fcfs.",
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
            "Serve requests with a higher priority first (with fcfs and lof), and retract"
            " running requests of much lower priority to make room for them.",
            live=True,
        ),
    ] = False
    schedule_low_priority_values_first: Annotated[
        bool, Option(GROUP, "Treat lower priority values as more urgent.", live=True)
    ] = False
    default_priority_value: Annotated[
        int | None,
        Option(
            GROUP,
            "Priority of requests that set none. If not given, such requests go last.",
            live=True,
        ),
    ] = None
    priority_scheduling_preemption_threshold: Annotated[
        int,
        Option(
            GROUP,
            "A running request is retracted for a waiting one whose priority is better by more"
            " than this.",
            low=0,
            live=True,
        ),
    ] = 10
    disable_priority_preemption: Annotated[
        bool,
        Option(
            GROUP,
            "Never retract a running request to make room for one of higher priority.",
            live=True,
        ),
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
            "Which requests are retracted first when the KV pool is full. length: those with the"
            " fewest output tokens. priority: the least urgent (needs"
            " --enable-priority-scheduling).",
            choices=("length", "priority"),
            live=True,
        ),
    ] = "length"
    prefill_decode_interval: Annotated[
        int | None,
        Option(
            GROUP,
            "Decode steps between two prefill steps or chunks while requests decode; with 0,"
            " prefill always goes first. If not given, prefill goes first, but on a CPU without"
            " mixed chunks one decode step follows each prefill step that computes only a part"
            " of one prompt.",
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
            "Number of decode steps after which the scheduler looks at the waiting queue again.",
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
            "While requests run, admit no other until as many slots are free as the largest"
            " prefill batch so far had requests. SGLang also uses this option to align the"
            " prefills of data-parallel ranks; here no engine waits for another.",
            tunable=(False, True),
            live=True,
        ),
    ] = False
    prefill_delayer_max_delay_passes: Annotated[
        int,
        Option(
            GROUP,
            "Maximum number of scheduling passes for which --enable-prefill-delayer and"
            " --min-free-slots-delay wait.",
            low=1,
            live=True,
        ),
    ] = 30
    prefill_delayer_max_delay_ms: Annotated[
        float | None,
        Option(
            GROUP,
            "Maximum milliseconds for which these two options wait. If not given, 5000.",
            metavar="MS",
            low=0,
            live=True,
        ),
    ] = None
    prefill_delayer_token_usage_low_watermark: Annotated[
        float | None,
        Option(
            GROUP,
            "--enable-prefill-delayer does not wait while less than this share of the KV pool is"
            " in use.",
            low=0,
            high=1,
            live=True,
        ),
    ] = None
    prefill_delayer_queue_min_ratio: Annotated[
        float | None,
        Option(
            GROUP,
            "--enable-prefill-delayer also waits until this many requests per running request"
            " are queued, but not for more than the largest prefill batch had. Useful values are"
            " 0.1 to 0.5.",
            low=0,
            live=True,
        ),
    ] = None
    min_free_slots_delay: Annotated[
        int | None,
        Option(
            GROUP,
            "While requests run, admit no other until this many slots are free. The value is"
            " limited to a sixth of all slots, and to between 2 and 4. With 0 or 1, or with"
            " fewer than 8 slots, nothing waits.",
            low=0,
            live=True,
        ),
    ] = None
    schedule_conservativeness: Annotated[
        float,
        Option(
            GROUP,
            "Factor of the share of its output limit that each running request is expected to"
            " use. A higher value means fewer retractions and more queueing.",
            low=0,
            tunable=Range(0.05, 1.5, log=True),
            live=True,
        ),
    ] = 1.0
    max_running_requests: Annotated[
        int | None,
        Option(
            GROUP,
            "Maximum requests running at once. If not given, it follows from the size of the KV"
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
            "Maximum requests waiting; further requests are answered 503. If not given, there is"
            " no limit.",
            low=1,
            live=True,
            server_only=True,
        ),
    ] = None
    chunked_prefill_size: Annotated[
        int | None,
        Option(
            GROUP,
            "Maximum prompt tokens computed in one step; longer prompts are split into chunks."
            " -1 turns splitting off.",
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
            "Maximum prompt tokens admitted to one prefill batch. It matters mainly when prompts"
            " are not split into chunks.",
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
            "Maximum requests in one prefill batch. If not given, there is no limit.",
            low=1,
            tunable=Range(1, 256, log=True),
            live=True,
        ),
    ] = None
    enable_mixed_chunk: Annotated[
        bool,
        Option(
            GROUP,
            "Compute decode tokens in the same step as prompt chunks, instead of making running"
            " requests wait.",
            tunable=(False, True),
            live=True,
        ),
    ] = False
    disable_overlap_schedule: Annotated[
        bool,
        Option(
            GROUP,
            "Wait for the result of each step before planning the next one. On a CPU this is"
            " always the case.",
        ),
    ] = False
    strict_accounting: Annotated[
        bool,
        Option(
            GROUP,
            "Check after every step, not only when idle, that no cache page is lost or has two"
            " owners.",
        ),
    ] = False
