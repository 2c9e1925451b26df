"""The figures of the quality benchmark, on answers made by hand, and how texts become requests."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from setpoint import cli
from setpoint.bench.divergence import NUM_PROMPTS, PROMPT, Predictions, TextWindows, compare, table
from setpoint.bench.engines.quality import ANSWER, TEXTS, cut_windows, is_exceeded
from setpoint.core.errors import ConfigError
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint_testing.byte_tokenizer import BOS_ID, write_byte_tokenizer

ABOUT = {
    "model": "m",
    "dtype": "bfloat16",
    "quantization": None,
    "kv_cache_dtype": "bfloat16",
    "linear_layers": "cpu",
    "weight_bytes": 1000,
}
WINDOWS = TextWindows(["prose", "prose", "code"], [[1, 2, 3], [4, 5], [6, 7]])


def measured(
    logprobs: list[list[float]], likeliest: list[list[int]], answers: list[list[int]]
) -> Predictions:
    return Predictions(
        [np.array(each) for each in logprobs],
        [np.array(each) for each in likeliest],
        answers,
        ABOUT,
    )


REFERENCE = measured(
    [[-1.0, -2.0], [-3.0], [-2.0]], [[2, 9], [5], [7]], [[1, 2, 3, 4], [5, 6, 7, 8]]
)


def test_the_same_answers_are_no_change() -> None:
    result = compare(WINDOWS, REFERENCE, REFERENCE)
    assert result["perplexity"] == result["reference_perplexity"] == pytest.approx(math.exp(2.0))
    assert (
        result["perplexity_change"],
        result["perplexity_change_error"],
        result["mean_abs_logprob_change"],
    ) == (0, 0, 0)
    assert (
        result["top1_agreement"],
        result["greedy_agreement"],
        result["identical_answers"],
        result["num_answers"],
    ) == (1, 1, 2, 2)
    assert not is_exceeded(result, 0.0)


def test_differences_are_counted_where_they_are() -> None:
    worse = measured(
        [[-1.0, -2.4], [-3.0], [-1.8]], [[2, 9], [4], [7]], [[1, 2, 9, 4], [5, 6, 7, 8]]
    )
    result = compare(WINDOWS, REFERENCE, worse)
    assert result["num_tokens"] == 4
    assert result["perplexity_change"] == pytest.approx(math.exp(0.2 / 4) - 1)
    assert result["mean_abs_logprob_change"] == pytest.approx(0.6 / 4)
    assert result["perplexity_change_error"] == pytest.approx(np.std([0, 0.4, 0, -0.2]) / 2)
    assert (result["top1_agreement"], result["greedy_agreement"], result["identical_answers"]) == (
        0.75,
        6 / 8,
        1,
    )
    assert result["by_text"]["code"]["perplexity_change"] == pytest.approx(math.exp(-0.2) - 1)
    assert (
        result["by_text"]["prose"]["top1_agreement"],
        result["by_text"]["code"]["top1_agreement"],
    ) == (2 / 3, 1)
    assert is_exceeded(result, 0.05)
    assert not is_exceeded(result, 0.06)
    assert not is_exceeded(result, None)
    rows = table(result).splitlines()
    assert [row.split("|")[1].strip() for row in rows if row.startswith("|")] == [
        "text",
        "---",
        "prose",
        "code",
        "all",
    ]
    assert (
        rows[-1]
        == "Greedy: 75.0% of the tokens before the first difference; 1 of 2 answers identical."
    )


def test_what_is_no_number_exceeds_every_limit() -> None:
    broken = measured([[math.nan, -2.0], [-3.0], [-2.0]], [[2, 9], [5], [7]], REFERENCE.answers)
    assert is_exceeded(compare(WINDOWS, REFERENCE, broken), 1e9)


def test_windows_hold_every_token_once_behind_the_special_ones(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    text = "".join(chr(97 + index % 26) for index in range(1000))
    windows, prefix = cut_windows({"letters": text, "one": "x", "few": "abc"}, tokenizer, 101)
    specials = [BOS_ID] if prefix else []
    assert len(specials) == prefix
    assert all(ids[:prefix] == specials and len(ids) <= 101 for ids in windows.ids)
    assert "".join(tokenizer.decode(ids[prefix:]) for ids in windows.ids) == text + "abc"
    assert set(windows.kinds) == {"letters", "few"}
    prompts = windows.prompts(prefix)
    assert len(prompts) == 1003 // PROMPT
    assert all(
        any(
            prompt[prefix:] == ids[at : at + PROMPT]
            for ids in windows.ids
            for at in range(len(ids))
        )
        for prompt in prompts
    )


@pytest.mark.parametrize("text", ["", "a"])
def test_text_without_anything_to_predict_is_refused(text: str, tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="fewer than two tokens"):
        cut_windows({"mine": text}, Tokenizer.from_folder(tmp_path), 512)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text-file", "no/such.txt"], "--text-file no/such.txt cannot be read: No such file"),
        (["--text-file", "{latin}"], "is not UTF-8 text"),
        (["--is-embedding"], "With --is-embedding a model predicts no tokens"),
        (["--max-perplexity-change", "-1"], "--max-perplexity-change must be at least 0"),
        (
            ["--output-file", "no/such/out.jsonl"],
            "--output-file no/such/out.jsonl cannot be written",
        ),
        (["--port", "1"], "--port belongs to 'setpoint serve'"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_any_work(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"\xff\xfe\xff")
    assert (
        cli.main(
            ["bench", "quality", "no-such-model", *(word.format(latin=latin) for word in arguments)]
        )
        == 2
    )
    assert message in capsys.readouterr().err


def test_our_texts_are_enough_for_every_prompt(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    texts = {file.stem: file.read_text(encoding="utf-8") for file in TEXTS.glob("*.txt")}
    assert len(texts) == 6
    assert 20_000 < sum(map(len, texts.values())) < 40_000
    windows, prefix = cut_windows(texts, Tokenizer.from_folder(tmp_path), 512)
    prompts = windows.prompts(prefix)
    assert len({tuple(prompt) for prompt in prompts}) == NUM_PROMPTS
    assert {len(prompt) - prefix for prompt in prompts} == {PROMPT}
    assert ANSWER + PROMPT + prefix <= 512
