"""The official openai client against the application with a fake engine
(docs/sglang/api.md#openai-routes)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from answers import CHAT, HI, says

from setpoint.core.messages import Finish
from setpoint.core.request import Request
from setpoint_testing.byte_tokenizer import EOS_ID, IM_END_ID
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]


def test_a_chat_answers_with_text_usage_and_finish_reason(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.openai.chat.completions.create(
            model="default", messages=HI, temperature=0
        )
        choice = answer.choices[0]
        assert (choice.message.content, choice.message.role, choice.finish_reason) == (
            "Hello, Ümit 🙂",
            "assistant",
            "stop",
        )
        prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        num_prompt = len(server.service.answering.text.tokenizer.encode(prompt))
        num_outputs = len("Hello, Ümit 🙂".encode()) + 1
        assert answer.usage.model_dump(
            include={"prompt_tokens", "completion_tokens", "total_tokens"}
        ) == {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_outputs,
            "total_tokens": num_prompt + num_outputs,
        }
        request: Request = server.engine.submitted[0]
        assert request.sampling.max_new_tokens is None
        assert answer.id == request.rid
        assert answer.model_dump()["metadata"] == {"weight_version": "default"}
        assert choice.model_extra["matched_stop"] == EOS_ID
        assert choice.message.model_extra["reasoning_content"] is None
        assert choice.message.model_extra["reasoning"] is None

    serve(scenario, says("Hello, Ümit 🙂"))


def test_a_chat_streams_role_deltas_finish_and_usage(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        stream = await server.openai.chat.completions.create(
            model="m", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[0].choices[0].delta.content == ""
        deltas = [chunk.choices[0].delta.content or "" for chunk in chunks[1:-2]]
        assert deltas == ["a", "ü", "🙂", "z"], "one delta per character, none splits one"
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-2]] == [None] * (
            len(chunks) - 2
        )
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-2].choices[0].model_extra["matched_stop"] == EOS_ID
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == len("aü🙂z".encode()) + 1
        assert server.engine.submitted[0].options.stream

    serve(scenario, says("aü🙂z"))


def test_continuous_usage_counts_up(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        stream = await server.openai.chat.completions.create(
            model="m",
            messages=HI,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
        counts = [chunk.usage.completion_tokens async for chunk in stream]
        assert counts == sorted(counts)
        assert counts[-1] == 4

    serve(scenario, says("abc"))


def test_the_stream_ends_with_done(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post(CHAT, json={"messages": HI, "stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in response.headers
        lines = response.text.strip().split("\n\n")
        assert lines[-1] == "data: [DONE]"
        assert all(
            json.loads(line.removeprefix("data: "))["object"] == "chat.completion.chunk"
            for line in lines[:-1]
        )

    serve(scenario, says("abc"))


def test_n_samples_have_their_own_indices_and_seeds(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.openai.chat.completions.create(model="m", messages=HI, n=3, seed=7)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [request.seed for request in server.engine.submitted] == [7, 8, 9]
        assert len({request.rid for request in server.engine.submitted}) == 3
        assert answer.usage.prompt_tokens == len(server.engine.submitted[0].prompt())
        assert answer.usage.completion_tokens == 9
        stream = await server.openai.chat.completions.create(
            model="m", messages=HI, n=2, stream=True
        )
        texts = {0: "", 1: ""}
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == {0: "ok", 1: "ok"}

    serve(scenario, says("ok"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
def test_a_stop_string_ends_the_answer_at_its_token(
    serve: Serve, stream: bool, tokens_per_event: int
) -> None:
    async def scenario(server: Any) -> None:
        arguments = {"model": "m", "messages": HI, "stop": ["STOP", "never"]}
        if stream:
            chunks = [
                c
                async for c in await server.openai.chat.completions.create(
                    **arguments, stream=True, stream_options={"include_usage": True}
                )
            ]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
            finish, matched = (
                chunks[-2].choices[0].finish_reason,
                chunks[-2].choices[0].model_extra["matched_stop"],
            )
            usage = chunks[-1].usage
        else:
            answer = await server.openai.chat.completions.create(**arguments)
            text, usage, choice = answer.choices[0].message.content, answer.usage, answer.choices[0]
            finish, matched = choice.finish_reason, choice.model_extra["matched_stop"]
        assert (text, finish, matched) == ("one ST two ", "stop", "STOP")
        assert usage.completion_tokens == len("one ST two STOP")

    serve(scenario, says("one ST two STOP three", tokens_per_event=tokens_per_event))


def test_a_stop_string_frees_the_engine(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        await server.openai.chat.completions.create(
            model="m", messages=HI, stop="c", max_tokens=100
        )
        assert server.engine.stopped == [server.engine.submitted[0].rid]

    serve(scenario, FakeEngine(script=lambda request: list(b"abcdef")))


def test_chat_logprobs_have_openai_shape(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.openai.chat.completions.create(
            model="m", messages=HI, logprobs=True, top_logprobs=2
        )
        content = answer.choices[0].logprobs.content
        assert [entry.token for entry in content] == ["h", "i", "<|eos|>"]
        assert content[0].logprob == -0.5
        assert [(top.token, top.logprob, top.bytes) for top in content[0].top_logprobs] == [
            ("h", -0.5, [104]),
            ("i", -1.0, [105]),
        ]
        stream = await server.openai.chat.completions.create(
            model="m", messages=HI, logprobs=True, stream=True
        )
        seen = [
            c.choices[0].logprobs.content[0].token async for c in stream if c.choices[0].logprobs
        ]
        assert seen == ["h", "i", "<|eos|>"]

    serve(scenario, says("hi"))


def test_completions_take_text_lists_and_ids(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        create = server.openai.completions.create
        assert (await create(model="m", prompt="xyz")).choices[0].text == "ok"
        assert server.engine.submitted[-1].sampling.max_new_tokens == 16
        assert len((await create(model="m", prompt=["a", "bc"])).choices) == 2
        assert (await create(model="m", prompt=[1, 2, 3])).usage.prompt_tokens == 3
        answer = await create(model="m", prompt=[[1, 2], [3]], n=2)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage.prompt_tokens == 3
        assert [request.prompt().tolist() for request in server.engine.submitted[-4:]] == [
            [1, 2],
            [1, 2],
            [3],
            [3],
        ]

    serve(scenario, says("ok"))


def test_completions_echo_with_logprobs(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        create = server.openai.completions.create
        answer = await create(model="m", prompt="ab", echo=True, logprobs=1, max_tokens=1)
        choice = answer.choices[0]
        assert choice.text == "abo"
        assert choice.logprobs.tokens == ["a", "b", "o"]
        assert choice.logprobs.token_logprobs == [None, -0.5, -0.5]
        assert choice.logprobs.top_logprobs == [None, {"b": -0.5}, {"o": -0.5}]
        assert choice.logprobs.text_offset == [0, 1, 2]
        chunks = [
            c
            async for c in await create(
                model="m", prompt="ab", echo=True, logprobs=1, max_tokens=1, stream=True
            )
        ]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "abo"
        offsets = [
            offset
            for chunk in chunks
            if chunk.choices[0].logprobs
            for offset in chunk.choices[0].logprobs.text_offset
        ]
        assert offsets == [0, 1, 2]
        only_prompt = await create(model="m", prompt="ab", echo=True, max_tokens=0)
        assert (only_prompt.choices[0].text, only_prompt.choices[0].finish_reason) == (
            "ab",
            "length",
        )

    serve(scenario, says("ok"))


@pytest.mark.parametrize(
    ("skip", "text", "offsets"),
    [
        (True, "aéüok", [0, 1, 1, 1, 2, 2, 3, 3, 4]),
        (False, "aéü<|im_end|>ok", [0, 1, 1, 1, 2, 2, 3, 13, 14]),
    ],
)
def test_text_offsets_are_those_of_the_text_that_is_shown(
    serve: Serve, skip: bool, text: str, offsets: list[int]
) -> None:
    outputs = [*"ü".encode(), IM_END_ID, *b"ok"]

    async def scenario(server: Any) -> None:
        create = server.openai.completions.create
        body = {
            "model": "m",
            "prompt": "a<|im_end|>é",
            "echo": True,
            "logprobs": 0,
            "max_tokens": 5,
        }
        choice = (await create(**body, extra_body={"skip_special_tokens": skip})).choices[0]
        assert (choice.text, choice.logprobs.text_offset) == (text, offsets)
        chunks = [
            c
            async for c in await create(
                **body, stream=True, extra_body={"skip_special_tokens": skip}
            )
        ]
        assert [
            offset
            for c in chunks
            if c.choices[0].logprobs
            for offset in c.choices[0].logprobs.text_offset
        ] == offsets

    serve(scenario, FakeEngine(script=lambda request: outputs))


def test_aborts_carry_their_status(serve: Serve) -> None:
    full = Finish(
        "abort",
        message="The request queue is full.",
        status_code=503,
        err_type="ServiceUnavailable",
    )

    async def scenario(server: Any) -> None:
        with pytest.raises(openai.InternalServerError) as caught:
            await server.openai.chat.completions.create(model="m", messages=HI)
        assert caught.value.status_code == 503
        assert "queue is full" in caught.value.message
        response = await server.http.post(CHAT, json={"messages": HI, "stream": True})
        assert response.status_code == 503, "an error before the first chunk has its own status"

    serve(scenario, FakeEngine(refuse=lambda request: full))


def test_an_abort_in_mid_stream_is_an_error_chunk(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        server.engine.refuse = lambda request: (
            Finish("abort", message="boom", status_code=500)
            if server.engine.running[0].num_sent == 2
            else None
        )
        response = await server.http.post(CHAT, json={"messages": HI, "stream": True})
        *_, error, done = response.text.strip().split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(error.removeprefix("data: "))["error"] == {
            "message": "boom", "type": "server_error", "param": None, "code": None,
        }  # fmt: skip

    serve(scenario, says("abcdef"))


def test_models(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        models = [model async for model in server.openai.models.list()]
        assert [(model.id, model.model_extra["max_model_len"]) for model in models] == [
            ("org/tiny", 256)
        ]
        assert (await server.openai.models.retrieve("org/tiny")).id == "org/tiny"
        response = await server.http.get("/v1/models/org/other")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"

    serve(scenario)


def test_a_pool_below_the_context_is_what_models_and_routes_name(serve: Serve) -> None:
    """Red before: 256, of which 56 have no room."""

    async def scenario(server: Any) -> None:
        async def get(path: str, **headers: str) -> Any:
            return (await server.http.get(path, headers=headers)).json()

        assert (await get("/v1/models"))["data"][0]["max_model_len"] == 200
        told = await get("/v1/models", **{"anthropic-version": "2023-06-01"})
        assert told["data"][0]["max_tokens"] == 200
        tokenized = await server.http.post("/tokenize", json={"prompt": "a"})
        assert tokenized.json()["max_model_len"] == 200
        shown = await server.http.post("/api/show", json={"model": "default"})
        assert shown.json()["parameters"] == "num_ctx 200"

    serve(scenario, pool_tokens=200)


def test_streams_end_with_usage_by_default_if_the_server_says_so(serve: Serve) -> None:
    async def usage_chunks(server: Any, **options: Any) -> int:
        stream = await server.openai.chat.completions.create(
            model="m", messages=HI, stream=True, **options
        )
        return sum([chunk.usage is not None async for chunk in stream])

    async def scenario(server: Any) -> None:
        assert await usage_chunks(server) == 1
        assert await usage_chunks(server, stream_options={"include_usage": False}) == 0

    async def plain(server: Any) -> None:
        assert await usage_chunks(server) == 0

    serve(scenario, says("ok"), stream_include_usage=True)
    serve(plain, says("ok"))


def test_cache_report(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.openai.chat.completions.create(model="m", messages=HI)
        assert answer.usage.prompt_tokens_details.cached_tokens == 12

    serve(scenario, says("ok", num_cached=12), enable_cache_report=True)
