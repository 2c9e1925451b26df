"""Encodes records as the rows of a recording, with one function for each kind of record. Both the
writer and the replay use it, so that recorded and replayed records can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from setpoint.core import records
from setpoint.core.conversion import convert
from setpoint.core.errors import RecordingError
from setpoint.core.plan_codec import arrays_of
from setpoint.core.records import (
    GrammarEnded,
    GrammarLate,
    Operated,
    Received,
    Record,
    RequestDone,
    ResultTaken,
    SettingsChanged,
    StepPlanned,
    Turn,
)
from setpoint.core.request import pack_ids
from setpoint.core.result import one_each
from setpoint.recording.format import (
    Kept,
    KeptPlan,
    KeptRecord,
    KeptResult,
    KeptTurn,
)
from setpoint.recording.kept_content import Content

Entry = Callable[[Any, Content], Kept]

NAMES = frozenset({"rid", "preempted", "by"})
"""Fields of records that hold one or several names that a client or an operator chose or
received."""


def encode_record(record: Record, content: Content) -> Kept:
    """The row of the recording for this record. Call it with the records of a run in order, once
    each."""
    return _ENTRIES[type(record)](record, content)


def as_record(row: KeptRecord, fields_of: Mapping[str, list[str]]) -> Record:
    """The record of a KeptRecord, the inverse of ``encode_record``. fields_of: the recording's
    Header.fields.

    Raises RecordingError for a kind or fields that this version does not know.
    """
    kind = _KINDS.get(row.kind)
    if kind is None or row.kind not in fields_of:
        raise RecordingError(f"The recording holds a {row.kind}, which this version does not know.")
    values = dict(zip(fields_of[row.kind], row.values, strict=False))
    try:
        record: Record = convert(values, kind)
    except msgspec.ValidationError as error:
        raise RecordingError(f"The recording's {row.kind} has other fields: {error}.") from None
    return record


def field_names() -> dict[str, list[str]]:
    """Kind of KeptRecord -> names of its values, for the header."""
    return {name: list(kind.__struct_fields__) for name, kind in _KINDS.items()}


def _turn(record: Turn, content: Content) -> Kept:
    return KeptTurn(record.at)


def _received(record: Received, content: Content) -> Kept:
    return content.message(record.message)


def _plan(record: StepPlanned, content: Content) -> Kept:
    plan = record.plan
    content.note_plan(plan)
    return KeptPlan(
        step_id=plan.step_id,
        rows=arrays_of(plan.rows),
        pages=arrays_of(plan.pages),
        admits=[
            [
                admit.slot,
                admit.seq_id,
                len(admit.ids),
                admit.num_prompt,
                admit.logprob_start,
                content.checksum(admit),
            ]
            for admit in plan.admits
        ],
        releases=list(plan.releases),
    )


def _result(record: ResultTaken, content: Content) -> Kept:
    result = record.result
    sampled = content.sampled_tokens(result)
    usual = np.array_equal(result.offsets, one_each(len(result.seq_ids)))
    return KeptResult(
        step_id=result.step_id,
        at=record.at,
        num_tokens=len(result.token_ids),
        offsets=b"" if usual else pack_ids(result.offsets),
        ids=sampled.ids,
        ends=sampled.ends,
        invalid=sampled.invalid,
        hashes=sampled.hashes,
        embedded={
            seq_id: bool(np.isfinite(vector).all()) for seq_id, vector in result.embeddings.items()
        },
        failures=dict(result.failures),
        forward_s=result.forward_s,
        sample_s=result.sample_s,
        way=result.way,
    )


def _whole(record: Any, content: Content) -> KeptRecord:
    """All values unchanged, except names."""
    values = list(msgspec.structs.astuple(record))
    for index, field in enumerate(record.__struct_fields__):
        if field in NAMES:
            value = values[index]
            values[index] = (
                content.name(value) if isinstance(value, str) else list(map(content.name, value))
            )
    return KeptRecord(type(record).__name__, values)


def _grammar_ended(record: GrammarEnded, content: Content) -> KeptRecord:
    return _whole(msgspec.structs.replace(record, finish=content.finish(record.finish)), content)


def _grammar_late(record: GrammarLate, content: Content) -> KeptRecord:
    content.note_late(record.seq_id)
    return _whole(record, content)


def _settings(record: SettingsChanged, content: Content) -> Kept:
    """All values. The reason is treated like a name, because an operator wrote it."""
    return _whole(msgspec.structs.replace(record, why=content.name(record.why)), content)


def _operation(record: Operated, content: Content) -> Kept:
    """All values. An error is replaced by "refused", because it may quote a path."""
    return _whole(msgspec.structs.replace(record, error="refused" if record.error else ""), content)


def _done(record: RequestDone, content: Content) -> KeptRecord:
    """All values except the stop id that ended the sequence: the client may have chosen it, and the
    result has it."""
    finish = msgspec.structs.replace(content.finish(record.finish), matched=None)
    return _whole(msgspec.structs.replace(record, finish=finish), content)


_WHOLE: tuple[type, ...] = (
    records.SendFailed,
    records.StepLost,
    records.StepDone,
    records.TurnDone,
    records.Retraction,
    records.Preemption,
    records.PreparationStarted,
    records.PreparationEnded,
    records.TransferStarted,
    records.TransferEnded,
    records.HandedOver,
    records.TokensForced,
    records.RequestAdmitted,
    records.RequestClipped,
    records.Fallback,
    records.CacheFlushed,
    records.Paused,
    records.Continued,
    records.Rested,
    records.PoolRebuilt,
)
_OTHERS: tuple[type, ...] = (GrammarEnded, GrammarLate, RequestDone, SettingsChanged, Operated)
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (*_WHOLE, *_OTHERS)}
_OWN: dict[type, Entry] = {
    Turn: _turn,
    Received: _received,
    ResultTaken: _result,
    StepPlanned: _plan,
    GrammarEnded: _grammar_ended,
    GrammarLate: _grammar_late,
    RequestDone: _done,
    SettingsChanged: _settings,
    Operated: _operation,
}
_ENTRIES = _OWN | dict.fromkeys(_WHOLE, _whole)

MEASURED = frozenset({"TurnDone", "PreparationEnded"})
"""Kinds of records that a replay does not compare: they hold measured values, or values that the
recorded inputs do not determine."""
INPUTS = frozenset({"SendFailed", "StepLost"})
"""Kinds of KeptRecord that are inputs."""
