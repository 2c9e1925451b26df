"""LangChain's ChatOpenAI: calls, streams, structured output, and an agent with two tools."""

from __future__ import annotations

from collections.abc import Callable

from checks import MODEL, URL, check, report
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

ASK = "What is the capital of France?"


def model(**options: object) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=f"{URL}/v1", api_key="none", temperature=0, max_retries=0, **options
    )


class City(BaseModel):
    """A city."""

    name: str
    population: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


@tool
def get_time(city: str) -> str:
    """The time in a city."""
    return f"It is noon in {city}."


@check("invoke")
def invoke() -> None:
    answer = model(max_tokens=16).invoke(ASK)
    assert "Paris" in answer.content
    assert answer.usage_metadata["output_tokens"] > 0


@check("stream")
def stream() -> None:
    text = "".join(chunk.content for chunk in model(max_tokens=16).stream(ASK))
    assert text == model(max_tokens=16).invoke(ASK).content


@check("structured output")
def structured() -> None:
    asked = model(max_tokens=100).with_structured_output(City, method="json_schema")
    assert isinstance(asked.invoke("Name a city and its population."), City)


@check("two tools, one of them forced")
def forced() -> None:
    bound = model(max_tokens=100).bind_tools([get_weather, get_time], tool_choice="get_time")
    (call,) = bound.invoke("What time is it in Paris?").tool_calls
    assert call["name"] == "get_time"
    assert set(call["args"]) == {"city"}


@check("an agent with two tools, which calls one after the other and then answers")
def agent() -> None:
    # A model of 135M parameters does not decide by itself to call a tool, so each of the agent's
    # calls says which one it must make. The loop, the history and the parsing are the agent's own.
    steps = iter(["get_weather", "get_time", "none"])

    @wrap_model_call
    def forced_step(request: ModelRequest, handler: Callable[[ModelRequest], object]) -> object:
        return handler(request.override(tool_choice=next(steps)))

    asked = create_agent(
        model(max_tokens=100), tools=[get_weather, get_time], middleware=[forced_step]
    )
    question = {"role": "user", "content": "What are the weather and the time in Paris?"}
    messages = asked.invoke({"messages": [question]})["messages"]
    assert [each.type for each in messages] == ["human", "ai", "tool", "ai", "tool", "ai"]
    assert [each.name for each in messages if each.type == "tool"] == ["get_weather", "get_time"]
    assert messages[2].content.startswith("It is sunny in")
    assert messages[-1].content


report()
