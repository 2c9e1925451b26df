"""The turns of a chat: reads messages and commands, and shows answers while they arrive.

Ctrl-C ends an answer, not the program. A question that is refused leaves no trace in the
conversation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from setpoint.chat.answers import AnswerSource
from setpoint.chat.chat_screen import Screen
from setpoint.chat.conversation import PARAMS, Conversation, read_params
from setpoint.chat.repetition import CircleWatch
from setpoint.core.errors import ContextLengthError, RequestError

REPEATED = "repeated"
"""The ending of an answer that repeated itself without end."""

HELP = f'''A line is a message. End it with a backslash to continue on the next line; """ opens and
closes a block of lines. Ctrl-C stops an answer, Ctrl-D ends the chat.
  /system [TEXT]        show or set the system prompt; "/system -" removes it
  /params [NAME=VALUE]  show or set sampling options; "NAME=" restores the default
                        ({", ".join(PARAMS)})
  /undo                 forget the last question and its answer
  /retry                answer the last question again
  /reset                forget all questions and answers
  /save FILE            write the conversation to a new JSON file
  /help                 show this text
  /quit                 end the chat, as "quit" and "exit" do'''


class Session:
    def __init__(
        self,
        source: AnswerSource,
        screen: Screen,
        conversation: Conversation,
        *,
        drop_old_turns: bool,
    ) -> None:
        self._source = source
        self._screen = screen
        self._conversation = conversation
        self._drop_old_turns = drop_old_turns
        self._num_errors = 0
        self._commands: dict[str, Callable[[], None]] = {
            "help": lambda: screen.note(HELP),
            "undo": self._undo,
            "retry": self._retry,
            "reset": self._reset,
            "quit": self._quit,
            "exit": self._quit,
        }
        self._commands_with_text: dict[str, Callable[[str], None]] = {
            "system": self._system,
            "params": self._params,
            "save": self._save,
        }

    def run(self) -> int:
        """Run until /quit or the end of the input. Returns the exit code: 1 if something went wrong
        and no person was at the terminal to see it."""
        while True:
            try:
                message, is_block = self._screen.read()
                self._turn(message, is_block=is_block)
            except EOFError:
                break
            except KeyboardInterrupt:
                self._screen.note("Ctrl-D or /quit ends the chat.")
            except RequestError as error:
                self._num_errors += 1
                self._screen.error(error.message)
        self._screen.end_line()
        return 1 if self._num_errors and not self._screen.is_terminal else 0

    def _turn(self, message: str, *, is_block: bool) -> None:
        line = message.strip()
        if is_block or not line.startswith("/"):
            if line in ("quit", "exit") and not is_block:
                self._quit()
            if line:
                self._ask(message)
            return
        name, _, argument = line[1:].partition(" ")
        if name in self._commands_with_text:
            self._commands_with_text[name](argument.strip())
        elif name not in self._commands:
            raise RequestError(
                f"There is no command /{name}; /help lists them. To send a message that begins with"
                ' a slash, put """ around it.'
            )
        elif argument:
            raise RequestError(
                f"/{name} takes no argument; type /{name} alone. To send the line as a message, put"
                ' """ around it.'
            )
        else:
            self._commands[name]()

    def _quit(self) -> None:
        raise EOFError

    def _ask(self, question: str) -> bool:
        """Show the answer while it arrives; returns True. A question without an answer leaves the
        conversation as it was: the method then returns False or raises."""
        turns = self._conversation.turns
        before = list(turns)
        try:
            answer = self._answer_that_fits(question)
        except RequestError:
            turns[:] = before
            raise
        if answer is None:
            turns[:] = before
            return False
        if len(turns) < len(before):
            count = len(before) - len(turns)
            oldest = (
                "oldest question and its answer are"
                if count == 1
                else f"{count} oldest questions and their answers are"
            )
            self._screen.note(
                f"[The conversation no longer fits the context: the {oldest} forgotten.]"
            )
        turns.append((question, answer))
        return True

    def _answer_that_fits(self, question: str) -> str | None:
        """Like ``_answer``, but if the user asked for it, drops the oldest turns while the
        conversation is too long."""
        turns = self._conversation.turns
        while True:
            try:
                return self._answer(question)
            except ContextLengthError as error:
                if not turns:
                    raise ContextLengthError(f"{error.message} Shorten the message.") from None
                if not self._drop_old_turns:
                    advice = (
                        "Shorten it with /undo or /reset, or start the chat with --drop-old-turns."
                    )
                    raise ContextLengthError(f"{error.message} {advice}") from None
                del turns[0]

    def _answer(self, question: str) -> str | None:
        """The text of the answer, or of its first part if it was stopped; None if it was stopped
        before any text."""
        started = time.perf_counter()
        first: float | None = None
        text, num_tokens, finish = "", None, None
        # A user who sets a limit gets the whole answer. Nobody is there to stop one in a pipe.
        watch = None if "max_tokens" in self._conversation.params else CircleWatch()
        try:
            with closing(self._source.answer(self._conversation, question)) as pieces:
                for piece in pieces:
                    if first is None and (piece.text or piece.num_tokens):
                        first = time.perf_counter()
                    self._screen.text(piece.text)
                    text += piece.text
                    num_tokens, finish = piece.num_tokens or num_tokens, piece.finish or finish
                    if watch is not None and watch.stops(text):
                        finish = REPEATED
                        break
        except KeyboardInterrupt:
            finish = "stopped"
        self._screen.end_line()
        self._screen.note(
            _summary(num_tokens, finish, started=started, first=first, ended=time.perf_counter())
        )
        if finish == REPEATED:
            self._screen.tell(
                "For the whole answer: /params max_tokens=1000 (or another limit), then /retry.",
                "An answer was stopped because it repeated itself. For the whole answer, set a"
                " limit: --max-tokens 1000, or another number.",
            )
        return None if finish == "stopped" and not text else text

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = "" if text == "-" else text
        self._screen.note(f"System prompt: {self._conversation.system or 'none'}")

    def _params(self, text: str) -> None:
        params = dict(self._conversation.params)
        for pair in text.split():
            name, equals, value = pair.partition("=")
            if not equals:
                raise RequestError(
                    f"{name} needs a value: NAME=VALUE sets a sampling option, NAME= restores its"
                    " default."
                )
            if value:
                params.update(read_params({name: value}))
            elif params.pop(name, None) is None:
                raise RequestError(f"{name} is not set; NAME=VALUE sets a sampling option.")
        self._conversation.params = params
        self._screen.note(
            "Sampling: "
            + (", ".join(f"{name}={value}" for name, value in params.items()) or "all defaults")
        )

    def _undo(self) -> None:
        self._last_turn()
        self._conversation.turns.pop()
        match len(self._conversation.turns):
            case 0:
                left = "The conversation is empty now."
            case 1:
                left = "One question and its answer remain."
            case many:
                left = f"{many} questions and their answers remain."
        self._screen.note(f"The last question and its answer are forgotten. {left}")

    def _retry(self) -> None:
        turn = self._last_turn()
        self._conversation.turns.pop()
        is_answered = False
        try:
            is_answered = self._ask(turn[0])
        finally:
            if not is_answered:
                self._conversation.turns.append(turn)

    def _reset(self) -> None:
        self._conversation.turns.clear()
        self._screen.note(
            "All questions and answers are forgotten; the system prompt and sampling options stay."
        )

    def _save(self, name: str) -> None:
        if not name:
            raise RequestError("/save needs the name of a file.")
        self._conversation.save(Path(name).expanduser(), model=self._source.name)
        self._screen.note(f"Saved to {name}.")

    def _last_turn(self) -> tuple[str, str]:
        if not self._conversation.turns:
            raise RequestError("The conversation is empty: there is no question to go back to.")
        return self._conversation.turns[-1]


def _summary(
    num_tokens: int | None, finish: str | None, *, started: float, first: float | None, ended: float
) -> str:
    """``[42 tokens, 81.3 tok/s, first after 0.09 s]``: the rate counts the tokens after the
    first."""
    parts = []
    if num_tokens is not None:
        parts.append(f"{num_tokens} token{'' if num_tokens == 1 else 's'}")
        if first is not None and num_tokens > 1 and ended > first:
            parts.append(f"{(num_tokens - 1) / (ended - first):.1f} tok/s")
    if first is not None:
        parts.append(f"first after {first - started:.2f} s")
    if finish == "length":
        parts.append("cut at the length limit")
    elif finish == REPEATED:
        parts.append("stopped because it repeated itself")
    elif finish in ("stopped", "abort"):
        parts.append("stopped")
    elif num_tokens is None:
        parts.append("the server does not count tokens")
    return f"[{', '.join(parts)}]"
