"""``setpoint chat`` at a real terminal: an engine of its own, a server, and servers that
misbehave."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from setpoint_testing.misbehaving import KEY, misbehaving
from setpoint_testing.pseudo_terminal import CTRL_C, CTRL_D, CTRL_Z, Terminal, terminal
from setpoint_testing.server_process import ServerProcess, wait_until

ARROW_UP = "\x1b[A"
CHAT = ["-m", "setpoint.cli", "chat"]
GREEDY = ["--temperature", "0"]


def press_until(screen: Terminal, key: str, text: str) -> None:
    """Press a key until ``text`` shows: a program that has just written its prompt may not listen
    yet."""
    for _ in range(50):
        screen.type(key)
        try:
            screen.expect(text, timeout_s=1)
        except AssertionError:
            continue
        return
    raise AssertionError(f"{text!r} does not come")


def endless(model: Path, folder: Path) -> Path:
    """A copy in which no token ends an answer."""
    shutil.copytree(model, folder)
    for name, key in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        config = json.loads((folder / name).read_text())
        del config[key]
        (folder / name).write_text(json.dumps(config))
    return folder


def test_a_session_with_an_engine_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    saved, model = tmp_path / "saved.json", endless(tiny_model, tmp_path / "model")
    with terminal(
        [*CHAT, str(model), "--dtype", "float32", "--system", "Be brief.", *GREEDY]
    ) as screen:
        screen.expect("Type a message, or /help for the commands.")
        screen.expect("> ")
        screen.type("Hello\n")
        screen.expect("Hello\n")
        shown = len(screen.screen)
        wait_until(
            lambda: screen.read(0.1) and len(screen.screen) > shown + 50
        )  # an answer without end is under way
        screen.type(CTRL_C)
        screen.expect(" tok/s, ")
        assert screen.expect("]").endswith("stopped")
        screen.expect("> ")
        screen.type("/params max_tokens=6\n")
        screen.expect("Sampling: temperature=0.0, max_tokens=6")
        screen.type("one \\\n")
        screen.expect("… ")
        screen.type("two\n")
        screen.expect("[6 tokens, ")
        screen.expect("cut at the length limit]")
        screen.type('"""\n/first\nsecond"""\n')
        screen.expect("[6 tokens, ")
        screen.type(f"/save {saved}\n")
        screen.expect("Saved to")
        press_until(screen, CTRL_C, "Ctrl-D or /quit ends the chat.")
        screen.type("/undo\n")
        screen.expect("2 questions and their answers remain.")
        screen.type("/reset\n")
        screen.expect("are forgotten")
        screen.type("/retry\n")
        screen.expect("error: The conversation is empty")
        screen.expect("> ")
        screen.type(f"{ARROW_UP}\n")
        screen.expect("/retry\nerror: The conversation is empty")
        screen.expect("> ")
        screen.type(CTRL_D)
        assert screen.end() == 0
    messages = json.loads(saved.read_text())["messages"]
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert [message["content"] for message in messages if message["role"] == "user"] == [
        "Hello",
        "one \ntwo",
        "/first\nsecond",
    ]
    assert messages[2]["content"]  # the stopped answer stays, as far as it came


def test_a_session_with_a_server(tiny: ServerProcess) -> None:
    with terminal([*CHAT, "--base-url", f"{tiny.url}/v1", "--max-tokens", "8", *GREEDY]) as screen:
        screen.expect(f"at {tiny.url}/v1 is ready. Type a message")
        for question in ("Hello", "And you?"):
            screen.expect("> ")
            screen.type(f"{question}\n")
            screen.expect(" tokens, ")
            screen.expect("first after ")
        screen.expect("> ")
        screen.type("/params temperature=x\n")
        screen.expect("error: temperature must be a number, got 'x'.")
        screen.type("x" * 3000 + "\n")
        screen.type("y" * 1500 + "\n")
        screen.expect("context length")
        screen.expect("Shorten it with /undo or /reset, or start the chat with --drop-old-turns.")
        screen.expect("> ")
        screen.type("/quit\n")
        assert screen.end() == 0
    wait_until(tiny.is_idle)


def test_a_pipe_gets_answers_and_nothing_else(tiny: ServerProcess) -> None:
    command = [
        sys.executable,
        *CHAT,
        "--base-url",
        f"{tiny.url}/v1",
        "--max-tokens",
        "8",
        "--drop-old-turns",
        *GREEDY,
    ]
    long = "x" * 2000 + "\n" + "y" * 2000 + "\n"
    typed = "Hello\n/reset\nHel\\\nlo\n" + long + '"""Hello'
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    refused = subprocess.run(
        [*command, "--max-tokens", "4000"], input=long, capture_output=True, text=True, timeout=120
    )
    assert refused.returncode == 1
    assert refused.stderr.count("context length") == 2


