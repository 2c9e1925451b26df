"""Types that two threads convert to for the first time at once. A child process does it: what used
to go wrong ends the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

RACE = """
import importlib, sys, threading
from setpoint.frontend.bodies import parse

def work():
    gate.wait()
    done.append({call})

sys.setswitchinterval(1e-6)
module = importlib.import_module("{module}")
for _ in range(20):
    module = importlib.reload(module)
    gate, done = threading.Barrier(2), []
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 2 and done[0] == done[1], done
"""
"""A module that is executed again has new classes, of which msgspec knows nothing."""
TAG = (
    '{"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content":'
    ' {"type": "any_text"}, "end": "</a>"}}'
)
BODY = {
    "model": "m",
    "max_tokens": 1,
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"name": "f", "input_schema": {}}],
}


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("setpoint.frontend.apis.anthropic.messages_body", f"parse({BODY}, module.MessagesBody)"),
        ("setpoint.grammar.tags", f"module.parse_tag('''{TAG}''')"),
    ],
    ids=["a long and a short body", "two grammars"],
)
def test_two_threads_learn_a_type_at_once(module: str, call: str) -> None:
    script = RACE.format(module=module, call=call)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
