"""Whatever a body holds, the answer is never a 500."""

from __future__ import annotations

import pytest
from any_input import Calls, Serve, anything, check_answers, real, some, whole, words
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CHAT = "/v1/chat/completions"
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


CALLS = st.lists(
    st.tuples(st.just("/generate"), generate_body)
    | st.tuples(st.sampled_from([CHAT, "/v1/completions"]), openai_body),
    min_size=4,
    max_size=8,
)
EXAMPLES = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=20, **EXAMPLES)
@given(CALLS)
def test_no_body_is_answered_with_500(serve: Serve, calls: Calls) -> None:
    check_answers(serve, calls)


@pytest.mark.full
@settings(max_examples=300, **EXAMPLES)
@given(CALLS)
def test_none_of_many_bodies_is_answered_with_500(serve: Serve, calls: Calls) -> None:
    check_answers(serve, calls)
