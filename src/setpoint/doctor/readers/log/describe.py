"""Describes a log as a whole: its generation, its clock, and what is unusual about it."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from typing import NoReturn

from setpoint.core.errors import ForeignLogError
from setpoint.doctor.observations import Observations, Source
from setpoint.doctor.readers.log.server_log import ServerLog
from setpoint.doctor.readers.log.server_run import ServerRun

MANY_TIMES_BACK = 20
SHOWN_STARTS = 12
_OURS = re.compile(rb"sglang|setpoint", re.IGNORECASE)
_PROGRAMS = (
    ("Ollama", re.compile(rb"\bollama\b|\[GIN\] |llama runner")),
    (
        "vLLM",
        re.compile(
            rb"\bvllm\b|\bvLLM\b|GPU KV cache usage: |\(EngineCore|EngineDeadError"
            rb"|\((?:APIServer|Worker(?:_\w+)?) pid=\d+\)|Avg generation throughput: "
        ),
    ),
    (
        "llama.cpp",
        re.compile(
            rb"\bllama_|llama-server|\bslot +(?:launch_|update_slots|release)"
            rb"|(?m:^|[|\] ])(?:srv|slot|que) +[a-z_]+: "
        ),
    ),
    ("TensorRT-LLM", re.compile(rb"TensorRT-LLM|TRT-LLM")),
    ("TGI", re.compile(rb"text_generation_(?:router|launcher|server)|text-generation-inference")),
    ("LMDeploy", re.compile(rb"\blmdeploy\b")),
    ("nginx", re.compile(rb"\bnginx\b")),
)
"""Other programs, with text that only their logs have."""


def observations(source: Source, origin: str, server: ServerLog, num_servers: int) -> Observations:
    """The observations of one server of a log. source: the whole log."""
    life, notes = _life(server)
    ranks = life.finished_ranks()
    logs = list(life.ranks.values())
    stamped = any(rank.is_stamped for rank in logs)
    estimated = any(rank.is_estimated for rank in logs)
    several = num_servers > 1 and origin
    described = dataclasses.replace(
        source,
        name=f"{source.name} ({origin})" if several else source.name,
        clock="timestamps" if stamped else "estimated" if estimated else "none",
        generation=generation(life, server),
        notes=[*source.notes, *notes, *_odd(life, server)],
        unknown_fields=dict(source.unknown_fields),
    )
    life.facts.engine = "setpoint" if server.is_setpoint else "sglang"
    ended = life.ended or any(event.kind in ("killed", "watchdog") for event in life.fatal_events())
    return Observations([described], life.facts, ranks, ended)


def generation(life: ServerRun, server: ServerLog) -> str:
    if server.is_setpoint:
        return "Setpoint"
    marks = life.styles
    if "tree-cache-hit-rate" in marks or "cache hit rate" in marks:
        return "SGLang 2024"
    if "style ," in marks:
        return "SGLang 2026" if "pending-token" in marks else "SGLang 0.5"
    if "cuda graph" in marks or "cpu graph" in marks or "npu graph" in marks:
        return "SGLang 2025"
    return "SGLang 2024 or early 2025" if marks else "SGLang"


def _life(server: ServerLog) -> tuple[ServerRun, list[str]]:
    """The life to diagnose: the last one that shows anything, and a note on the others."""
    lives = server.lives
    chosen = next((life for life in reversed(lives) if life.has_begun), lives[-1])
    notes = []
    if len(lives) > 1:
        first = [str(life.first_line) for life in lives]
        starts = ", ".join(first if len(first) <= SHOWN_STARTS else [*first[:4], "…", *first[-4:]])
        which = "last start" if chosen is lives[-1] else "last start that shows anything"
        crashed = sum(1 for life in lives if life is not chosen and life.fatal_events())
        crashes = f" {crashed} of the others ended with an error." if crashed else ""
        notes.append(
            f"The server was started {len(lives) + server.num_left_out} times in this log (lines"
            f" {starts}). The report is about the {which}, from line {chosen.first_line}"
            f" on.{crashes}"
        )
    return chosen, notes


def _odd(life: ServerRun, server: ServerLog) -> list[str]:
    notes = []
    if life.models:
        names = ", ".join(life.models)
        notes.append(
            f"This log is of a server with {len(life.models)} models ({names}), which this report"
            " puts together. Ask the server for a report about one of them: /doctor?model=NAME."
        )
    back = sum(rank.times_back for rank in life.ranks.values())
    mixed = not life.models and (
        (life.is_ready and life.num_before_ready > 2) or _two_pools(server.pools)
    )
    if mixed or back >= MANY_TIMES_BACK:
        why = (
            f"the clock goes back {back} times"
            if back >= MANY_TIMES_BACK
            else "its lines show KV pools of two sizes"
            if _two_pools(server.pools)
            else "batches run while another server is still starting"
        )
        notes.append(
            f"Two servers seem to write to this log: {why}. This report mixes them; read a separate"
            " log of each."
        )
    elif back:
        times = "once" if back == 1 else f"{back} times"
        notes.append(f"The clock goes back {times}; the times after that were shifted to follow.")
    if deaths := life.engine_deaths:
        what = (
            f"An engine of the server died (line {deaths[0]})."
            if len(deaths) == 1
            else f"Engines of the server died {len(deaths)} times (last in line {deaths[-1]})."
        )
        notes.append(
            f"{what} The server starts a new one for as long as --max-engine-restarts allows, and"
            " open requests go on there."
        )
    if server.tests_retraction:
        notes.append(
            "The server retracts requests on purpose (SGLANG_TEST_RETRACT); these retractions do"
            " not count."
        )
    return notes


def _two_pools(sizes: list[float]) -> bool:
    """Whether the size of the pool (#token / token usage) alternates between two values. Usage has
    two decimals, so that the size of one pool varies by a few percent."""
    if len(sizes) < 20:
        return False
    # Split where the gap between neighbours, in proportion, is widest.
    ordered = sorted(sizes)
    gaps = [larger / smaller for smaller, larger in pairwise(ordered)]
    widest = gaps.index(max(gaps))
    if gaps[widest] < 1.15 or min(widest + 1, len(sizes) - widest - 1) < len(sizes) / 10:
        return False
    changes = sum(
        (before > ordered[widest]) != (after > ordered[widest]) for before, after in pairwise(sizes)
    )
    return changes >= min(8, len(sizes) / 10)


def program_of(lines: bytes) -> str:
    """The other program that wrote these lines; "" if there is no sign of one."""
    if _OURS.search(lines):  # our servers' tracebacks may mention any of them
        return ""
    return next((name for name, marks in _PROGRAMS if marks.search(lines)), "")


def refuse(source: Source, program: str) -> NoReturn:
    """Raise ForeignLogError for a log in which no server was found. program: the program that wrote
    it, or "" if it is unknown."""
    if program:
        raise ForeignLogError(
            f"{source.name} is a log of {program}. The doctor reads logs of Setpoint and SGLang."
        )
    name = "Standard input" if source.name == "-" else source.name
    lines = "1 line" if source.num_lines == 1 else f"{source.num_lines} lines"
    raise ForeignLogError(
        f"{name} has {lines}, but none that SGLang or Setpoint writes about"
        f' its batches, start or end ("Decode batch, #running-req: …").'
    )
