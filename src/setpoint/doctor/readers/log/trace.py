"""Records of several lines: a traceback, whose frames tell what the server was doing, and options
that the terminal or a shipper broke into lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from setpoint.doctor.readers.log.messages import Message
from setpoint.doctor.readers.log.server_args import is_whole

Doing = Literal["weights", "pool", "graphs", "logprobs", "vision", "prefill", "decode"]
MAX_LINES = 400

_FRAMES: dict[bytes, Doing] = {
    b"graph_runner": "graphs",
    b"init_cuda_graphs": "graphs",
    b"init_device_graphs": "graphs",
    b"load_model": "weights",
    b"model_loader": "weights",
    b"init_memory_pool": "pool",
    b"memory_pool.py": "pool",
    b"pool_configurator": "pool",
    b"compute_logprobs": "logprobs",
    b"input_logprob": "logprobs",
    b"get_image_feature": "vision",
    b"vision": "vision",
    b"forward_decode": "decode",
    b"prepare_for_decode": "decode",
    b"forward_extend": "prefill",
    b"prepare_for_extend": "prefill",
    b"forward_fill": "prefill",
}
_LAST = re.compile(
    rb"(?:\[rank\d+\]: ?)?[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Stop|Failure)\b"
)
_CHAINED = (b"During handling of", b"The above exception", b"Traceback (most")


@dataclass(slots=True)
class Traceback:
    line: int
    rank: str
    at: float | None
    doing: dict[Doing, None] = field(default_factory=dict)
    """What the frames are about, outermost first."""
    num_lines: int = 0
    ended: bool = False

    def takes(self, message: Message) -> bool:
        """Whether the line belongs to it. The exception's line is the last one."""
        text = message.text
        self.num_lines += 1
        if message.has_prefix or self.num_lines > MAX_LINES:
            self.ended = True
            return False
        for words, doing in _FRAMES.items():
            if words in text:
                self.doing[doing] = None
        if _LAST.match(text):
            self.ended = True
        return True


@dataclass(slots=True)
class Options:
    """``ServerArgs(…`` until its bracket is closed."""

    line: int
    at: float | None
    text: str
    first: str
    num_lines: int = 0
    ended: bool = False

    def takes(self, message: Message) -> bool:
        self.num_lines += 1
        if message.has_prefix or self.num_lines > MAX_LINES:
            self.ended = True
            return False
        self.text += message.text.decode(errors="replace")
        self.ended = is_whole(self.text)
        return True
