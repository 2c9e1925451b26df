"""Step plans as bytes, without loss: for the other ranks of a model, and the arrays for
recordings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import msgspec
import numpy as np

from setpoint.core.plan import Admit, PageDeltas, Rows, StepPlan
from setpoint.core.request import RequestOptions, pack_ids, unpack_ids
from setpoint.core.sampling import SamplingParams

Arrays = TypeVar("Arrays", Rows, PageDeltas)


class _Admit(msgspec.Struct, frozen=True, array_like=True):
    """An Admit whose ids are packed."""

    slot: int
    seq_id: int
    ids: bytes
    num_prompt: int
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    options: RequestOptions
    logprob_start: int


class _Plan(msgspec.Struct, frozen=True, array_like=True):
    step_id: int
    admits: tuple[_Admit, ...]
    rows: dict[str, bytes]
    pages: dict[str, bytes]
    num_groups: int
    releases: tuple[int, ...]
    forced_ids: bytes


def arrays_of(group: Rows | PageDeltas) -> dict[str, bytes]:
    """Field -> the bytes of its array."""
    return {field.name: getattr(group, field.name).tobytes() for field in fields(group)}


def encode_plan(plan: StepPlan) -> bytes:
    return msgspec.msgpack.encode(
        _Plan(
            plan.step_id,
            tuple(_packed(admit) for admit in plan.admits),
            arrays_of(plan.rows),
            arrays_of(plan.pages),
            plan.pages.pages.shape[1],
            plan.releases,
            pack_ids(plan.forced_ids),
        )
    )


def decode_plan(data: bytes) -> StepPlan:
    """The inverse of ``encode_plan``. Raises msgspec.DecodeError for other bytes."""
    plan = msgspec.msgpack.decode(data, type=_Plan)
    pages = _arrays(PageDeltas, plan.pages)
    return StepPlan(
        plan.step_id,
        tuple(_unpacked(admit) for admit in plan.admits),
        _arrays(Rows, plan.rows),
        PageDeltas(pages.slots, pages.indices, pages.pages.reshape(-1, plan.num_groups)),
        plan.releases,
        unpack_ids(plan.forced_ids),
    )


def _packed(admit: Admit) -> _Admit:
    values = {field.name: getattr(admit, field.name) for field in fields(Admit)}
    return _Admit(**(values | {"ids": pack_ids(admit.ids)}))


def _unpacked(admit: _Admit) -> Admit:
    values = {field.name: getattr(admit, field.name) for field in fields(Admit)}
    return Admit(**(values | {"ids": unpack_ids(admit.ids)}))


def _arrays(kind: type[Arrays], found: Mapping[str, bytes]) -> Arrays:
    arrays: dict[str, Any] = {
        name: np.frombuffer(data, np.int64 if name == "seq_ids" else np.int32)
        for name, data in found.items()
    }
    return kind(**arrays)
