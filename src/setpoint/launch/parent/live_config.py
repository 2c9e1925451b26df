"""Holds the options of a running server and applies changes of them to this process. The engine
applies its own part (``observe.logline``, ``scheduler``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from setpoint.config.groups.declare import Field, Option
from setpoint.config.keywords import as_keywords, naming_keywords
from setpoint.config.live_changes import LIVE, Running, read_values
from setpoint.config.resolved import ResolvedConfig
from setpoint.frontend.live_options import FrontendSettings, LiveOption, Proposal
from setpoint.launch.settings import live_settings
from setpoint.observe.logline import set_log_level

WEB_LOGGERS = ("uvicorn.error", "uvicorn.access", "uvicorn.asgi")


class LiveConfig:
    """Implements ``frontend.live_options.LiveOptions``."""

    def __init__(self, running: Running) -> None:
        self._started = self._running = running
        self.frontend = self._settings()

    @property
    def config(self) -> ResolvedConfig:
        """The configuration in force."""
        return self._running.config

    def propose(self, values: Mapping[str, Any]) -> Proposal:
        with naming_keywords():
            wanted = read_values(values)
            after = self._running.with_values(wanted)
        return Proposal(
            live_settings(after.config, after.pool),
            after.differences(self._running),
            [as_keywords(warning) for warning in after.warnings(wanted)],
            lambda: self._accept(after),
        )

    def _accept(self, after: Running) -> None:
        self._running = after
        self.frontend = self._settings()
        options = after.config.options
        set_log_level(options.logs.log_level)
        for name in WEB_LOGGERS:
            set_log_level(options.logs.log_level_http or options.logs.log_level, name)

    def _settings(self) -> FrontendSettings:
        options = self._running.config.options
        return FrontendSettings(
            log_requests=options.logs.log_requests,
            log_requests_level=options.logs.log_requests_level,
            log_requests_format=options.logs.log_requests_format,
            drain_timeout_s=options.server.drain_timeout,
            options=self._running.live_options(),
            decisions=tuple(map(asdict, self._running.decisions_since(self._started))),
            described=DESCRIBED,
        )


def _choices(field: Field[Option]) -> tuple[str, ...]:
    if field.kind is bool:
        return "true", "false"
    choices = tuple(map(str, field.about.choices))
    return (*choices, "none") if choices and field.default is None else choices


DESCRIBED = {field.name: LiveOption(field.about.meaning, _choices(field)) for field in LIVE}
