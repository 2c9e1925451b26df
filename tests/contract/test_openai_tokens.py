"""Token ids in the answers of OpenAI's routes, as clients of SGLang and vLLM ask for them, and
prompts cut to a number of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from answers import CHAT, HI, says

from setpoint.core.request import LogprobOptions
from setpoint_testing.byte_tokenizer import EOS_ID
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
TEXT = "/v1/completions"
OK = [*b"ok", EOS_ID]


def asked(route: str, **more: Any) -> dict[str, Any]:
    return {**({"messages": HI} if route == CHAT else {"prompt": "ab"}), "max_tokens": 5, **more}


async def answered(server: Any, route: str, **more: Any) -> Any:
    response = await server.http.post(route, json=asked(route, **more))
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(server: Any, route: str, **more: Any) -> list[Any]:
    response = await server.http.post(route, json=asked(route, stream=True, **more))
    *events, done = response.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def prompt_of(server: Any) -> list[int]:
    ids: list[int] = server.engine.submitted[-1].prompt().tolist()
    return ids


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_token_ids_of_a_whole_answer(serve: Serve, route: str) -> None:
    """Red before: the key was ignored, and the hint named another one."""

    async def scenario(server: Any) -> None:
        answer = await answered(server, route, return_token_ids=True, n=2)
        assert "warnings" not in answer
        for choice in answer["choices"]:
            assert choice["token_ids"] == OK
            assert choice["prompt_token_ids"] == prompt_of(server)
            assert choice.get("response_token_ids") == (OK if route == CHAT else None)
        assert answer.get("prompt_token_ids") == (prompt_of(server) if route == CHAT else None)
        only = await answered(server, route, return_prompt_token_ids=True)
        assert only["choices"][0]["prompt_token_ids"] == prompt_of(server)
        assert "token_ids" not in only["choices"][0]
        none = await answered(server, route, return_token_ids=False)
        assert "prompt_token_ids" not in none["choices"][0]
        assert "prompt_token_ids" not in none

    serve(scenario, says("ok"))


@pytest.mark.parametrize("tokens_per_event", [1, 3])
@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_token_ids_of_a_stream(serve: Serve, route: str, tokens_per_event: int) -> None:
    async def scenario(server: Any) -> None:
        chunks = await streamed(server, route, return_token_ids=True, n=2)
        for index in range(2):
            choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]  # fmt: skip
            assert [token for each in choices for token in each.get("token_ids", [])] == OK
            assert [each["prompt_token_ids"] for each in choices if "prompt_token_ids" in each] == [prompt_of(server)]  # fmt: skip
            assert "prompt_token_ids" in choices[0]
        first, *others = chunks
        assert first.get("prompt_token_ids") == (prompt_of(server) if route == CHAT else None)
        assert not any("prompt_token_ids" in chunk for chunk in others)
        plain = await streamed(server, route)
        assert "token_ids" not in json.dumps(plain)

    serve(scenario, says("ok", tokens_per_event=tokens_per_event))


def test_tokens_without_text_are_streamed_too(serve: Serve) -> None:
    """Half a character and the first half of a marker have no text yet, but they have ids."""

    async def scenario(server: Any) -> None:
        for route in (CHAT, TEXT):
            body = {"return_token_ids": True, "max_tokens": 40}
            if route == CHAT:
                tool = {"type": "function", "function": {"name": "f"}}
                body["tools"] = [tool]
            chunks = await streamed(server, route, **body)
            ids = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", [])]  # fmt: skip
            assert ids == [*text.encode(), EOS_ID]
            assert all(len(choice.get("token_ids", [])) <= 1 for chunk in chunks for choice in chunk["choices"])  # fmt: skip

    text = "é<tool_ but not"
    serve(scenario, says(text, context_len=2048), tool_call_parser="hermes")


def test_generate_returns_the_prompt(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.generate(text="ab", return_prompt_token_ids=True)
        assert answer["prompt_token_ids"] == [97, 98]
        many = await server.generate(text=["a", "b"], return_prompt_token_ids=True)
        assert [each["prompt_token_ids"] for each in many] == [[97], [98]]
        assert "prompt_token_ids" not in await server.generate(text="ab")

    serve(scenario, says("ok"))


def test_tokens_as_ids_in_logprobs(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = {"return_tokens_as_token_ids": True, "logprobs": 2, "echo": True}
        whole = (await answered(server, TEXT, **body))["choices"][0]["logprobs"]
        assert whole["tokens"] == [f"token_id:{token}" for token in [97, 98, *OK]]
        assert all(key.startswith("token_id:") for top in whole["top_logprobs"][1:] for key in top)
        assert whole["text_offset"] == [0, 1, 2, 3, 4]
        body = {"return_tokens_as_token_ids": True, "logprobs": True, "top_logprobs": 2}
        content = (await answered(server, CHAT, **body))["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in OK]
        assert content[0]["bytes"] == [ord("o")]
        assert all(top["token"].startswith("token_id:") for top in content[0]["top_logprobs"])
        chunks = await streamed(server, CHAT, **body)
        tokens = [entry["token"] for chunk in chunks for choice in chunk["choices"] for entry in (choice["logprobs"] or {"content": []})["content"]]  # fmt: skip
        assert tokens == [entry["token"] for entry in content]

    serve(scenario, says("ok"))


def test_logprobs_of_named_tokens(serve: Serve) -> None:
    """vLLM's key: the named tokens stand where the likeliest would."""

    async def scenario(server: Any) -> None:
        body = {"logprobs": True, "top_logprobs": 5, "logprob_token_ids": [120, 111]}
        content = (await answered(server, CHAT, **body))["choices"][0]["logprobs"]["content"]
        request = server.engine.submitted[-1]
        assert request.options.logprobs == LogprobOptions(ids=(120, 111))
        assert [top["token"] for top in content[0]["top_logprobs"]] == ["o", "x"]
        assert [top["token"] for top in content[1]["top_logprobs"]] == ["k", "x", "o"]
        assert content[1]["top_logprobs"][0]["logprob"] == content[1]["logprob"]
        body = {"logprobs": 0, "logprob_token_ids": [120]}
        logprobs = (await answered(server, TEXT, **body))["choices"][0]["logprobs"]
        assert [list(top) for top in logprobs["top_logprobs"][:2]] == [["o", "x"], ["k", "x"]]

    serve(scenario, says("ok"))


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_prompts_are_cut_to_a_number_of_tokens(serve: Serve, route: str) -> None:
    async def scenario(server: Any) -> None:
        await answered(server, route)
        whole = prompt_of(server)
        for more, kept in (
            ({"truncate_prompt_tokens": 2}, whole[-2:]),
            ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, whole[-2:]),
            ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, whole[:2]),
            ({"truncate_prompt_tokens": 200}, whole),
            ({"truncate_prompt_tokens": -1}, whole),
            ({"truncate_prompt_tokens": None}, whole),
        ):
            answer = await answered(server, route, **more)
            assert prompt_of(server) == kept
            assert answer["usage"]["prompt_tokens"] == len(kept)

    serve(scenario, says("ok"))


