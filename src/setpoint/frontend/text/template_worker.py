"""``python -m setpoint.frontend.text.template_worker``: renders one chat template, with limits that
the kernel enforces.

Reads messages from its standard input and writes answers to its standard output, each after its
length: first the template, then one conversation after another. Ends when its input ends or a limit
is reached: code that runs in C cannot be interrupted in any other way.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from typing import IO, Any

import msgspec

from setpoint.core.errors import CheckpointError, RequestError
from setpoint.frontend.text.template import ChatTemplate

CPU_SECONDS = 2.0
"""CPU time for one conversation, or to compile the template. Ten thousand messages take some tenths
of a second."""
MEMORY_BYTES = 512 << 20
"""Limit of the address space, including the interpreter's 50 MiB."""
MAX_PROMPT_BYTES = 16 << 20

LENGTH = struct.Struct("<I")
DONE, REFUSED = b"\0", b"\1"
"""First byte of an answer. The rest is the prompt, or the reason why there is none."""
OUT_OF_MEMORY = 3
"""Exit code."""


class TemplateJob(msgspec.Struct):
    source: str
    special_tokens: dict[str, str]


class RenderJob(msgspec.Struct):
    messages: list[Any]
    add_generation_prompt: bool
    variables: dict[str, Any]


def write(stream: IO[bytes], data: bytes) -> None:
    stream.write(LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def read(stream: IO[bytes]) -> bytes | None:
    """The next message; None if the other end is gone."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template: ChatTemplate | None = None
    while (data := read(sys.stdin.buffer)) is not None:
        signal.setitimer(
            signal.ITIMER_PROF, CPU_SECONDS
        )  # SIGPROF is not handled, so it ends the process
        try:
            if template is None:
                job = msgspec.json.decode(data, type=TemplateJob)
                template, answer = ChatTemplate(job.source, special_tokens=job.special_tokens), DONE
            else:
                answer = _render(template, data)
        except (RequestError, CheckpointError) as error:
            answer = REFUSED + str(error).encode(errors="replace")
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write(sys.stdout.buffer, answer)


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
    return DONE + prompt


if __name__ == "__main__":
    main()
