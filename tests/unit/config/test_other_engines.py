"""People who come from llama.cpp, vLLM or Ollama are told the name here."""

from __future__ import annotations

from pathlib import Path

import pytest

from setpoint.config import sglang
from setpoint.config.commandline import parse
from setpoint.config.commands import SERVE
from setpoint.config.other_engines import EQUIVALENTS
from setpoint.core.errors import ConfigError


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(SERVE, list(words))
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--max-model-len", "4096"),
            "--max-model-len 4096 of vLLM is --context-length 4096 here.",
        ),
        (("--max-model-len=32k",), "--max-model-len 32k of vLLM is --context-length 32k here."),
        (
            ("--gpu-memory-utilization", "0.9"),
            "--gpu-memory-utilization 0.9 of vLLM is --mem-fraction-static 0.9 here.",
        ),
        (
            ("--enforce-eager", "--port", "1"),
            "--enforce-eager of vLLM is --disable-cuda-graph here.",
        ),
        (("-m", "a.gguf"), "-m a.gguf of llama.cpp is --model-path a.gguf here."),
        (
            ("--enable-expert-parallel",),
            "--enable-expert-parallel of vLLM is --ep-size here. Give it the value of --tp-size.",
        ),
        (
            ("--n-cpu-moe", "4"),
            "--n-cpu-moe is an option of llama.cpp. All experts are on the CPU: leave it out.",
        ),
        (("--num_ctx", "2048"), "--num_ctx 2048 of Ollama is --context-length 2048 here."),
    ],
)
def test_an_option_of_another_engine_gets_its_name_here(
    words: tuple[str, ...], message: str
) -> None:
    assert refusal(*words) == message


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("-hf", "org/model"), ("--model-path org/model here", "safetensors")),
        (("-hf", "org/model:Q4_K_M"), ("--model-path org/model here.", "tag", "safetensors")),
        (("--hf-repo=org/model-GGUF:q8_0",), ("--model-path org/model-GGUF here.",)),
        (("--ctx-size", "4096"), ("--context-length 4096 here", "share")),
        (("-c", "4096"), ("--context-length 4096 here",)),
        (("--eplb-config", "{}"), ("--enable-eplb here", "--ep-num-redundant-experts")),
        (("-ngl", "99"), ("option of llama.cpp", "leave it out")),
    ],
)
def test_what_differs_is_said(words: tuple[str, ...], parts: tuple[str, ...]) -> None:
    said = refusal(*words)
    assert all(part in said for part in parts), said


def test_a_config_file_gets_the_same_hint(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("max-model-len: 4096\n")
    assert "--context-length 4096 here" in refusal("--config", str(path))


def test_the_table_names_options_that_exist_and_takes_none_away() -> None:
    for spelling, equivalent in EQUIVALENTS.items():
        assert spelling not in {*sglang.SUPPORTED, *sglang.ALIASES, *sglang.KNOWN}
        assert not equivalent.flag or equivalent.flag in sglang.SUPPORTED
        assert equivalent.flag or equivalent.advice
        assert not equivalent.advice or equivalent.advice.endswith(".")


def test_values_that_look_like_such_options_stay_values() -> None:
    line = parse(SERVE, ["--served-model-name=-m", "--default-priority-value", "-1"])
    assert line.options.model.served_model_name == "-m"
