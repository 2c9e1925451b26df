"""The state of a chat: the system prompt, the turns so far, and the sampling options.

Plain data and functions that change it. It does not know where answers come from or how they are
shown.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from setpoint.core.errors import RequestError
from setpoint.core.sampling import SamplingParams

Message = dict[str, str]
"""``role`` and ``content``, as in OpenAI's API."""

PARAMS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
    "stop": str,
}
"""Sampling options of a chat, by their names in OpenAI's API and in this server's extensions of
it."""

_NATIVE = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
"""OpenAI's name of an option -> its name in SamplingParams, where they differ."""


def read_params(texts: dict[str, str]) -> dict[str, Any]:
    """Convert values as people type them. Raises RequestError for an unknown name, a wrong type or
    a value out of range."""
    params: dict[str, Any] = {}
    for name, text in texts.items():
        if name not in PARAMS:
            raise RequestError(
                f"A chat has no sampling option {name!r}; its options are {', '.join(PARAMS)}."
            )
        try:
            params[name] = PARAMS[name](text)
        except ValueError:
            kind = "a whole number" if PARAMS[name] is int else "a number"
            raise RequestError(f"{name} must be {kind}, got {text!r}.") from None
    SamplingParams.parse(native_params(params))
    return params


def native_params(params: dict[str, Any]) -> dict[str, Any]:
    """The same options under the names of SamplingParams."""
    return {_NATIVE.get(name, name): value for name, value in params.items()}


@dataclass(slots=True)
class Conversation:
    system: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    """Sampling options that the user set; the model or the server chooses the others."""
    turns: list[tuple[str, str]] = field(default_factory=list)
    """Questions and answers, oldest first."""

    def messages(self, question: str | None = None) -> list[Message]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in self.turns:
            messages += [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": answered},
            ]
        return messages if question is None else [*messages, {"role": "user", "content": question}]

    def save(self, path: Path, *, model: str) -> None:
        """Write a new JSON file whose ``messages`` any OpenAI client accepts. Raises RequestError
        if it cannot be written."""
        content = {"model": model, "params": self.params, "messages": self.messages()}
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(content, file, ensure_ascii=False, indent=1)
                file.write("\n")
        except FileExistsError:
            raise RequestError(f"{path} exists already; give another name.") from None
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}.") from None
