"""The results of tools in a conversation of Ollama's, and the calls that they belong to."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from setpoint.core.errors import RequestError
from setpoint.frontend.apis.ollama.ollama_bodies import OllamaChatBody

NAMES = st.sampled_from("ab")
IDS = st.sampled_from(["", "1", "2"])
CALLS = st.lists(st.tuples(IDS, NAMES), min_size=1, max_size=5)
RESULTS = st.lists(st.tuples(st.none() | IDS, st.none() | NAMES), max_size=6)


def expected(
    calls: list[tuple[str, str]], results: list[tuple[str | None, str | None]]
) -> list[tuple[str, str]] | None:
    """The call of each result; None if one belongs to no call."""
    left = [(own or f"call_0_{number}", name) for number, (own, name) in enumerate(calls)]
    found = []
    for wanted, tool in results:
        rules = [lambda call: call[0] == wanted, lambda call: call[1] == tool]  # noqa: B023
        if wanted is None:
            rules.append(lambda call: True)
        meant = next((call for rule in rules for call in left if rule(call)), None)
        if meant is None:
            return None
        left.remove(meant)
        found.append(meant)
    return found


@given(CALLS, RESULTS)
def test_a_result_belongs_to_the_call_with_its_id_else_of_its_tool_else_the_first(
    calls: list[tuple[str, str]], results: list[tuple[str | None, str | None]]
) -> None:
    messages: list[dict[str, Any]] = [
        {
            "role": "assistant",
            "tool_calls": [{"id": own, "function": {"name": name}} for own, name in calls],
        },
        *({"role": "tool", "tool_call_id": own, "tool_name": name} for own, name in results),
    ]
    body = msgspec.convert({"model": "m", "messages": messages}, OllamaChatBody)
    try:
        _, *answers = body.history()
    except RequestError:
        assert expected(calls, results) is None
    else:
        assert [(each["tool_call_id"], each["name"]) for each in answers] == expected(
            calls, results
        )
