"""Logs how options were decided: news and warnings for everybody, the rest at "debug"."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from setpoint.config.decisions import Decision

logger = logging.getLogger(__name__)


def log_decisions(decisions: Iterable[Decision]) -> None:
    for decision in decisions:
        level = (
            logging.WARNING
            if decision.warn
            else logging.INFO
            if decision.is_news
            else logging.DEBUG
        )
        logger.log(level, "Decision: %s", decision)
