"""Logs a start: a dozen lines for a person at "info", every decision with its reason at "debug".

SGLang writes ``server_args=ServerArgs(…)`` with all options, some 2,000 characters. No program is
known to read that line (they ask ``/server_info``, which has all options), so at "info" it holds
only those that differ from the declared defaults, and a terminal does not show it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from setpoint.config.environment import unread_variables
from setpoint.config.options import OPTION_FIELDS, server_args
from setpoint.config.pool import memory_model
from setpoint.launch.decision_log import log_decisions
from setpoint.launch.parent.served_model import ServedModel
from setpoint.observe.logline import FOR_FILES, gib

logger = logging.getLogger(__name__)


def log_configuration(served: ServedModel, environ: Mapping[str, str]) -> None:
    """Log the model, the options, the decisions, and the environment variables without effect."""
    config = served.config
    logger.info("Model: %s (%s)", served.source.name, served.source.origin)
    defaults = {field.name: field.default for field in OPTION_FIELDS}
    shown = {
        name: value
        for name, value in server_args(config.options).items()
        if logger.isEnabledFor(logging.DEBUG) or value != defaults[name] or name == "model_path"
    }
    logger.info(
        "server_args=ServerArgs(%s)",
        ", ".join(f"{name}={value!r}" for name, value in shown.items()),
        extra=FOR_FILES,
    )
    log_decisions(config.decisions)
    if config.options.parallel.engine_standby:
        logger.info(
            "The standby engine (--engine-standby) takes %s GB for its weights; the KV cache is"
            " smaller by this amount.",
            gib(memory_model(config, served.spec).weights()),
        )
    for name in unread_variables(environ):
        logger.warning(
            "The environment variable %s is set, but this version of Setpoint does not use it.",
            name,
        )
