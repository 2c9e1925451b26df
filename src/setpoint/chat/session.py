"""The turns of a chat: reads messages and commands, shows answers as they come.

Ctrl-C ends an answer, not the program. A question that is refused leaves no trace in the conversation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from setpoint.chat.answers import Source
from setpoint.chat.conversation import PARAMS, Conversation, read_params
from setpoint.chat.screen import Screen
from setpoint.core.errors import ContextLengthError, RequestError

HELP = f'''A line is a message. A backslash at its end continues it; """ opens and closes a block of lines.
Ctrl-C stops the answer, Ctrl-D ends the chat.
  /system [TEXT]        show or set the system prompt; "/system -" removes it
  /params [NAME=VALUE]  show or set sampling options; "NAME=" goes back to the default
                        ({", ".join(PARAMS)})
  /undo                 forget the last question and its answer
  /retry                answer the last question again
  /reset                forget all questions and answers
  /save FILE            write the conversation to a new JSON file
  /help, /quit'''


class Session:
    def __init__(self, source: Source, screen: Screen, conversation: Conversation, *, drop_old_turns: bool) -> None:
        self._source = source
        self._screen = screen
        self._conversation = conversation
        self._drop_old_turns = drop_old_turns
        self._num_errors = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: screen.note(HELP),
            "system": self._system,
            "params": self._params,
            "undo": self._undo,
            "retry": self._retry,
            "reset": self._reset,
            "save": self._save,
        }

    def run(self) -> int:
        """Until /quit or the end of the input. Returns the exit code: 1 if something went wrong and nobody was there to see it."""
        while True:
            try:
                message, is_block = self._screen.read()
                if message.strip() in ("/quit", "/exit") and not is_block:
                    break
                self._turn(message, is_block=is_block)
            except EOFError:
                break
            except KeyboardInterrupt:
                self._screen.interrupted()
                self._screen.note("Ctrl-D or /quit ends the chat.")
            except RequestError as error:
                self._num_errors += 1
                self._screen.error(error.message)
        self._screen.end_line()
        return 1 if self._num_errors and not self._screen.is_terminal else 0

    def _turn(self, message: str, *, is_block: bool) -> None:
        if not message.strip():
            return
        if not message.startswith("/") or is_block:
            self._ask(message)
            return
        name, _, argument = message[1:].partition(" ")
        command = self._commands.get(name)
        if command is None:
            raise RequestError(f'There is no command /{name}; /help lists them. A message that begins with a slash goes between """.')
        command(argument.strip())

    def _ask(self, question: str) -> bool:
        """Show the answer as it comes. A question without one leaves the conversation as it was; returns False then, or raises."""
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
            num_dropped = len(before) - len(turns)
            self._screen.note(f"[forgot the {num_dropped} oldest questions and answers: the conversation had outgrown the context]")
        turns.append((question, answer))
        return True

    def _answer_that_fits(self, question: str) -> str | None:
        """As ``_answer``; while the conversation is too long it loses its oldest turn, if that was asked for."""
        turns = self._conversation.turns
        while True:
            try:
                return self._answer(question)
            except ContextLengthError as error:
                if not turns:
                    raise ContextLengthError(f"{error.message} Shorten the message.") from None
                if not self._drop_old_turns:
                    advice = "Shorten it with /undo or /reset, or start the chat with --drop-old-turns."
                    raise ContextLengthError(f"{error.message} {advice}") from None
                del turns[0]

    def _answer(self, question: str) -> str | None:
        """The text of the answer; of its part if it was stopped, None if there was none yet."""
        started = time.perf_counter()
        first: float | None = None
        text, num_tokens, finish = "", None, None
        try:
            with closing(self._source.answer(self._conversation, question)) as pieces:
                for piece in pieces:
                    if first is None and (piece.text or piece.num_tokens):
                        first = time.perf_counter()
                    self._screen.text(piece.text)
                    text += piece.text
                    num_tokens, finish = piece.num_tokens or num_tokens, piece.finish or finish
        except KeyboardInterrupt:
            finish = "stopped"
            self._screen.interrupted()
        self._screen.end_line()
        self._screen.note(_summary(num_tokens, finish, started=started, first=first, ended=time.perf_counter()))
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
                raise RequestError(f"{name} needs a value: NAME=VALUE sets a sampling option, NAME= takes it back.")
            if value:
                params.update(read_params({name: value}))
            elif params.pop(name, None) is None:
                raise RequestError(f"{name} is not set; NAME=VALUE sets a sampling option.")
        self._conversation.params = params
        self._screen.note("Sampling: " + (", ".join(f"{name}={value}" for name, value in params.items()) or "all defaults"))

    def _undo(self, _: str) -> None:
        self._last_turn()
        self._conversation.turns.pop()
        self._screen.note(f"Forgotten; {len(self._conversation.turns)} questions and answers are left.")

    def _retry(self, _: str) -> None:
        turn = self._last_turn()
        self._conversation.turns.pop()
        is_answered = False
        try:
            is_answered = self._ask(turn[0])
        finally:
            if not is_answered:
                self._conversation.turns.append(turn)

    def _reset(self, _: str) -> None:
        self._conversation.turns.clear()
        self._screen.note("All questions and answers are forgotten; the system prompt and sampling options stay.")

    def _save(self, name: str) -> None:
        if not name:
            raise RequestError("/save needs the name of a file.")
        self._conversation.save(Path(name).expanduser(), model=self._source.name)
        self._screen.note(f"Saved to {name}.")

    def _last_turn(self) -> tuple[str, str]:
        if not self._conversation.turns:
            raise RequestError("There is nothing to go back to.")
        return self._conversation.turns[-1]


def _summary(num_tokens: int | None, finish: str | None, *, started: float, first: float | None, ended: float) -> str:
    """``[42 tokens, 81.3 tok/s, first after 0.09 s]``: the rate is that of the tokens after the first."""
    parts = []
    if num_tokens is not None:
        parts.append(f"{num_tokens} tokens")
        if first is not None and num_tokens > 1 and ended > first:
            parts.append(f"{(num_tokens - 1) / (ended - first):.1f} tok/s")
    if first is not None:
        parts.append(f"first after {first - started:.2f} s")
    if finish == "length":
        parts.append("cut at the length limit")
    elif finish in ("stopped", "abort"):
        parts.append("stopped")
    elif num_tokens is None:
        parts.append("the server counts no tokens")
    return f"[{', '.join(parts)}]"
