"""A model that cannot fit is refused before anything of it is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import psutil

from setpoint.testing.server_process import running_server

LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def test_dummy_weights_that_cannot_fit(tiny_model: Path, tmp_path: Path) -> None:
    """Red before: the process grew until the machine died. The number of layers follows the
    machine's memory, so that no machine can take the model."""
    copies = max(1, psutil.virtual_memory().total // (100 << 30) + 1)
    config = json.loads((tiny_model / "config.json").read_text()) | LLAMA_70B
    config["num_hidden_layers"] *= copies
    config.pop("head_dim", None)
    folder = tmp_path / "large"
    folder.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    arguments = ("--model-path", str(folder), "--load-format", "dummy")
    with running_server(tmp_path / "server", *arguments, ready=False) as server:
        assert server.wait_end() == 1
        last = server.messages[-1]
        assert "does not fit into the memory: its weights need" in last, server.errors
        assert "What would fit here: " in last
        assert "billion parameters in bfloat16" in last
        assert "Load weight" not in server.errors
        assert "Traceback" not in server.errors
