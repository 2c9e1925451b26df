"""The datasets: prompts from options and a tokenizer; the same seed gives the same prompts.

Works on text and ids. It knows nothing of servers. Random text consists of words of the tokenizer's
own vocabulary, so that it needs no download and has the wanted number of tokens when it is encoded
again; SGLang's ``random`` cuts ShareGPT's conversations instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from setpoint.bench.request_record import Prompt
from setpoint.config.bench import DatasetOptions
from setpoint.core.errors import ConfigError
from setpoint.core.plain_file import read_plain
from setpoint.frontend.text.tokenizer import Tokenizer

DATASET_MIB = 4096
"""Most MiB of a file of prompts; ShareGPT's has 670 MB."""
NUM_WORDS = 2000
"""Number of words of the vocabulary that are used; enough for texts of realistic variety."""
FEW_WORDS = 100
TRIES = 8
"""Most attempts to make a text with the wanted number of tokens."""


def make_prompts(
    options: DatasetOptions, tokenizer: Tokenizer, *, as_ids: bool = False
) -> list[Prompt]:
    """Make the prompts. ``as_ids``: as ids instead of text. Raises ConfigError for a file that is
    missing or holds no usable conversation."""
    rng = np.random.default_rng(options.seed)
    maker = _Maker(tokenizer, rng, as_ids=as_ids)
    match options.dataset_name:
        case "random":
            return [maker.text(*lengths) for lengths in _lengths(options, rng)]
        case "random-ids":
            return [maker.any_ids(*lengths) for lengths in _lengths(options, rng)]
        case "generated-shared-prefix":
            return maker.groups(options)
        case _:
            return maker.recorded(options)


def _lengths(options: DatasetOptions, rng: np.random.Generator) -> list[tuple[int, int]]:
    """(input, output) length of each prompt."""
    low = options.random_range_ratio

    def draw(most: int) -> list[int]:
        lengths: list[int] = rng.integers(
            max(int(most * low), 1), most, size=options.num_prompts, endpoint=True
        ).tolist()
        return lengths

    return list(zip(draw(options.random_input_len), draw(options.random_output_len), strict=True))


class _Maker:
    def __init__(self, tokenizer: Tokenizer, rng: np.random.Generator, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._as_ids = as_ids
        self._words: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def text(self, num_tokens: int, output_len: int) -> Prompt:
        return self._prompt(self._some_words(num_tokens), output_len)

    def any_ids(self, num_tokens: int, output_len: int) -> Prompt:
        """Ids of the whole vocabulary except its special tokens. Decoded to text they may be
        another number of tokens for the server."""
        ids: list[int] = []
        while len(ids) < num_tokens:
            drawn = self._rng.integers(0, self._tokenizer.vocab_size, size=num_tokens)
            ids += [token for token in drawn.tolist() if token not in self._tokenizer.special_ids]
        ids = ids[:num_tokens]
        return Prompt(ids if self._as_ids else self._tokenizer.decode(ids), num_tokens, output_len)

    def groups(self, options: DatasetOptions) -> list[Prompt]:
        prompts = []
        for _ in range(options.gsp_num_groups):
            shared = self._some_words(options.gsp_system_prompt_len)
            for _ in range(options.gsp_prompts_per_group):
                prompts.append(
                    self._prompt(
                        shared + self._some_words(options.gsp_question_len), options.gsp_output_len
                    )
                )
        return [prompts[index] for index in self._rng.permutation(len(prompts))]

    def recorded(self, options: DatasetOptions) -> list[Prompt]:
        entries = list(_read(options))
        prompts: list[Prompt] = []
        for index in self._rng.permutation(len(entries)):
            text, answer, wanted = entries[index]
            num_tokens, num_answer = len(self._encode(text)), len(self._encode(answer))
            output_len = options.sharegpt_output_len or wanted or num_answer
            is_short = num_tokens < 2 or output_len < 1
            is_long = (
                options.sharegpt_context_len is not None
                and num_tokens + output_len > options.sharegpt_context_len
            )
            if not is_short and not is_long:
                prompts.append(self._prompt(text, output_len))
            if len(prompts) == options.num_prompts:
                break
        if not prompts:
            raise ConfigError(f"--dataset-path {options.dataset_path} holds no usable prompt.")
        return prompts

    def _prompt(self, text: str, output_len: int) -> Prompt:
        ids = self._encode(text)
        return Prompt(ids if self._as_ids else text, len(ids), output_len)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).tolist()
        return ids

    def _some_words(self, num_tokens: int) -> str:
        """Text of that many tokens, or of nearly as many if the tokenizer joins words in ways that
        cannot be foreseen."""
        ids: list[int] = self._rng.choice(self._vocabulary(), size=num_tokens).tolist()
        for _ in range(TRIES):
            text = self._tokenizer.decode(ids)
            again = self._encode(text)
            if len(again) == num_tokens:
                break
            ids = again[:num_tokens]
            ids += self._rng.choice(self._vocabulary(), size=num_tokens - len(ids)).tolist()
        return text

    def _vocabulary(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Ids of tokens that begin a word, because such tokens never join; if a vocabulary has
        fewer than FEW_WORDS of them, ids of tokens of any letters."""
        if self._words is None:
            words: list[int] = []
            letters: list[int] = []
            for token in self._rng.permutation(self._tokenizer.vocab_size).tolist():
                text = self._tokenizer.decode([token])
                if text.strip(" ").isalpha() and text.isascii() and self._encode(text) == [token]:
                    (words if text.startswith(" ") else letters).append(token)
                if len(words) == NUM_WORDS:
                    break
            found = words if len(words) >= FEW_WORDS else letters[:NUM_WORDS]
            if not found:
                raise ConfigError(
                    "The tokenizer has no words to make random text from; use --dataset-name"
                    " random-ids."
                )
            self._words = np.array(found)
        return self._words


def _read(options: DatasetOptions) -> Iterator[tuple[str, str, int | None]]:
    """(prompt, recorded answer, wanted tokens) of each conversation in the file."""
    if options.dataset_path is None:
        raise ConfigError(
            f"--dataset-name {options.dataset_name} needs --dataset-path: nothing is downloaded."
        )
    try:
        data = read_plain(options.dataset_path, DATASET_MIB)
        if options.dataset_name == "sharegpt":
            entries = msgspec.json.decode(data, type=list[dict[str, Any]])
        else:
            entries = [
                msgspec.json.decode(line, type=dict[str, Any])
                for line in data.splitlines()
                if line.strip()
            ]
    except OSError as error:
        raise ConfigError(
            f"--dataset-path {options.dataset_path} cannot be read: {error.strerror}."
        ) from None
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--dataset-path {options.dataset_path} cannot be read as {options.dataset_name}:"
            f" {error}."
        ) from None
    for entry in entries:
        turns = entry.get("conversations") or entry.get("conversation") or []
        if isinstance(entry.get("prompt"), str):
            yield entry["prompt"], "", entry.get("output_len") or 1
        elif len(turns) >= 2:
            prompt, answer = (str(turn.get("value", turn.get("content", ""))) for turn in turns[:2])
            yield prompt, answer, None
