"""A server for embeddings, from the model folder to the openai client's vectors."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch

from setpoint_testing.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_byte_tokenizer
from setpoint_testing.server_process import PATIENCE_S, running_server
from setpoint_testing.tiny_models import write_tiny_llama

TEXTS = ["Paris lies on the Seine.", "x", "Prefixes are shared. " * 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pooled by the mean and normalised, as its modules.json says."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(
        folder,
        vocab_size=VOCAB_SIZE,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        max_position_embeddings=1024,
    )
    write_byte_tokenizer(folder)
    steps = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    (folder / "modules.json").write_text(
        json.dumps(
            [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in steps]
        )
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_mean_tokens": True})
    )
    return folder


def test_vectors_over_http_equal_transformers(folder: Path, tmp_path: Path) -> None:
    from transformers import LlamaModel

    model = LlamaModel.from_pretrained(folder, dtype=torch.float32).eval()
    arguments = (
        "--model-path",
        str(folder),
        "--dtype",
        "float32",
        "--is-embedding",
        "--chunked-prefill-size",
        "64",
        "--num-threads",
        "1",
    )
    with running_server(tmp_path / "server", *arguments) as server:
        assert "Decision: embedding_pooling=mean (by modules.json)" in server.errors
        assert (
            httpx.get(f"{server.url}/model_info", timeout=PATIENCE_S).json()["is_generation"]
            is False
        )
        assert httpx.get(f"{server.url}/health_generate", timeout=30).status_code == 200
        client = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0
        )
        for _ in range(2):
            answer = client.embeddings.create(model="default", input=TEXTS)
            for item, text in zip(answer.data, TEXTS, strict=True):
                ids = httpx.post(
                    f"{server.url}/tokenize", json={"prompt": text}, timeout=PATIENCE_S
                ).json()["tokens"]
                with torch.inference_mode():
                    hidden = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
                np.testing.assert_allclose(
                    item.embedding, hidden / hidden.norm(), rtol=0, atol=2e-5
                )
        with pytest.raises(openai.BadRequestError, match="--is-embedding"):
            client.completions.create(model="default", prompt="x")
        assert "/v1/embeddings" in server.output
        assert server.is_idle()
