"""Stop strings and stop tokens of ``/generate``: what is cut, what is held back and what is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from setpoint.frontend.text import stop_regex
from setpoint_testing.byte_tokenizer import EOS_ID, IM_END_ID
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


@pytest.mark.parametrize("tokens_per_event", [1, 2, 50])
def test_stop_expressions_do_what_stop_strings_do(serve: Serve, tokens_per_event: int) -> None:
    async def scenario(server: Any) -> None:
        for value in (r"\nQ\d:", ["x{3}", r"\nQ\d:"]):
            sampling = {"stop_regex": value}
            result = await server.generate(text="x", sampling_params=sampling)
            assert result["text"] == "Yes.\nQ"
            assert result["output_ids"] == list(b"Yes.\nQ\nQ2:")
            finish = {"type": "stop", "matched": r"\nQ\d:"}
            assert result["meta_info"]["finish_reason"] == finish
            body = {"text": "x", "stream": True, "sampling_params": sampling}
            chunks = chunks_of(await server.http.post("/generate", json=body))
            assert chunks[-1]["text"] == "Yes.\nQ"
            assert all("Yes.\nQ".startswith(chunk["text"]) for chunk in chunks)
        kept = await server.generate(
            text="x", sampling_params={"stop_regex": r"Q\d", "no_stop_trim": True}
        )
        assert kept["text"] == "Yes.\nQ\nQ2"
        chat = await server.openai.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "x"}],
            extra_body={"stop_regex": r"\s"},
        )
        assert chat.choices[0].message.content == "Yes."
        assert chat.choices[0].model_extra["matched_stop"] == r"\s"

    serve(scenario, says("Yes.\nQ\nQ2: why", tokens_per_event=tokens_per_event))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "a(",
            "stop_regex 'a(' is not a valid expression: missing ), unterminated subpattern at position 1.",
        ),
        (["a", "b*"], "stop_regex 'b*' matches the empty text."),
        ("a(?=b)", "stop_regex 'a(?=b)' uses look-around, a reference or an atomic part."),
        (
            "a{5000}",
            "stop_regex 'a{5000}' is too complex, alone or together with the other expressions.",
        ),
        (5, "stop_regex[0] must be a string, got a whole number."),
        ("x" * 257, "An expression of stop_regex may have at most 256 bytes."),
        (["x"] * 33, "stop_regex may have at most 32 expressions, got 33."),
    ],
)
def test_a_stop_expression_that_is_not_searched_is_refused(
    serve: Serve, value: Any, message: str
) -> None:
    async def scenario(server: Any) -> None:
        body = {"text": "x", "sampling_params": {"stop_regex": value}}
        answer = await server.http.post("/generate", json=body)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
        assert server.engine.submitted == []

    serve(scenario)


def test_expressions_that_take_long_to_compile_hold_up_nobody(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_regex, "COMPILE_S", 0.0)

    async def scenario(server: Any) -> None:
        body = {"text": "x", "sampling_params": {"stop_regex": ["(?i)[a-z]", "b"]}}
        answer = await server.http.post("/generate", json=body)
        assert answer.status_code == 400
        assert "'b' was not compiled: those before it took too long" in answer.text

    serve(scenario)


@pytest.mark.parametrize("tokens_per_event", [1, 2, 50])
def test_stop_strings_cut_text_ids_and_logprobs_alike(serve: Serve, tokens_per_event: int) -> None:
    async def scenario(server: Any) -> None:
        result = await server.generate(
            text="x", return_logprob=True, sampling_params={"stop": "END"}
        )
        meta = result["meta_info"]
        assert result["text"] == "a E "
        assert result["output_ids"] == list(b"a E END")
        assert (meta["completion_tokens"], meta["output_token_logprobs_length"]) == (7, 7)
        assert meta["finish_reason"] == {"type": "stop", "matched": "END"}
        kept = await server.generate(
            text="x", sampling_params={"stop": "END", "no_stop_trim": True}
        )
        assert kept["text"] == "a E END"
        eos_ignored = await server.generate(
            text="x", sampling_params={"stop": "END", "ignore_eos": True, "max_new_tokens": 9}
        )
        assert eos_ignored["text"] == "a E "

    serve(scenario, says("a E END b", tokens_per_event=tokens_per_event))


@pytest.mark.cases(9)
@pytest.mark.parametrize("tokens_per_event", [1, 3, 50])
@pytest.mark.parametrize(
    ("params", "text", "num_ids", "matched"),
    [
        ({"stop": "<|im_end|>"}, "ok a", 5, "<|im_end|>"),
        ({"stop": ["never", "<|im_end|>"]}, "ok a", 5, "<|im_end|>"),
        ({"stop": "<|im_end|>", "no_stop_trim": True}, "ok a", 5, "<|im_end|>"),
        (
            {"stop": "<|im_end|>", "no_stop_trim": True, "skip_special_tokens": False},
            "ok a<|im_end|>",
            5,
            "<|im_end|>",
        ),
        ({"stop": "<|im_end|>", "skip_special_tokens": False}, "ok a", 5, "<|im_end|>"),
        ({"stop": "a<|im_end|>b"}, "ok ", 6, "a<|im_end|>b"),
        ({"stop": "a<|im_end|>b", "no_stop_trim": True}, "ok ab", 6, "a<|im_end|>b"),
        ({"stop": "ab"}, "ok ab c", 9, EOS_ID),  # a special token stands between the two
        ({"stop": "c<|eos|>"}, "ok ab ", 9, "c<|eos|>"),
        ({"stop": "c<|eos|>!"}, "ok ab c", 9, EOS_ID),
        ({"stop": "b c", "stop_token_ids": [ord("c")]}, "ok a", 8, "b c"),
        ({"stop": "<|eos|>", "ignore_eos": True}, "ok ab c", 9, "<|eos|>"),
    ],
)
def test_a_stop_string_may_hold_special_tokens(
    serve: Serve,
    params: dict[str, Any],
    text: str,
    num_ids: int,
    matched: int | str,
    tokens_per_event: int,
) -> None:
    ids = [*b"ok a", IM_END_ID, *b"b c", EOS_ID]

    async def scenario(server: Any) -> None:
        body = {
            "text": "x",
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": 20, **params},
        }
        result = await server.generate(**body)
        assert (result["text"], result["output_ids"]) == (text, ids[:num_ids])
        assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
        assert (
            result["meta_info"]["completion_tokens"]
            == result["meta_info"]["output_token_logprobs_length"]
            == num_ids
        )
        chunks = chunks_of(await server.http.post("/generate", json={**body, "stream": True}))
        assert all(text.startswith(chunk["text"]) for chunk in chunks)
        assert (chunks[-1]["text"], chunks[-1]["output_ids"]) == (text, ids[:num_ids])

    engine = FakeEngine(
        script=lambda request: ids, eos_ids=frozenset({EOS_ID}), tokens_per_event=tokens_per_event
    )
    serve(scenario, engine)


def test_a_held_back_tail_is_delivered_at_the_end(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        assert (await server.generate(text="x", sampling_params={"stop": "END"}))["text"] == "so EN"
        response = await server.http.post(
            "/generate", json={"text": "x", "stream": True, "sampling_params": {"stop": "END"}}
        )
        assert [chunk["text"] for chunk in chunks_of(response)] == [
            "s",
            "so",
            "so ",
            "so ",
            "so ",
            "so EN",
        ]

    serve(scenario, says("so EN"))


def test_an_unfinished_character_shows_as_replacement_at_the_end(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        assert (await server.generate(text="x", sampling_params={"max_new_tokens": 3}))[
            "text"
        ] == "a�"

    serve(scenario, says("a🙂"))


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "ok"),
        ({"skip_special_tokens": False}, "ok"),
        ({"no_stop_trim": True}, "ok"),
        ({"skip_special_tokens": False, "no_stop_trim": True}, "ok<|eos|>"),
        ({"skip_special_tokens": False, "ignore_eos": True, "max_new_tokens": 3}, "ok<|eos|>"),
    ],
)
def test_the_stop_token_is_counted_but_not_shown(
    serve: Serve, params: dict[str, Any], text: str
) -> None:
    async def scenario(server: Any) -> None:
        result = await server.generate(text="x", sampling_params=params)
        assert (result["text"], result["output_ids"]) == (text, [*b"ok", EOS_ID])

    serve(scenario, says("ok"))
