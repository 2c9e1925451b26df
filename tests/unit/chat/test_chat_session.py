"""A chat's turns and commands, with answers from a script."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from setpoint.chat.answers import AnswerChunk
from setpoint.chat.chat_screen import Screen, printable
from setpoint.chat.conversation import Conversation, read_params
from setpoint.chat.repetition import goes_in_circles
from setpoint.chat.session import Session
from setpoint.core.errors import ContextLengthError, RequestError


class Script:
    """Answers with the number of the question, in two pieces; conversations of more than ``limit``
    messages are too long."""

    name = "script"

    def __init__(self, limit: int = 100) -> None:
        self.limit = limit
        self.asked: list[list[str]] = []

    def answer(
        self, conversation: Conversation, question: str
    ) -> Generator[AnswerChunk, None, None]:
        contents = [message["content"] for message in conversation.messages(question)]
        if len(contents) > self.limit:
            raise ContextLengthError("Too long.")
        self.asked.append(contents)
        while question == "repeat":
            yield AnswerChunk("* Grey\n", 1)
        if question == "stop me at once":
            raise KeyboardInterrupt
        yield AnswerChunk(f"answer {len(self.asked)}", 1)
        if question == "stop me":
            raise KeyboardInterrupt
        yield AnswerChunk("!", 2, "stop")

    def close(self) -> None: ...


Play = Callable[..., tuple[int, str, str]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Play:
    def run(
        source: Script,
        typed: str,
        *,
        conversation: Conversation | None = None,
        drop_old_turns: bool = False,
    ) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        code = Session(
            source, Screen(), conversation or Conversation(), drop_old_turns=drop_old_turns
        ).run()
        return code, *capsys.readouterr()

    return run


def test_turns_build_on_each_other(play: Play) -> None:
    source = Script()
    code, out, err = play(
        source,
        "one\n\ntwo\n/undo\nthree\n/retry\n/reset\nfour\n",
        conversation=Conversation("Be brief."),
    )
    assert (code, err) == (0, "")
    assert out == "".join(f"answer {number}!\n" for number in range(1, 6))
    first = ["Be brief.", "one", "answer 1!"]
    assert source.asked == [
        first[:2],
        [*first, "two"],
        [*first, "three"],
        [*first, "three"],
        ["Be brief.", "four"],
    ]


def test_a_stopped_answer_stays_as_far_as_it_came(play: Play) -> None:
    source = Script()
    play(source, "stop me\nand?\n")
    assert source.asked[1] == ["stop me", "answer 1", "and?"]


def test_an_overgrown_conversation_is_refused_or_loses_its_oldest_turns(play: Play) -> None:
    source = Script(limit=3)
    code, out, err = play(source, "one\ntwo\nthree\n")
    assert (code, out) == (1, "answer 1!\nanswer 2!\n")
    assert (
        err == "error: Too long. Shorten it with /undo or /reset, or start the chat with"
        " --drop-old-turns.\n"
    )
    source = Script(limit=3)
    assert play(source, "one\ntwo\nthree\n", drop_old_turns=True)[0] == 0
    assert source.asked[2] == ["two", "answer 2!", "three"]
    source, conversation = Script(limit=0), Conversation(turns=[("one", "answer 1!")])
    assert (
        play(source, "two\n", conversation=conversation, drop_old_turns=True)[2]
        == "error: Too long. Shorten the message.\n"
    )
    assert conversation.turns == [("one", "answer 1!")], "what is refused leaves no trace"


def test_a_retry_without_an_answer_keeps_the_turn(play: Play) -> None:
    conversation = Conversation(turns=[("one", "answer 1!")])
    assert play(Script(limit=0), "/retry\n", conversation=conversation)[0] == 1
    assert conversation.turns == [("one", "answer 1!")]
    conversation.turns = [("stop me at once", "answer 1!")]
    assert play(Script(), "/retry\n", conversation=conversation)[0] == 0
    assert conversation.turns == [("stop me at once", "answer 1!")]


def test_commands_change_what_is_sent(play: Play, tmp_path: Path) -> None:
    conversation = Conversation()
    saved = tmp_path / "chat.json"
    typed = (
        f"/system Be kind.\n/params temperature=0.5 max_tokens=7\none\n/save {saved}\n/save"
        f" {saved}\n/system -\n/params max_tokens=\n"
    )
    code, _, err = play(Script(), typed, conversation=conversation)
    assert (code, err) == (1, f"error: {saved} exists already; give another name.\n")
    assert (conversation.system, conversation.params) == ("", {"temperature": 0.5})
    content = json.loads(saved.read_text())
    assert content["params"] == {"temperature": 0.5, "max_tokens": 7}
    assert [message["role"] for message in content["messages"]] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("/nope", "There is no command /nope"),
        ("/quit now", "/quit takes no argument; type /quit alone."),
        ("/undo 2", "/undo takes no argument"),
        ("/undo", "no question to go back to"),
        ("/save", "needs the name of a file"),
        ("/save /nowhere/at/all", "cannot be written: No such file or directory"),
        ("/params temperature=hot", "temperature must be a number, got 'hot'"),
        ("/params top_p=2", "top_p must be above 0"),
        ("/params n=2", "A chat has no sampling option 'n'"),
        ("/params seed=", "seed is not set"),
        ("/params temperature", "temperature needs a value"),
    ],
)
def test_bad_commands(play: Play, typed: str, message: str) -> None:
    source = Script()
    code, _, err = play(source, typed + "\n")
    assert code == 1
    assert message in err
    assert not source.asked


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ("a\\\nb\\\n\nc\n", ["a\nb\n", "c"]),
        ('"""a\n/b\nc"""\nd\n', ["a\n/b\nc", "d"]),
        ('"""\na\n\n  b\n"""\n', ["a\n\n  b"]),
        ('"""one line"""\n', ["one line"]),
        ('"""to the end\nof the input', ["to the end\nof the input"]),
        ("no newline", ["no newline"]),
    ],
)
def test_messages_of_several_lines(play: Play, typed: str, messages: list[str]) -> None:
    source = Script()
    play(source, typed)
    assert [asked[-1] for asked in source.asked] == messages


