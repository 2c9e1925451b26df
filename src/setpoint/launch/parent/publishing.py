"""Makes the publisher of KV cache events, if there is to be one, before any engine starts, so that
an unusable address ends the start at once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from setpoint.config.extras import check_extra
from setpoint.config.groups.events import FLAG, publisher_config
from setpoint.config.options import Options

if TYPE_CHECKING:
    from setpoint.frontend.telemetry.kv_publisher import KVPublisher

logger = logging.getLogger(__name__)


@contextmanager
def publishing(options: Options) -> Iterator[KVPublisher | None]:
    """A context with the publisher of --kv-events-config. Raises ConfigError."""
    num_ranks = options.parallel.dp_size
    config = publisher_config(options.events, num_ranks=num_ranks)
    if config is None:
        yield None
        return
    check_extra(FLAG, "kv-events")
    from setpoint.frontend.telemetry.kv_publisher import KVPublisher

    with KVPublisher(config, num_ranks) as publisher:
        logger.info(
            "KV events are published at %s. They contain the tokens of all prompts and outputs,"
            " and everybody who can connect can read them.",
            config.endpoint,
        )
        if config.max_queue_size is not None:
            logger.info(
                "%s: max_queue_size has no effect, because every batch goes to ZeroMQ at once;"
                " hwm limits how many batches wait for a subscriber.",
                FLAG,
            )
        yield publisher
