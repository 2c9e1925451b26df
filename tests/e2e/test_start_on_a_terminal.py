"""What a start shows on a terminal: few lines, for a person. Files get SGLang's lines as well."""

from __future__ import annotations

import re
from pathlib import Path

from setpoint_testing.pseudo_terminal import CTRL_C, terminal
from setpoint_testing.server_process import ServerProcess, free_port

MOST_LINES, MOST_CHARACTERS = 12, 200
FOR_FILES = ("server_args=", "Load weight end.", "KV Cache is allocated.", "max_total_num_tokens=")


def test_a_terminal_gets_few_short_lines(tiny_model: Path) -> None:
    model, port = str(tiny_model), str(free_port())
    arguments = ["serve", "--model-path", model, "--dtype", "float32", "--port", port]
    with terminal(["-m", "setpoint.cli", *arguments]) as server:
        before = server.expect("message.content)")
        server.type(CTRL_C)
        server.end()
    # Progress comes when the start takes long, and is not counted.
    lines = [line for line in before.splitlines() if line and "Loading " not in line]
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= MOST_CHARACTERS
    assert any("] Prefill batch, " in line for line in lines), "the warm-up"
    assert f"\n\nReady: http://127.0.0.1:{port}\n" in before.replace("\r", "")
    assert not [word for word in FOR_FILES if word in before]
    assert re.search(r"\] Memory: the weights take .* KV cache up to .* tokens; .* left\.", before)
    assert "] Limits: 4,096 tokens per request (--context-length), " in before


def test_a_file_gets_the_lines_of_sglang(tiny: ServerProcess) -> None:
    log = tiny.errors
    assert [word for word in FOR_FILES if word not in log] == []
    assert "] Memory: " not in log
