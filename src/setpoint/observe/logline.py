"""The log lines of a serving engine, in SGLang's words and layout (docs/sglang/logs.md), so that
existing dashboards and habits work.

Formats records; it measures nothing itself. A message always becomes one printable line, so no
client can forge a line by its content.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from setpoint.core.excerpt import IS_JSON, excerpt, printable
from setpoint.core.records import (
    CacheFlushed,
    Continued,
    Fallback,
    HandedOver,
    Operated,
    Paused,
    PoolRebuilt,
    Preemption,
    Record,
    RequestClipped,
    RequestDone,
    Retraction,
    SettingsChanged,
    StepDone,
    TurnDone,
)
from setpoint.core.result import EAGER
from setpoint.observe.contention import Contention
from setpoint.observe.figures import Figures
from setpoint.observe.log_stream import log_stream
from setpoint.observe.work import WorkMeter

logger = logging.getLogger(__name__)

GIB = 1 << 30
IN_WORDS = {
    "AttachStorage": ("The storage is attached", "The storage could not be attached"),
    "DetachStorage": ("The storage is detached", "The storage could not be detached"),
    "ClearStorage": (
        "This engine's blocks are being removed from the storage",
        "The storage could not be cleared",
    ),
}
"""Operation -> words for its success and its failure, where its name says too little."""
REPEAT_S = 60.0
"""How long the same failure to hand a prompt over is counted and not logged."""
MAX_REASONS = 64
"""Different failures that are remembered for that."""
CLIPPED = (
    "Request %s: max_new_tokens lowered from %d to %d, the most that the context length and the KV"
    " pool can hold."
)
NOT_FLUSHED = (
    "Cache not flushed because there are pending requests. #queue-req: %d, #running-req: %d"
)
CONTENDED = (
    "CPU contention: the engine had a CPU for %.1f s of the last %.1f s of its steps (%.0f %%)."
    " Other programs, or a limit of its container, take the rest."
)
HELD = "Held for an order to all engines."
RELEASED = "Not held any more for an order to all engines, after %.1f s."
CONTINUED = "Generation continued after %.1f s. #running-req: %d, #queue-req: %d"

FOR_FILES = {"audience": "files"}
"""``extra`` of a line in SGLang's words that people need not read: terminals get it only at
"debug"."""
FOR_TERMINALS = {"audience": "terminals"}
"""``extra`` of a line that says on a terminal what those lines say."""

_ExceptionInfo = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


def setup_logging(level: str, *, rank: str = "", milliseconds: bool = False) -> None:
    """Log to stderr as ``[2026-01-31 12:00:00 TP0] message``; rank is "" or e.g. " TP0"."""
    stamp = "%(asctime)s.%(msecs)03d" if milliseconds else "%(asctime)s"
    handler = logging.StreamHandler(log_stream(sys.stderr))
    handler.addFilter(_for_terminals if sys.stderr.isatty() else _for_files)
    handler.setFormatter(
        LineFormatter(f"[{stamp}{rank}] %(levelprefix)s%(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _for_terminals(record: logging.LogRecord) -> bool:
    is_for_files = getattr(record, "audience", "") == "files"
    return not is_for_files or logging.getLogger().isEnabledFor(logging.DEBUG)


def _for_files(record: logging.LogRecord) -> bool:
    return getattr(record, "audience", "") != "terminals"


def set_log_level(level: str, name: str | None = None) -> None:
    """Change the level of the logger of this name, or of all loggers that have no level of their
    own."""
    logging.getLogger(name).setLevel(level.upper())


def leave_out_of_access_log(prefixes: Sequence[str]) -> None:
    """Write no line for HTTP requests whose path begins with one of these."""
    left_out = tuple(prefixes)

    def is_shown(record: logging.LogRecord) -> bool:
        # The third argument of a line is the path.
        match record.args:
            case (_, _, str(path), *_):
                return not path.startswith(left_out)
        return True

    logging.getLogger("uvicorn.access").addFilter(is_shown)


class LineFormatter(logging.Formatter):
    """Formats a record as one printable line. The lines of a traceback after it are indented, so
    that none looks like a record."""

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage() if hasattr(record, IS_JSON) else super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        # INFO lines carry no level word, as in SGLang; those of higher levels do.
        record.levelprefix = "" if record.levelno <= logging.INFO else f"{record.levelname}: "
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: _ExceptionInfo) -> str:
        # An exception's message may quote a client.
        return "\n".join(f"  {printable(line)}" for line in super().formatException(ei).split("\n"))


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def ready_line(
    *,
    max_total_num_tokens: int,
    chunked_prefill_size: int,
    max_prefill_tokens: int,
    max_running_requests: int,
    context_len: int,
    device: str,
    available_bytes: int,
) -> str:
    """The one line that sums up memory planning; ``available_bytes`` is the memory left after
    weights, pool and graphs."""
    label = "available_cpu_mem" if device == "cpu" else "available_gpu_mem"
    return (
        f"max_total_num_tokens={max_total_num_tokens}, chunked_prefill_size={chunked_prefill_size},"
        f" max_prefill_tokens={max_prefill_tokens}, max_running_requests={max_running_requests},"
        f" context_len={context_len}, {label}={gib(available_bytes)} GB"
    )


class LogLines:
    """Writes a line per prefill step, one per ``decode_log_interval`` decode steps, and the
    warnings."""

    def __init__(
        self,
        figures: Figures,
        *,
        device: str,
        request_times: bool = False,
        work: WorkMeter | None = None,
        is_short: bool = False,
    ) -> None:
        """figures, work: must get each record before this object does. request_times: write a line
        for each request that ends. is_short: leave out of a prefill's line what a person at a
        terminal needs least, since the whole of it has more than 200 characters."""
        self._figures = figures
        self._work = work
        self._request_times = request_times
        self._is_short = is_short
        self._not_handed: dict[str, tuple[float, int]] = {}
        """Why prompts were not handed over -> (when that was logged, how often it came since)."""
        self._contention = Contention()
        self._graph = "cpu graph" if device == "cpu" else "cuda graph"

    def on(self, record: Record) -> None:
        match record:
            case StepDone():
                if record.num_prefill_rows:
                    self._prefill(record)
                elif self._figures.decode_is_due:
                    self._decode(record)
            case TurnDone():
                if (found := self._contention.add(record)) is not None:
                    busy_s, cpu_s = found
                    logger.warning(CONTENDED, cpu_s, busy_s, 100 * cpu_s / busy_s)
            case RequestDone():
                _done(record)
                if self._request_times:
                    _request_times(record)
            case HandedOver():
                self._handed_over(record)
            case Retraction():
                _retraction(record)
            case Preemption():
                _preemption(record)
            case RequestClipped(rid, wanted, granted):
                logger.warning(CLIPPED, excerpt(rid), wanted, granted)
            case Fallback():
                log_fallback(record)
            case CacheFlushed(True):
                logger.info("Cache flushed successfully!")
            case CacheFlushed(False, _, num_queued, num_running):
                logger.warning(NOT_FLUSHED, num_queued, num_running)
            case SettingsChanged(settings):
                _settings_change(record)
                self._request_times = settings.log_request_times
            case Paused(is_hold=True):
                logger.debug(HELD)
            case Paused():
                _pause(record)
            case Operated():
                _operation(record)
            case Continued(paused_s, was_hold=True):
                logger.debug(RELEASED, paused_s)
            case Continued(paused_s, num_queued, num_running):
                logger.info(CONTINUED, paused_s, num_running, num_queued)
            case PoolRebuilt(violations):
                logger.error(
                    "KV cache accounting is broken and was rebuilt empty: %s", "; ".join(violations)
                )

    def _handed_over(self, record: HandedOver) -> None:
        """Log a failure; the same one again only after a while, because every request has it."""
        if not record.why:
            return
        why, now = excerpt(record.why, 600), time.monotonic()
        logged_at, num_more = self._not_handed.pop(why, (float("-inf"), 0))
        if now - logged_at < REPEAT_S:
            self._not_handed[why] = logged_at, num_more + 1
            return
        if len(self._not_handed) >= MAX_REASONS:
            del self._not_handed[next(iter(self._not_handed))]
        self._not_handed[why] = now, 0
        more = f" ({num_more} others since the last line like this)" if num_more else ""
        logger.warning(
            "The prompt of request %s was not handed over: %s%s", excerpt(record.rid), why, more
        )

    def _prefill(self, stats: StepDone) -> None:
        pending = f" #pending-token: {stats.num_pending_tokens},"
        graph = f"{self._graph}: {stats.way != EAGER}, "
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f,"
            " #running-req: %d, #queue-req: %d,%s %s%sinput throughput (token/s): %.2f%s",
            stats.num_prefill_rows,
            stats.num_new_tokens,
            stats.num_cached_tokens,
            stats.pool.usage,
            stats.num_running,
            stats.num_queued,
            "" if self._is_short else pending,
            _handover_words(stats),
            "" if self._is_short else graph,
            self._figures.input_throughput,
            "" if self._work is None else self._work.prefill_words(),
        )

    def _decode(self, stats: StepDone) -> None:
        logger.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, %s%s: %s, gen"
            " throughput (token/s): %.2f, #queue-req: %d%s",
            stats.num_running,
            stats.pool.used,
            stats.pool.usage,
            _handover_words(stats),
            self._graph,
            stats.way != EAGER,
            self._figures.gen_throughput,
            stats.num_queued,
            "" if self._work is None else self._work.decode_words(),
        )


def _handover_words(stats: StepDone) -> str:
    """SGLang's pieces of a line about requests that another server computes, too."""
    counts = stats.handover
    if counts is None:
        return ""
    if counts.role == "prefill":  # no prompt is computed before somebody has asked for it
        return (
            f"#bootstrap-req: {counts.num_waiting}, #inflight-req: {counts.num_moving},"
            " #optimistic-req: 0, "
        )
    return (
        f"pre-allocated usage: {counts.num_tokens / max(stats.pool.total, 1):.2f},"
        f" #prealloc-req: {counts.num_waiting}, #transfer-req: {counts.num_moving},"
        f" #retracted-req: {counts.num_retracted}, "
    )


