"""The group of options "Recording"."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.groups.declare import Option

GROUP = "Recording"


class RecordingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The recording of a server."""

    record: Annotated[
        str | None,
        Option(
            GROUP,
            "Record what enters and leaves the engine to this new file, for 'setpoint replay'"
            " (docs/recording.md).",
            metavar="FILE",
        ),
    ] = None
    record_content: Annotated[
        str,
        Option(
            GROUP,
            "off: the recording holds lengths and hashes, and no text, token id or name of a"
            " client; on: token ids and names, too.",
            choices=("off", "on"),
        ),
    ] = "off"
    record_max_bytes: Annotated[
        int,
        Option(
            GROUP,
            "Largest size of the recording. It is divided into 16 files, and beyond this size the"
            " oldest is deleted; what is left can be printed, not replayed.",
            low=1 << 20,
            human=True,
        ),
    ] = 1 << 30
