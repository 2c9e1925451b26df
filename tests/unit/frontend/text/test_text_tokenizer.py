"""Tokenizer, detokenizers: pieces joined equal the whole, whatever the ids; no piece splits a
character."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from setpoint.core.errors import CheckpointError
from setpoint.frontend.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    make_detokenizer,
)
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint_testing.byte_tokenizer import (
    EOS_ID,
    VOCAB_SIZE,
    make_byte_tokenizer,
    write_byte_tokenizer,
)

BYTES = Tokenizer(make_byte_tokenizer())


def sentencepiece_like() -> Tokenizer:
    """Llama 2's kind: metaspace words, byte fallback, a leading space that the decoder drops."""
    words = ["▁the", "▁cat", "s", "▁", "é", "▁naïve"]
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    vocab |= {word: 257 + index for index, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return Tokenizer(tokenizer)


def in_pieces(detokenizer: Detokenizer, ids: list[int], sizes: Iterator[int]) -> list[str]:
    pieces = []
    start = 0
    while start < len(ids):
        size = next(sizes)
        pieces.append(detokenizer.feed(ids[start : start + size]))
        start += size
    return [*pieces, detokenizer.flush()]


def sizes_of(seed: int, largest: int) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        yield rng.randint(1, largest)


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40),
    st.booleans(),
    st.integers(0, 99),
    st.sampled_from([1, 3]),
)
def test_any_byte_level_ids_in_any_pieces_decode_as_a_whole(
    ids: list[int], skip: bool, seed: int, largest: int
) -> None:
    whole = BYTES.decode(ids, skip_special_tokens=skip)
    assert (
        "".join(
            in_pieces(
                ByteDetokenizer(BYTES, skip_special_tokens=skip), ids, sizes_of(seed, largest)
            )
        )
        == whole
    )


@settings(max_examples=200)
@given(st.text(max_size=30), st.integers(0, 99), st.sampled_from([1, 2, 5, 30]))
def test_text_comes_through_whole_characters_only(text: str, seed: int, largest: int) -> None:
    ids = [int(token) for token in BYTES.encode(text)]
    for kind in (ByteDetokenizer, WindowDetokenizer):
        pieces = in_pieces(kind(BYTES, skip_special_tokens=False), ids, sizes_of(seed, largest))
        assert "".join(pieces) == text
        assert text.count("\ufffd") == sum(piece.count("\ufffd") for piece in pieces)


@settings(max_examples=200)
@given(
    st.lists(
        st.sampled_from(["▁the", "▁cat", "s", "▁", "é", "▁naïve", "🙂", "ü", "漢"]), max_size=12
    ),
    st.integers(0, 99),
    st.sampled_from([1, 4, 20]),
)
def test_the_window_decoder_on_a_sentencepiece_tokenizer(
    words: list[str], seed: int, largest: int
) -> None:
    tokenizer = sentencepiece_like()
    assert not tokenizer.is_byte_level
    ids: list[int] = []
    for word in words:
        known = tokenizer._tokenizer.token_to_id(word)
        ids += [known] if known is not None else [byte + 1 for byte in word.encode()]
    pieces = in_pieces(
        make_detokenizer(tokenizer, skip_special_tokens=True), ids, sizes_of(seed, largest)
    )
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_window_decoder_does_not_wait_for_ever() -> None:
    tokenizer = sentencepiece_like()
    detokenizer = WindowDetokenizer(tokenizer, skip_special_tokens=True)
    pieces = [detokenizer.feed([0x81]) for _ in range(100)]  # lone continuation bytes
    assert sum(map(len, pieces)) >= 90
    assert any(pieces[:10])


@pytest.mark.parametrize("kind", [ByteDetokenizer, WindowDetokenizer])
@pytest.mark.parametrize("ids", [[97], [0x80], [EOS_ID], [0xF0, 0x9F]])
def test_cost_per_token_does_not_grow(kind: type, ids: list[int]) -> None:
    class Counting(Tokenizer):
        num_decoded = 0

        def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
            ids = list(ids)
            self.num_decoded += len(ids)
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

        def token_bytes(self, token_id: int) -> bytes:
            self.num_decoded += 1
            return super().token_bytes(token_id)

    tokenizer = Counting(make_byte_tokenizer())
    detokenizer = kind(tokenizer, skip_special_tokens=True)

    def cost(num_tokens: int) -> int:
        before = tokenizer.num_decoded
        for _ in range(num_tokens // len(ids)):
            detokenizer.feed(ids)
        return tokenizer.num_decoded - before

    early = cost(1000)
    cost(8000)
    assert cost(1000) <= 1.1 * early


def test_token_bytes_and_text() -> None:
    assert [BYTES.token_bytes(byte) for byte in range(256)] == [
        bytes([byte]) for byte in range(256)
    ]
    assert BYTES.token_bytes(EOS_ID) == b"<|eos|>"
    assert BYTES.token_bytes(VOCAB_SIZE) == b""
    assert (BYTES.token_text(0x80), BYTES.token_text(97)) == ("\ufffd", "a")
    assert sentencepiece_like().token_bytes(257) == b"the"


def test_an_added_token_with_a_space_stands_for_itself() -> None:
    raw = make_byte_tokenizer()
    raw.add_tokens(["two words"])
    tokenizer = Tokenizer(raw)
    assert tokenizer.token_bytes(VOCAB_SIZE) == b"two words"
    assert (
        "".join(
            in_pieces(
                ByteDetokenizer(tokenizer, skip_special_tokens=True),
                [97, VOCAB_SIZE],
                sizes_of(0, 1),
            )
        )
        == "atwo words"
    )


def test_a_folder_is_read_back(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    older = {"bos_token": "<s>", "pad_token": {"content": "<pad>", "lstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    named = Tokenizer.from_folder(tmp_path).special_tokens
    assert named == {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<pad>"}
    assert tokenizer.encode("aü<|eos|>").tolist() == [97, 195, 188, EOS_ID]
    assert tokenizer.max_token_chars == len("<|im_start|>")


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"No tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps([]))
    with pytest.raises(CheckpointError, match="JSON object"):
        Tokenizer.from_folder(tmp_path)
