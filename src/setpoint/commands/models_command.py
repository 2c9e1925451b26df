"""Runs ``setpoint models``: examines each model, has its pace measured, and prints details of one,
a table of several, or JSON."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from setpoint.commands.doctor_command import make_console, reader_may_leave
from setpoint.config.commandline import CommandLine
from setpoint.config.environment import EnvSettings
from setpoint.config.hardware import probe_hardware
from setpoint.core.errors import ConfigError
from setpoint.core.excerpt import printable
from setpoint.core.model import ROUNDED
from setpoint.core.progress import reported_to
from setpoint.launch.parent.model_report import Memory, ModelExamination, ModelReport, examine
from setpoint.launch.parent.preflight import check_device
from setpoint.observe.logline import setup_logging
from setpoint.observe.progress_display import Waiting, on_stderr
from setpoint.planning.memory import format_bytes

SERVED, NOT_SERVED = 0, 1
"""Exit codes. ``cli`` ends with 2 if an option cannot be honoured."""
DISTURBED = (
    "Other programs were busy meanwhile, so the speed follows from the processor time of one thread"
)
LABEL = 15
"""Columns of the labels in the details of a model."""


def show_models(
    line: CommandLine, env: EnvSettings, measure: Callable[[ModelExamination], None]
) -> int:
    """Run the command; returns the exit code. measure: writes a model's pace into its report.
    Raises ConfigError."""
    options = line.options
    setup_logging(options.logs.log_level, milliseconds=env.log_ms)
    if line.own.model and options.model.model_path is not None:
        raise ConfigError("models are named as arguments or by --model-path, not by both.")
    check_device(options.execution.device)
    names = line.own.model or (options.model.model_path,)
    waiting = Waiting("Looking at the models", on_stderr())
    try:
        found = [examine(options.replace(model_path=name), env, line.given) for name in names]
        for each in found:  # afterwards, because it takes memory that the models are given above
            if each.report.runs:
                waiting.doing(f"timing matrix products of {each.report.model}")
                with reported_to(waiting.doing):
                    measure(each)
    finally:
        waiting.end()
    reports = [each.report for each in found]
    console = make_console(no_color=True)
    shown = [  # a file's name may have control sequences
        replace(report, model=printable(report.model), reason=printable(report.reason))
        for report in reports
    ]
    with reader_may_leave():
        if line.own.json:
            print(json.dumps(_contract(reports), indent=2))
        elif len(shown) == 1:
            print("\n".join(details(shown[0], width=console.width)))
        else:
            _print_table(console, shown, options.model.context_length)
    return SERVED if all(report.runs for report in reports) else NOT_SERVED


def _contract(reports: list[ModelReport]) -> dict[str, Any]:
    machine = probe_hardware()
    return {
        "machine": {
            "device": machine.device,
            "num_cores": machine.num_cores,
            "available_bytes": machine.available_bytes,
        },
        "models": [asdict(report) for report in reports],
    }


def details(report: ModelReport, *, width: int) -> list[str]:
    """What is known about one model, a paragraph for each property."""
    disk = "" if report.disk_bytes is None else format_bytes(report.disk_bytes)
    if report.parameters and not disk:
        disk = "the weights are not on this machine; a start would download them"
    rows = {
        "runs here": f"yes{_shortened(report)}" if report.runs else f"no: {report.reason}",
        "nearest": f"{report.nearest} is supported" if report.nearest else "",
        **_speed(report),
        "architecture": _architecture(report),
        "parameters": _parameters(report),
        "precision": _precision(report, with_counts=True),
        "on disk": disk,
        **_memory(report),
    }
    paragraphs = [
        textwrap.fill(
            text,
            width,
            initial_indent=f"  {name:<{LABEL}}",
            subsequent_indent=" " * (LABEL + 2),
            break_on_hyphens=False,
            break_long_words=False,
        )
        for name, text in rows.items()
        if text
    ]
    return [report.model, *paragraphs]


def _shortened(report: ModelReport) -> str:
    """What the memory makes of the context, if it has no room for the whole of it."""
    memory = report.memory
    if memory is None or memory.pool is None or memory.pool.pool_tokens >= memory.context_len:
        return ""
    return (
        f", but the memory has room for {memory.pool.pool_tokens:,} tokens, not for a request of"
        f" {memory.context_len:,}"
    )


def _architecture(report: ModelReport) -> str:
    if not report.architecture or not report.context_len:
        return report.architecture
    library = ", through the transformers library" if report.served_by == "transformers" else ""
    return f"{report.architecture}{library}, up to {report.context_len:,} tokens of context"


def _parameters(report: ModelReport) -> str:
    if not report.parameters:
        return ""
    words = _count(report.parameters)
    if report.active_parameters < report.parameters:
        words += f", of which a token uses {_count(report.active_parameters)}"
    return words


def _precision(report: ModelReport, *, with_counts: bool = False) -> str:
    if report.quantization in ROUNDED:
        return f"{report.quantization} over {report.dtype}"
    if not report.blocks and not report.dequantized_parameters:
        return report.dtype
    kinds = [
        f"{_count(each.parameters)} in {each.kind}" if with_counts else each.kind
        for each in report.blocks
    ]
    if not with_counts:
        return ", ".join(kinds) or report.dtype
    if report.dequantized_parameters:
        count = _count(report.dequantized_parameters)
        kinds.append(f"{count} in codes that are dequantized to {report.dtype} at load")
    return f"{', '.join(kinds)}, the rest in {report.dtype}"


def _memory(report: ModelReport) -> dict[str, str]:
    memory = report.memory
    if memory is None:
        return {}
    needed = memory.needed
    each = _for_each(memory)
    besides = needed.workspace_bytes + needed.graphs_bytes
    rows = {
        "memory": (
            f"{format_bytes(needed.total_bytes)} for {_requests(memory)} of"
            f" {memory.context_len:,} tokens{each}: weights"
            f" {format_bytes(needed.weights_bytes)}, KV cache {format_bytes(needed.kv_bytes)},"
            f" a step {format_bytes(besides)}"
        )
    }
    if memory.available_bytes is not None:
        rows["free memory"] = format_bytes(memory.available_bytes) + each
    if pool := memory.pool:
        rows["KV pool here"] = (
            f"{pool.pool_tokens:,} tokens in {format_bytes(pool.kv_bytes)}{each};"
            f" limited by {pool.limited_by}"
        )
    return rows


def _speed(report: ModelReport) -> dict[str, str]:
    pace = report.pace
    if pace is None:
        return {"speed": f"unknown: {report.pace_unknown}"} if report.pace_unknown else {}
    words = (
        f"about {_seconds(pace.first_token_s)} to the first token of a prompt of"
        f" {pace.prompt_tokens:,}, then {_rate(pace.decode_tokens_per_s)}"
    )
    if pace.streams > 1:
        words += f"; {pace.streams} streams together {_rate(pace.streams_tokens_per_s)}"
    if report.disturbed:
        words += f". {DISTURBED}"
    return {"speed": words}


def _print_table(console: Console, reports: list[ModelReport], context_length: int | None) -> None:
    """context_length: the one that was asked for."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("model", "parameters", "precision", "needs", "about", "here"):
        table.add_column(name, no_wrap=name != "model", overflow="fold")
    for report, name in zip(reports, _names(reports), strict=True):
        memory, pace = report.memory, report.pace
        active = report.active_parameters < report.parameters
        table.add_row(
            Text(name),
            _short(report.parameters)
            + (f" ({_short(report.active_parameters)})" if active else ""),
            _precision(report),
            format_bytes(memory.needed.total_bytes) if memory else "",
            _rate(pace.decode_tokens_per_s) if pace else "",
            "yes" if report.runs else "too large" if report.too_large else "no",
        )
    console.print(table)
    if any(report.disturbed for report in reports):
        console.print(f"\n{DISTURBED}.")
    if memory := next((report.memory for report in reports if report.memory), None):
        context, more = "the whole context", "; --context-length sets a shorter one"
        if context_length is not None:
            context, more = f"{memory.context_len:,} tokens", ""
        console.print(
            f'\n"needs" is the memory of {_requests(memory)} of {context}{_for_each(memory)}{more}.'
        )
    for report in reports:
        if words := _shortened(report):
            console.print(f"\n{report.model} runs here{words}.", markup=False, highlight=False)
        if not report.runs:
            name = "" if report.model in report.reason else f"{report.model}: "
            words = f" The nearest that is supported is {report.nearest}." if report.nearest else ""
            console.print(f"\n{name}{report.reason}{words}", markup=False)


