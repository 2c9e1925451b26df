"""The log of requests: a line when one arrives, and one when each of its sequences ends."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from setpoint.core.excerpt import IS_JSON
from setpoint.core.request import Request
from setpoint.frontend.telemetry.measured_sequence import MeasuredSequence
from setpoint.frontend.telemetry.timings import timings_of

logger = logging.getLogger(__name__)

SHOWN_CHARS = 2048
"""Length to which values are cut below level 3."""

_METADATA = ("rid", "meta_info", "stream", "model")
_CONTENTS = (
    *("text", "input_ids", "output_ids", "messages", "prompt", "system", "tools"),
    *("input", "instructions", "query", "items", "documents", "instruct"),
)
"""The keys of every API's bodies that hold what people wrote."""


class LogSettings(Protocol):
    """What may be logged of a request."""

    @property
    def log_requests(self) -> bool: ...

    @property
    def log_requests_level(self) -> int:
        """0 metadata, 1 + sampling parameters, 2 + text and ids cut short, 3 everything."""
        ...

    @property
    def log_requests_format(self) -> str:
        """ "text", or "json": one JSON object per line."""
        ...


class RequestLog:
    def __init__(self, settings: Callable[[], LogSettings]) -> None:
        """settings: asked anew for every line, because they change while the server runs."""
        self._settings = settings

    def received(self, requests: Sequence[Request], body: dict[str, Any], api: str) -> bool:
        """Log a body that has become these requests. Returns whether requests are logged."""
        if not self._settings().log_requests:
            return False
        shown = self._loggable({**body, "rid": [request.rid for request in requests]})
        if self._settings().log_requests_format == "json":
            self._event("request.received", {"api": api or "native", "obj": shown})
        else:
            logger.info("Receive%s: obj=%s", f" {api}" if api else "", repr(shown))
        return True

    def finished(self, output: MeasuredSequence) -> None:
        sampling = msgspec.to_builtins(output.request.sampling)
        request = self._loggable({"rid": output.rid, "sampling_params": sampling})
        content = {"text": output.text, "output_ids": output.output_ids}
        result = self._loggable({**content, "meta_info": summary(output)})
        if self._settings().log_requests_format == "json":
            self._event("request.finished", {"obj": request, "out": result})
        else:
            logger.info("Finish: obj=%s, out=%s", repr(request), repr(result))

    def _event(self, name: str, content: dict[str, Any]) -> None:
        line = {"timestamp": datetime.now(UTC).isoformat(), "event": name, **content}
        logger.info("%s", json.dumps(line), extra={IS_JSON: True})

    def _loggable(self, value: dict[str, Any]) -> dict[str, Any]:
        """The parts of a request that ``--log-requests-level`` lets into the log: 0 metadata, 1 +
        parameters, 2 + contents cut short, 3 everything."""
        level = self._settings().log_requests_level
        shown = {}
        for key, item in value.items():
            if level < (0 if key in _METADATA else 2 if key in _CONTENTS else 1):
                continue
            text = repr(item)
            shown[key] = (
                item
                if level >= 3 or len(text) <= SHOWN_CHARS
                else f"{text[:SHOWN_CHARS]}… ({len(text)} characters)"
            )
        return shown


def summary(output: MeasuredSequence) -> dict[str, Any]:
    """A description of a sequence, its end and its times in SGLang's terms, without its
    content."""
    return {
        "id": output.rid,
        "finish_reason": None if output.finish is None else msgspec.to_builtins(output.finish),
        "prompt_tokens": output.num_prompt,
        "completion_tokens": output.num_outputs,
        "cached_tokens": output.num_cached,
        "num_retractions": output.num_retractions,
        "e2e_latency": output.e2e_s,
        **timings_of(output),
    }
