"""The group of options "Recording"."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.groups.declare import Option

GROUP = "Recording"


class RecordingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options about the recording of a server."""

    record: Annotated[
        str | None,
        Option(
            GROUP,
            "Record everything that enters and leaves the engine to this file, which must not"
            " exist yet, for 'setpoint replay' (docs/recording.md).",
            metavar="FILE",
        ),
    ] = None
    record_content: Annotated[
        str,
        Option(
            GROUP,
            "off: the recording holds lengths and hashes, but no text, no token ids and no names"
            " from clients. on: it also holds token ids and names.",
            choices=("off", "on"),
        ),
    ] = "off"
    record_max_bytes: Annotated[
        int,
        Option(
            GROUP,
            "Maximum size of the recording, which consists of 16 files. Beyond this size, the"
            " oldest file is deleted; the rest can be printed, but not replayed.",
            low=1 << 20,
            human=True,
        ),
    ] = 1 << 30
