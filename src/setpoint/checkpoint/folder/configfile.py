"""Typed access to a config.json. This module knows how values are written, not what they mean."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from setpoint.checkpoint.folder import safetensors_file
from setpoint.core.errors import CheckpointError

MAX_DIMENSION = 1 << 28
"""Largest accepted dimension of a tensor: far above that of any real model, and small enough that
the product of two dimensions fits in 64 bits."""
MAX_POSITIONS = (1 << 31) - 1
"""Largest accepted number of positions: positions are 32-bit integers."""
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
SHOWN_CHARS = 60
"""Most characters of a refused value that an error message shows."""


class ConfigFile:
    """The values of a config.json. Every error names the key and the file."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.config = config

    def fail(self, key: str, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {key!r} {problem}.")

    def positive(
        self, key: str, default: int | None = None, *, at_most: int = MAX_DIMENSION
    ) -> int:
        """The value of ``key``, a positive integer of at most ``at_most``."""
        value = self.config.get(key)
        if value is None:
            value = default
        if value is None:
            self.fail(key, f"is missing; {self.architecture()} does not look like a text decoder")
        if type(value) is not int or value < 1:
            self.fail(key, f"must be a positive integer, not {short_repr(value)}")
        if value > at_most:
            self.fail(key, f"is {value}; the largest supported value is {at_most}")
        return value

    def check_number(self, key: str) -> None:
        """Raise CheckpointError if the value of ``key`` is given and is no finite number above
        zero."""
        value = self.config.get(key)
        if value is None:
            return
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            self.fail(key, f"must be a number above zero, not {short_repr(value)}")

    def flag(self, key: str) -> bool:
        """The value of ``key``, true or false; False if it is absent or null."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            self.fail(key, f"must be true or false, not {short_repr(value)}")
        return bool(value)

    def architecture(self) -> str:
        names = self.config.get("architectures")
        if (
            not isinstance(names, list)
            or not names
            or not isinstance(names[0], str)
            or not names[0].isidentifier()
        ):
            self.fail("architectures", f"must list the model's class, not {short_repr(names)}")
        return str(self.config["architectures"][0])

    def ids(self, key: str) -> tuple[int, ...]:
        """The value of ``key``, a token id or a list of them, as a tuple; empty if it is absent or
        null."""
        value = self.config.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            self.fail(key, f"must be a token id or a list of them, not {short_repr(value)}")
        return tuple(ids)

    def dtype(self, tensors: Iterable[safetensors_file.TensorInfo]) -> str:
        """The dtype that the config names (transformers 5 writes "dtype", older versions
        "torch_dtype"); if it names none, the dtype that holds most of the stored weights, and
        bfloat16 if there are none (the config of gpt-oss names none)."""
        named = self.config.get("dtype") or self.config.get("torch_dtype")
        if named is None:
            sizes: Counter[str] = Counter()
            for tensor in tensors:
                sizes[tensor.dtype] += tensor.num_elements
            named = DTYPES.get(sizes.most_common(1)[0][0]) if sizes else "bfloat16"
        named = str(named).removeprefix("torch.")
        if named not in DTYPES.values():
            self.fail(
                "dtype", f"must be one of {', '.join(DTYPES.values())}, not {short_repr(named)}"
            )
        return named


def short_repr(value: object) -> str:
    """The value's repr, of at most SHOWN_CHARS characters: how an error message shows it."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"
