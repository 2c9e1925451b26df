"""Fields of OpenAI's bodies: what reaches the engine, what the template is given, what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import openai
import pytest
from answers import CHAT, HI, says

from setpoint.core.request import Request

Serve = Callable[..., None]


def test_every_sampling_field_reaches_the_engine(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        extra = {
            "top_k": 5,
            "min_p": 0.1,
            "min_tokens": 1,
            "repetition_penalty": 1.1,
            "stop_token_ids": [9],
            "ignore_eos": True,
        }
        extra |= {
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "priority": 3,
            "extra_key": "k",
            "cache_salt": "s",
            "rid": "mine",
        }
        extra |= {"routing_key": "r"}
        await server.openai.chat.completions.create(
            model="m", messages=HI, max_completion_tokens=4, temperature=0.3, top_p=0.8, frequency_penalty=0.1, presence_penalty=0.2,
            logit_bias={"5": 1.5}, seed=11, stop="zz", extra_body=extra,
        )  # fmt: skip
        request: Request = server.engine.submitted[0]
        sampling = request.sampling
        assert (
            sampling.max_new_tokens,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.min_p,
        ) == (4, 0.3, 0.8, 5, 0.1)
        assert (
            sampling.frequency_penalty,
            sampling.presence_penalty,
            sampling.repetition_penalty,
        ) == (0.1, 0.2, 1.1)
        assert (
            sampling.min_new_tokens,
            sampling.stop_token_ids,
            sampling.ignore_eos,
            sampling.no_stop_trim,
        ) == (1, (9,), True, True)
        assert (sampling.skip_special_tokens, sampling.logit_bias) == (False, ((5, 1.5),))
        assert (request.seed, sampling.stop) == (11, ("zz",))
        assert (
            request.options.priority,
            request.options.namespace,
            request.rid,
            request.options.routing_key,
        ) == (
            3,
            "1:ks",
            "mine",
            "r",
        )

    serve(scenario, says("ok"))


def test_generation_config_gives_defaults_that_requests_override(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        await server.openai.chat.completions.create(model="m", messages=HI)
        await server.openai.completions.create(model="m", prompt="a", temperature=0.1)
        await server.generate(text="a")
        temperatures = [request.sampling.temperature for request in server.engine.submitted]
        assert temperatures == [0.6, 0.1, 1.0], "native requests do not take them"
        assert server.engine.submitted[0].sampling.top_k == 20

    serve(scenario, says("ok"), sampling_defaults={"temperature": 0.6, "top_k": 20})


def test_template_inputs(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        async def prompt_of(**arguments: Any) -> str:
            await server.openai.chat.completions.create(model="m", **arguments)
            return server.service.answering.text.tokenizer.decode(
                server.engine.submitted[-1].prompt().tolist(), skip_special_tokens=False
            )

        parts = [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            }
        ]
        assert (
            await prompt_of(messages=parts)
            == "<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n"
        )
        started = [*HI, {"role": "assistant", "content": "Sure, "}]
        continued = await prompt_of(messages=started, extra_body={"continue_final_message": True})
        assert continued.endswith("<|im_start|>assistant\nSure, ")
        bare = await prompt_of(
            messages=HI, extra_body={"chat_template_kwargs": {"add_generation_prompt": False}}
        )
        assert bare.endswith("hi<|im_end|>\n")

    serve(scenario, says("ok"))


def test_default_variables_of_the_template_hold_unless_the_request_sets_them(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for own in ({}, {"add_generation_prompt": True}):
            extra = {"chat_template_kwargs": own}
            await server.openai.chat.completions.create(model="m", messages=HI, extra_body=extra)
        without, generating = (len(each.prompt()) for each in server.engine.submitted)
        assert without < generating

    serve(scenario, says("ok"), chat_template_kwargs={"add_generation_prompt": False})


@pytest.mark.cases(20)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "a b"}}]),
        ("tools", [{"type": "function", "function": {"name": "f"}}] * 2),
        ("tool_choice", "required"),
        ("tool_choice", "any"),
        ("tool_choice", 5),
        ("tool_choice", {"type": "function"}),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("response_format", {}),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": 5}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": "{}"}}),
        ("audio", {"voice": "alloy"}),
        ("web_search_options", {"a": 1}),
        ("stop_regex", "a("),
        ("lora_path", "x"),
        ("modalities", ["text", "audio"]),
        ("return_hidden_states", True),
        ("top_logprobs", 21),
        ("top_logprobs", 1),
        ("stream_options", {"include_usage": True}),
        ("messages", []),
        (
            "messages",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        ),
        ("messages", [{"content": "no role"}]),
        ("messages", [{"role": "tool", "content": "x", "tool_call_id": "1"}]),
        ("max_tokens", -1),
        ("max_tokens", 10**30),
        ("top_k", 10**30),
        ("temperature", -0.5),
        ("n", 0),
        ("n", 10**9),
        ("seed", 2**70),
        ("stop", ["x"] * 300),
        ("logit_bias", {"260": 1.0}),
        ("priority", 2**70),
        ("rid", ""),
        ("model", "base:adapter"),
    ],
)
def test_what_cannot_be_honoured_is_a_400(serve: Serve, field: str, value: Any) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post(CHAT, json={"messages": HI, field: value})
        assert response.status_code == 400, response.text
        error = response.json()
        assert (error["object"], error["code"]) == ("error", 400)
        assert error["type"] == "invalid_request_error"
        with pytest.raises(openai.BadRequestError, match=re.escape(error["message"])):
            await server.openai.chat.completions.create(
                model="m", messages=HI, extra_body={field: value}
            )
        assert server.engine.submitted == []

    serve(scenario)


@pytest.mark.cases(10)
@pytest.mark.parametrize(
    "field", ["tools", "response_format", "regex", "lora_path", "stop", "logit_bias", "functions"]
)
@pytest.mark.parametrize("nothing", [None, [], "", False])
def test_an_unsupported_field_that_asks_for_nothing_is_accepted(
    serve: Serve, field: str, nothing: Any
) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post(CHAT, json={"messages": HI, field: nothing})
        typed = field in ("response_format", "regex", "stop", "logit_bias", "tools")
        is_list = field in ("stop", "tools") and nothing == []
        assert response.status_code == (200 if not typed or nothing is None or is_list else 400)

    serve(scenario, says("ok"))


def test_what_clients_send_without_effect_is_accepted_and_told_if_it_asks_for_more(
    serve: Serve,
) -> None:
    hints = {
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "u",
        "store": False,
        "verbosity": "medium",
        "reasoning_effort": "none",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
    }
    told = {"store": True, "verbosity": "low", "reasoning_effort": "high"}

    async def scenario(server: Any) -> None:
        for body in (hints, {**hints, **told}):
            response = await server.http.post(CHAT, json={"messages": HI, **body})
            assert response.status_code == 200, response.text
            warnings = response.json().get("warnings", [])
            for key in told:
                assert any(f"{key} has no effect" in each for each in warnings) == (
                    body is not hints
                )
        for key in ("service_tier", "verbosity", "reasoning_effort"):
            response = await server.http.post(CHAT, json={"messages": HI, key: "huge"})
            assert (response.status_code, response.json()["param"]) == (400, key)

    serve(scenario, says("ok"))
