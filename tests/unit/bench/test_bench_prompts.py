"""Datasets: lengths, what is shared, files, and the same prompts for the same seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from setpoint.bench.prompt_sets import make_prompts
from setpoint.config.bench import DatasetOptions
from setpoint.core.errors import ConfigError
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint_testing.byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer

TOKENIZER = Tokenizer(make_byte_tokenizer())


def options(**values: Any) -> DatasetOptions:
    return DatasetOptions(
        **{"num_prompts": 20, "random_input_len": 40, "random_output_len": 8, **values}
    )


@pytest.mark.parametrize("name", ["random", "random-ids", "generated-shared-prefix"])
@pytest.mark.parametrize("as_ids", [False, True])
def test_a_seed_is_a_dataset(name: str, as_ids: bool) -> None:
    small = {
        "gsp_num_groups": 2,
        "gsp_prompts_per_group": 2,
        "gsp_system_prompt_len": 9,
        "gsp_question_len": 3,
    }
    made = [
        make_prompts(options(dataset_name=name, seed=seed, **small), TOKENIZER, as_ids=as_ids)
        for seed in (1, 1, 2)
    ]
    assert made[0] == made[1] != made[2]
    assert all(isinstance(prompt.content, list if as_ids else str) for prompt in made[0])


def test_lengths_are_exact_or_in_their_range() -> None:
    for prompt in make_prompts(options(random_range_ratio=1.0), TOKENIZER):
        assert (prompt.num_tokens, prompt.output_len) == (40, 8)
        assert len(TOKENIZER.encode(str(prompt.content))) == 40
        assert str(prompt.content).isalpha()
    drawn = make_prompts(options(num_prompts=300, random_range_ratio=0.5), TOKENIZER)
    assert {prompt.num_tokens for prompt in drawn} == set(range(20, 41))
    assert {prompt.output_len for prompt in drawn} == set(range(4, 9))
    assert (
        min(prompt.num_tokens for prompt in make_prompts(options(num_prompts=300), TOKENIZER)) == 1
    )


def test_random_ids_are_of_the_whole_vocabulary_less_special_tokens() -> None:
    prompts = make_prompts(
        options(dataset_name="random-ids", num_prompts=50, random_range_ratio=1.0),
        TOKENIZER,
        as_ids=True,
    )
    ids = {token for prompt in prompts for token in prompt.content}
    assert all(len(prompt.content) == prompt.num_tokens == 40 for prompt in prompts)
    assert ids <= set(range(VOCAB_SIZE)) - TOKENIZER.special_ids
    assert len(ids) > 240


def test_groups_share_their_beginning_and_nothing_else() -> None:
    shape = {
        "gsp_num_groups": 3,
        "gsp_prompts_per_group": 4,
        "gsp_system_prompt_len": 30,
        "gsp_question_len": 10,
        "gsp_output_len": 5,
    }
    prompts = make_prompts(options(dataset_name="generated-shared-prefix", **shape), TOKENIZER)
    assert {(prompt.num_tokens, prompt.output_len) for prompt in prompts} == {(40, 5)}
    groups: dict[str, list[str]] = {}
    for prompt in prompts:
        groups.setdefault(str(prompt.content)[:30], []).append(str(prompt.content))
    assert sorted(map(len, groups.values())) == [4, 4, 4]
    assert len({str(prompt.content)[30:] for prompt in prompts}) == 12
    assert len({shared[:6] for shared in groups}) == 3


def test_text_is_as_long_as_asked_where_tokens_merge() -> None:
    """Words of a tokenizer that joins neighbours: they stay apart, within a prompt and between its
    parts."""
    syllables = ["ka", "ro", "mi", "ten", "sul", "vo"]
    words = [
        first + second + third for first in syllables for second in syllables for third in syllables
    ]
    merging = tokenizers.Tokenizer(models.BPE())
    merging.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    merging.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    merging.train_from_iterator([" ".join(words)] * 3, trainer)
    tokenizer = Tokenizer(merging)
    shape = {
        "gsp_num_groups": 2,
        "gsp_prompts_per_group": 3,
        "gsp_system_prompt_len": 50,
        "gsp_question_len": 14,
    }
    for name in ("random", "generated-shared-prefix"):
        small = options(dataset_name=name, random_input_len=64, random_range_ratio=1.0, **shape)
        for prompt in make_prompts(small, tokenizer):
            assert prompt.num_tokens == len(tokenizer.encode(str(prompt.content))) == 64
            assert len(set(str(prompt.content).split())) > 20


def test_recorded_conversations(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    turns = [("ab" * k, "c" * k) for k in range(1, 11)]
    entries = [
        {"conversations": [{"from": "human", "value": ask}, {"from": "gpt", "value": answer}]}
        for ask, answer in turns
    ]
    path.write_text(
        json.dumps([*entries, {"conversations": [{"from": "human", "value": "alone"}]}])
    )
    given: dict[str, Any] = {"dataset_name": "sharegpt", "dataset_path": str(path)}
    made = make_prompts(options(**given), TOKENIZER)
    assert sorted((str(prompt.content), prompt.output_len) for prompt in made) == sorted(
        (ask, len(answer)) for ask, answer in turns
    )
    assert {
        prompt.output_len
        for prompt in make_prompts(options(**given, sharegpt_output_len=7), TOKENIZER)
    } == {7}
    assert len(make_prompts(options(**given, sharegpt_context_len=15), TOKENIZER)) == 5
    assert len(make_prompts(options(**{**given, "num_prompts": 3}), TOKENIZER)) == 3


def test_custom_lines(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    lines = [
        {"prompt": "hello", "output_len": 3},
        {"conversations": [{"content": "question"}, {"content": "answer"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    made = make_prompts(options(dataset_name="custom", dataset_path=str(path)), TOKENIZER)
    assert sorted((prompt.content, prompt.num_tokens, prompt.output_len) for prompt in made) == [
        ("hello", 5, 3),
        ("question", 8, 6),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("sharegpt", None, "needs --dataset-path"),
        ("sharegpt", "{}", "cannot be read as sharegpt"),
        ("custom", "[1]\n", "cannot be read as custom"),
        ("custom", "{}\n", "holds no usable prompt"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    path = tmp_path / "file"
    path.write_text(content or "")
    with pytest.raises(ConfigError, match=message):
        make_prompts(
            options(dataset_name=name, dataset_path=None if content is None else str(path)),
            TOKENIZER,
        )
    with pytest.raises(ConfigError, match="cannot be read"):
        make_prompts(options(dataset_name=name, dataset_path=str(tmp_path / "missing")), TOKENIZER)
