"""What vLLM's clients send to ``/v1/embeddings``: conversations, other types of numbers, and texts
cut to a number of tokens."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from setpoint.core.model import Pooling
from setpoint.frontend.apis.openai.vector_bytes import packed_vector
from setpoint_testing.fake_engine import EMBEDDING_SIZE

Serve = Callable[..., None]
ROUTE = "/v1/embeddings"
LAST = Pooling("last", True, EMBEDDING_SIZE, None, "test")
ASK = {"role": "user", "content": "hi"}
SHOWN = "user\nhi\n"


async def embedded(server: Any, **body: Any) -> Any:
    answer = await server.http.post(ROUTE, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts_of(server: Any) -> list[str]:
    return [bytes(token for token in request.prompt() if token < 256).decode() for request in server.engine.submitted]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ({"messages": [ASK]}, [SHOWN]),
        ({"messages": [[ASK], [ASK, ASK]]}, [SHOWN, SHOWN * 2]),
        ({"input": [ASK]}, [SHOWN]),
        ({"input": [[ASK], [ASK]]}, [SHOWN, SHOWN]),
        ({"messages": [ASK], "add_generation_prompt": True}, [f"{SHOWN}assistant\n"]),
    ],
)
def test_conversations(serve: Serve, body: dict[str, Any], texts: list[str]) -> None:
    async def scenario(server: Any) -> None:
        answer = await embedded(server, **body)
        assert "warnings" not in answer
        assert texts_of(server) == texts
        assert len(answer["data"]) == len(texts)

    serve(scenario, pooling=LAST)


def test_texts_are_cut_at_their_end(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for more in ({}, {"truncation_side": "left"}):
            await embedded(server, input=["abcd", [1]][0], truncate_prompt_tokens=2, **more)
        await embedded(server, input=[65, 66, 67], truncate_prompt_tokens=2)
        assert texts_of(server) == ["ab", "cd", "AB"]

    serve(scenario, pooling=LAST)


def test_numbers_of_other_types(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        vector = np.array((await embedded(server, input="ab"))["data"][0]["embedding"], "f4")
        for dtype in ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"):
            for endianness in ("native", "little", "big"):
                body = {"embed_dtype": dtype, "endianness": endianness, "encoding_format": "base64"}
                answer = await embedded(server, input="ab", **body)
                wanted = packed_vector(vector, dtype)  # type: ignore[arg-type]
                wanted = wanted.byteswap() if endianness == "big" else wanted
                assert base64.b64decode(answer["data"][0]["embedding"]) == wanted.tobytes()

    serve(scenario, pooling=LAST)


@pytest.mark.parametrize(
    ("dtype", "kind", "bits"),
    [
        ("float16", torch.float16, torch.int16),
        ("bfloat16", torch.bfloat16, torch.int16),
        ("fp8_e4m3", torch.float8_e4m3fn, torch.uint8),
        ("fp8_e5m2", torch.float8_e5m2, torch.uint8),
    ],
)
def test_numbers_are_rounded_as_torch_rounds_them(dtype: Any, kind: Any, bits: Any) -> None:
    random = np.random.default_rng(0)
    sizes = (1e-6, 1e-3, 1e-2, 1, 100)
    vector = np.concatenate(
        [random.normal(size=2000) * size for size in sizes] + [np.arange(-4000, 4000) / 512]
    ).astype("f4")
    vector = np.append(
        vector, np.array([0, -0.0, 448, -448, 2**-9, 2**-10, 2**-17, 465, -5e4, 65000], "f4")
    )
    theirs = torch.from_numpy(vector).to(kind).view(bits).numpy()
    assert packed_vector(vector, dtype).tobytes() == theirs.tobytes()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "Give exactly one of input and messages."),
        ({"input": "a", "messages": [ASK]}, "Give exactly one of input and messages."),
        ({"messages": []}, "messages must not be empty."),
        ({"messages": [5]}, "messages must be a conversation, or a list of conversations."),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing."),
        ({"input": "a", "embed_dtype": "int8"}, "embed_dtype must"),
        ({"input": []}, "input must not be empty."),
    ],
)
def test_what_is_refused(serve: Serve, body: dict[str, Any], message: str) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.http.post(ROUTE, json=body)
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["message"]

    serve(scenario, pooling=LAST)
