"""The default model through OpenAI's client for Node: chats whole and streamed, and the text of
every error."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from setpoint_testing.server_process import ServerProcess

HERE = Path(__file__).with_name("openai_node")


@pytest.fixture(scope="module")
def seen(smol: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the client's user sees of each call in ``calls.mjs``."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip(
            "Node.js and npm are needed to run OpenAI's Node client; this machine does not have"
            " both."
        )
    folder = shutil.copytree(HERE, tmp_path_factory.mktemp("node") / "client")
    environment = {**os.environ, "npm_config_cache": str(folder / ".npm")}
    installed = subprocess.run(
        ["npm", "ci", "--no-audit", "--no-fund"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if installed.returncode != 0:
        pytest.skip(
            f"npm could not install OpenAI's Node client: {installed.stderr.strip()[-500:]}"
        )
    run = subprocess.run(
        ["node", "calls.mjs", smol.url], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


ERRORS = {
    "a temperature out of range": "400 temperature must be .*-1",
    "a temperature that is text": "400 temperature must be a number, got a string",
    "max_tokens below zero": "400 max_tokens must be between 0 and .*, got -1",
    "an unknown role": r"400 messages\[0\].role must be one of .*user.*; got 'bot'",
    "an unknown model": "404 .*'gpt-4'.*does not exist",
    "a prompt that is too long": "400 .*longer than the model's context length",
    "a streamed prompt that is too long": "400 .*longer than the model's context length",
    "a body that is no object": "400 The body must be a JSON object, got a list",
    "a body without messages": "400 messages is missing",
    "a route that does not exist": "404 There is no route /v1/conversations",
    "a method that does not exist": "405 .*POST",
}


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", ERRORS)
def test_the_text_of_an_error_reaches_the_user(seen: dict[str, Any], case: str) -> None:
    assert re.match(ERRORS[case], seen[case]["error"]), seen[case]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_chats(seen: dict[str, Any]) -> None:
    assert "Paris" in seen["a chat"]["answer"]
    assert seen["a streamed chat"] == seen["a chat"]
    assert seen["the model default"] == {"answer": "model"}
