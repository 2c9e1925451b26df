"""Compares the outputs of a replay with the recorded ones, and describes differences in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np

from setpoint.recording.format import KeptPlan, KeptRecord

Output = KeptPlan | KeptRecord
MAX_SHOWN = 16
"""Most values of a list that a description shows."""

_kept_record = msgspec.msgpack.Decoder(KeptRecord)


def difference(
    recorded: Output | None, replayed: Output | None, fields_of: Mapping[str, list[str]]
) -> str:
    """The difference in words; "" if there is none. fields_of: the recording's Header.fields."""
    if isinstance(replayed, KeptRecord):
        replayed = _kept_record.decode(msgspec.msgpack.encode(replayed))
    if recorded == replayed:
        return ""
    if isinstance(recorded, KeptPlan) and isinstance(replayed, KeptPlan):
        parts = zip(_parts(recorded), _parts(replayed), strict=True)
        found = next((name, one, other) for (name, one), (_, other) in parts if one != other)
        return f"plan of step {recorded.step_id}: {_both(*found)}"
    if (
        isinstance(recorded, KeptRecord)
        and isinstance(replayed, KeptRecord)
        and recorded.kind == replayed.kind
    ):
        names = fields_of.get(recorded.kind, [])
        triples = zip_longest(names, recorded.values, replayed.values)
        return f"{recorded.kind}: " + "; ".join(
            _both(name, one, other) for name, one, other in triples if one != other
        )
    return _both("what comes next", _description(recorded), _description(replayed))


def _parts(plan: KeptPlan) -> Iterator[tuple[str, Any]]:
    """(name, value) of each part of a plan, in the order in which to report differences."""
    yield "step_id", plan.step_id
    yield "releases", plan.releases
    yield "admits", plan.admits
    for group, arrays in (("rows", plan.rows), ("pages", plan.pages)):
        for name, data in arrays.items():
            yield (
                f"{group}.{name}",
                np.frombuffer(data, "<i8" if name == "seq_ids" else "<i4").tolist(),
            )


def _both(name: str | None, recorded: Any, replayed: Any) -> str:
    return f"{name} recorded {_text(recorded)}, replayed {_text(replayed)}"


def _text(value: Any) -> str:
    if isinstance(value, list) and len(value) > MAX_SHOWN:
        first = ", ".join(map(str, value[:MAX_SHOWN]))
        return f"[{first}, … {len(value)} in all]"
    return str(value)


def _description(output: Output | None) -> str:
    match output:
        case KeptPlan(step_id):
            return f"the plan of step {step_id}"
        case KeptRecord(kind, values):
            return f"{kind}({', '.join(map(_text, values))})"
        case _:
            return "nothing in this turn"
