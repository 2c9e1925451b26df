"""``python -m setpoint.frontend.text.template_worker``: renders one chat template, under limits
that the kernel enforces. The first job is the template; each of the others is a conversation."""

from __future__ import annotations

from typing import Any

import msgspec

from setpoint.core.errors import CheckpointError, RequestError
from setpoint.frontend.text.template import ChatTemplate
from setpoint.sandbox.process_limits import ProcessLimits
from setpoint.sandbox.worker import serve

LIMITS = ProcessLimits(cpu_s=2.0, memory_bytes=512 << 20)
"""CPU time for one conversation, or to compile the template. Ten thousand messages take some tenths
of a second."""
MAX_PROMPT_BYTES = 16 << 20

DONE, REFUSED = b"\0", b"\1"
"""First byte of an answer. The rest is the prompt, or the reason why there is none."""


class TemplateJob(msgspec.Struct):
    source: str
    special_tokens: dict[str, str]


class RenderJob(msgspec.Struct):
    messages: list[Any]
    add_generation_prompt: bool
    variables: dict[str, Any]


class _Worker:
    def __init__(self) -> None:
        self._template: ChatTemplate | None = None

    def answer(self, data: bytes) -> bytes:
        try:
            if self._template is not None:
                return DONE + _render(self._template, data)
            job = msgspec.json.decode(data, type=TemplateJob)
            self._template = ChatTemplate(job.source, special_tokens=job.special_tokens)
            return DONE
        except (RequestError, CheckpointError) as error:
            return REFUSED + str(error).encode(errors="replace")


def _render(template: ChatTemplate, data: bytes) -> bytes:
    job = msgspec.json.decode(data, type=RenderJob)
    text = template.render(
        job.messages, add_generation_prompt=job.add_generation_prompt, variables=job.variables
    )
    prompt = text.encode(errors="replace")
    if len(prompt) > MAX_PROMPT_BYTES:
        raise RequestError(
            f"The chat template makes a prompt of more than {MAX_PROMPT_BYTES} bytes of these"
            " messages."
        )
    return prompt


if __name__ == "__main__":
    serve(_Worker().answer, LIMITS)
