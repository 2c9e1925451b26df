"""Whatever a body of Anthropic's, Ollama's or the scoring routes holds, the answer is never a
500."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from test_any_input import anything, real, some, whole, words

from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]

schema = st.just({"type": "object"}) | anything
call = {"id": words, "name": words, "input": st.just({}) | anything}
block = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": words}),
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": words}),
    st.fixed_dictionaries({"type": st.just("tool_use"), **call}),
    st.fixed_dictionaries(
        {"type": st.just("tool_result"), "tool_use_id": words, "content": words | anything}
    ),
    anything,
)
role = st.sampled_from(["user", "assistant", "system", "tool"])
turn = st.fixed_dictionaries({"role": role, "content": words | st.lists(block, max_size=3)})
tool = st.fixed_dictionaries({"name": words, "input_schema": schema})
ANTHROPIC = {
    "system": words | st.lists(block, max_size=2),
    "stop_sequences": st.lists(words, max_size=2),
    "temperature": real,
    "top_p": real,
    "top_k": whole,
    "stream": st.booleans(),
    "tools": st.lists(tool, max_size=2),
    "tool_choice": st.fixed_dictionaries(
        {"type": st.sampled_from(["auto", "any", "tool", "none"]), "name": words}
    ),
    "thinking": st.fixed_dictionaries({"type": words, "budget_tokens": whole}),
    "output_config": st.fixed_dictionaries({"effort": words}),
    "metadata": st.fixed_dictionaries({"user_id": words}),
    "what": words,
}
anthropic_body = st.builds(
    lambda base, more: base | more,
    st.fixed_dictionaries(
        {"model": words, "max_tokens": whole, "messages": st.lists(turn, max_size=3)}
    ),
    some(ANTHROPIC),
)

OPTIONS = {
    "num_predict": whole,
    "num_ctx": whole,
    "seed": st.integers(),
    "stop": words | st.lists(words, max_size=2),
    "temperature": real,
    "top_k": whole,
    "top_p": real,
    "repeat_penalty": real,
    "mirostat": whole,
    "what": words,
}
said = st.fixed_dictionaries(
    {"role": role, "content": words},
    optional={
        "thinking": words,
        "tool_calls": st.lists(
            st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": words})}), max_size=2
        ),
        "tool_name": words,
        "images": st.lists(words, max_size=1),
    },
)
OLLAMA = {
    "options": some(OPTIONS),
    "stream": st.booleans(),
    "format": st.sampled_from(["", "json", "xml"]) | anything,
    "think": st.booleans() | words,
    "raw": st.booleans(),
    "system": words,
    "keep_alive": words | whole,
    "logprobs": st.booleans(),
    "top_logprobs": whole,
    "input": words | st.lists(words, max_size=2),
    "what": words,
}
ollama_body = st.builds(
    lambda base, more: base | more,
    st.fixed_dictionaries(
        {"model": words, "prompt": words, "messages": st.lists(said, max_size=3)}
    ),
    some(OLLAMA),
)

SCORING = {
    "items": words | st.lists(words | st.lists(whole, max_size=2), max_size=2),
    "label_token_ids": st.lists(whole, max_size=3),
    "apply_softmax": st.booleans(),
    "item_first": st.booleans(),
    "documents": st.lists(words, max_size=2),
    "top_n": whole,
    "instruct": words,
}
scoring_body = st.builds(
    lambda base, more: base | more,
    st.fixed_dictionaries(
        {
            "query": words | st.lists(whole, max_size=2),
            "items": st.lists(words, max_size=2),
            "label_token_ids": st.lists(whole, max_size=3),
        }
    ),
    some(SCORING),
)


@settings(max_examples=20, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.sampled_from(["/v1/messages", "/v1/messages/count_tokens"]), anthropic_body
            ),
            st.tuples(
                st.sampled_from(
                    ["/api/chat", "/api/generate", "/api/embed", "/api/show", "/api/pull"]
                ),
                ollama_body,
            ),
            st.tuples(st.sampled_from(["/v1/score", "/v1/rerank"]), scoring_body),
        ),
        min_size=12,
        max_size=20,
    )
)
def test_no_body_is_answered_with_500(
    serve: Serve, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    async def scenario(server: Any) -> None:
        for path, body in calls:
            response = await server.http.post(path, json=body)
            event(f"{path} {response.status_code}")  # shown by --hypothesis-show-statistics
            assert response.status_code in (200, 400), (path, body, response.text)

    serve(scenario, FakeEngine(tokens_per_event=64))
