"""What a start prints, and what it says when it cannot start: one line, an exit code, no
traceback."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from setpoint.config.options import OPTION_FIELDS
from setpoint_testing import tiny_gguf
from setpoint_testing.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from setpoint_testing.server_process import (
    PATIENCE_S,
    READY,
    ServerProcess,
    free_port,
    running_server,
    wait_until,
)
from setpoint_testing.tiny_models import write_tiny_llama

GB = r"\d+\.\d\d GB"
START_UP = [
    r"Model: .* \(.*\)",
    r"server_args=ServerArgs\(model_path='.*', .*dtype='float32'.*\)",
    (
        rf"Load weight end\. elapsed=\d+\.\d\d s, type=LlamaForCausalLM, avail mem={GB}, mem"
        rf" usage={GB}\."
    ),
    rf"KV Cache is allocated\. dtype: float32, #tokens: \d+, K size: {GB}, V size: {GB};"
    r" these are limits: memory is taken when tokens first fill it",
    r"max_total_num_tokens=(\d+), chunked_prefill_size=512, max_prefill_tokens=16384,"
    r" max_running_requests=(\d+), "
    rf"context_len=4096, available_cpu_mem={GB}",
    r"Prefill batch, .*",
    re.escape(READY),
]
"""The lines stand in SGLang's order (docs/sglang, log lines). Warnings may stand between them, and
news for whoever waits."""
IN_DETAIL = [
    (
        r"server_args=ServerArgs\(model_path='.*', revision=None, .*port=\d+,"
        r" .*trust_remote_code=False\)"
    ),
    r"Decision: dtype=float32 \(given\)",
    r"Decision: page_size=1 \(a prefix matches up to its last token\)",
    rf"Load weight begin\. avail mem={GB}",
    r"Decision: max_total_num_tokens=\d+ \(limited by .*\)",
    rf"Memory pool end\. avail mem={GB}",
    re.escape(READY),
    (
        r"Start-up took \d+\.\d s from process start \(interpreter \d+\.\d, .*warm-up \d+\.\d\);"
        r" engine: .*"
    ),
]


def assert_in_order(patterns: list[str], server: ServerProcess) -> None:
    lines = iter(server.messages)
    for pattern in patterns:
        assert any(re.fullmatch(pattern, line) for line in lines), (
            f"{pattern}\nnot in order in\n{server.errors}"
        )


def test_a_start_is_a_dozen_lines(tiny_model: Path, tmp_path: Path) -> None:
    with running_server(tmp_path, "--model-path", str(tiny_model), "--dtype", "float32") as server:
        wait_until(lambda: server.output.endswith(")\n"))
        assert_in_order(START_UP, server)
        aside = ("WARNING: ", "Loading ")
        said = [line for line in server.messages if not line.startswith(aside)]
        assert len(said) == len(START_UP), server.errors
        ready, console, *example = filter(None, server.output.splitlines())
        assert (ready, console) == (f"Ready: {server.url}", f"Console: {server.url}/console")
        assert len(example) == 4
        stamp = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d( TP0)?\] ")
        assert all(stamp.match(line) for line in server.errors.splitlines())
        assert f"max_total_num_tokens={server.state()['pool']['total']}," in server.errors
        assert "Traceback" not in server.errors


@pytest.mark.full
def test_what_a_start_does_not_say_is_at_debug_and_in_server_info(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running_server(
        tmp_path, "--model-path", str(tiny_model), "--dtype", "float32", "--log-level", "debug"
    ) as server:
        wait_until(lambda: "Start-up took" in server.errors)
        assert_in_order(IN_DETAIL, server)
        info = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()
    names = {field.name for field in OPTION_FIELDS}
    assert names <= info.keys()
    assert names | {"max_total_num_tokens", "max_req_len", "overlap_depth"} <= {
        decision["field"] for decision in info["decisions"]
    }


@pytest.mark.full
def test_a_model_with_windows_names_its_cache_groups(tiny_model: Path, tmp_path: Path) -> None:
    """... and answers more tokens than its pool would hold if every layer kept every position."""
    folder = shutil.copytree(tiny_model, tmp_path / "windowed")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 64}))
    options = ("--max-total-tokens", "256", "--chunked-prefill-size", "64", "--strict-accounting")
    with running_server(tmp_path, "--model-path", str(folder), *options) as server:
        assert "KV cache groups: 1 group with a window of 64 tokens" in server.errors
        pool = server.state()["pool"]["total"]
        assert pool == 256
        body = {"prompt": "a" * 300, "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S).json()
        assert reply.get("usage", {}).get("completion_tokens") == 1500 > pool, reply


def snippets(server: ServerProcess) -> tuple[str, str]:
    """What the start printed for a shell, and for Python."""
    wait_until(lambda: server.output.endswith(")\n"))
    _, _, _, _, shell, _, *python = server.output.splitlines()
    assert shell.startswith("curl ")
    return shell, "\n".join(python)


def run(*command: str, **env: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, **env},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_a_start_prints_runs_when_pasted(smol: ServerProcess) -> None:
    shell, python = snippets(smol)
    answer = json.loads(run("bash", "-c", shell))["choices"][0]["message"]["content"]
    assert len(answer.split()) > 2
    assert len(run(sys.executable, "-c", python).split()) > 2  # sampled: its words are not known


@pytest.mark.full
def test_what_a_start_prints_for_embeddings_behind_a_key_runs_when_pasted(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running_server(
        tmp_path, "--model-path", str(tiny_model), "--is-embedding", "--api-key", "sesame"
    ) as server:
        shell, python = snippets(server)
        assert "sesame" not in server.output + server.errors
        assert len(json.loads(run("bash", "-c", shell, API_KEY="sesame"))["data"]) == 2
        assert len(json.loads(run(sys.executable, "-c", python, API_KEY="sesame"))) == 8


def test_every_step_kind_has_its_line(tiny: ServerProcess) -> None:
    tiny.generate(
        text="abc", sampling_params={"max_new_tokens": 90, "temperature": 0, "ignore_eos": True}
    )
    prefill = (
        r"Prefill batch, #new-seq: 1, #new-token: \d+, #cached-token: \d+, token usage: 0\.\d\d,"
        r" #running-req: \d+, #queue-req: 0, "
        r"#pending-token: 0, cpu graph: True, input throughput \(token/s\): \d+\.\d\d"
    )
    decode = (
        r"Decode batch, #running-req: \d+, #token: \d+, token usage: 0\.\d\d, cpu graph: True, gen"
        r" throughput \(token/s\): \d+\.\d\d, "
        r"#queue-req: 0"
    )
    for pattern in (prefill, decode):
        assert any(re.fullmatch(pattern, line) for line in tiny.messages), pattern


def broken(
    tmp_path: Path,
    change: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
    **config: object,
) -> list[str]:
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
    path = tiny_gguf.write(
        tmp_path / "m.gguf",
        tiny_gguf.gguf_tensors(model, model.weights()),
        tiny_gguf.metadata(model),
    )
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
    no_memory_for_a_page: (
        1,
        r"does not fit into the memory.*What would fit here: --mem-fraction-static",
    ),
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


FULL_ONLY = (
    *(broken_tokenizer, config_that_is_no_json, misshapen_tensor, no_memory_for_a_page),
    *(no_tokenizer, template_that_does_not_parse, truncated_safetensors),
)
"""Also tested without processes."""


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, marks=[pytest.mark.full] if make in FULL_ONLY else [], id=make.__name__)
        for make in REFUSALS
    ],
)
def test_a_start_that_fails_says_why_in_one_line(
    make: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    code, words = REFUSALS[make]
    with running_server(tmp_path, *make(tmp_path), ready=False) as server:
        assert server.wait_end() == code, server.errors
        assert re.search(words, complaint(server)), server.errors
        assert server.output == ""


def test_a_gpu_that_is_not_there(tiny_model: Path, tmp_path: Path) -> None:
    arguments, hidden = (
        ["--model-path", str(tiny_model), "--device", "cuda"],
        {"CUDA_VISIBLE_DEVICES": "-1"},
    )
    with running_server(tmp_path, *arguments, ready=False, env=hidden) as server:
        assert server.wait_end() == 2
        assert "--device cuda was asked for, but CUDA_VISIBLE_DEVICES hides every GPU" in complaint(
            server
        )
        assert server.errors.count("\n") == 1


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--chat-template", "/nope"], "--chat-template /nope: no such file"),
        (["--tokenizer-path", "/nope"], "No tokenizer at '/nope'"),
        (["--max-total-tokens", "7"], "--max-total-tokens 7 holds no request"),
        (["--page-size", "1Gi"], "--page-size: '1Gi' is not a whole number"),
        (["--page-size", "1000000000"], "--page-size 1000000000"),
        (["--random-seed", "99999999999999999999"], "--random-seed must be at most"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_can_be_known_early_is_said_before_anything_is_loaded(
    words: list[str], said: str, tmp_path: Path
) -> None:
    with running_server(tmp_path, *words, ready=False) as server:
        assert server.wait_end() in (1, 2)
        assert said in complaint(server)
        assert "Load" not in server.errors


@pytest.mark.full
def test_a_pool_smaller_than_the_warm_up_starts(tiny_model: Path, tmp_path: Path) -> None:
    """The server's own first request is cut to what it can hold, instead of ending it."""
    with running_server(
        tmp_path, "--model-path", str(tiny_model), "--max-total-tokens", "8"
    ) as server:
        assert (
            server.generate(text="a", sampling_params={"max_new_tokens": 2})["meta_info"][
                "completion_tokens"
            ]
            == 2
        )


