"""Ollama's Python client."""

from __future__ import annotations

import json

import ollama
from checks import MODEL, URL, check, refused, report

client = ollama.Client(host=URL)
ASK = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "num_predict": 16}


@check("chat")
def chat() -> None:
    answer = client.chat(model=MODEL, messages=ASK, options=GREEDY)
    assert "Paris" in answer.message.content
    assert answer.done
    assert min(answer.total_duration, answer.eval_count, answer.prompt_eval_count) > 0


@check("a streamed chat")
def streamed() -> None:
    parts = list(client.chat(model=MODEL, messages=ASK, options=GREEDY, stream=True))
    text = "".join(part.message.content for part in parts)
    assert text == client.chat(model=MODEL, messages=ASK, options=GREEDY).message.content
    assert parts[-1].done


@check("generate")
def generate() -> None:
    answer = client.generate(model=MODEL, prompt="The capital of France is", options=GREEDY)
    assert answer.response
    parts = list(client.generate(model=MODEL, prompt="One two", options=GREEDY, stream=True))
    assert parts[-1].done


@check("a JSON schema as format")
def schema() -> None:
    properties = {"city": {"type": "string", "maxLength": 20}}
    wanted = {"type": "object", "properties": properties, "required": ["city"]}
    answer = client.chat(
        model=MODEL, messages=ASK, format=wanted, options={**GREEDY, "num_predict": 100}
    )
    assert "city" in json.loads(answer.message.content)


@check("list, show, ps")
def models() -> None:
    assert MODEL in {each.model.removesuffix(":latest") for each in client.list().models}
    assert client.show(MODEL).modelinfo is not None
    assert client.ps().models


@check("an unknown option")
def refusal() -> None:
    with refused(ollama.ResponseError) as errors:
        client.chat(model=MODEL, messages=ASK, options={"temperature": -1})
    (error,) = errors
    assert error.status_code == 400
    assert "temperature" in error.error


report()
