"""The contents of a console stream's events, as far as ``setpoint top`` shows them
(docs/console.md#the-stream)."""

from __future__ import annotations

from msgspec import Struct


class Limits(Struct):
    max_running_requests: int | None = None


class State(Struct):
    model: str | None = None
    dtype: str | None = None
    device: str | None = None
    version: str | None = None
    paused: str | None = None
    """The mode of the pause in force."""
    limits: Limits | None = None


class Action(Struct):
    text: str


class Finding(Struct):
    action: Action | None = None


class Report(Struct):
    verdict: str
    summary: str = ""
    findings: list[Finding] = []


class Row(Struct):
    """A request. Times are in seconds."""

    rid: str = ""
    state: str = ""
    why: str | None = None
    end: str | None = None
    prompt: int = 0
    """Tokens, like the next two."""
    output: int = 0
    limit: int | None = None
    waited_s: float | None = None
    ran_s: float | None = None
    tps: float | None = None


class Requests(Struct):
    num_running: int = 0
    num_queued: int = 0
    rows: list[Row] = []
