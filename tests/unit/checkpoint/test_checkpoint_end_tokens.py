"""Which ids end a turn: what the model's configs name, and what its tokenizer names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from setpoint.checkpoint.end_tokens import tokenizer_end_ids
from setpoint.config.environment import EnvSettings
from setpoint.config.options import Options
from setpoint.core.errors import CheckpointError
from setpoint.launch.parent.configuration import settle
from setpoint_testing.byte_tokenizer import (
    EOS_ID,
    VOCAB_SIZE,
    make_byte_tokenizer,
    write_byte_tokenizer,
)
from setpoint_testing.tiny_models import write_tiny_llama

EOM_ID = VOCAB_SIZE


def write(folder: Path, *, eos: Any = "<|eos|>", added: tuple[str, ...] = ()) -> Path:
    tokenizer = make_byte_tokenizer()
    tokenizer.add_special_tokens(list(added))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder


@pytest.mark.parametrize(
    ("eos", "added", "ids"),
    [
        ("<|eos|>", (), (EOS_ID,)),
        ({"content": "<|eos|>", "special": True}, (), (EOS_ID,)),
        (None, (), ()),
        ("</s>", (), ()),
        ("a", (), (97,)),  # no added token
        ("<|eos|>", ("<|eom_id|>",), (EOS_ID, EOM_ID)),
        (None, ("<|other|>", "<|eom_id|>"), (EOM_ID + 1,)),
        ("<|eom_id|>", ("<|eom_id|>",), (EOM_ID,)),
    ],
)
def test_a_tokenizer_names_what_ends_a_turn(
    tmp_path: Path, eos: Any, added: tuple[str, ...], ids: tuple[int, ...]
) -> None:
    assert tokenizer_end_ids(write(tmp_path, eos=eos, added=added)) == ids


def test_a_unigram_vocabulary_and_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_end_ids(tmp_path) == ()
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [], "model": {"vocab": [["<unk>", 0.0], ["</s>", -1.0]]}})
    )
    assert tokenizer_end_ids(tmp_path) == ()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert tokenizer_end_ids(tmp_path) == (1,)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"added_tokens": [1]}',
        '{"added_tokens": []}',
        '{"added_tokens": [], "model": {"vocab": [1]}}',
    ],
)
def test_a_broken_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        tokenizer_end_ids(tmp_path)


def test_generation_ends_at_the_configs_ids_and_the_tokenizers(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    write_tiny_llama(model, vocab_size=VOCAB_SIZE, eos_token_id=2)
    write_byte_tokenizer(model)
    other.mkdir()
    write(
        other, eos="<|im_end|>", added=("<|eom_id|>",)
    )  # the model has no such id and will never choose it

    def ids(**options: Any) -> tuple[int, ...]:
        given = Options.of(model_path=str(model), **options)
        return settle(given, EnvSettings(), frozenset()).spec.eos_token_ids

    assert ids() == (2, EOS_ID)
    assert ids(tokenizer_path=str(other)) == (2, EOS_ID + 2)
    (model / "generation_config.json").write_text('{"eos_token_id": [7, 100000]}')
    assert ids() == (7, 2, EOS_ID)
