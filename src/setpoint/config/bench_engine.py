"""Options of the benchmarks that measure an engine directly, without traffic."""

from __future__ import annotations

from typing import Annotated

import msgspec

from setpoint.config.bench import DATASET, RESULTS
from setpoint.config.declare import Option

BATCH = "Batch"


class OneBatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``setpoint bench one-batch``, in addition to the engine's. Every combination
    of the three lists is measured."""

    batch_size: Annotated[
        tuple[int, ...], Option(BATCH, "Number of sequences in the batch.", metavar="N", low=1)
    ] = (1,)
    input_len: Annotated[
        tuple[int, ...], Option(BATCH, "Tokens of each prompt.", metavar="N", low=1)
    ] = (1024,)
    output_len: Annotated[
        tuple[int, ...],
        Option(BATCH, "Tokens that each sequence generates, one per step.", metavar="N", low=2),
    ] = (16,)
    breakdown: Annotated[
        bool,
        Option(
            BATCH,
            "Show where the time of a step goes, and how fast each part could be on this machine,"
            " whose limits are measured.",
        ),
    ] = False
    run_name: Annotated[str, Option(RESULTS, "A name for this run, kept in the results.")] = (
        "default"
    )
    output_file: Annotated[
        str | None,
        Option(
            RESULTS,
            "File of JSON lines to which one line per combination is appended.",
            metavar="FILE",
        ),
    ] = None
    compare: Annotated[
        str | None,
        Option(
            RESULTS,
            "File of an earlier run; shows how many times as fast each combination is now.",
            metavar="FILE",
        ),
    ] = None


class QualityOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``setpoint bench quality``, in addition to the engine's."""

    text_file: Annotated[
        str | None,
        Option(DATASET, "UTF-8 text to predict instead of the built-in texts.", metavar="FILE"),
    ] = None
    max_perplexity_change: Annotated[
        float | None,
        Option(
            RESULTS,
            "Exit with code 3 if the perplexity rises by more than this share (0.02 is 2 %).",
            metavar="SHARE",
            low=0,
        ),
    ] = None
    output_file: Annotated[
        str | None,
        Option(RESULTS, "File of JSON lines to which the result is appended.", metavar="FILE"),
    ] = None
