"""What an engine does when it has nothing else to do, and its end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from setpoint.launch.child import engine_process
from setpoint.launch.child.engine_process import IDLE_LOOKS, once_idle


@pytest.mark.parametrize("runs", [[], [0], [IDLE_LOOKS - 1], [IDLE_LOOKS - 1, 0, 2, 1]])
def test_the_work_waits_until_the_engine_was_idle_for_a_while(
    monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    """runs: how often the engine is found idle before it is found busy again."""
    monkeypatch.setattr(engine_process, "LOOK_EVERY_S", 0.0)
    looks: list[bool] = []
    done: list[int] = []

    def found() -> Iterator[bool]:
        for idle in runs:
            yield from [True] * idle
            yield False
        while True:
            yield True

    states = found()

    def is_idle() -> bool:
        looks.append(next(states))
        return looks[-1]

    once_idle(is_idle, lambda: done.append(len(looks))).join()
    assert done == [sum(runs) + len(runs) + IDLE_LOOKS]
    assert looks[-IDLE_LOOKS:] == [True] * IDLE_LOOKS


MIDST_OF_NATIVE_CODE = """\
import runpy, sys, threading
from llguidance import LLTokenizer
from setpoint.launch.child import engine_process

text = sys.stdin.read()
begun = threading.Barrier(3)

def work():
    begun.wait()
    while True:
        LLTokenizer(text)

def main(ranks, inherited):
    for _ in range(2):
        threading.Thread(target=work, daemon=True).start()
    begun.wait()
    return 0

engine_process.main = main
sys.argv = ["setpoint.launch.child", "0", "1"]
runpy.run_module("setpoint.launch.child", run_name="__main__")
"""


def test_an_engine_ends_in_order_while_threads_are_in_native_code() -> None:
    """The interpreter's own end unwinds a thread that comes back from native code: a crash in a
    library that is written in Rust, such as the one that makes grammars."""
    words = [*pre_tokenizers.ByteLevel.alphabet(), *map(str, range(10_000, 50_000))]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, "-c", MIDST_OF_NATIVE_CODE],
            input=tokenizer.to_str(),
            text=True,
            check=False,
        )
        assert ended.returncode == 0