def _settings_change(change: SettingsChanged) -> None:
    changes = ", ".join(map(str, change.options)) or "those in force"
    why = f" ({excerpt(change.why)})" if change.why else ""
    logger.info("Settings changed by %s: %s%s", excerpt(change.by), changes, why)
    set_log_level(change.settings.log_level)


def _pause(pause: Paused) -> None:
    logger.info(
        "Generation paused (%s). #aborted-req: %d, #retracted-req: %d, #running-req: %d,"
        " #queue-req: %d",
        pause.mode,
        pause.num_aborted,
        pause.num_retracted,
        pause.num_running,
        pause.num_queued,
    )


def _operation(done: Operated) -> None:
    succeeded, failed = IN_WORDS.get(
        done.what, (f"{done.what} is done", f"{done.what} was refused")
    )
    if done.error:
        logger.warning("%s: %s", failed, excerpt(done.error))
    else:
        released = f" Released memory: {', '.join(done.parts)}" if done.parts else ""
        logger.info("%s.%s", succeeded, released)


def log_fallback(fallback: Fallback) -> None:
    logger.warning("Fallback: %s (%s)", fallback.what, fallback.why)


def _done(done: RequestDone) -> None:
    """Log the ends that an operator should know of. Refusals on arrival (a full queue) are not
    among them: there may be thousands, and the access log has them."""
    status = done.finish.status_code
    words = excerpt(done.rid), done.finish.message or "(the reason was not recorded)"
    if status == 500:
        logger.error("Request %s was answered 500: %s", *words)
    elif status == 503 and done.accepted_at is not None:
        logger.warning("Request %s was answered 503: %s", *words)


