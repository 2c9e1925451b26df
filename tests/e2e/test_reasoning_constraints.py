"""A schema for the answer of a model that reasons: the constraint begins where the reasoning ends,
on a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from tokenizers import AddedToken

from setpoint_testing.byte_tokenizer import BOS_ID, CHAT_TEMPLATE, EOS_ID, make_byte_tokenizer
from setpoint_testing.server_process import ServerProcess, running_server
from setpoint_testing.tiny_models import write_tiny_llama

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SWITCH = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
END_BIAS = 4.0
"""Makes the end of the reasoning likely, which a random model would hardly ever write; the end of
the output comes when nothing else is allowed."""


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, int]]:
    """A server of a random model over bytes that knows <think> and </think>, and the latter's
    id."""
    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in ("<think>", "</think>")])
    folder = write_tiny_llama(
        tmp_path_factory.mktemp("thinker"),
        vocab_size=tokenizer.get_vocab_size(),
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        max_position_embeddings=4096,
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|eos|>", "chat_template": CHAT_TEMPLATE + SWITCH}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    arguments = ("--model-path", str(folder), "--dtype", "float32")
    with running_server(tmp_path_factory.mktemp("server"), *arguments) as server:
        yield server, tokenizer.token_to_id("</think>")


def ask(thinker: tuple[ServerProcess, int], *, stream: bool, **extra: Any) -> Any:
    server, end = thinker
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0)
    body: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "Where?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "logit_bias": {str(end): END_BIAS, str(EOS_ID): -30},
        "seed": 7,
        "max_tokens": 2000,
        "extra_body": extra,
    }
    if not stream:
        return client.chat.completions.create(**body)
    with client.chat.completions.stream(**body) as events:
        return events.get_final_completion()


def test_the_answer_behind_the_reasoning_satisfies_the_schema(
    thinker: tuple[ServerProcess, int],
) -> None:
    answer = ask(thinker, stream=False)
    message = answer.choices[0].message
    jsonschema.validate(json.loads(message.content), SCHEMA)
    assert answer.choices[0].finish_reason == "stop"
    reasoning = message.model_extra["reasoning_content"]
    assert reasoning.strip()
    assert answer.usage.completion_tokens_details.reasoning_tokens > 1
    streamed = ask(thinker, stream=True).choices[0].message
    assert streamed.content == message.content
    assert streamed.model_extra["reasoning_content"] == reasoning


def test_without_reasoning_the_schema_holds_from_the_start(
    thinker: tuple[ServerProcess, int],
) -> None:
    answer = ask(thinker, stream=False, chat_template_kwargs={"enable_thinking": False})
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
    assert answer.choices[0].message.model_extra["reasoning_content"] is None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
