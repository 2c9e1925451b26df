"""The default model through the official client, as the README shows it."""

from __future__ import annotations

import httpx
import openai
import pytest

from setpoint_testing.server_process import PATIENCE_S, ServerProcess


@pytest.fixture
def client(smol: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none", timeout=60, max_retries=0)


def test_the_capital_of_france(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="default", prompt="The capital of France is", max_tokens=8, temperature=0
    )
    assert "Paris" in answer.choices[0].text
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    pieces = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Name the capital city of France."}],
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(pieces)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "Paris" in "".join(texts)
    assert len([text for text in texts if text]) > 3
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens <= 24


def test_the_model_names_its_tokenizer(smol: ServerProcess) -> None:
    """Clients and benchmarks load the tokenizer from the path that /model_info gives."""
    from tokenizers import Tokenizer

    info = httpx.get(f"{smol.url}/model_info", timeout=PATIENCE_S).json()
    ids = (
        Tokenizer.from_file(f"{info['tokenizer_path']}/tokenizer.json")
        .encode("The capital of France is")
        .ids
    )
    assert (
        httpx.post(
            f"{smol.url}/tokenize", json={"prompt": "The capital of France is"}, timeout=PATIENCE_S
        ).json()["tokens"]
        == ids
    )
