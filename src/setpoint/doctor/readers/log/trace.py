"""Reads records of several lines: a traceback, whose frames show what the server was doing, and
options that the terminal or a log shipper broke into lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from setpoint.doctor.readers.log.messages import Message
from setpoint.doctor.readers.log.server_args import Brackets, begin_of_options

Doing = Literal[
    "weights", "pool", "graphs", "replay", "logprobs", "vision", "sampling", "prefill", "decode"
]
MAX_LINES = 400
MAX_OPTIONS_TEXT = 1 << 18

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
    b"layers/sampler.py": "sampling",
    b"/sampling.py": "sampling",
    b"top_k_top_p": "sampling",
    b"_renorm_prob": "sampling",
    b"_sample_from": "sampling",
    b", in sample": "sampling",
    b"penaltylib": "sampling",
    b", in replay": "replay",
    b"get_image_feature": "vision",
    b"vision": "vision",
    b"forward_decode": "decode",
    b"alloc_for_decode": "decode",
    b"prepare_for_decode": "decode",
    b"forward_extend": "prefill",
    b"alloc_for_extend": "prefill",
    b"prepare_for_extend": "prefill",
    b"forward_fill": "prefill",
}
_SCHEDULER = (b"run_scheduler_process", b"event_loop_", b"/tp_worker", b"/model_runner.py")
"""Frames of the process that computes: an exception that it does not catch ends it."""
_LAST = re.compile(
    rb"(?:\[rank\d+\]: ?)?(?:[A-Za-z_][\w.]*)?"
    rb"(?:Error|Exception|Interrupt|Exit|Warning|Stop|Failure)\b"
)
_FRAME = re.compile(r' *File "([^"\n]{1,300})", line (\d+), in (\S{1,100})')
_OURS = re.compile(r"/(?:sglang|sgl_kernel|setpoint)/")
_SERVES = (b"event_loop_", b"run_batch", b"forward_batch_generation", b"handle_generate_request")
"""Frames of the loop that serves requests, which a start does not run."""


@dataclass(slots=True)
class Traceback:
    line: int
    told: dict[str, float | str]
    """Values of its event: "in" is "scheduler" if a frame is of the process that computes."""
    doing: dict[Doing, None] = field(default_factory=dict)
    """What the frames were doing, outermost first."""
    serves: bool = False
    """Whether a frame is of the loop that serves requests."""
    num_lines: int = 0
    ended: bool = False

    @property
    def step(self) -> str:
        """The step that failed: "prefill", "decode", or "" if no frame shows it. The sampler counts
        as decode, because its memory is proportional to the running requests."""
        steps = [each for each in self.doing if each in ("prefill", "decode")]
        if steps:
            return steps[-1]
        return "decode" if {"sampling", "replay"} & set(self.doing) else ""

    def takes(self, message: Message) -> bool:
        """Whether the line belongs to the traceback, whose last line is that of the exception."""
        text = message.text
        self.num_lines += 1
        # Some wrappers put a time before each line, also before those of a frame.
        is_new = message.has_prefix and not text.startswith((b"  ", b"\t"))
        if is_new or self.num_lines > MAX_LINES:
            self.ended = True
            return False
        for words, doing in _FRAMES.items():
            if words in text:
                self.doing[doing] = None
        if any(words in text for words in _SCHEDULER):
            self.told["in"] = "scheduler"
        self.serves = self.serves or any(words in text for words in _SERVES)
        line = text.decode(errors="replace")
        frame = _FRAME.match(line)
        if frame and (_OURS.search(frame[1]) or "frame" not in self.told):
            self.told["frame"] = f"{frame[3]} ({'/'.join(frame[1].split('/')[-2:])}:{frame[2]})"
        if _LAST.match(text):
            self.told["error"], self.told["error_line"] = line.strip(), self.line + self.num_lines
            self.ended = True
        return True


@dataclass(slots=True)
class Options:
    """``ServerArgs(…`` until its bracket is closed."""

    line: int
    first: str
    text: str = ""
    num_lines: int = 0
    ended: bool = False
    brackets: Brackets = field(default_factory=Brackets)

    def takes(self, message: Message) -> bool:
        words = message.text.decode(errors="replace")
        self.num_lines += 1
        begins_anew = message.has_prefix or begin_of_options(words) is not None
        if begins_anew or self.num_lines > MAX_LINES or len(self.text) > MAX_OPTIONS_TEXT:
            self.ended = True
            return False
        self.add(words)
        return True

    def add(self, words: str) -> None:
        self.text += words
        self.ended = self.brackets.closes(words)
