"""What ``resolve`` makes of the options, and both planes are built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from setpoint.config.decisions import Decision
from setpoint.config.environment import EnvSettings
from setpoint.config.options import Options
from setpoint.planning.memory import DTYPE_BYTES

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class ResolvedConfig:
    """What both planes are built from. The properties are options whose type leaves them open and
    which are settled here."""

    options: Options
    """None and "auto" remain only where they mean something ("no limit", "as the files say")."""
    env: EnvSettings
    decisions: tuple[Decision, ...]
    """One for every option, in the order of their declaration, then those about something else."""
    fraction_given: bool
    """The user chose ``mem_fraction_static``."""
    overlap_depth: int
    """Steps in flight while the next one is planned."""
    decode_after_piece: int
    """Decode steps after a step that read nothing but a piece of a long prompt."""

    @property
    def context_len(self) -> int:
        return _settled(self.options.context_length)

    @property
    def max_body_bytes(self) -> int:
        return _settled(self.options.max_body_bytes)

    @property
    def chunked_prefill_size(self) -> int:
        """-1 = chunking is off."""
        return _settled(self.options.chunked_prefill_size)

    @property
    def prefill_decode_interval(self) -> int:
        return _settled(self.options.prefill_decode_interval)

    @property
    def mem_fraction_static(self) -> float:
        return _settled(self.options.mem_fraction_static)

    @property
    def num_threads(self) -> int:
        return _settled(self.options.num_threads)

    @property
    def random_seed(self) -> int:
        return _settled(self.options.random_seed)

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.options.dtype]

    @property
    def kv_element_bytes(self) -> int:
        return DTYPE_BYTES[self.options.kv_cache_dtype]

    @property
    def step_tokens(self) -> int:
        """Most prompt tokens of one step: the chunk; without chunking a batch, or one prompt that
        fills the context."""
        if self.chunked_prefill_size > 0:
            return self.chunked_prefill_size
        return max(self.options.max_prefill_tokens, self.context_len)


def _settled(value: T | None) -> T:
    assert value is not None, "resolve() settles this option"
    return value
