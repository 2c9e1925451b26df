"""Determines what each SOURCE of ``setpoint doctor`` is, and reads it with the right reader. The
readers of all but logs are imported when they are used, because most sources are logs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from setpoint.core.addresses import url_meant
from setpoint.core.errors import ForeignLogError, SourceError
from setpoint.doctor.observations import Observations
from setpoint.doctor.readers.kinds import is_recording, is_saved
from setpoint.doctor.readers.log.reader import read_log
from setpoint.doctor.readers.log.stream import STDIN
from setpoint.doctor.timeline import thinned

MAX_MOMENTS = 1 << 16
"""Most moments of all sources together. A diagnosis takes about a second for every 10,000."""


def observe_sources(
    names: Sequence[str], *, seconds: float, past_s: float = 0.0, api_key: str | None = None
) -> list[Observations]:
    """The observations of the sources, in their order; a log of several servers gives several.

    names: log files (plain, gzip or Zstandard), "-" for standard input, folders of logs, URLs of
    servers or of their /metrics, saved metrics, recordings; seconds: how long to watch a URL;
    past_s: how much from before that is wanted of a server that remembers it; api_key: of a server,
    by default the environment variable OPENAI_API_KEY. Raises SourceError for what cannot be read.
    Logs of other programs are left out and named, if there is anything else.
    """
    found: list[Observations] = []
    foreign: list[ForeignLogError] = []
    for name in names:
        try:
            found += _observe(name, seconds, past_s, api_key)
        except ForeignLogError as error:
            foreign.append(error)
    if foreign and not found:
        raise foreign[0]
    for seen in found:
        seen.sources[0].notes += [f"{error} It was left out." for error in foreign]
    _thin(found)
    return found


def _thin(found: Sequence[Observations]) -> None:
    """Merge neighbouring moments where very many ranks or servers have too many in all."""
    ranks = [rank for seen in found for rank in seen.ranks]
    if sum(len(rank.moments) for rank in ranks) <= MAX_MOMENTS:
        return
    for rank in ranks:
        rank.moments = thinned(rank.moments, MAX_MOMENTS // len(ranks))


def _observe(name: str, seconds: float, past_s: float, api_key: str | None) -> list[Observations]:
    if name == STDIN:
        return read_log(name)
    if name.startswith(("http://", "https://")):
        return [_watch(name, seconds, past_s, api_key)]
    path = Path(name)
    if path.is_dir():
        from setpoint.doctor.readers.folder import read_folder

        return read_folder(name)
    if is_recording(path):
        from setpoint.doctor.readers.recording import open_source, read_recording

        return [read_recording(open_source(name), name)]
    if not path.exists():
        if meant := url_meant(name):
            raise SourceError(f"{name} is no file and no URL: did you mean {meant}?")
        raise SourceError(
            f"{name} does not exist. Give a log file, a folder of logs, a recording, saved metrics,"
            " the URL of a server (http://…), or - for standard input."
        )
    if is_saved(path):
        from setpoint.doctor.readers.metrics import read_saved

        return [read_saved(name)]
    return read_log(name)


def _watch(url: str, seconds: float, past_s: float, api_key: str | None) -> Observations:
    key = api_key or os.environ.get("OPENAI_API_KEY")
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None
    if not host or any(character.isspace() for character in url):
        raise SourceError(f"{url!r} is not a URL: http://HOST:PORT was expected.")
    is_page = url.partition("?")[0].rstrip("/").endswith("/metrics")
    if is_page:
        from setpoint.doctor.readers.metrics import watch_metrics

        return watch_metrics(url, seconds=seconds, api_key=key)
    from setpoint.doctor.readers.server import watch_server

    return watch_server(url, seconds=seconds, past_s=past_s, api_key=key)
