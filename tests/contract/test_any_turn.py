"""Whatever stands in a conversation or among its tools, the answer is never a 500."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
CHAT = "/v1/chat/completions"

KEYS = ("type", "function", "name", "arguments", "parameters", "schema", "format", "mode", "tools")
atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["", "f", "{}", "[", "auto", "function", "json_schema", "text", "\0"])
)
anything = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
    ),
    max_leaves=6,
)


def nearly(fields: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """These fields, in one of three cases with one of them replaced by anything."""
    wild = st.dictionaries(st.sampled_from(sorted(fields)), anything, min_size=1, max_size=1)
    return st.builds(
        lambda mild, wild: mild | wild,
        st.fixed_dictionaries(
            {
                key: value if isinstance(value, st.SearchStrategy) else st.just(value)
                for key, value in fields.items()
            }
        ),
        st.just({}) | st.just({}) | wild,
    )


arguments = st.sampled_from(["{}", '{"a": 1}', "{", "[1]", ""]) | st.just({"a": 1})
call = nearly(
    {"id": "1", "type": "function", "function": nearly({"name": "f", "arguments": arguments})}
)
user = nearly({"role": "user", "content": "hi", "tool_calls": None})
called = nearly(
    {"role": "assistant", "content": None, "tool_calls": st.lists(call, min_size=1, max_size=2)}
)
result = nearly({"role": "tool", "tool_call_id": "1", "content": "x"})
said = nearly({"role": "assistant", "content": "a", "tool_calls": None, "reasoning_content": "b"})
messages = st.builds(
    lambda first, rest: [first, *rest], user, st.lists(called | result | said | user, max_size=3)
)
schema = st.just({"type": "object"}) | anything
tool = nearly(
    {
        "type": "function",
        "function": nearly(
            {
                "name": st.sampled_from(["f", "g"]),
                "description": "d",
                "parameters": schema,
                "strict": st.booleans(),
            }
        ),
    }
)
named = {"type": "function", "function": {"name": "f"}}
choice = st.sampled_from(["auto", "none", "required"]) | nearly(named)
allowed = nearly({"mode": "auto", "tools": [named]})
response_format = st.sampled_from([{"type": "text"}, {"type": "json_object"}]) | nearly(
    {"type": "json_schema", "json_schema": nearly({"name": "x", "schema": schema})}
)
optional = {
    "tools": st.lists(tool, max_size=2),
    "tool_choice": choice | nearly({"type": "allowed_tools", "allowed_tools": allowed}),
    "parallel_tool_calls": st.booleans(),
    "response_format": response_format,
    "regex": st.just("a+") | anything,
    "reasoning_effort": st.sampled_from(["none", "high"]),
    "separate_reasoning": st.booleans(),
    "stream_reasoning": st.booleans(),
    "continue_final_message": st.booleans(),
    "stream": st.booleans(),
}
bodies = st.builds(
    lambda history, more: {"messages": history, "max_tokens": 4, **more},
    messages,
    st.fixed_dictionaries({}, optional=optional),
)


@settings(
    max_examples=10,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # to make a failing list smaller takes minutes
)
@given(st.lists(bodies, min_size=20, max_size=30), st.sampled_from(["none", "hermes"]))
def test_no_turn_is_answered_with_500(
    serve: Serve, turns: list[dict[str, Any]], parser: str
) -> None:
    async def scenario(server: Any) -> None:
        for body in turns:
            response = await server.http.post(CHAT, json=body)
            event(f"{response.status_code}")  # shown by --hypothesis-show-statistics
            assert response.status_code in (200, 400), (body, response.text)

    engine = FakeEngine(tokens_per_event=64, context_len=4096)
    serve(scenario, engine, tool_call_parser=parser, reasoning_parser="qwen3")
