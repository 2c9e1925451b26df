"""Settles the implementation of attention, and whether a row's bits depend on its batch. Pure."""

from __future__ import annotations

from setpoint.config.decisions import Book
from setpoint.config.groups.declare import flag_of
from setpoint.config.pool import CPU_KERNEL_DTYPES
from setpoint.core.errors import ConfigError
from setpoint.core.model import BLOCKS_INT8

ONE_DEVICE = {"cpu": "cpu", "triton": "cuda"}
"""Attention implementation -> the only device that it runs on."""
OF_STEPS = ("prefill_attention_backend", "decode_attention_backend")


def settle_attention(book: Book, device: str) -> None:
    """Settle ``--attention-backend`` and its two forms for one kind of step. Raises ConfigError for
    what does not run here, and for two that differ."""
    for name in ("attention_backend", *OF_STEPS):
        asked = book.get(name)
        if asked in ONE_DEVICE and ONE_DEVICE[asked] != device:
            raise ConfigError(
                f"{flag_of(name)} {asked} does not run on --device {device}; use torch_ref, or"
                " leave the option out."
            )
        if asked == "torch_native":
            book.put(
                name,
                "torch_ref",
                "SGLang's torch_native is attention in plain torch, which Setpoint calls torch_ref",
            )
    _agree(book)
    if book.get("attention_backend") != "auto":
        return
    if device == "cpu":
        why = "the engine chooses the fastest one that runs here, and logs which"
    else:
        why = (
            "the engine takes triton, whose steps can be captured as graphs; where Triton cannot"
            " run it takes torch_ref, and logs why"
        )
    book.put("attention_backend", "auto", why, is_news=device != "cpu")


def _agree(book: Book) -> None:
    """Take the implementation of one kind of step for all."""
    asked = {
        name: book.get(name)
        for name in ("attention_backend", *OF_STEPS)
        if book.get(name) not in (None, "auto")
    }
    if len(set(asked.values())) > 1:
        (first, one), *others = asked.items()
        second, other = next((name, value) for name, value in others if value != one)
        raise ConfigError(
            f"{flag_of(first)} {one} and {flag_of(second)} {other} differ, and one implementation"
            " has to serve every step, because a step may have decode and prompt tokens; give only"
            f" --attention-backend {one}, or {other}."
        )
    if asked and "attention_backend" not in asked:
        ((name, value), *_) = asked.items()
        book.put("attention_backend", value, f"{flag_of(name)}: one serves every step")


PROMISE = (
    "every C++ kernel sums in an order that does not depend on the number of rows (docs/kernels.md)"
)


def settle_determinism(book: Book, device: str) -> None:
    """Say in ``--enable-deterministic-inference`` which promise holds. Raises ConfigError if more
    is asked for."""
    name = "enable_deterministic_inference"
    exception = _dependence(book, device)
    if not book.get(name):
        why = exception or f"not asked for, but where the C++ kernels run: {PROMISE}"
        book.put(name, False, why)
    elif exception:
        raise ConfigError(f"{flag_of(name)} cannot be promised here: {exception}. Leave it out.")
    else:
        book.put(name, True, f"given; {PROMISE}")


def _dependence(book: Book, device: str) -> str:
    """What makes a row's bits depend on its batch, or may do so; "" if nothing is known to."""
    if device != "cpu":
        return (
            "on a GPU, attention, norms and sampling do not depend on a row's batch, but the"
            " products of cuBLAS do, and there is no product yet that does not"
        )
    if book.get("quantization") == BLOCKS_INT8:
        return f"--quantization {BLOCKS_INT8} multiplies 24 rows and more in another way"
    if book.get("dtype") not in CPU_KERNEL_DTYPES:
        return (
            f"products in {book.get('dtype')} are torch's, which round by the number of rows;"
            f" those in {' and '.join(CPU_KERNEL_DTYPES)} do not"
        )
    for field, value in (
        ("model_impl", "transformers"),
        ("attention_backend", "torch_ref"),
        ("enable_torch_compile", True),
    ):
        if book.get(field) == value:
            written = "" if value is True else f" {value}"
            what = f"with {flag_of(field)}{written} some operations are torch's"
            return f"{what}, which do not promise it"
    return ""
