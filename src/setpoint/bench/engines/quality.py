"""``setpoint bench quality``: how much worse a configuration predicts than the same model in plain
bf16, on a fixed set of texts.

Works on two Engines, one after the other, that get the same ids. Perplexity and the likeliest next
tokens come from the texts' logprobs, in windows of WINDOW tokens; greedy continuations begin at
equal distances in the texts. It knows nothing of quantization.

Exit codes: 0: measured; 3: measured, and the change is above --max-perplexity-change.

Definitions, with p the probability that a model gives the text's next token. Perplexity:
exp(mean(-ln p)). Change: perplexity of the candidate divided by that of the reference, minus 1; its
error is the standard error of the mean of ln p(reference) - ln p(candidate). Mean |Δ ln p|: the
mean magnitude of the same differences. Top-1 agreement: the share of positions where both models
find the same token likeliest. Greedy agreement: the share of generated tokens before an answer's
first difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from setpoint.bench import report
from setpoint.bench.bench_progress import waiting
from setpoint.bench.divergence import Predictions, TextWindows, compare, table
from setpoint.config.bench import QualityOptions
from setpoint.config.commandline import CommandLine
from setpoint.config.environment import EnvSettings
from setpoint.core.errors import ConfigError, SetpointError
from setpoint.core.plain_file import read_plain
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint.observe.logline import setup_logging
from setpoint.offline.offline_engine import Engine

EXCEEDED = 3
TEXTS = Path(__file__).parents[1] / "texts"
"""One file per kind of text. They were written for this benchmark, so that no model has learned
them by heart."""
TEXT_MIB = 1024
"""Most MiB of the user's text."""
REFERENCE = {"dtype": "bfloat16", "quantization": "unquant", "kv_cache_dtype": "auto"}
"""Options of the reference engine. Options that are not listed here have the user's values."""

WINDOW = 512
"""Most tokens that a prediction can look back on, and most tokens of one request."""
ANSWER = 64
AT_ONCE = 32
"""Number of windows whose logprobs exist as Python objects at the same time."""


def bench_quality(line: CommandLine, env: EnvSettings) -> int:
    """Measure, print and record; returns the exit code. Raises SetpointError, and ConfigError for
    texts that cannot be used."""
    own: QualityOptions = line.own
    options = line.options
    if options.model.is_embedding:
        raise ConfigError(
            "With --is-embedding a model predicts no tokens, so there is nothing to compare."
        )
    texts = _texts(own.text_file)
    report.check_writable(own.output_file)
    setup_logging(options.logs.log_level, milliseconds=env.log_ms)
    if options.execution.random_seed is None:
        options = options.replace(random_seed=0)  # both engines have the same dummy weights
    plain = options.replace(**REFERENCE)
    with Engine.from_options(plain, env, given=line.given | REFERENCE.keys()) as engine:
        info = engine.get_server_info()
        tokenizer = Tokenizer.from_folder(info["tokenizer_path"])
        windows, prefix = cut_windows(texts, tokenizer, min(WINDOW, info["max_req_input_len"]))
        prompts = windows.prompts(prefix)
        reference = measure(engine, windows, prompts, name="The reference")
    with Engine.from_options(options, env, given=line.given) as engine:
        candidate = measure(engine, windows, prompts, name="The candidate")
    result = compare(windows, reference, candidate) | {
        "text_file": own.text_file,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    print(table(result))
    if own.output_file is not None:
        report.append(own.output_file, result)
    return EXCEEDED if is_exceeded(result, own.max_perplexity_change) else 0


def is_exceeded(result: Mapping[str, Any], limit: float | None) -> bool:
    """Whether the change is above the limit, or is not a number."""
    return limit is not None and not result["perplexity_change"] <= limit


def cut_windows(
    texts: Mapping[str, str], tokenizer: Tokenizer, length: int
) -> tuple[TextWindows, int]:
    """Windows of at most ``length`` ids, and the number of ids that the tokenizer puts before any
    text, with which each window begins."""
    with_specials = tokenizer.encode("a").tolist()
    prefix = with_specials[
        : with_specials.index(tokenizer.encode("a", add_special_tokens=False)[0])
    ]
    step = length - len(prefix)
    kinds, windows = [], []
    for kind, text in texts.items():
        ids = tokenizer.encode(text, add_special_tokens=False).tolist()
        for begin in range(0, len(ids), step):
            if len(ids) - begin > 1:
                kinds.append(kind)
                windows.append(prefix + ids[begin : begin + step])
    if not windows:
        raise ConfigError("--text-file holds too little text: fewer than two tokens.")
    return TextWindows(kinds, windows), len(prefix)


class PredictingEngine(Protocol):
    """The part of an Engine that is used here."""

    @property
    def generate(self) -> Callable[..., Any]: ...

    def get_server_info(self) -> dict[str, Any]: ...


def measure(
    engine: PredictingEngine, windows: TextWindows, prompts: Sequence[list[int]], *, name: str
) -> Predictions:
    """Run the windows and prompts on an engine. ``name``: what the engine is, for the progress
    line. Raises SetpointError if a request fails."""
    logprobs, likeliest = [], []
    wanted = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    for begin in range(0, len(windows.ids), AT_ONCE):
        asked = windows.ids[begin : begin + AT_ONCE]
        with waiting(
            f"{name} predicts the texts, {begin + len(asked)} of {len(windows.ids)} windows"
        ):
            predicted = engine.generate(
                input_ids=asked, sampling_params={"temperature": 0.0, "max_new_tokens": 0}, **wanted
            )
        for meta in _meta_infos(predicted):
            logprobs.append(np.array([value for value, _, _ in meta["input_token_logprobs"][1:]]))
            likeliest.append(np.array([top[0][1] for top in meta["input_top_logprobs"][1:]]))
    with waiting(f"{name} continues {len(prompts)} passages"):
        answers = engine.generate(
            input_ids=list(prompts),
            sampling_params={"temperature": 0.0, "max_new_tokens": ANSWER, "ignore_eos": True},
        )
    _meta_infos(answers)
    info = engine.get_server_info()
    names = (
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "model_impl",
        "kernels",
        "linear_layers",
        "attention",
        "weight_bytes",
    )
    about = {"model": info["model_path"], **{name: info[name] for name in names}}
    return Predictions(logprobs, likeliest, [answer["output_ids"] for answer in answers], about)


def _meta_infos(answers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The ``meta_info`` of each answer. Raises SetpointError if a request failed."""
    metas = [answer["meta_info"] for answer in answers]
    failed = [
        meta["finish_reason"]["message"]
        for meta in metas
        if meta["finish_reason"]["type"] == "abort"
    ]
    if failed:
        raise SetpointError(f"{len(failed)} of {len(metas)} requests failed: {failed[0]}")
    return metas


def _texts(path: str | None) -> dict[str, str]:
    """Kind -> text: the texts that come with Setpoint, or the user's text under its file's name."""
    if path is None:
        return {file.stem: file.read_text(encoding="utf-8") for file in sorted(TEXTS.glob("*.txt"))}
    try:
        return {Path(path).name: read_plain(path, TEXT_MIB).decode()}
    except OSError as error:
        raise ConfigError(f"--text-file {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--text-file {path} is not UTF-8 text.") from None