def test_nothing_a_terminal_would_obey_gets_through() -> None:
    every = "".join(map(chr, range(0x3000)))
    shown = printable(every)
    assert not [
        character for character in shown if ord(character) < 0x20 and character not in "\t\n"
    ]
    assert not [character for character in shown if 0x7F <= ord(character) < 0xA0]
    assert printable("\x1b[31mred\x1b[0m Zürich\n\t✓") == "␛[31mred␛[0m Zürich\n\t✓"


@pytest.mark.parametrize("typed", ["quit", "exit", "/quit", " /exit "])
def test_words_that_end_the_chat(play: Play, typed: str) -> None:
    source = Script()
    assert play(source, f"{typed}\none\n") == (0, "", "")
    play(source, f'"""{typed}"""\n')
    assert source.asked == [[typed]], "a block is always a message"


def test_a_repeated_answer_holds_up_no_question_of_a_pipe(play: Play) -> None:
    """Red before: the chat waited for the end of the context, for minutes, before it read on."""
    code, out, err = play(Script(), "repeat\ntwo\n")
    assert (code, out.splitlines()[-1]) == (0, "answer 2!")
    assert err.startswith("An answer was stopped because it repeated itself. ")


def test_an_answer_that_goes_in_circles_is_told_from_one_that_does_not() -> None:
    line = "The lighthouse is a beacon of hope. "
    assert goes_in_circles("Once upon a time. " + line * 7 + line[:9])
    assert goes_in_circles("ha" * 120)
    assert not goes_in_circles(line * 6)
    assert not goes_in_circles("".join(f"{number}, " for number in range(1000)))
    assert not goes_in_circles(
        "| a | b |\n|---|---|\n" + "".join(f"| {number} | {number**2} |\n" for number in range(100))
    )


def test_params_are_typed_and_checked() -> None:
    assert read_params({"temperature": "0.5", "seed": "7", "stop": "END"}) == {
        "temperature": 0.5,
        "seed": 7,
        "stop": "END",
    }
    with pytest.raises(RequestError, match="seed must be a whole number"):
        read_params({"seed": "1.5"})