def test_ctrl_c_hangs_up_on_a_server() -> None:
    with misbehaving() as (url, gone), terminal([*talks(url), "--max-tokens", "9999"]) as screen:
        for _ in range(2):
            screen.expect("> ")
            screen.type("Hello\n")
            screen.expect("bla bla bla")
            screen.type(CTRL_C)
            screen.expect("stopped]")
            assert gone.wait(30)
            gone.clear()
        screen.expect("> ")
        screen.type(CTRL_D)
        assert screen.end() == 0


def talks(url: str) -> list[str]:
    """A chat with a server whose answers never end."""
    return [*CHAT, "talks", "--base-url", url, "--api-key", KEY]


def test_what_is_typed_during_an_answer_waits_for_the_next_prompt() -> None:
    with misbehaving() as (url, _), terminal([*talks(url), "--max-tokens", "9999"]) as screen:
        before = screen.modes()
        screen.expect("> ")
        screen.type("Hello\n")
        screen.expect("bla bla bla")
        screen.type("/quit now\nexi")
        screen.expect("bla bla bla bla bla")
        screen.type(CTRL_C)
        answer = screen.expect("stopped]")
        assert not set(answer) & set("qxw/^"), "the answer stays whole"
        screen.expect("> /quit now\n")
        screen.expect("error: /quit takes no argument; type /quit alone.")
        screen.expect("> exi")
        screen.type("t\n")
        assert screen.end() == 0
        assert screen.modes() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_the_shell_gets_the_terminal_back_when_the_chat_is_killed(number: signal.Signals) -> None:
    with misbehaving() as (url, _), terminal([*talks(url), "--max-tokens", "9999"]) as screen:
        before = screen.modes()
        screen.expect("> ")
        screen.type("Hello\n")
        screen.expect("bla bla bla")
        assert screen.modes() != before
        screen.process.send_signal(number)
        assert screen.end() == -number
        assert screen.modes() == before


def test_ctrl_z_stops_the_chat_and_the_shell_gets_the_terminal() -> None:
    with misbehaving() as (url, _):
        chat = shlex.join([sys.executable, *talks(url), "--max-tokens", "9999"])
        shell = (
            "import os; os.execlp('bash', 'bash', '-mc',"
            f" {f'{chat}; read line; echo shell got $line; fg; echo ended'!r})"
        )
        with terminal(["-c", shell]) as screen:
            before = screen.modes()
            screen.expect("> ")
            screen.type("Hello\n")
            screen.expect("bla bla bla")
            during = screen.modes()
            screen.type(CTRL_Z)
            wait_until(lambda: screen.modes() == before)
            screen.type("this\n")
            screen.expect("shell got this")
            screen.expect("bla bla bla")
            assert screen.modes() == during
            screen.type(CTRL_C + CTRL_D)
            screen.expect("ended")
            assert screen.end() == 0
            assert screen.modes() == before


@pytest.mark.full
def test_an_answer_that_repeats_itself_is_stopped() -> None:
    with misbehaving() as (url, gone), terminal(talks(url)) as screen:
        screen.expect("> ")
        screen.type("Hello\n")
        screen.expect("stopped because it repeated itself]")
        screen.expect("For the whole answer: /params max_tokens=")
        assert gone.wait(30)
        screen.expect("> ")
        screen.type(CTRL_D)
        assert screen.end() == 0


@pytest.mark.full
def test_the_documented_session() -> None:
    """The beginning of the one in docs/chat.md, with the default model."""
    with terminal([*CHAT, "--system", "Answer in one or two sentences.", *GREEDY]) as screen:
        screen.expect("Type a message, or /help for the commands.")
        screen.expect("> ")
        screen.type("What is the capital of France?\n")
        assert "The capital of France is Paris." in screen.expect(" tok/s")
        screen.expect("> ")
        screen.type("And what is it famous for?\n")
        assert "Eiffel Tower" in screen.expect(" tok/s")
        screen.expect("> ")
        screen.type(CTRL_D)
        assert screen.end() == 0
