"""What a start prints, and what it says when it cannot start: one line, an exit code, no traceback."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from setpoint.testing import tiny_gguf
from setpoint.testing.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from setpoint.testing.server import READY, ServerProcess, free_port, running_server, wait_until
from setpoint.testing.tiny_models import write_tiny_llama

GB = r"\d+\.\d\d GB"
START_UP = [
    r"server_args=ServerArgs\(.*model_path='.*'.*\)",
    rf"Load weight begin\. avail mem={GB}",
    rf"Load weight end\. elapsed=\d+\.\d\d s, type=LlamaForCausalLM, avail mem={GB}, mem usage={GB}\.",
    rf"KV Cache is allocated\. dtype: float32, #tokens: \d+, K size: {GB}, V size: {GB}",
    rf"Memory pool end\. avail mem={GB}",
    r"max_total_num_tokens=(\d+), chunked_prefill_size=512, max_prefill_tokens=16384, max_running_requests=(\d+), "
    rf"context_len=4096, available_cpu_mem={GB}",
    r"Started server process \[\d+\]",
    re.escape(READY),
    r"Start-up took \d+\.\d s from process start \(interpreter \d+\.\d, .*warm-up \d+\.\d\); engine: .*",
]
"""In SGLang's order (docs/sglang/logs.md#start-up); other lines may stand between."""


