"""Damaged GGUF files of every kind: each is converted or refused in one line that names the file,
and nothing else happens."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf.constants import TokenType
from gguf_cases import MODEL, write

from setpoint.checkpoint.gguf import convert
from setpoint.checkpoint.gguf import tokenizer_files as gguf_tokenizer
from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.checkpoint.gguf.split_files import open_gguf
from setpoint.checkpoint.spec import spec_of
from setpoint.core.errors import CheckpointError
from setpoint_testing import gguf_families, tiny_gguf

NUMBERS = [0, 1, 2, 31, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1]
"""What replaces eight or four bytes; and their negatives."""
FAMILIES = (
    "gemma2",
    "gemma3",
    "phi3",
    "gpt-oss",
    "deepseek2",
    "deepseek2/v3",
    "glm4moe",
    "qwen3moe",
)


def sentencepiece(folder: Path) -> list[Path]:
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    kinds += [TokenType.NORMAL] * 3
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.scores": [-float(index) for index in range(len(texts))],
    }
    return [write(folder / "m.gguf", keys=keys, kind=Kind.Q5_1)]


def written(folder: Path, name: str) -> list[Path]:
    """The parts of a whole file; the first has the metadata."""
    if name == "sentencepiece":
        return sentencepiece(folder)
    if name == "split":
        tensors = tiny_gguf.gguf_tensors(MODEL, MODEL.weights())
        return tiny_gguf.write_split(folder, tensors, tiny_gguf.metadata(MODEL), kind=Kind.Q4_0)
    if name == "llama":
        return [write(folder / "m.gguf", kind=Kind.Q4_0)]
    return [gguf_families.write_model(folder, name, gguf_families.mixed)[0]]


def mutated(data: bytes, header_bytes: int, rng: np.random.Generator) -> bytes:
    changed = bytearray(data)
    at = int(rng.integers(4, header_bytes))
    match rng.integers(6):
        case 0:
            for each in rng.integers(4, header_bytes, int(rng.integers(1, 4))):
                changed[each] = int(rng.integers(256))
        case 1:
            number = NUMBERS[rng.integers(len(NUMBERS))] * int(rng.choice([-1, 1]))
            changed[at : at + 8] = struct.pack("<Q", number & (1 << 64) - 1)
        case 2:
            number = NUMBERS[rng.integers(len(NUMBERS))] * int(rng.choice([-1, 1]))
            changed[at : at + 4] = struct.pack("<I", number & (1 << 32) - 1)
        case 3:
            del changed[at : at + int(rng.integers(1, 64))]
        case 4:
            other = int(rng.integers(4, header_bytes))
            changed[at:at] = changed[other : other + int(rng.integers(1, 64))]
        case 5:
            del changed[int(rng.integers(len(changed))) :]
    return bytes(changed)


def converted(path: Path, folder: Path) -> None:
    """All that a conversion reads and computes, with the tokenizer written into ``folder``."""
    with open_gguf(path) as file:
        plan = convert._plan(file)
        spec_of(convert._description(path, plan))
        gguf_tokenizer.write(file, plan.tokens, folder, context_len=64, log=lambda line: None)
        convert._check_scales(file, plan)
        for _ in convert._all_cast(file, plan.weights, plan.dtype):
            pass


def check(folder: Path, name: str, count: int) -> None:
    whole = written(folder, name)
    converted(whole[0], folder)
    contents = [path.read_bytes() for path in whole]
    ends = []
    for path in whole:
        with GGUFFile(path) as file:
            ends.append(min(tensor.offset for tensor in file.tensors.values()))
    rng, ends_with = np.random.default_rng(len(name)), Counter[str]()
    for number in range(count):
        part = number % len(whole)
        whole[part].write_bytes(mutated(contents[part], ends[part], rng))
        try:
            converted(whole[0], folder)
            ends_with["converted"] += 1
        except CheckpointError as error:
            message = str(error)
            assert "\n" not in message, message
            assert any(str(path) in message for path in whole), message
            assert len(message) < 2000
            ends_with["refused"] += 1
        whole[part].write_bytes(contents[part])
    assert min(ends_with.values()) > count // 20, ends_with


@pytest.mark.parametrize("name", ["llama", "sentencepiece", "split", "deepseek2/v3"])
def test_some_damaged_files_are_refused(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, 60)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["llama", "sentencepiece", "split", *FAMILIES])
def test_damaged_files_are_refused(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, 20_000)
