"""Instructor: answers as pydantic models, by tool call, by JSON schema, and in pieces."""

from __future__ import annotations

import instructor
import openai
from checks import MODEL, URL, check, report
from pydantic import BaseModel, ConfigDict, Field

ASK = [{"role": "user", "content": "Name a city and its population."}]


class City(BaseModel):
    # A schema that allows more properties gets more of them from a small model, without an end.
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=100_000_000)


def client(mode: instructor.Mode) -> instructor.Instructor:
    plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(plain, mode=mode)


def ask(mode: instructor.Mode) -> None:
    answer = client(mode).chat.completions.create(
        model=MODEL,
        messages=ASK,
        response_model=City,
        temperature=0,
        max_completion_tokens=100,
        max_retries=0,
    )
    assert isinstance(answer, City)


@check("by tool call")
def by_tool() -> None:
    ask(instructor.Mode.TOOLS)


@check("by JSON schema")
def by_schema() -> None:
    ask(instructor.Mode.JSON_SCHEMA)


@check("in pieces")
def in_pieces() -> None:
    pieces = list(
        client(instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(
            model=MODEL,
            messages=ASK,
            response_model=City,
            temperature=0,
            max_completion_tokens=100,
        )
    )
    assert len(pieces) > 2
    assert pieces[-1].population is not None


report()
