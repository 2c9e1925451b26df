"""What each SOURCE of ``setpoint doctor`` is, and who reads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from setpoint.advisor.doctor.observations import Observations
from setpoint.advisor.doctor.readers.folder import read_folder
from setpoint.advisor.doctor.readers.log.reader import read_log
from setpoint.advisor.doctor.readers.log.stream import STDIN
from setpoint.core.errors import SourceError


def observe_sources(names: Sequence[str], *, seconds: float) -> list[Observations]:
    """What the sources show, in their order; a log of several servers gives several.

    names: log files (plain, gzip or Zstandard), "-" for standard input, folders of logs, URLs of
    servers or of their /metrics, saved metrics, recordings; seconds: how long to watch a URL.
    Raises SourceError for what cannot be read.
    """
    return [seen for name in names for seen in _observe(name, seconds)]


def _observe(name: str, seconds: float) -> list[Observations]:
    if name == STDIN:
        return read_log(name)
    path = Path(name)
    if path.is_dir():
        return [read_folder(name)]
    if not path.exists():
        raise SourceError(
            f"{name} does not exist. Give a log file, a folder of logs, a recording, saved metrics,"
            " the URL of a server, or - for standard input."
        )
    return read_log(name)