def _names(reports: list[ModelReport]) -> list[str]:
    """What the table calls the models: of a long path the last part, if it names only one of
    them."""
    last = [
        Path(report.model).name if report.model.count("/") > 1 else report.model
        for report in reports
    ]
    names = dict(zip((report.model for report in reports), last, strict=True))
    num_named = Counter(names.values())
    return [
        name if num_named[name] == 1 else report.model
        for report, name in zip(reports, last, strict=True)
    ]


def _requests(memory: Memory) -> str:
    return "a request" if memory.requests == 1 else f"{memory.requests:,} requests"


def _for_each(memory: Memory) -> str:
    """Says that a figure is that of one of several engines."""
    return "" if memory.engines == 1 else f" for each of {memory.engines} engines"


def _rate(tokens_per_s: float) -> str:
    digits = 1 if tokens_per_s < 10 else 0
    return f"{tokens_per_s:,.{digits}f} tokens/s"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds * 1e3:,.0f} ms"


def _count(number: int) -> str:
    for unit, size in (("billion", 10**9), ("million", 10**6)):
        if number >= size:
            return f"{number / size:.{0 if number >= 100 * size else 1}f} {unit}"
    return f"{number:,}"


def _short(number: int) -> str:
    """A number of parameters as models' names have it."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.{0 if number >= 100 * size else 1}f}{unit}"
    return str(number) if number else ""