def test_an_option_nobody_knows_is_named_with_its_neighbour(tmp_path: Path) -> None:
    with running_server(tmp_path, "--mem-fraction-statik", "0.5", ready=False) as server:
        assert server.wait_end() == 2
        assert "--mem-fraction-static" in complaint(server)


def test_a_taken_port(tiny: ServerProcess, tiny_model: Path, tmp_path: Path) -> None:
    with running_server(
        tmp_path, "--model-path", str(tiny_model), ready=False, port=tiny.port
    ) as server:
        assert server.wait_end() == 2
        assert f"127.0.0.1:{tiny.port}" in complaint(server)
        assert "--port" in complaint(server)


@pytest.mark.full
def test_a_port_that_another_server_takes_during_the_start(
    tiny_model: Path, tmp_path: Path
) -> None:
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
        assert (
            winner.generate(text="a", sampling_params={"max_new_tokens": 2})["meta_info"][
                "completion_tokens"
            ]
            == 2
        )


@pytest.mark.full
def test_options_from_a_file_reach_the_engine(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "options.yaml").write_text(json.dumps({"max-total-tokens": "2Ki", "page-size": 16}))
    with running_server(
        tmp_path, str(tiny_model), "--config", str(tmp_path / "options.yaml")
    ) as server:
        assert server.state()["pool"]["total"] == 2048
