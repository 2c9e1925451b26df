"""``/tokenize`` and ``/detokenize``: texts, and conversations as a chat renders them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from setpoint_testing.byte_tokenizer import BOS_ID, EOS_ID
from setpoint_testing.chat_templates import CHATML, QWEN2, QWEN3
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
USER = {"role": "user", "content": "hi"}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}


async def text_of(server: Any, **body: Any) -> str:
    response = await server.http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["count"] == len(answer["tokens"])
    return str(
        server.service.answering.text.tokenizer.decode(answer["tokens"], skip_special_tokens=False)
    )


def test_tokenize_and_detokenize(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        async def post(path: str, body: Any) -> Any:
            return (await server.http.post(path, json=body)).json()

        for prefix in ("", "/v1"):
            assert await post(prefix + "/tokenize", {"prompt": "aü"}) == {
                "tokens": [97, 195, 188],
                "count": 3,
                "max_model_len": 256,
            }
            assert (await post(prefix + "/tokenize", {"prompt": ["a", ""]}))["count"] == [1, 0]
            assert await post(prefix + "/detokenize", {"tokens": [97, 195, 188, EOS_ID]}) == {
                "text": "aü"
            }
            body = {"tokens": [[97], [EOS_ID]], "skip_special_tokens": False}
            assert await post(prefix + "/detokenize", body) == {"text": ["a", "<|eos|>"]}
        assert (await server.http.post("/detokenize", json={"tokens": [260]})).status_code == 400

    serve(scenario)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_a_conversation_has_the_tokens_of_its_chat(serve: Serve, path: str) -> None:
    async def scenario(server: Any) -> None:
        turn = {"messages": [USER], "tools": [TOOL], "chat_template_kwargs": {"x": 1}}
        chat = {**turn, "max_tokens": 1}
        assert (await server.http.post("/v1/chat/completions", json=chat)).status_code == 200
        (request,) = server.engine.submitted
        response = await server.http.post(path, json=turn)
        assert response.json() == {
            "tokens": request.prompt().tolist(),
            "count": len(request.prompt_ids) // 4,
            "max_model_len": 2048,
        }

    serve(scenario, FakeEngine(context_len=2048), chat_template=QWEN2)


def test_what_the_prompt_of_a_conversation_ends_with(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        whole = await text_of(server, messages=[USER])
        assert whole.endswith("<|im_start|>assistant\n")
        for told in ({"add_generation_prompt": False}, {"add_generation_prompt": True}):
            text = await text_of(server, messages=[USER], **told)
            assert text.endswith("assistant\n") is told["add_generation_prompt"]
        started = [USER, {"role": "assistant", "content": "It is"}]
        shown = await text_of(server, messages=started, add_generation_prompt=False)
        assert shown.endswith("It is<|im_end|>\n")
        for more in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": True}):
            text = await text_of(server, messages=started, continue_final_message=True, **more)
            assert text.endswith("<|im_start|>assistant\nIt is")

    serve(scenario, chat_template=CHATML)


def test_variables_and_tools_reach_the_template(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        off = {"enable_thinking": False}
        text = await text_of(server, messages=[USER], chat_template_kwargs=off)
        assert text.endswith("</think>\n\n")
        assert await text_of(server, messages=[USER], reasoning_effort="none") == text
        called = await text_of(server, messages=[USER], tools=[TOOL])
        assert '"name":"f"' in called
        assert "assistant" in await text_of(server, messages=[USER], tools=[])
        hidden = await text_of(server, messages=[USER], tools=[TOOL], tool_choice="none")
        assert '"f"' not in hidden

    serve(scenario, chat_template=QWEN3)


def test_special_tokens_are_the_templates_unless_they_are_asked_for(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        async def first(**body: Any) -> int:
            response = await server.http.post("/tokenize", json=body)
            return int(response.json()["tokens"][0])

        encode = server.service.answering.text.tokenizer.encode

        def with_bos(text: str, *, add_special_tokens: bool = True) -> Any:
            ids = encode(text, add_special_tokens=add_special_tokens)
            return np.concatenate([[BOS_ID], ids]) if add_special_tokens else ids

        server.service.answering.text.tokenizer.encode = with_bos
        assert await first(prompt="a") == BOS_ID
        assert await first(prompt="a", add_special_tokens=False) == ord("a")
        assert await first(messages=[USER]) != BOS_ID
        assert await first(messages=[USER], add_special_tokens=True) == BOS_ID

    serve(scenario)


def test_tokens_as_text(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = {"prompt": "a<|eos|>", "return_token_strs": True}
        answer = (await server.http.post("/tokenize", json=body)).json()
        assert answer["token_strs"] == ["a", "<|eos|>"]
        body = {"prompt": ["a", "b"], "return_token_strs": True}
        answer = (await server.http.post("/tokenize", json=body)).json()
        assert answer["token_strs"] == [["a"], ["b"]]

    serve(scenario)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "Exactly one of 'prompt' or 'messages' must be provided."),
        ({"prompt": "a", "messages": [USER]}, "Exactly one of 'prompt' or 'messages'"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "user"}]}, r"messages[0].content is missing"),
        ({"messages": [USER], "tools": [{"type": "x"}]}, "tools[0]"),
        ({"messages": [USER], "tool_choice": "required"}, "but tools is empty"),
        ({"messages": [USER], "chat_template": "x"}, "chat_template is not supported"),
    ],
)
def test_what_cannot_be_tokenized_is_refused(
    serve: Serve, body: dict[str, Any], reason: str
) -> None:
    async def scenario(server: Any) -> None:
        for path in ("/tokenize", "/v1/tokenize"):
            response = await server.http.post(path, json=body)
            assert response.status_code == 400
            assert reason in response.json()["message"]

    serve(scenario)


def test_the_tokenizer_tells_of_itself(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        bos = {"content": "<s>", "lstrip": False, "normalized": False}
        config = {"bos_token": bos, "added_tokens_decoder": {"0": bos}, "model_max_length": 5}
        server.service.answering.text.tokenizer.config = config
        answer = (await server.http.get("/tokenizer_info")).json()
        assert answer == {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "added_tokens_decoder": {"0": "<s>"},
            "model_max_length": 5,
            "chat_template": CHATML,
        }

    serve(scenario, chat_template=CHATML)
