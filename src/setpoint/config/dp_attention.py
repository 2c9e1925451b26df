"""What --enable-dp-attention demands and changes (decision 0069). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from setpoint.config.decisions import Book
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from setpoint.config.groups.declare import Scalar
    from setpoint.core.model import ModelSpec

CONSERVATIVENESS_FACTOR = 0.3
"""SGLang's factor for --schedule-conservativeness (arg_groups/parallel_hook.py)."""


def check_dp_attention(options: Options) -> None:
    """Raise ConfigError if --enable-dp-attention contradicts other options."""
    parallel = options.parallel
    if not parallel.enable_dp_attention:
        return
    if parallel.dp_size < 2:
        raise ConfigError(
            "--enable-dp-attention needs several engines, and --dp-size is"
            f" {parallel.dp_size}: give --dp-size N and"
            " --tp-size N, or leave --enable-dp-attention out."
        )
    if parallel.tp_size != parallel.dp_size:
        raise ConfigError(
            f"--enable-dp-attention with --dp-size {parallel.dp_size} needs --tp-size"
            f" {parallel.dp_size}, because each engine is one rank of the experts; got --tp-size"
            f" {parallel.tp_size}. For engines that each have the whole model, leave"
            " --enable-dp-attention out."
        )
    for is_given, flag, why in (
        (parallel.nnodes > 1, f"--nnodes {parallel.nnodes}", "its engines share one memory"),
        (
            options.execution.enable_torch_compile,
            "--enable-torch-compile",
            "compiled steps cannot wait for other engines",
        ),
        (
            options.experts.enable_eplb,
            "--enable-eplb",
            "experts would have to move on all engines between the same two steps",
        ),
    ):
        if is_given:
            raise ConfigError(
                f"--enable-dp-attention cannot be combined with {flag}, because {why}; leave one of"
                " them out."
            )


def check_its_model(options: Options, model: ModelSpec, device: str) -> None:
    """Raise ConfigError if --enable-dp-attention is given and this model or device cannot do it."""
    parallel = options.parallel
    if not parallel.enable_dp_attention:
        return
    if model.mixture is None:
        raise ConfigError(
            f"--enable-dp-attention divides experts, and {model.architecture} has none. Leave it"
            f" out: --dp-size {parallel.dp_size} alone gives each engine the whole model, and"
            f" --tp-size {parallel.tp_size} alone divides one engine."
        )
    if device != "cpu":
        raise ConfigError(
            f"--enable-dp-attention runs on CPUs only yet, not on {device}; use --device cpu, or"
            " leave it out."
        )
    if options.model.model_impl == "transformers":
        raise ConfigError(
            "--enable-dp-attention needs a model of Setpoint's own, so it cannot be combined with"
            " --model-impl transformers; leave one of them out."
        )


def of_all_engines(values: Mapping[str, Scalar], dp_size: int) -> dict[str, Scalar]:
    """The options that settle as these values of each engine: the inverse of
    ``settle_dp_attention`` and ``own_chunk``."""
    found = dict(values)
    for name in ("max_running_requests", "chunked_prefill_size"):
        if isinstance(value := values.get(name), int) and value > 0:
            found[name] = value * dp_size
    if isinstance(value := values.get("schedule_conservativeness"), float):
        found["schedule_conservativeness"] = value / CONSERVATIVENESS_FACTOR
    return found


def settle_dp_attention(book: Book) -> None:
    """Settle the limits of one engine, if engines compute in step."""
    parallel = book.options.parallel
    if not parallel.enable_dp_attention:
        return
    before = book.get("schedule_conservativeness")
    book.put(
        "schedule_conservativeness",
        round(before * CONSERVATIVENESS_FACTOR, 9),
        f"{before:g} x {CONSERVATIVENESS_FACTOR:g} with --enable-dp-attention, as in SGLang: an"
        " engine that holds a request back computes in the steps of the others all the same",
        is_news=True,
    )
    running = book.get("max_running_requests")
    if running is not None:
        book.put(
            "max_running_requests",
            max(running // parallel.dp_size, 1),
            f"{running} divided by --dp-size {parallel.dp_size} with --enable-dp-attention, as in"
            " SGLang; each engine runs at least 1",
            is_news=True,
        )


def own_chunk(book: Book, chunk: int) -> int:
    """The prompt tokens of an engine's step, of ``chunk`` in a step of all; in whole pages. -1: not
    limited."""
    parallel = book.options.parallel
    page: int = book.get("page_size")
    if not parallel.enable_dp_attention or chunk < 0:
        return chunk
    return book.put(
        "chunked_prefill_size",
        max(chunk // parallel.dp_size // page, 1) * page,
        f"{chunk} divided by --dp-size {parallel.dp_size} with --enable-dp-attention, as in SGLang:"
        " the experts compute the tokens of all engines in one step",
        is_news=True,
    )