def test_a_prompt_beyond_the_context_is_cut_to_what_fits(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        text = "".join(chr(97 + index % 26) for index in range(5000))
        for prompt in (text, list(text.encode())):
            body = {"prompt": prompt, "truncate_prompt_tokens": -1, "max_tokens": 1}
            await answered(server, TEXT, **body)
            assert bytes(prompt_of(server)) == text[-250:].encode(), "the pool takes 250 tokens"
            body["truncation_side"] = "right"
            await answered(server, TEXT, **body)
            assert bytes(prompt_of(server)) == text[:250].encode()

    serve(scenario, says("ok"))


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        (TEXT, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be between -1 and 256, the context length; got -2"),
        (TEXT, {"truncate_prompt_tokens": 0}, "The prompt is empty"),
        (CHAT, {"truncate_prompt_tokens": 257}, "truncate_prompt_tokens must be between -1 and 256, the context length; got 257"),
        (TEXT, {"truncation_side": "top", "truncate_prompt_tokens": 1}, "truncation_side must"),
        (CHAT, {"logprob_token_ids": [1]}, "logprob_token_ids needs logprobs"),
        (TEXT, {"logprob_token_ids": [1]}, "logprob_token_ids needs logprobs"),
        (TEXT, {"logprob_token_ids": [1], "logprobs": 1, "echo": True}, "logprob_token_ids and echo"),
        (TEXT, {"logprob_token_ids": [999], "logprobs": 1}, "logprob_token_ids"),
        (TEXT, {"return_token_ids": "yes"}, "return_token_ids must be"),
    ],
)  # fmt: skip
def test_what_is_refused(serve: Serve, route: str, body: dict[str, Any], message: str) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post(route, json=asked(route, **body))
        assert response.status_code == 400, response.text
        assert message in response.json()["message"]

    serve(scenario, FakeEngine())


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_usage_can_be_in_every_chunk(serve: Serve, route: str) -> None:
    """vLLM's --enable-force-include-usage."""

    async def scenario(server: Any) -> None:
        for options in ({}, {"stream_options": {"include_usage": False}}):
            chunks = await streamed(server, route, **options)
            assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"]["completion_tokens"] == 3

    serve(scenario, says("ok"), stream_always_usage=True)
