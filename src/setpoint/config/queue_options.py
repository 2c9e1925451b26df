"""Options of the waiting queue, of priorities, and of turns between prompts and answers: who is
served next. ``options`` says what is common to all declarations."""

from __future__ import annotations

from typing import Annotated

from setpoint.config.declare import Option, Range
from setpoint.config.service_options import ServiceOptions

SCHEDULE = "Scheduling"
MAX_DECODE_STEPS = 1000
"""Most decode steps for which prompts may be made to wait; with more, a queue would not move until
nothing runs any more."""


class QueueOptions(ServiceOptions, frozen=True, kw_only=True):
    """The user's wishes about the queue."""

    workload: Annotated[
        str | None,
        Option(
            SCHEDULE,
            "Kind of traffic: takes the defaults that SGLang's tuning guide recommends for it, as"
            " far as they suit this machine. Every explicit option wins; each value is logged with"
            " its reason.",
            choices=("online", "offline", "long-context", "multi-turn"),
        ),
    ] = None
    schedule_policy: Annotated[
        str,
        Option(
            SCHEDULE,
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
            SCHEDULE,
            "Requests with a higher priority go first, under fcfs and lof; running ones of much"
            " lower priority make room.",
            live=True,
        ),
    ] = False
    schedule_low_priority_values_first: Annotated[
        bool, Option(SCHEDULE, "Requests with lower priority values go first.", live=True)
    ] = False
    default_priority_value: Annotated[
        int | None,
        Option(
            SCHEDULE, "Priority of requests that have none; if not given, they go last.", live=True
        ),
    ] = None
    priority_scheduling_preemption_threshold: Annotated[
        int,
        Option(
            SCHEDULE,
            "A running request makes room for one whose priority is better by more than this.",
            low=0,
            live=True,
        ),
    ] = 10
    disable_priority_preemption: Annotated[
        bool,
        Option(
            SCHEDULE, "Running requests never make room for those of higher priority.", live=True
        ),
    ] = False
    abort_on_priority_when_disabled: Annotated[
        bool,
        Option(
            SCHEDULE,
            "Answer 503 to a request with a priority while priority scheduling is off, instead of"
            " ignoring the priority.",
            live=True,
        ),
    ] = False
    retraction_policy: Annotated[
        str,
        Option(
            SCHEDULE,
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
            SCHEDULE,
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
            SCHEDULE,
            "--prefill-decode-interval applies only while at least this many requests decode.",
            low=0,
            live=True,
        ),
    ] = 0
    num_continuous_decode_steps: Annotated[
        int,
        Option(
            SCHEDULE,
            "Decode steps between two looks at the waiting queue.",
            low=1,
            high=MAX_DECODE_STEPS,
            tunable=Range(1, 16),
            live=True,
        ),
    ] = 1
