"""The formats by their names, which are SGLang's; ``hunyuan_a13b`` is vLLM's."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TypeVar

from setpoint.core.errors import ConfigError
from setpoint.frontend.chat.formats import deepseek
from setpoint.frontend.chat.formats.gemma import FUNCTION_GEMMA, GEMMA4
from setpoint.frontend.chat.formats.glm import GLM
from setpoint.frontend.chat.formats.harmony import GPT_OSS_CALLS, GPT_OSS_REASONING
from setpoint.frontend.chat.formats.hermes import HERMES
from setpoint.frontend.chat.formats.hunyuan import HUNYUAN, HUNYUAN_A13B
from setpoint.frontend.chat.formats.kimi import KIMI_K2
from setpoint.frontend.chat.formats.llama3 import LLAMA3
from setpoint.frontend.chat.formats.minimax import MINIMAX_M2
from setpoint.frontend.chat.formats.mistral import MISTRAL
from setpoint.frontend.chat.formats.pythonic import LFM2, PYTHONIC
from setpoint.frontend.chat.formats.qwen3_coder import QWEN3_CODER
from setpoint.frontend.chat.formats.reasoning import MARKED
from setpoint.frontend.chat.formats.step import STEP3
from setpoint.frontend.chat.formats.tool_format import ReasoningFormat, ToolFormat

TOOL_FORMATS: dict[str, ToolFormat] = {
    "deepseekv3": deepseek.DEEPSEEK_V3,
    "deepseekv31": deepseek.DEEPSEEK_V31,
    "deepseekv32": deepseek.DEEPSEEK_V32,
    "deepseekv4": deepseek.DEEPSEEK_V4,
    "deepseekv41": deepseek.DEEPSEEK_V41,
    "functiongemma": FUNCTION_GEMMA,
    "gemma4": GEMMA4,
    "glm": GLM,
    "glm45": GLM,
    "glm47": GLM,
    "gpt-oss": GPT_OSS_CALLS,
    "granite4": HERMES,
    "hermes": HERMES,
    "hunyuan": HUNYUAN,
    "hunyuan_a13b": HUNYUAN_A13B,
    "kimi_k2": KIMI_K2,
    "lfm2": LFM2,
    "llama3": LLAMA3,
    "llama4": PYTHONIC,
    "mimo": QWEN3_CODER,
    "minimax-m2": MINIMAX_M2,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "qwen": HERMES,
    "qwen25": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "step3": STEP3,
    "step3p5": QWEN3_CODER,
}

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    **{form.name: form for form in MARKED},
    "gpt-oss": GPT_OSS_REASONING,
}

T = TypeVar("T")


def tool_format(name: str) -> ToolFormat:
    """The format of tool calls with this name. Raises ConfigError for an unknown name."""
    return _looked_up(TOOL_FORMATS, name, "tool-call parser")


def reasoning_format(name: str) -> ReasoningFormat:
    """The format of reasoning with this name. Raises ConfigError for an unknown name."""
    return _looked_up(REASONING_FORMATS, name, "reasoning parser")


def _looked_up(formats: dict[str, T], name: str, kind: str) -> T:
    if name in formats:
        return formats[name]
    near = get_close_matches(name, formats, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"There is no {kind} named {name[:64]!r}.{hint} The choices are {', '.join(formats)}."
    )
