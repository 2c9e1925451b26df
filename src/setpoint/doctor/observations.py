"""What the doctor knows about a server, in one form for every source. Readers write it, checks read
it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from setpoint.core.control import TierState
from setpoint.core.moments import Moment


@dataclass(slots=True, frozen=True)
class Evidence:
    """A line of a source, or a sentence with figures that were computed from it."""

    line: int
    """Its number, from 1; 0 if it is not one line of a log."""
    text: str
    source: str = ""
    """Name of the source, if there are several."""


@dataclass(slots=True)
class Facts:
    """What a server says about itself at its start, or in ``/server_info``. None: unknown."""

    engine: Literal["setpoint", "sglang"] | None = None
    version: str | None = None
    model: str | None = None
    device: Literal["gpu", "cpu"] | None = None
    """The device that the ready line shows: it says available_gpu_mem or available_cpu_mem."""
    options: dict[str, Any] = field(default_factory=dict)
    """Server options by field name (max_running_requests, tp_size, …), as they were printed."""
    start_values: dict[str, Any] = field(default_factory=dict)
    """What the options that have changed since were when the server started."""
    max_total_num_tokens: int | None = None
    """Size of the KV pool in tokens."""
    max_running_requests: int | None = None
    """The resolved value, which may be less than the option (sglang#30160)."""
    chunked_prefill_size: int | None = None
    """-1: prompts are not split."""
    max_prefill_tokens: int | None = None
    context_len: int | None = None
    available_gb: float | None = None
    """Memory that is free when the server is ready: after weights, KV pool and graphs."""
    left_after_pool_gb: float | None = None
    """Memory that is free after weights and KV pool, before graphs are captured."""
    total_gb: float | None = None
    """Memory of the device."""
    weights_gb: float | None = None
    kv_gb: float | None = None
    graph_gb: float | None = None
    graph_batch_sizes: list[int] = field(default_factory=list)
    """Batch sizes that have a captured decode graph."""
    said: dict[str, Evidence] = field(default_factory=dict)
    """Name of a field above, or of an option -> the line that says so."""


EventKind = Literal[
    "ready",
    "retraction",
    "oom",
    "traceback",
    "killed",
    "watchdog",
    "unhealthy",
    "leak",
    "queue-full",
    "timeout",
    "grammar-timeout",
    "aborted",
    "clipped",
    "reduced",
    "flushed",
    "fallback",
    "tier-off",
    "cpu-contention",
    "diagnosed",
    "access-error",
]
"""retraction: the pool ran out of pages. oom: an allocation failed. killed: a process ended or was
ended. unhealthy: a health check failed. leak: the accounting of the pool does not add up.
queue-full, timeout, grammar-timeout (its grammar was not compiled in time), aborted: a request
ended that way. reduced: a limit was lowered at start-up. tier-off: a cache tier is not used any
more. cpu-contention: other programs took the CPU. diagnosed: the server's own doctor named another
limit than before.
access-error: an HTTP answer of 500 or above."""


@dataclass(slots=True)
class Event:
    """Something that happened at one time. For each rank, the first 32 and the last 32 of each kind
    are kept; all are counted (``Rank.num_events``)."""

    kind: EventKind
    at: float | None
    line: int
    text: str
    values: dict[str, float | str] = field(default_factory=dict)
    """Figures of the message, by name. retraction: num, ratio_before, ratio_after. oom: tried_mib,
    free_mib, total_mib, where (init, prefill or decode), by (what shows where: message, traceback,
    or order of the lines), pool (1: the KV pool had no tokens left). killed and traceback: way (how
    the process ended). traceback: in ("scheduler": in the process that computes). cpu-contention:
    cpu_s, busy_s. diagnosed: limit ("" if it is gone), cpu_s and busy_s if it is the CPU."""


@dataclass(slots=True)
class Rank:
    """One scheduler. In a tensor-parallel group only the first rank logs batches, in a
    data-parallel group every rank does."""

    name: str
    """The rank's name in the prefix of log lines ("DP0 TP0"); "" if there is only one."""
    moments: list[Moment] = field(default_factory=list)
    """The rank's moments in the order of time, at most a few thousand: readers merge neighbours of
    longer sources."""
    events: list[Event] = field(default_factory=list)
    num_events: dict[EventKind, int] = field(default_factory=dict)


SourceKind = Literal["log", "metrics", "server", "recording", "live"]
"""metrics: scrapes of a metrics page. server: a server that was watched over HTTP. live: the server
in which the doctor runs."""


@dataclass(slots=True)
class Source:
    name: str
    kind: SourceKind
    clock: Literal["timestamps", "estimated", "none"] = "timestamps"
    """Where times come from. estimated: from the throughput figures of a log without timestamps.
    none: only the order is known."""
    generation: str = ""
    """The program that wrote it, such as "SGLang 2024", "SGLang 0.5.23", "Setpoint"."""
    num_lines: int = 0
    num_batch_lines: int = 0
    """Lines that report a batch."""
    num_understood: int = 0
    """Batch lines of which every field was read."""
    unknown_fields: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the user should know about this source: truncation, several servers in one file, a clock
    that goes backwards."""


@dataclass(slots=True, frozen=True)
class Silence:
    """The end of a log, after its last batch: other lines, but none about a batch."""

    seconds: float
    """The time from the last batch to the last line."""
    last: Evidence
    """The last line of the log."""
    num_requests: int = 0
    """Number of lines about requests for text, and about their answers, among those that were
    kept."""


@dataclass(slots=True)
class Observations:
    """One life of one server."""

    sources: list[Source]
    facts: Facts
    ranks: list[Rank]
    ended: bool = False
    """Whether the source shows the end of the server's life, orderly or not."""
    silence: Silence | None = None
    """How the source continues after the last batch."""
    tiers: tuple[TierState, ...] = ()
    """What the cache tiers of each engine have done; empty if the source does not tell, or the
    server has none."""
    files: dict[tuple[int, str], str] = field(default_factory=dict)
    """(number, text) of a line -> its file, if there are several."""

    @property
    def coverage(self) -> float:
        """Share of batch lines that were understood; 1 if the sources have none."""
        total = sum(source.num_batch_lines for source in self.sources)
        return sum(source.num_understood for source in self.sources) / total if total else 1.0
