"""A model that cannot fit is refused before anything of it is loaded, downloaded or converted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import psutil

from setpoint.checkpoint.spec import read_spec
from setpoint.planning.memory import format_bytes
from setpoint_testing import tiny_gguf
from setpoint_testing.hub import Hub
from setpoint_testing.server_process import ServerProcess, running_server

LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


NAME = "owner/large"


def large_config(tiny_model: Path) -> dict[str, Any]:
    """A config whose number of layers follows the machine's memory, so that no machine can take
    the model."""
    copies = max(1, psutil.virtual_memory().total // (100 << 30) + 1)
    config = json.loads((tiny_model / "config.json").read_text()) | LLAMA_70B
    config["num_hidden_layers"] *= copies
    config.pop("head_dim", None)
    return dict(config)


def check_refused(server: ServerProcess) -> None:
    assert server.wait_end() == 1
    last = server.messages[-1]
    assert "does not fit into the memory: its weights need" in last, server.errors
    assert "What would fit here: " in last
    assert re.search(r"[mb]illion parameters in bfloat16", last)  # as much as is free just now
    assert "Load weight" not in server.errors
    assert "Traceback" not in server.errors


def test_dummy_weights_that_cannot_fit(tiny_model: Path, tmp_path: Path) -> None:
    """Red before: the process grew until the machine died."""
    folder = tmp_path / "large"
    folder.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(large_config(tiny_model)))
    arguments = ("--model-path", str(folder), "--load-format", "dummy")
    with running_server(tmp_path / "server", *arguments, ready=False) as server:
        check_refused(server)
        parameters = read_spec(folder).num_parameters
        assert f"its weights need {format_bytes(2 * parameters)} (" in server.messages[-1]


def hub_files(tiny_model: Path, config: dict[str, Any]) -> dict[str, bytes | int]:
    small = {
        file.name: file.read_bytes() for file in tiny_model.iterdir() if file.suffix == ".json"
    }
    index = json.dumps({"weight_map": {f"layer.{n}": f"m-{n}.safetensors" for n in range(30)}})
    shards = {f"m-{number}.safetensors": 5 << 30 for number in range(30)}
    return {
        **small,
        "config.json": json.dumps(config).encode(),
        "model.safetensors.index.json": index.encode(),
        **shards,
    }


def test_weights_that_cannot_fit_are_not_downloaded(tiny_model: Path, tmp_path: Path) -> None:
    """Red before: 150 GB were downloaded first."""
    files = hub_files(tiny_model, large_config(tiny_model))
    with Hub(NAME, files).running() as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub")}
        arguments = ("--model-path", NAME)
        with running_server(tmp_path / "server", *arguments, ready=False, env=env) as server:
            check_refused(server)
            assert server.messages[-1].startswith(f"setpoint: error: {NAME} does not fit")
    small = sorted(name for name, content in files.items() if isinstance(content, bytes))
    steps = [each for each in hub.requests if NAME in each]
    print(f"from the name to the refusal: {len(steps)} requests", *steps, sep="\n")
    assert sorted(hub.fetched()) == small, "each small file once, and no weights"
    assert not [each for each in steps if "/m-" in each], "not even the size of a weight file"
    assert len(steps) <= 2 * len(small) + 2, "two for a file, two for the list of files"


def test_a_model_of_the_hub_that_fits_is_downloaded_and_served(
    tiny_model: Path, tmp_path: Path
) -> None:
    files: dict[str, bytes | int] = {file.name: file.read_bytes() for file in tiny_model.iterdir()}
    with Hub(NAME, files).running() as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub")}
        arguments = ("--model-path", NAME, "--max-total-tokens", "512")
        with running_server(tmp_path / "server", *arguments, env=env) as server:
            server.generate(input_ids=[5, 6], sampling_params={"max_new_tokens": 2})
    fetched = hub.fetched()
    assert sorted(fetched) == sorted(files), "every file once"
    assert fetched[-1] == "model.safetensors"


def test_a_gguf_file_that_cannot_fit_is_not_converted(tmp_path: Path) -> None:
    """Red before: its digest was computed and it was written out in bfloat16, for many minutes. The
    file has a whole header and no data: what lies behind the header is a hole."""
    layers = 80 * max(1, psutil.virtual_memory().total // (100 << 30) + 1)
    model = tiny_gguf.TinyLlama(
        num_layers=layers,
        hidden_size=8192,
        intermediate_size=28_672,
        num_heads=64,
        num_kv_heads=8,
    )
    path = tiny_gguf.write_header(tmp_path / "large.gguf", model)
    cache = tmp_path / "cache"
    env = {"XDG_CACHE_HOME": str(cache)}
    arguments = ("--model-path", str(path))
    with running_server(tmp_path / "server", *arguments, ready=False, env=env) as server:
        check_refused(server)
        assert "Converting" not in server.errors
    assert not (cache / "setpoint" / "models").exists(), "neither a digest nor a folder"
