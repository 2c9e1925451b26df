"""Whatever a body holds, the answer is never a 500."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
CHAT = "/v1/chat/completions"
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
ids = st.lists(st.integers(0, 259), min_size=1, max_size=4)
SHARED = {
    "n": st.integers(1, 3), "temperature": real, "top_p": real, "top_k": whole, "min_p": real, "frequency_penalty": real,
    "repetition_penalty": real, "stop": words | st.lists(words, max_size=2), "stop_token_ids": ids, "ignore_eos": st.booleans(),
    "no_stop_trim": st.booleans(), "skip_special_tokens": st.booleans(), "logit_bias": st.dictionaries(st.sampled_from(["5", "x"]), real),
}  # fmt: skip
SAMPLING = SHARED | {
    "max_new_tokens": whole,
    "min_new_tokens": whole,
    "sampling_seed": st.integers(),
    "stream_interval": whole,
    "what": real,
}
OPTIONS = {
    "stream": st.booleans(),
    "rid": words,
    "priority": whole,
    "extra_key": words,
    "what": words,
}
GENERATE = OPTIONS | {
    "return_logprob": st.booleans(), "logprob_start_len": whole, "top_logprobs_num": whole, "token_ids_logprob": ids,
    "return_text_in_logprobs": st.booleans(), "image_data": words,
}  # fmt: skip
OPENAI = SHARED | OPTIONS | {
    "max_tokens": whole, "min_tokens": whole, "seed": st.integers(), "model": words, "echo": st.booleans(),
    "logprobs": st.booleans() | whole, "top_logprobs": whole, "stream_options": st.just({"include_usage": True}),
    "reasoning_effort": words, "tools": st.lists(words, max_size=1),
    "chat_template_kwargs": st.dictionaries(words, words, max_size=2), "continue_final_message": st.booleans(),
}  # fmt: skip


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


content = (
    words
    | words
    | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": words}), max_size=2)
    | anything
)
role = st.sampled_from(["user", "assistant", "system"])
messages = st.lists(st.fixed_dictionaries({"role": role, "content": content}), max_size=3)
generate_body = st.builds(
    lambda base, more, params: base | more | params,
    st.fixed_dictionaries({"text": words | st.lists(words, max_size=2)})
    | st.fixed_dictionaries({"input_ids": ids | st.lists(ids, max_size=2)}),
    some(GENERATE),
    st.fixed_dictionaries({"sampling_params": some(SAMPLING)}) | st.just({}),
)
openai_body = st.builds(
    lambda base, more: base | more,
    st.fixed_dictionaries(
        {"messages": messages, "prompt": words | ids | st.lists(words, max_size=2)}
    ),
    some(OPENAI),
)


Calls = list[tuple[str, dict[str, Any]]]
some_calls: st.SearchStrategy[Calls] = st.lists(
    st.tuples(st.just("/generate"), generate_body)
    | st.tuples(st.sampled_from([CHAT, "/v1/completions"]), openai_body),
    min_size=4,
    max_size=8,
)


@settings(max_examples=20, derandomize=True, suppress_health_check=list(HealthCheck))
@given(some_calls)
def test_no_body_is_answered_with_500(serve: Serve, calls: Calls) -> None:
    check(serve, calls)


@pytest.mark.full
@settings(max_examples=80, derandomize=True, suppress_health_check=list(HealthCheck))
@given(some_calls)
def test_none_of_more_bodies_is_answered_with_500(serve: Serve, calls: Calls) -> None:
    check(serve, calls)


def check(serve: Serve, calls: Calls) -> None:
    async def scenario(server: Any) -> None:
        for path, body in calls:
            response = await server.http.post(path, json=body)
            event(f"{path} {response.status_code}")  # shown by --hypothesis-show-statistics
            assert response.status_code in (200, 400), (path, body, response.text)

    serve(scenario, FakeEngine(tokens_per_event=64))
