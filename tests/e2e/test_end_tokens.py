"""A server whose model and tokenizer do not agree on what ends a turn stops at each of them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from setpoint_testing.byte_tokenizer import (
    EOS_ID,
    VOCAB_SIZE,
    make_byte_tokenizer,
    write_byte_tokenizer,
)
from setpoint_testing.server_process import ServerProcess, running_server
from setpoint_testing.tiny_models import write_tiny_llama

CONFIG_EOS, EOM_ID = 2, VOCAB_SIZE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_tiny_llama(
        tmp_path_factory.mktemp("ends"), vocab_size=VOCAB_SIZE + 1, eos_token_id=CONFIG_EOS
    )
    write_byte_tokenizer(folder)
    tokenizer = make_byte_tokenizer()
    tokenizer.add_special_tokens(["<|eom_id|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    with running_server(
        tmp_path_factory.mktemp("server"),
        "--model-path",
        str(folder),
        "--dtype",
        "float32",
        "--skip-server-warmup",
    ) as ready:
        yield ready


def answer(server: ServerProcess, token_id: int, **sampling: Any) -> tuple[str, int, Any]:
    """The answer of a model that wants to say one token only: the text, the number of tokens, and
    what matched."""
    wishes = {
        "max_new_tokens": 4,
        "temperature": 0,
        "logit_bias": {str(token_id): 1000.0},
        **sampling,
    }
    reply = httpx.post(
        f"{server.url}/generate", json={"text": "a", "sampling_params": wishes}, timeout=60
    ).json()
    return (
        reply["text"],
        reply["meta_info"]["completion_tokens"],
        reply["meta_info"]["finish_reason"].get("matched"),
    )


@pytest.mark.parametrize("token_id", [CONFIG_EOS, EOS_ID, EOM_ID])
def test_every_end_token_ends_a_turn(server: ServerProcess, token_id: int) -> None:
    assert answer(server, token_id) == ("", 1, token_id)
    assert answer(server, token_id, ignore_eos=True)[1:] == (4, None)
    assert answer(server, token_id, min_new_tokens=2)[1] > 1, "it is no choice before"


def test_a_stop_string_of_a_special_token_ends_a_turn(server: ServerProcess) -> None:
    assert answer(server, EOM_ID, stop="<|eom_id|>") == ("", 1, "<|eom_id|>")
    assert answer(server, EOM_ID, stop="<|eom_id|>", ignore_eos=True) == ("", 1, "<|eom_id|>")
    assert answer(server, EOS_ID + 2, stop=["</s>", "<|im_end|>"]) == ("", 1, "<|im_end|>")
    assert answer(server, EOS_ID + 2, stop="<|im_end|><|im_end|>") == (
        "",
        2,
        "<|im_end|><|im_end|>",
    )
    assert answer(server, ord("a"), stop="<|im_end|>") == ("aaaa", 4, None)
