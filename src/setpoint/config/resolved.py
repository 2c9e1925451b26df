"""Defines the result of ``resolve``, from which the frontend and the engine are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from setpoint.config.decisions import Decision
from setpoint.config.environment import EnvSettings
from setpoint.config.groups.tiers import StorageConfig
from setpoint.config.options import Options
from setpoint.config.placement import RankPlacement
from setpoint.core.graph_sizes import NO_GRAPHS, GraphSizes
from setpoint.core.kv_events import PublisherConfig

T = TypeVar("T")

DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
"""Bytes of an element; the fp8 types are for the KV cache only."""


@dataclass(slots=True, frozen=True)
class ResolvedConfig:
    """The settled configuration. Its properties are options whose type allows None or "auto", with
    their settled values."""

    options: Options
    """The options. None and "auto" remain only where they have a meaning ("no limit", "as the files
    say")."""
    env: EnvSettings
    decisions: tuple[Decision, ...]
    """One decision for every option, in the order of declaration, followed by decisions about other
    subjects."""
    fraction_given: bool
    """Whether the user chose ``mem_fraction_static``."""
    overlap_depth: int
    """Number of steps in flight while the next one is planned."""
    decode_after_piece: int
    """Number of decode steps after a step that computed only a piece of a long prompt."""
    places: tuple[RankPlacement, ...] = ()
    """Where each rank runs, first those of the first engine; none if nothing is bound."""
    storage: StorageConfig = field(default_factory=StorageConfig)
    """``--hicache-storage-backend-extra-config``, parsed."""
    events: PublisherConfig | None = None
    """``--kv-events-config``, parsed; None if nothing is published."""
    eviction_parameters: Mapping[str, int] = field(default_factory=dict)
    """``--radix-eviction-policy-config``, parsed."""

    graph_sizes: GraphSizes = NO_GRAPHS
    """The sizes for which steps are captured on a GPU."""

    @property
    def context_len(self) -> int:
        return _settled(self.options.model.context_length)

    @property
    def max_body_bytes(self) -> int:
        return _settled(self.options.server.max_body_bytes)

    @property
    def chunked_prefill_size(self) -> int:
        """Prompt tokens of a chunk; -1 turns chunking off."""
        return _settled(self.options.scheduling.chunked_prefill_size)

    @property
    def prefill_decode_interval(self) -> int:
        return _settled(self.options.scheduling.prefill_decode_interval)

    @property
    def mem_fraction_static(self) -> float:
        return _settled(self.options.memory.mem_fraction_static)

    @property
    def page_size(self) -> int:
        return _settled(self.options.memory.page_size)

    @property
    def num_threads(self) -> int:
        return _settled(self.options.execution.num_threads)

    @property
    def random_seed(self) -> int:
        return _settled(self.options.execution.random_seed)

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.options.model.dtype]

    @property
    def kv_element_bytes(self) -> int:
        return DTYPE_BYTES[self.options.model.kv_cache_dtype]

    @property
    def step_tokens(self) -> int:
        """Largest number of prompt tokens in one step: a chunk or, without chunks, a whole prefill
        batch or one prompt that fills the context."""
        if self.chunked_prefill_size > 0:
            return self.chunked_prefill_size
        return max(self.options.scheduling.max_prefill_tokens, self.context_len)


def _settled(value: T | None) -> T:
    assert value is not None, "resolve() settles this option"
    return value
