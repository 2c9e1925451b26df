"""Recognizes lines that only SGLang and Setpoint write. A log needs one: memory runs out in any
program, and any text may mention a signal. Prose that quotes such a line within a sentence does not
count, because a server's message begins its line."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from setpoint.doctor.readers.log.messages import Message, message_of

_MESSAGE = re.compile(
    rb"(?:(?:INFO|WARNING|ERROR|CRITICAL):? +)?(?:[\w.]*(?:Error|Exception): )?(?:"
    # the start
    rb"[\w.:= ]{0,40}(?:ServerArgs|Namespace)\(\w+=|server_args="
    rb"|[Ll]oad weight (?:begin|end)\b|KV Cache is allocated"
    rb"|Memory pool end\. |Capture (?:\w+ ){0,3}(?:cuda|CUDA|cpu|npu) graph"
    rb"|max_total_num_tokens?=\d|The server is fired up and ready|router init state: "
    rb"|max_running_requests .{0,40}reduced from"
    rb"|Model: [^ ]+ \(.*\)$|Decision: |\d+ models are served, of which "
    # the memory of the device and the pool
    rb"|Not enough memory\. Please try to|There is no room for one page of KV cache"
    rb"|(?:Prefill|Decode) out of memory|KV cache pool |alloc_req_slots runs out"
    rb"|(?:token_to_kv_pool|req_to_token_pool|mamba_pool|pool)\w* memory leak detected"
    rb"|KV cache accounting is broken|[A-Za-z .,]{0,60}#retracted_reqs: \d"
    # the end, and processes that no longer answer
    rb"|(?:Scheduler|Detokenizer\w*|TokenizerManager|DataParallelController) hit an exception"
    rb"|Exception in (?:run_tp_server|Controller|Model(?:Tp|Rpc)Server)"
    rb"|Received sigquit from a child proc|SIGQUIT received\. signum="
    rb"|Watchdog timeout(?: \(self\.|: the stacks)|Health check failed\. Server couldn"
    rb"|Subprocess scheduler_|Scheduler or DataParallelController |The engine ends: "
    rb"|(?:ERROR: )?Engine \d+(?: of model \S+)? died: "
    # of a server that runs
    rb"|Fallback: .+ \(.*\)$|CPU contention: the engine had |Doctor: [a-z-]+ (?:no longer )?limits "
    rb"|Cache tier \w+(?: is off)?: |Cache flushed successfully!"
    rb"|Request \S+(?: was answered 50\d: |: max_new_tokens lowered from )"
    rb")"
)
_RANK = re.compile(r"(?:(?:(?:ATTN_|MOE_)?(?:DP|TP|PP|EP|CP)\d+ ?)+|gpu(?:_id)?=\d+)")
"""The name that a scheduler puts before its messages."""
_COMMAND = (
    rb"(?:(?:\S*/)?python[\d.]* .{0,80}-m sglang\.launch_server\b"
    rb"|(?:\S*/)?(?:sglang|setpoint) serve )"
)
_BEGINS = re.compile(_COMMAND)
_NAMED = re.compile(
    # a frame of a traceback
    rb'File "[^"]{0,200}/(?:sglang/(?:srt|launch_server|bench|lang)\b|sgl_kernel/'
    rb"|(?:src|site-packages)/setpoint/)"
    # a command line that a shell or a supervisor shows
    rb"|^(?:[$+#>] *|\S+: line \d+: .*)" + _COMMAND +
    # a process, a container, or a unit of systemd, and what became of it
    rb"|(?:Killed process \d+|\bpid=\d+,name=|\btask) ?\(?(?:sglang|setpoint)\b"
    rb"|^(?:sglang|setpoint)[\w.@-]*(?:\.service)?(?:: | (?:exited|has been|was) )"
    rb"|^(?:sglang|setpoint)[\w:]*\[\d+\]: "
    rb"|\bsglang::\w+"
)
_WORDS = (
    *(b"glang", b"gl_kernel", b"etpoint", b"gpu=", b"gpu_id="),
    *(b" DP", b"[DP", b" TP", b"[TP", b" PP", b"[PP", b" EP", b"[EP", b" CP", b"[CP"),
    *(b"server_args=", b"ServerArgs(", b"oad weight ", b"KV Cache is", b"Memory pool end"),
    *(b"Capture ", b"max_total_num_token", b"fired up and ready", b"router init state"),
    *(b"reduced from", b"Model: ", b"Decision: ", b"models are served", b"Not enough memory"),
    *(b"no room for one page", b"out of memory", b"KV cache ", b"alloc_req_slots"),
    *(b"leak detected", b"#retracted_reqs", b"hit an exception", b"Exception in ", b"igquit"),
    *(b"SIGQUIT", b"atchdog ", b"Health check failed", b"Subprocess scheduler"),
    *(b"DataParallelController", b"engine ends", b"Engine ", b"Fallback: ", b"CPU contention"),
    *(b"Doctor: ", b"Cache ", b"Request "),
)
"""Words of which each such line has one. Only lines with it are taken apart."""
_NAMES = ("sglang", "setpoint")


def has_own_line(lines: Sequence[bytes], *, from_start: bool) -> bool:
    """Whether one of the lines, none of which reports a batch, is a server's. from_start: whether
    the log begins with them; the command that starts a server may be its first line."""
    if from_start and lines and _BEGINS.match(lines[0]):
        return True
    return any(_is_own(line, message_of(line)) for line in _candidates(lines))


def _is_own(line: bytes, message: Message) -> bool:
    if any(name in message.origin.lower() for name in _NAMES):
        return True
    if message.rank and _RANK.fullmatch(message.rank):
        return True
    return _MESSAGE.match(message.text) is not None or _NAMED.search(message.text) is not None


def _candidates(lines: Sequence[bytes]) -> Iterator[bytes]:
    text = b"\n".join(lines)
    ends = list(accumulate(len(line) + 1 for line in lines))
    for word in _WORDS:
        place = text.find(word)
        while place >= 0:
            index = bisect_right(ends, place)
            yield lines[index]
            place = text.find(word, ends[index])