def test_the_start_up_lines_come_in_order(tiny: ServerProcess) -> None:
    wait_until(lambda: "Start-up took" in tiny.errors)
    lines = iter(tiny.messages)
    for pattern in START_UP:
        assert any(re.fullmatch(pattern, line) for line in lines), f"{pattern}\nnot in order in\n{tiny.errors}"
    stamps = [re.match(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d( TP0)?\] ", line) for line in tiny.errors.splitlines()]
    assert all(stamps)
    info = tiny.state()
    assert f"max_total_num_tokens={info['pool']['total']}," in tiny.errors
    assert "Traceback" not in tiny.errors
    assert "from openai import OpenAI" in tiny.output


def test_every_step_kind_has_its_line(tiny: ServerProcess) -> None:
    tiny.generate(text="abc", sampling_params={"max_new_tokens": 90, "temperature": 0, "ignore_eos": True})
    prefill = (
        r"Prefill batch, #new-seq: 1, #new-token: \d+, #cached-token: \d+, token usage: 0\.\d\d, #running-req: \d+, #queue-req: 0, "
        r"#pending-token: 0, cpu graph: True, input throughput \(token/s\): \d+\.\d\d"
    )
    decode = (
        r"Decode batch, #running-req: \d+, #token: \d+, token usage: 0\.\d\d, cpu graph: True, gen throughput \(token/s\): \d+\.\d\d, "
        r"#queue-req: 0"
    )
    for pattern in (prefill, decode):
        assert any(re.fullmatch(pattern, line) for line in tiny.messages), pattern


def broken(tmp_path: Path, change: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None, **config: object) -> list[str]:
    """A tiny model folder with changed tensors or config.json."""
    folder = write_tiny_llama(tmp_path / "model", vocab_size=VOCAB_SIZE, **config)
    write_byte_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return ["--model-path", str(folder)]


def missing_tensor(tmp_path: Path) -> list[str]:
    return broken(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def misshapen_tensor(tmp_path: Path) -> list[str]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((3, 5), np.float32)

    return broken(tmp_path, change)


def truncated_safetensors(tmp_path: Path) -> list[str]:
    arguments = broken(tmp_path)
    path = Path(arguments[1]) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    return arguments


def unsupported_architecture(tmp_path: Path) -> list[str]:
    return broken(tmp_path, architectures=["MambaForCausalLM"], model_type="mamba")


def truncated_gguf(tmp_path: Path) -> list[str]:
    model = tiny_gguf.TinyLlama()
    path = tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.gguf_tensors(model, model.weights()), tiny_gguf.metadata(model))
    path.write_bytes(path.read_bytes()[:-5000])
    return ["--model-path", str(path)]


def no_memory_for_a_page(tmp_path: Path) -> list[str]:
    return [*broken(tmp_path), "--mem-fraction-static", "0.00000001"]


def broken_tokenizer(tmp_path: Path) -> list[str]:
    arguments = broken(tmp_path)
    (Path(arguments[1]) / "tokenizer.json").write_text("{}")
    return arguments


def no_tokenizer(tmp_path: Path) -> list[str]:
    arguments = broken(tmp_path)
    (Path(arguments[1]) / "tokenizer.json").unlink()
    return arguments


def config_that_is_no_json(tmp_path: Path) -> list[str]:
    arguments = broken(tmp_path)
    (Path(arguments[1]) / "config.json").write_text('{"architectures": ["LlamaForCausalLM"')
    return arguments


def wrong_path(tmp_path: Path) -> list[str]:
    return ["--model-path", str(tmp_path / "nothing")]


def template_that_does_not_parse(tmp_path: Path) -> list[str]:
    (tmp_path / "chat.jinja").write_text("{% for message in %}")
    return [*broken(tmp_path), "--chat-template", str(tmp_path / "chat.jinja")]


REFUSALS = {
    truncated_gguf: (1, r"m\.gguf.*(truncated|ends|shorter)"),
    truncated_safetensors: (1, r"model\.safetensors.*(truncated|damaged|shorter|ends)"),
    missing_tensor: (1, r"model\.layers\.1\.mlp\.up_proj\.weight"),
    misshapen_tensor: (1, r"model\.layers\.0\.self_attn\.k_proj\.weight.*\[3, 5\]"),
    unsupported_architecture: (1, r"MambaForCausalLM cannot be served.*recurrent state"),
    no_memory_for_a_page: (1, r"no room for one page of KV cache.*Raise --mem-fraction-static"),
    no_tokenizer: (1, r"tokenizer\.json"),
    broken_tokenizer: (1, r"tokenizer\.json"),
    config_that_is_no_json: (1, r"config\.json"),
    wrong_path: (1, r"No model at .*nothing"),
    template_that_does_not_parse: (1, r"chat template cannot be compiled.*--chat-template"),
}


def complaint(server: ServerProcess) -> str:
    """The one line that is not a log line; it is the last one."""
    others = [line for line in server.errors.splitlines() if not re.match(r"\[\d{4}-", line)]
    assert len(others) == 1, server.errors
    assert server.errors.endswith(others[0] + "\n"), server.errors
    assert others[0].startswith("setpoint: error: ")
    assert others[0].endswith((".", "?"))
    assert " ERROR: " not in server.errors, server.errors
    return others[0]


FULL_ONLY = (broken_tokenizer, no_tokenizer, template_that_does_not_parse, truncated_safetensors)
"""Also tested without processes."""


@pytest.mark.parametrize(
    "make", [pytest.param(make, marks=[pytest.mark.full] if make in FULL_ONLY else [], id=make.__name__) for make in REFUSALS]
)
def test_a_start_that_fails_says_why_in_one_line(make: Callable[[Path], list[str]], tmp_path: Path) -> None:
    code, words = REFUSALS[make]
    with running_server(tmp_path, *make(tmp_path), ready=False) as server:
        assert server.wait_end() == code, server.errors
        assert re.search(words, complaint(server)), server.errors
        assert server.output == ""


def test_a_gpu_that_is_not_there(tiny_model: Path, tmp_path: Path) -> None:
    arguments, hidden = ["--model-path", str(tiny_model), "--device", "cuda"], {"CUDA_VISIBLE_DEVICES": "-1"}
    with running_server(tmp_path, *arguments, ready=False, env=hidden) as server:
        assert server.wait_end() == 1
        assert "--device cuda was asked for, but torch sees no CUDA device here" in complaint(server)


def test_an_option_nobody_knows_is_named_with_its_neighbour(tmp_path: Path) -> None:
    with running_server(tmp_path, "--mem-fraction-statik", "0.5", ready=False) as server:
        assert server.wait_end() == 2
        assert "--mem-fraction-static" in complaint(server)


def test_a_taken_port(tiny: ServerProcess, tiny_model: Path, tmp_path: Path) -> None:
    with running_server(tmp_path, "--model-path", str(tiny_model), ready=False, port=tiny.port) as server:
        assert server.wait_end() == 2
        assert f"127.0.0.1:{tiny.port}" in complaint(server)
        assert "--port" in complaint(server)


def test_a_port_that_another_server_takes_during_the_start(tiny_model: Path, tmp_path: Path) -> None:
    """Both bind it before either listens; the second to be ready says so instead of hanging."""
    port = free_port()
    arguments = ("--model-path", str(tiny_model))
    with (
        running_server(tmp_path / "a", *arguments, ready=False, port=port) as first,
        running_server(tmp_path / "b", *arguments, ready=False, port=port) as second,
    ):
        wait_until(lambda: first.process.poll() is not None or second.process.poll() is not None)
        loser, winner = (first, second) if first.process.poll() is not None else (second, first)
        assert loser.wait_end() == 2
        assert f"127.0.0.1:{port}" in complaint(loser)
        winner.wait_ready()
        assert winner.generate(text="a", sampling_params={"max_new_tokens": 2})["meta_info"]["completion_tokens"] == 2


def test_options_from_a_file_reach_the_engine(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "options.yaml").write_text(json.dumps({"max-total-tokens": "2Ki", "page-size": 16}))
    with running_server(tmp_path, str(tiny_model), "--config", str(tmp_path / "options.yaml")) as server:
        assert server.state()["pool"]["total"] == 2048
