"""Settles the implementation of attention, and whether a row's bits depend on its batch. Pure."""

from __future__ import annotations

from setpoint.config.decisions import Book
from setpoint.config.groups.declare import flag_of
from setpoint.config.pool import CPU_KERNEL_DTYPES
from setpoint.core.errors import ConfigError
from setpoint.core.model import BLOCKS_INT8

ONE_DEVICE = {"cpu": "cpu", "triton": "cuda", "flashinfer": "cuda", "fa3": "cuda"}
"""Attention implementation -> the only device that it runs on."""
LIBRARIES = ("flashinfer", "fa3")
"""Attention implementations whose bits of a row depend on its batch, as far as is known."""
PLANNED_ON_HOST = ("torch_ref", "flashinfer")
"""Attention implementations whose steps cannot be captured as graphs."""
OF_STEPS = ("prefill_attention_backend", "decode_attention_backend")


def settle_attention(book: Book, device: str) -> None:
    """Settle ``--attention-backend``, which is that of steps with prompt tokens, and
    ``--decode-attention-backend``, which is None if all steps have the same. Raises ConfigError for
    what does not run on this device, and on a CPU for two that differ."""
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
    _by_kind(book, device)
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


def _by_kind(book: Book, device: str) -> None:
    """Settle which implementation each kind of step has."""
    of_all = book.get("attention_backend")
    prefill, decode = (book.get(name) or "auto" for name in OF_STEPS)
    prefill, decode = (of_all if each == "auto" else each for each in (prefill, decode))
    if prefill == decode:
        if of_all != prefill:
            book.put("attention_backend", prefill, "given for both kinds of steps")
        for name in OF_STEPS:
            if book.get(name) is not None:
                book.put(name, None, f"all steps have {flag_of('attention_backend')}")
        return
    if device == "cpu":
        raise ConfigError(
            f"{prefill} for steps with prompt tokens and {decode} for decode steps differ"
            f" ({flag_of(OF_STEPS[0])}, {flag_of(OF_STEPS[1])}), and on a CPU steps of both kinds"
            " are replayed from one recording; give only --attention-backend, or leave it out."
        )
    both = "decode steps may have another one, because all read the same pages of the KV cache"
    book.put("attention_backend", prefill, f"for steps with prompt tokens; {both}", is_news=True)
    if book.get(OF_STEPS[0]) is not None:
        book.put(OF_STEPS[0], None, f"it is {flag_of('attention_backend')}")
    book.put(OF_STEPS[1], decode, "for steps with one token of each request", is_news=True)


def attention_of(book: Book, kind: str) -> str:
    """The settled implementation for "decode" or "prefill" steps."""
    own = book.get(OF_STEPS[1]) if kind == "decode" else None
    name: str = own or book.get("attention_backend")
    return name


PROMISE = (
    "every C++ kernel sums in an order that does not depend on the number of rows (docs/kernels.md)"
)
GPU_PROMISE = (
    "every product is a kernel in Triton that sums in one order, and attention reads what is before"
    " a token in one order, so a token's bits depend on the tokens before it alone: on no batch, no"
    " chunk and no cached prefix (docs/gpu.md)"
)


def settle_determinism(book: Book, device: str) -> None:
    """Say in ``--enable-deterministic-inference`` which promise holds. Raises ConfigError if more
    is asked for."""
    name = "enable_deterministic_inference"
    exception, is_cpu = _dependence(book, device), device == "cpu"
    if book.get(name):
        if exception:
            raise ConfigError(
                f"{flag_of(name)} cannot be promised here: {exception}. Leave it out."
            )
        book.put(name, True, f"given; {PROMISE if is_cpu else GPU_PROMISE}")
    elif is_cpu:
        book.put(
            name, False, exception or f"not asked for, but where the C++ kernels run: {PROMISE}"
        )
    else:
        book.put(
            name,
            False,
            "not asked for: on a GPU the products of cuBLAS depend on the number of rows and"
            " attention on the chunk; with the option, slower kernels do not",
        )


def _dependence(book: Book, device: str) -> str:
    """What makes a row's bits depend on its batch, or may do so; "" if nothing is known to."""
    if book.get("quantization") == BLOCKS_INT8:
        return f"--quantization {BLOCKS_INT8} multiplies 24 rows and more in another way"
    if device == "cpu" and book.get("dtype") not in CPU_KERNEL_DTYPES:
        return (
            f"products in {book.get('dtype')} are torch's, which round by the number of rows;"
            f" those in {' and '.join(CPU_KERNEL_DTYPES)} do not"
        )
    for kind in ("prefill", "decode"):
        if attention_of(book, kind) in LIBRARIES:
            return f"attention by {attention_of(book, kind)} depends on the batch"
    for field, value in (
        ("model_impl", "transformers"),
        ("attention_backend", "torch_ref"),
        ("decode_attention_backend", "torch_ref"),
        ("enable_torch_compile", True),
    ):
        if book.get(field) == value:
            written = "" if value is True else f" {value}"
            what = f"with {flag_of(field)}{written} some operations are torch's"
            return f"{what}, which do not promise it"
    return ""
