"""Calls of a program on the fake engine: bounded depth, order, and nothing left running after a
failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from setpoint.core.errors import RequestError
from setpoint.core.messages import Finish
from setpoint.core.request import Request
from setpoint.frontend import feed
from setpoint.offline.program_calls import Calls
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]

TWO = {"temperature": 0, "max_new_tokens": 2}


def test_a_long_list_is_answered_in_order_behind_a_short_queue(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "LOOK_S", 0.001)
    depths: list[int] = []
    engine = FakeEngine(max_running=16)

    def watch(request: Request) -> Finish | None:
        depths.append(len(engine.running))
        return None

    engine.refuse = watch

    async def scenario(server: Any) -> None:
        calls = Calls(server.service.answering)
        prompts = [f"{index:04}" for index in range(2000)]
        answers = await calls.generate(prompts, TWO, {})
        assert [answer["text"] for answer in answers] == [prompt[:2] for prompt in prompts]
        assert feed.QUEUE_TARGET <= max(depths) <= feed.QUEUE_TARGET + 16
        depths.clear()
        samples = await calls.generate(prompts[:600], {**TWO, "n": 4}, {})
        assert len(samples) == 2400
        assert feed.QUEUE_TARGET <= max(depths) <= feed.QUEUE_TARGET + 16 + 3

    serve(scenario, engine)


@pytest.mark.parametrize(
    "bad", [{"prompt": ["fine"] * 500 + [""]}, {"input_ids": [[1]] * 500 + [[9999]]}]
)
def test_a_bad_prompt_is_named_before_anything_runs(serve: Serve, bad: dict[str, Any]) -> None:
    engine = FakeEngine()

    async def scenario(server: Any) -> None:
        calls = Calls(server.service.answering)
        prompt = bad.get("prompt")
        request = {} if prompt else bad
        with pytest.raises(RequestError, match="prompt 501 of 501: "):
            await calls.generate(prompt, TWO, request)
        with pytest.raises(RequestError, match="prompt 501 of 501: "):
            await anext(calls.stream(prompt, TWO, request))

    serve(scenario, engine)
    assert not engine.submitted


def test_a_failure_in_the_middle_names_the_prompt_and_ends_the_others(serve: Serve) -> None:
    def refuse(request: Request) -> Finish | None:
        full = request.prompt().tolist() == list(b"bad")
        return Finish("abort", message="The queue is full.", status_code=503) if full else None

    async def scenario(server: Any) -> None:
        calls = Calls(server.service.answering)
        with pytest.raises(RequestError, match=r"prompt 701 of 4701: The queue is full\.") as error:
            await calls.generate(
                [*["fine"] * 700, "bad", *["fine"] * 4000], {"max_new_tokens": 50}, {}
            )
        assert error.value.status_code == 503
        assert len(server.engine.submitted) < 4701, "the queue was short when it failed"
        one = await calls.generate("fine", TWO, {})
        assert one["text"] == "fi"

    serve(scenario, FakeEngine(refuse=refuse, step_s=0.001))


def test_what_a_conversation_must_be(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        calls = Calls(server.service.answering)
        for messages, words in (
            ([], "or a list of such lists, not an empty one"),
            ("hello", "or a list of such lists, not str"),
            ([[{"role": "user", "content": "a"}], []], "prompt 2 of 2: messages must not be empty"),
            ([{"role": "user", "content": 5}], "must be a string or a list of parts"),
            ([{"content": "a"}], r"messages\[0\].role must be one of"),
            ([{"role": "user"}], r"messages\[0\].content is missing"),
            (
                [[5]],
                r"prompt 1 of 1: messages\[0\] must be an object with role and content, got a whole number",
            ),
        ):
            with pytest.raises(RequestError, match=words):
                await calls.chat(messages, None, None, {})

    serve(scenario)


def test_keywords_that_a_call_does_not_have(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        calls = Calls(server.service.answering)
        chat = [{"role": "user", "content": "a"}]
        for call, key in (
            (calls.generate("a", TWO, {"stream": True}), "'stream'. Call stream"),
            (calls.generate("a", TWO, {"text": "b"}), "'text'"),
            (calls.generate("a", TWO, {"images": []}), "'images'"),
            (calls.chat(chat, TWO, None, {"input_ids": [1]}), "'input_ids'"),
            (calls.generate("a", TWO, {"prompts": ["a"]}), "'prompts'. Did you mean prompt"),
            (
                calls.generate("a", TWO, {"temperature": 0}),
                "'temperature'. Put it into sampling_params",
            ),
        ):
            with pytest.raises(TypeError, match=f"unexpected keyword argument {key}"):
                await call
        assert (await calls.generate("abc", TWO, {"image_data": None}))["text"] == "ab"

    serve(scenario)
