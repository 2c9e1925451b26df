"""Values for bodies of requests, and what no answer to one may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import event
from hypothesis import strategies as st

from setpoint.testing.fake_engine import FakeEngine

Serve = Callable[..., None]
Calls = list[tuple[str, dict[str, Any]]]
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
whole = st.integers(-1, 300)
real = st.floats(-1, 3)
words = st.text(max_size=5)


def some(plausible: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """A few keys, with plausible values; in a third of the cases one more with any value."""
    wild = st.dictionaries(st.sampled_from(sorted(plausible)), anything, min_size=1, max_size=1)
    pairs = st.sampled_from(sorted(plausible)).flatmap(
        lambda key: st.tuples(st.just(key), plausible[key])
    )
    return st.builds(
        lambda mild, wild: dict(mild) | wild,
        st.lists(pairs, max_size=3),
        st.just({}) | st.just({}) | wild,
    )


def check_answers(serve: Serve, calls: Calls, **allowed: tuple[int, ...]) -> None:
    """Each call, a path and a body, is answered or refused, but never with a 500. allowed: name of
    a route -> its statuses, if they are not 200 and 400."""

    async def scenario(server: Any) -> None:
        for path, body in calls:
            response = await server.http.post(path, json=body)
            event(f"{path} {response.status_code}")  # shown by --hypothesis-show-statistics
            statuses = allowed.get(path.rpartition("/")[2], (200, 400))
            assert response.status_code in statuses, (path, body, response.text)

    serve(scenario, FakeEngine(tokens_per_event=64))