def _request_times(done: RequestDone) -> None:
    """SGLang's line, which says where the time of one request went."""
    if done.accepted_at is None or done.admitted_at is None:
        return
    logger.info(
        "ReqTimeStats(rid=%s, input_len=%d, cached_input_len=%d, output_len=%d, attempts=%d,"
        " type=unified): queue_duration=%.2fms, forward_duration=%.2fms",
        excerpt(done.rid),
        done.num_prompt,
        done.num_cached,
        done.num_outputs,
        done.num_retractions + 1,
        (done.admitted_at - done.accepted_at) * 1e3,
        (done.ended_at - done.admitted_at) * 1e3,
    )


def _retraction(retraction: Retraction) -> None:
    counts = (
        f"#retracted_reqs: {retraction.num_seqs}, #new_tokens_gained:"
        f" {retraction.num_tokens_gained}"
    )
    if retraction.testing:
        logger.warning("Testing retraction. %s", counts)
        return
    logger.warning(
        "KV cache pool is full. Retract requests. %s, #new_token_ratio: %.4f -> %.4f",
        counts,
        retraction.ratio_before,
        retraction.ratio_after,
    )


def _preemption(preemption: Preemption) -> None:
    logger.info(
        "Priority preemption. #preempted_reqs: %d, #new_tokens_gained: %d, for request %s; back"
        " in the queue: %s",
        len(preemption.preempted),
        preemption.num_tokens_gained,
        excerpt(preemption.rid),
        ", ".join(map(excerpt, preemption.preempted)),
    )
