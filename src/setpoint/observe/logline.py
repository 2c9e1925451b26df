"""The log lines of a serving engine, in SGLang's words and layout (docs/sglang/logs.md), so that
existing dashboards and habits work.

Formats records; it measures nothing itself. Whatever a message holds, it stays one printable line:
nobody can write another's.
"""

from __future__ import annotations

import logging
from types import TracebackType

from setpoint.core.records import (
    CacheFlushed,
    Fallback,
    PoolRebuilt,
    Preemption,
    Record,
    RequestClipped,
    RequestDropped,
    RequestFailed,
    RequestUnservable,
    Retraction,
    SettingsChanged,
    StepDone,
)
from setpoint.core.result import EAGER
from setpoint.core.shown import printable, shown

logger = logging.getLogger(__name__)

GIB = 1 << 30
CLIPPED = (
    "Request %s: max_new_tokens lowered from %d to %d, the most that the context length and the KV"
    " pool can hold."
)
UNSERVABLE = "Request %s was aborted: nothing else runs and it cannot be admitted (%s); pool: %s"
NOT_FLUSHED = (
    "Cache not flushed because there are pending requests. #queue-req: %d, #running-req: %d"
)

_ExceptionInfo = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


def setup_logging(level: str, *, rank: str = "", milliseconds: bool = False) -> None:
    """Log to stderr as ``[2026-01-31 12:00:00 TP0] message``; rank is "" or e.g. " TP0"."""
    stamp = "%(asctime)s.%(msecs)03d" if milliseconds else "%(asctime)s"
    handler = logging.StreamHandler()
    handler.setFormatter(
        LineFormatter(f"[{stamp}{rank}] %(levelprefix)s%(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    access = logging.getLogger("uvicorn.access")
    access.removeFilter(_bound_arguments)
    access.addFilter(_bound_arguments)


def set_log_level(level: str, name: str | None = None) -> None:
    """From now on; of the logger of this name, or of all that have no level of their own."""
    logging.getLogger(name).setLevel(level.upper())


class LineFormatter(logging.Formatter):
    """A record as one printable line; the lines of a traceback behind it are indented, so that none
    looks like a record."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        # Information carries no level word, as in SGLang; everything louder does.
        record.levelprefix = "" if record.levelno <= logging.INFO else f"{record.levelname}: "
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: _ExceptionInfo) -> str:
        # An exception's message may quote a client.
        return "\n".join(f"  {printable(line)}" for line in super().formatException(ei).split("\n"))


def _bound_arguments(record: logging.LogRecord) -> bool:
    """The web server's access lines name the path that the client asked for, however long."""
    if isinstance(record.args, tuple):
        record.args = tuple(shown(arg) if isinstance(arg, str) else arg for arg in record.args)
    return True


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
    """The one line that sums up memory planning; ``available_bytes`` is what is left after weights,
    pool and graphs."""
    label = "available_cpu_mem" if device == "cpu" else "available_gpu_mem"
    return (
        f"max_total_num_tokens={max_total_num_tokens}, chunked_prefill_size={chunked_prefill_size},"
        f" max_prefill_tokens={max_prefill_tokens}, max_running_requests={max_running_requests},"
        f" context_len={context_len}, {label}={gib(available_bytes)} GB"
    )


class LogLines:
    """An observer that writes a line per prefill step, one per ``decode_log_interval`` decode
    steps, and the warnings."""

    def __init__(self, *, decode_log_interval: int, device: str, started_at: float) -> None:
        self._interval = decode_log_interval
        self._graph = "cpu graph" if device == "cpu" else "cuda graph"
        self._last_prefill = started_at
        self._last_decode = started_at
        self._num_generated = 0
        self._num_decodes = 0
        self.last_gen_throughput = 0.0

    def on(self, record: Record) -> None:
        match record:
            case StepDone():
                self._step(record)
            case Retraction():
                _retraction(record)
            case Preemption():
                _preemption(record)
            case RequestDropped(rid, why):
                logger.warning("Request %s was answered 503: %s", shown(rid), why)
            case RequestFailed(rid, why):
                logger.error("Request %s was answered 500: %s", shown(rid), why)
            case RequestClipped(rid, wanted, granted):
                logger.warning(CLIPPED, shown(rid), wanted, granted)
            case RequestUnservable(rid, why, pool):
                logger.error(UNSERVABLE, shown(rid), why, pool)
            case Fallback(what, why):
                logger.warning("Fallback: %s (%s)", what, why)
            case CacheFlushed(True):
                logger.info("Cache flushed successfully!")
            case CacheFlushed(False, _, num_queued, num_running):
                logger.warning(NOT_FLUSHED, num_queued, num_running)
            case SettingsChanged():
                self._changed(record)
            case PoolRebuilt(violations):
                logger.error(
                    "KV cache accounting is broken and was rebuilt empty: %s", "; ".join(violations)
                )

    def _changed(self, record: SettingsChanged) -> None:
        changes = ", ".join(map(str, record.options))
        why = f" ({shown(record.why)})" if record.why else ""
        logger.info("Settings changed by %s: %s%s", shown(record.by), changes, why)
        self._interval = record.settings.decode_log_interval
        set_log_level(record.settings.log_level)

    def _step(self, stats: StepDone) -> None:
        self._num_generated += stats.num_sampled
        if stats.num_prefill_rows:
            self._prefill(stats)
        else:
            self._num_decodes += 1
            if self._num_decodes % self._interval == 0:
                self._decode(stats)

    def _prefill(self, stats: StepDone) -> None:
        elapsed = stats.finished_at - self._last_prefill
        self._last_prefill = stats.finished_at
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f,"
            " #running-req: %d, #queue-req: %d, #pending-token: %d, %s: %s, input throughput"
            " (token/s): %.2f",
            stats.num_prefill_rows,
            stats.num_new_tokens,
            stats.num_cached_tokens,
            stats.pool.usage,
            stats.num_running,
            stats.num_queued,
            stats.num_pending_tokens,
            self._graph,
            stats.way != EAGER,
            stats.num_new_tokens / elapsed if elapsed > 0 else 0.0,
        )

    def _decode(self, stats: StepDone) -> None:
        elapsed = stats.finished_at - self._last_decode
        self._last_decode = stats.finished_at
        self.last_gen_throughput = self._num_generated / elapsed if elapsed > 0 else 0.0
        self._num_generated = 0
        logger.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, %s: %s, gen throughput"
            " (token/s): %.2f, #queue-req: %d",
            stats.num_running,
            stats.pool.used,
            stats.pool.usage,
            self._graph,
            stats.way != EAGER,
            self.last_gen_throughput,
            stats.num_queued,
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
        shown(preemption.rid),
        ", ".join(map(shown, preemption.preempted)),
    )
