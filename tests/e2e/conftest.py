"""Servers shared by the end-to-end tests. Every test under here starts, or talks to, real
processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from setpoint_testing.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_byte_tokenizer
from setpoint_testing.server_process import ServerProcess, running_server
from setpoint_testing.tiny_models import write_tiny_llama

Start = Callable[..., ServerProcess]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over bytes, with room for 4,096 tokens."""
    folder = write_tiny_llama(
        tmp_path_factory.mktemp("tiny"),
        vocab_size=VOCAB_SIZE,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        max_position_embeddings=4096,
    )
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The tiny model in float32; it keeps files and batches."""
    with running_server(
        tmp_path_factory.mktemp("server"),
        *("--model-path", str(tiny_model), "--dtype", "float32"),
        *("--file-storage-path", str(tmp_path_factory.mktemp("storage"))),
    ) as server:
        yield server


@pytest.fixture(scope="session")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The default model in float32."""
    with running_server(tmp_path_factory.mktemp("server"), "--dtype", "float32") as server:
        yield server
