"""A plan that is encoded and decoded is the same plan, whatever is in it."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from setpoint.core.plan import Admit, PageDeltas, Rows, StepPlan
from setpoint.core.plan_codec import decode_plan, encode_plan
from setpoint.core.request import LogprobOptions, RequestOptions
from setpoint.core.sampling import SamplingParams

small = st.integers(0, 2**31 - 1)
ids = st.lists(small, max_size=5).map(lambda values: np.array(values, np.int32))


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    count = draw(st.integers(0, 4))

    def column(values: st.SearchStrategy[int], kind: type = np.int32) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=count, max_size=count)), kind)

    return Rows(
        slots=column(small),
        seq_ids=column(st.integers(0, 2**63 - 1), np.int64),
        starts=column(st.integers(-1, 2**31 - 1)),
        counts=column(small),
        samples=column(st.integers(0, 3)),
    )


@st.composite
def pages(draw: st.DrawFn) -> PageDeltas:
    count, groups = draw(st.integers(0, 4)), draw(st.integers(1, 3))
    numbers = st.lists(small, min_size=count * groups, max_size=count * groups)
    column = st.lists(small, min_size=count, max_size=count)
    return PageDeltas(
        np.array(draw(column), np.int32),
        np.array(draw(column), np.int32),
        np.array(draw(numbers), np.int32).reshape(count, groups),
    )


admits = st.builds(
    Admit,
    slot=small,
    seq_id=st.integers(0, 2**63 - 1),
    ids=ids,
    num_prompt=small,
    sampling=st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
        max_new_tokens=st.integers(1, 100),
    ),
    seed=st.integers(0, 2**63 - 1),
    stop_ids=st.lists(small, max_size=3).map(tuple),
    options=st.builds(
        RequestOptions,
        logprobs=st.none() | st.builds(LogprobOptions, start=st.integers(-1, 9)),
    ),
    logprob_start=st.integers(-1, 100),
)
plans = st.builds(
    StepPlan,
    step_id=st.integers(0, 2**40),
    admits=st.lists(admits, max_size=3).map(tuple),
    rows=rows(),
    pages=pages(),
    releases=st.lists(small, max_size=3).map(tuple),
    forced_ids=ids,
)


def plain(value: object) -> object:
    """Compares with ``==``: arrays by type, shape and content."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tolist()
    if isinstance(value, Rows | PageDeltas | Admit | StepPlan):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return tuple(plain(each) for each in value)
    return value


@given(plans)
def test_nothing_is_lost(plan: StepPlan) -> None:
    assert plain(decode_plan(encode_plan(plan))) == plain(plan)
