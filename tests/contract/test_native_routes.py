"""``/generate`` and tokenization against a fake engine (docs/sglang/api.md)."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from setpoint.core.messages import Finish
from setpoint.frontend.apis.sglang.sglang_logprobs import NativeLogprobs
from setpoint_testing.byte_tokenizer import EOS_ID
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]


def says(text: str, **options: Any) -> FakeEngine:
    return FakeEngine(
        script=lambda request: [*text.encode(), EOS_ID], eos_ids=frozenset({EOS_ID}), **options
    )


def chunks_of(response: Any) -> list[dict[str, Any]]:
    *events, done = response.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_one_text(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        result = await server.generate(text="abc", rid="my-id")
        meta = result["meta_info"]
        assert meta.pop("e2e_latency") > 0
        assert result == {
            "text": "ok",
            "output_ids": [*b"ok", EOS_ID],
            "meta_info": {
                "id": "my-id",
                "finish_reason": {"type": "stop", "matched": EOS_ID},
                "prompt_tokens": 3,
                "completion_tokens": 3,
                "cached_tokens": 2,
                "cached_tokens_details": {"device": 2, "host": 0},
                "reasoning_tokens": 0,
                "num_retractions": 0,
                "weight_version": "default",
                "dp_rank": None,
            },
        }
        sampling = server.engine.submitted[0].sampling
        assert (sampling.max_new_tokens, sampling.temperature) == (128, 1.0)

    serve(scenario, says("ok", num_cached=2))


def test_priority_and_routing_key_reach_the_engine(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        await server.generate(text=["a", "b"], priority=-7, routing_key="r")
        assert [
            (request.options.priority, request.options.routing_key)
            for request in server.engine.submitted
        ] == [(-7, "r")] * 2
        await server.generate(text="c")
        assert (
            server.engine.submitted[2].options.priority,
            server.engine.submitted[2].options.routing_key,
        ) == (
            None,
            "",
        )
        response = await server.http.post("/generate", json={"text": "a", "routing_key": 5})
        assert response.status_code == 400

    serve(scenario, says("ok"))


def test_length_and_put(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.put(
            "/generate", json={"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}
        )
        result = response.json()
        assert (result["output_ids"], result["meta_info"]["finish_reason"]) == (
            [1, 2],
            {"type": "length", "length": 2},
        )

    serve(scenario)


def test_a_stream_is_cumulative(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post("/generate", json={"text": "x", "stream": True})
        chunks = chunks_of(response)
        assert [chunk["text"] for chunk in chunks] == ["a", "a", "aü", "aüb", "aüb"]
        assert chunks[-1]["output_ids"] == [*"aüb".encode(), EOS_ID]
        assert [chunk["meta_info"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5]
        assert [chunk["meta_info"]["finish_reason"] is None for chunk in chunks] == [True] * 4 + [
            False
        ]
        assert "index" not in chunks[0]

    serve(scenario, says("aüb"))


def test_an_incremental_stream_has_deltas(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = {"text": "x", "stream": True, "return_logprob": True}
        chunks = chunks_of(await server.http.post("/generate", json=body))
        assert [chunk["text"] for chunk in chunks] == ["a", "b", ""]
        assert [chunk["output_ids"] for chunk in chunks] == [[97], [98], [EOS_ID]]
        assert [chunk["meta_info"]["output_token_logprobs"] for chunk in chunks] == [
            [[-0.5, i, None]] for i in (97, 98, EOS_ID)
        ]

    serve(scenario, says("ab"), incremental_streaming_output=True)


def test_a_batch_answers_in_order_and_streams_with_an_index(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        parameters = [{"max_new_tokens": 3}, {"max_new_tokens": 2, "n": 1}]
        results = await server.generate(
            text=["abc", "xy"], sampling_params=parameters, rid=["r1", "r2"]
        )
        assert [(result["text"], result["meta_info"]["id"]) for result in results] == [
            ("abc", "r1"),
            ("xy", "r2"),
        ]
        response = await server.http.post(
            "/generate",
            json={
                "input_ids": [[97], [98, 99]],
                "rid": "b",
                "stream": True,
                "sampling_params": {"max_new_tokens": 2},
            },
        )
        last = {chunk["index"]: chunk for chunk in chunks_of(response)}
        assert (last[0]["text"], last[1]["text"]) == ("aa", "bc")
        assert [last[0]["meta_info"]["id"], last[1]["meta_info"]["id"]] == ["b_0", "b_1"]

    serve(scenario)


def test_n_gives_a_list(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        results = await server.generate(
            text="ab", rid="r", sampling_params={"n": 2, "max_new_tokens": 1}
        )
        assert [result["text"] for result in results] == ["a", "a"]
        assert [request.rid for request in server.engine.submitted] == ["r_0", "r_1"]

    serve(scenario)


def test_logprobs(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = {
            "text": "abc",
            "return_logprob": True,
            "return_text_in_logprobs": True,
            "top_logprobs_num": 2,
            "token_ids_logprob": [5, 6],
        }
        meta = (
            await server.generate(
                **body, logprob_start_len=1, sampling_params={"max_new_tokens": 1}
            )
        )["meta_info"]
        assert meta["input_token_logprobs"] == [[None, 98, "b"], [-0.5, 99, "c"]]
        assert meta["output_token_logprobs"] == [[-0.5, 97, "a"]]
        assert meta["output_token_logprobs_length"] == 1
        assert meta["input_top_logprobs"] == [None, [[-0.5, 99, "c"], [-1.0, 100, "d"]]]
        assert meta["output_top_logprobs"] == [[[-0.5, 97, "a"], [-1.0, 98, "b"]]]
        assert meta["input_token_ids_logprobs"][1] == [[-5.0, 5, "\x05"], [-6.0, 6, "\x06"]]
        assert meta["output_token_ids_logprobs"] == [[[-5.0, 5, "\x05"], [-6.0, 6, "\x06"]]]
        plain = (
            await server.generate(
                text="abc", return_logprob=True, sampling_params={"max_new_tokens": 1}
            )
        )["meta_info"]
        assert plain["output_token_logprobs"] == [[-0.5, 97, None]]
        assert plain["input_token_logprobs"] == []
        assert (
            not {
                "input_top_logprobs",
                "output_top_logprobs",
                "input_token_ids_logprobs",
                "output_token_ids_logprobs",
            }
            & plain.keys()
        )
        for nothing in ({}, {"logprob_start_len": 3}):  # not given, or the end of the prompt
            meta = (
                await server.generate(**body, **nothing, sampling_params={"max_new_tokens": 1})
            )["meta_info"]
            assert [
                meta[f"input_{name}"]
                for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs")
            ] == [[], [], []]
            assert meta["output_token_logprobs"] == [[-0.5, 97, "a"]]
        none = (await server.generate(text="abc", sampling_params={"max_new_tokens": 1}))[
            "meta_info"
        ]
        assert "output_token_logprobs" not in none

    serve(scenario)


def test_unknown_top_level_keys_are_ignored_but_logged(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(server: Any) -> None:
        await server.generate(text="x", surprising_key_1=1)
        await server.generate(text="x", surprising_key_1=1)

    serve(scenario)
    assert [
        record.message for record in caplog.records if "surprising_key_1" in record.message
    ] == ["Ignored the unknown key 'surprising_key_1' of /generate (logged once per key)."]


def test_a_rid_in_use_is_refused_and_the_first_goes_on(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        server.engine.max_running = 0  # nothing goes on before all has been asked
        first = asyncio.create_task(
            server.generate(text="x", rid="same", sampling_params={"max_new_tokens": 10})
        )
        while not server.engine.running:
            await asyncio.sleep(0)
        response = await server.http.post("/generate", json={"text": "y", "rid": "same"})
        assert response.status_code == 400
        assert "Duplicate request ID" in response.json()["error"]["message"]
        batch = await server.http.post(
            "/generate", json={"text": ["y", "z"], "rid": ["other", "same"]}
        )
        assert batch.status_code == 400
        server.engine.max_running = 10
        assert (await first)["text"] == "x" * 10
        assert await server.generate(text="x", rid="same")

    serve(scenario)


def test_abort_by_prefix(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        server.engine.max_running = 0
        tasks = [
            asyncio.create_task(server.generate(text="x", rid=rid))
            for rid in ("job-1", "job-2", "other")
        ]
        while len(server.engine.running) < 3:
            await asyncio.sleep(0)
        for body in ({"rid": ""}, {"rid": "job"}):
            response = await server.http.post("/abort_request", json=body)
            assert (response.status_code, response.content) == (200, b"")
        server.engine.max_running = 10
        results = await asyncio.gather(*tasks)
        assert [result["meta_info"]["finish_reason"]["type"] for result in results] == [
            "abort",
            "abort",
            "length",
        ]
        assert server.service.events.book.num_aborted == 2

    serve(scenario, says("x" * 200))


def test_aborts_with_a_status_become_that_status(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post("/generate", json={"text": "x"})
        error = {
            "message": "The request queue is full.",
            "type": "ServiceUnavailableError",
            "param": None,
        }
        assert (response.status_code, response.json()) == (
            503,
            {"object": "error", **error, "code": 503, "error": {**error, "code": None}},
        )
        server.engine.refuse = lambda request: Finish("abort", message="too long", status_code=400)
        response = await server.http.post("/generate", json={"text": "x"})
        assert (response.status_code, response.json()["error"]["message"]) == (400, "too long")

    serve(
        scenario,
        FakeEngine(
            refuse=lambda request: Finish(
                "abort", message="The request queue is full.", status_code=503
            )
        ),
    )


def test_an_answer_with_many_logprobs_is_made_beside_the_event_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers: list[str] = []
    of_prompt = NativeLogprobs.of_prompt

    def noted(self: NativeLogprobs, *arguments: Any) -> dict[str, Any]:
        makers.append(threading.current_thread().name)
        return of_prompt(self, *arguments)

    monkeypatch.setattr(NativeLogprobs, "of_prompt", noted)

    async def scenario(server: Any) -> None:
        body = {
            "text": "a" * 100,
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        for top, thread in ((5, "MainThread"), (200, "bodies_0")):
            many = {**body, "top_logprobs_num": top}
            whole = await server.generate(**many)
            assert [
                len(position or []) for position in whole["meta_info"]["input_top_logprobs"]
            ] == [0] + [top] * 99
            last = (await server.http.post("/generate", json={**many, "stream": True})).text.split(
                "\n\n"
            )[-3]
            same = json.loads(last.removeprefix("data: "))["meta_info"]
            assert same["input_top_logprobs"] == whole["meta_info"]["input_top_logprobs"]
            assert set(makers) == {thread}
            makers.clear()

    serve(scenario)


def test_preferred_sampling_is_what_a_native_request_leaves_out(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        await server.generate(text="a", sampling_params={"top_p": 0.5})
        await server.generate(text=["a", "b"], sampling_params=[{"max_new_tokens": 2}, {}])
        await server.openai.completions.create(model="m", prompt="a")
        sampled = [request.sampling for request in server.engine.submitted]
        assert [(each.max_new_tokens, each.top_p) for each in sampled] == [
            (3, 0.5),
            (2, 0.9),
            (3, 0.9),
            (16, 1.0),
        ]
        info = (await server.http.get("/model_info")).json()
        assert info["preferred_sampling_params"] == {"max_new_tokens": 3, "top_p": 0.9}

    serve(scenario, preferred_sampling={"max_new_tokens": 3, "top_p": 0.9})


def test_an_output_that_begins_in_the_reasoning(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.generate(text="a", require_reasoning=True)
        assert answer["meta_info"]["reasoning_tokens"] == len("hm</think>")
        assert (await server.generate(text="a"))["meta_info"]["reasoning_tokens"] == 0
        body = {"text": "a", "require_reasoning": True, "sampling_params": {"regex": "a"}}
        response = await server.http.post("/generate", json=body)
        assert response.status_code == 400
        assert "can write '</think>' in different tokens" in response.json()["message"]

    script = [*b"hm</think>ok", EOS_ID]
    engine = FakeEngine(script=lambda request: script, eos_ids=frozenset({EOS_ID}))
    serve(scenario, engine, reasoning_parser="deepseek-r1")


def test_reasoning_without_a_format_of_it_is_refused(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post(
            "/generate", json={"text": "a", "require_reasoning": True}
        )
        assert response.status_code == 400
        assert "--reasoning-parser" in response.json()["message"]

    serve(scenario)
