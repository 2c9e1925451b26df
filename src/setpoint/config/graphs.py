"""Settles for which sizes steps are captured as graphs of a GPU (docs/sglang/options.md#graphs).
Pure."""

from __future__ import annotations

from collections.abc import Callable

from setpoint.config.backends import PLANNED_ON_HOST, attention_of
from setpoint.config.decisions import Book
from setpoint.config.groups.graphs import KINDS
from setpoint.config.hardware import Hardware
from setpoint.core.graph_sizes import (
    EXTEND_TOKENS,
    NO_GRAPHS,
    GraphSizes,
    decode_sizes,
    extend_sizes,
    up_to,
)
from setpoint.core.limits import CAPTURED_TOKENS
from setpoint.core.model import ModelSpec
from setpoint.planning.memory import GIB, format_bytes

MANY_RANKS = 4
DECODE_SIZES = ((20, 8, 8), (35, 48, 160), (60, 32, 160), (160, 256, 512))
"""Triples (GiB, requests, requests with MANY_RANKS ranks): with less GPU memory than this, the
largest graph of a decode step has this many requests. With more than all of them, LARGEST."""
LARGEST, UNKNOWN = 512, 160
"""The largest of all, and the largest where the size of the GPU's memory is not known."""
ON_A_CPU = (
    f"on a CPU, every step of up to {CAPTURED_TOKENS} tokens is replayed from one recording"
    " (--disable-cuda-graph switches that off)"
)


def settle_graphs(
    book: Book, hardware: Hardware, model: ModelSpec, device: str, *, step_tokens: int
) -> GraphSizes:
    """The sizes of the graphs. step_tokens: prompt tokens of the largest step."""
    if device == "cpu":
        for kind in KINDS:
            _say_useless(book, f"disable_{kind}_cuda_graph", ON_A_CPU)
            for name in _names(kind):
                _say_useless(book, name, ON_A_CPU)
        return NO_GRAPHS
    running = book.get("max_running_requests")
    no_decode = ""
    if model.pooling is not None:
        no_decode = "a model for embeddings decodes nothing"
    elif book.get("disaggregation_mode") == "prefill":
        no_decode = "a prefill server decodes nothing"
    rows = _settle(
        book,
        "decode",
        no_decode,
        default=_default_rows(hardware, book.options.parallel.tp_size),
        limit=None if running is None else (running, f"--max-running-requests {running}"),
        sizes=decode_sizes,
    )
    tokens = _settle(
        book,
        "prefill",
        "",
        default=(EXTEND_TOKENS, "in larger steps the GPU's work hides the host's"),
        limit=(step_tokens, f"a step has at most {step_tokens} prompt tokens"),
        sizes=extend_sizes,
    )
    return GraphSizes(rows, tokens)


def _default_rows(hardware: Hardware, num_ranks: int) -> tuple[int, str]:
    if hardware.gpu_bytes is None:
        return UNKNOWN, "the size of the GPU's memory is not known"
    column = 2 if num_ranks >= MANY_RANKS else 1
    size = next(
        (each[column] for each in DECODE_SIZES if hardware.gpu_bytes < each[0] * GIB), LARGEST
    )
    return size, f"chosen for a GPU with {format_bytes(hardware.gpu_bytes)}"


def _names(kind: str) -> tuple[str, str, str]:
    """Names of the options of a kind: how, the largest size, all sizes."""
    return f"cuda_graph_backend_{kind}", f"cuda_graph_max_bs_{kind}", f"cuda_graph_bs_{kind}"


def _settle(
    book: Book,
    kind: str,
    why_none: str,
    *,
    default: tuple[int, str],
    limit: tuple[int, str] | None,
    sizes: Callable[[int], tuple[int, ...]],
) -> tuple[int, ...]:
    """The sizes of one kind. why_none: why there are none, whatever is asked for; "": there may be
    some. default, limit: (size, reason)."""
    backend, most, listed = _names(kind)
    how = book.get(backend)
    if why_none := why_none or _switched_off(book, kind):
        for name in (most, listed):
            _say_useless(book, name, why_none)
        book.put(backend, "disabled", why_none)
        return ()
    if how == "breakable":
        book.put(backend, "full", "given as breakable; each size is captured whole")
    book.fill(backend, "full", "each size is one graph")
    asked = book.get(listed)
    given = book.get(most) or (asked[-1] if asked else None)
    largest, why = default if given is None else (given, "given")
    if limit is not None and largest > limit[0]:
        why = f"{largest} were asked for, but {limit[1]}" if given else limit[1]
        largest = limit[0]
    is_less = given is not None and largest < given
    book.put(most, largest, why, warn=is_less)
    return book.put(
        listed,
        up_to(largest, asked or sizes(largest)),
        "given" if asked else f"SGLang's list up to {largest}",
        warn=is_less and bool(asked),
    )


def _switched_off(book: Book, kind: str) -> str:
    """Why the user has no graphs of this kind; "" if there are some."""
    if book.get("disable_cuda_graph"):
        return "--disable-cuda-graph"
    if book.get(f"disable_{kind}_cuda_graph"):
        return f"--disable-{kind}-cuda-graph"
    if (attention := attention_of(book, kind)) in PLANNED_ON_HOST:
        return f"--attention-backend {attention} plans each step on the host"
    if book.get(_names(kind)[0]) == "disabled":
        return f"--cuda-graph-backend-{kind} disabled"
    return ""


def _say_useless(book: Book, name: str, why: str) -> None:
    if book.changed(name):
        book.put(name, book.get(name), f"given, without effect: {why}", warn=True)
