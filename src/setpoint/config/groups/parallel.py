"""The group of options "Parallelism"."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.groups.declare import Option

GROUP = "Parallelism"


class ParallelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks and replicas."""

    tp_size: Annotated[
        int, Option(GROUP, "Tensor parallel ranks; only 1 so far.", choices=(1,))
    ] = 1
    dp_size: Annotated[
        int, Option(GROUP, "Data parallel replicas; only 1 so far.", choices=(1,))
    ] = 1
    pp_size: Annotated[int, Option(GROUP, "Pipeline stages; only 1 so far.", choices=(1,))] = 1
    ep_size: Annotated[
        int, Option(GROUP, "Expert parallel ranks; only 1 so far.", choices=(1,))
    ] = 1
