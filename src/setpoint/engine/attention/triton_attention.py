"""Attention over the paged pool by the Triton kernels (kernels/triton/attention.py): any mix of
rows, planned on the device, so that a captured step serves all lengths.

A step of T tokens in n rows with T = n has one token in every row, and the kernels of wide rows are
not launched for it. Nothing else depends on the rows but what the kernels read. Rows without
positions (kv_len 0) and tokens of no row get 0.

With ``AttentionShape.invariant`` all rows are wide and none is cut, so that a token's bits depend
on the tokens before it alone; a few rows on long prefixes then leave most of the chip idle.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from types import ModuleType

import torch

from setpoint.engine.attention.attention_backend import (
    AttentionBatch,
    AttentionShape,
    AttentionVariant,
)
from setpoint.engine.kernels.kernel_registry import resolve
from setpoint.engine.kernels.ops import KernelsUnavailable
from setpoint.engine.kernels.triton.attention_sizes import (
    DOUBLINGS,
    FIELDS,
    RowClass,
    power_of_2,
    tiles,
)
from setpoint.engine.kernels.triton.availability import (
    E4M3_CAPABILITY,
    require_device,
    require_triton,
)

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NARROW = (torch.bfloat16, torch.float16)
LOG2E = 1.4426950408889634
PIECES = {False: 256, True: 512}
"""Are the rows wide -> positions of the smallest piece. A wide row has more to keep of a piece."""
ROOM_BYTES = 288 << 20
"""Scratch memory of the rows that are computed at once. The rows of larger steps take turns."""
ROWS = (32, 256, 2048, 16384)
"""Numbers of rows for which kernels are compiled."""
PROGRAMS = 8
"""Programs launched for each multiprocessor: those that end early make room for others."""
MERGING_PROGRAMS = 32
"""Programs launched for each multiprocessor to join pieces."""
MERGED_COLUMNS = 128
"""Columns of V that one program joins."""


@dataclass(slots=True, frozen=True)
class Part:
    """What a step launches for one class of rows."""

    sizes: RowClass
    constants: dict[str, int | bool]
    turns: int
    programs: tuple[int, int]
    merging: tuple[int, int] | None
    """None: no row of the class is ever cut."""
    sums: torch.Tensor
    stats: torch.Tensor


@dataclass(slots=True)
class Step:
    """A step's rows on the pages of one cache group."""

    batch: AttentionBatch
    parts: list[Part]
    windows: set[int] = field(default_factory=set)
    """The windows of the group's layers; 0: none."""


class TritonAttention:
    """Implements ``attention.attention_backend.AttentionBackend``."""

    is_capturable = True

    def __init__(
        self,
        shape: AttentionShape,
        classes: tuple[RowClass, ...],
        room_bytes: int = ROOM_BYTES,
    ) -> None:
        """classes: narrow rows and wide ones, or one for all."""
        self._shape, self._classes = shape, classes
        self._kernels: ModuleType = importlib.import_module(
            "setpoint.engine.kernels.triton.attention"
        )
        self._room = max(1, room_bytes // (4 * classes[0].unit_numbers))
        """Units of scratch memory."""
        self._separate: dict[str, bool] = resolve("setpoint.engine.kernels.triton.tiles:SEPARATE")
        self._multiprocessors = self._kernels.multiprocessors()
        self._scratch = [torch.empty(0, device=shape.device)]
        """The last one is used. Captured steps have the addresses of those before."""
        self._steps: dict[int, Step] = {}
        """Cache group -> its step."""
        self._plans: dict[tuple[int, int, int], torch.Tensor] = {}
        """(Group, window, compiled number of rows) -> a plan for each class. A captured step may
        read a plan that ``prepare`` has written outside of it, so plans never move."""

    def prepare(self, batch: AttentionBatch) -> None:
        """Plan for the windows that this group's layers have had so far. A layer with another one
        plans in its first ``forward``."""
        tokens, rows = len(batch.positions), len(batch.slots)
        longest = batch.page_table.shape[1] * self._shape.page_size
        assert longest <= self._classes[0].piece << DOUBLINGS
        classes = self._classes[:1] if tokens == rows else self._classes
        units = [each.scratch(tokens, rows, self._room) for each in classes]
        numbers = max(units) * classes[0].unit_numbers
        if len(self._scratch[-1]) < numbers:
            grown = max(numbers, 2 * len(self._scratch[-1]))
            self._scratch.append(self._scratch[-1].new_empty(grown))
        parts = [self._part(*each, tokens, rows) for each in zip(classes, units, strict=True)]
        step = self._steps.setdefault(batch.group, Step(batch, parts))
        step.batch, step.parts = batch, parts
        for window in step.windows:
            self._plan(step, window)

    def _part(self, sizes: RowClass, units: int, tokens: int, rows: int) -> Part:
        split = units * sizes.num_heads * sizes.value_dim
        programs = PROGRAMS * self._multiprocessors // sizes.head_programs
        columns = -(-sizes.value_dim // MERGED_COLUMNS)
        merging = min(MERGING_PROGRAMS * self._multiprocessors, tokens * sizes.num_heads)
        return Part(
            sizes,
            {**sizes.constants(), "PAGE": self._shape.page_size, "ROWS": compiled(rows)},
            sizes.turns(tokens, rows, self._room),
            (sizes.head_programs, max(1, min(programs, sizes.items(tokens, rows)))),
            (merging, columns) if units else None,
            self._scratch[-1][:split],
            self._scratch[-1][split:],
        )

    def _plan(self, step: Step, window: int) -> None:
        batch = step.batch
        rows = len(batch.slots)
        key = batch.group, window, compiled(rows)
        if key not in self._plans:
            size = len(self._classes), FIELDS * compiled(rows)
            self._plans[key] = torch.empty(size, dtype=torch.int32, device=self._shape.device)
        for part, plan in zip(step.parts, self._plans[key], strict=False):
            sizes = part.sizes
            self._kernels.attention_plan[(1,)](
                batch.kv_lens, batch.cu_q, plan, rows, window, BLOCK_Q=sizes.block_q,
                PIECE=sizes.piece, MOST=sizes.most, WORK=sizes.work, ROWS=compiled(rows),
                WIDE=sizes.wide, EVERY=sizes.every, **self._separate,
            )  # fmt: skip

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        shape = self._shape
        assert q.stride()[1:] == (shape.head_dim, 1)
        assert q.dtype == shape.dtype
        assert k_cache.dtype == v_cache.dtype == shape.kv_dtype
        step, window = self._steps[batch.group], variant.window or 0
        if window not in step.windows:
            step.windows.add(window)
            self._plan(step, window)
        plans = self._plans[batch.group, window, compiled(len(batch.slots))]
        # Tokens of no row pad a step with several tokens in a row; nothing writes their results.
        new = q.new_empty if len(q) == len(batch.slots) else q.new_zeros
        out = new((*q.shape[:2], shape.value_dim))
        for part, plan in zip(step.parts, plans, strict=False):
            self._launch(part, plan, (q, k_cache, v_cache), batch, variant, out)
        return out

    def _launch(
        self,
        part: Part,
        plan: torch.Tensor,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
        variant: AttentionVariant,
        out: torch.Tensor,
    ) -> None:
        q, _, v_cache = tensors
        rows, sizes, capped = len(batch.slots), part.sizes, variant.softcap is not None
        scale = variant.scale * variant.k_scale * (1.0 if capped else LOG2E)
        # Latent attention: V is a part of the tile of K that a product has just used.
        shared = v_cache.stride(2) != sizes.value_dim == part.constants["MAIN"]
        sinks = {"SINKS": variant.sinks is not None}
        for turn in range(part.turns):
            self._kernels.attention_pieces[part.programs](
                *tensors, batch.page_table, batch.slots, batch.kv_lens, batch.cu_q, plan,
                variant.sinks, part.sums, part.stats, out, rows, variant.window or 0, turn,
                part.turns, self._room, scale, variant.softcap or 1.0, variant.v_scale,
                q.stride(0), batch.page_table.stride(0), V_STRIDE=v_cache.stride(2),
                WINDOWED=variant.window is not None, CAPPED=capped,
                SHARED=shared, **sinks, **part.constants, **self._separate,
            )  # fmt: skip
            if part.merging:
                self._kernels.attention_merge[part.merging](
                    batch.cu_q, plan, variant.sinks, part.sums, part.stats, out, rows, turn,
                    part.turns, self._room, variant.v_scale, HEADS=sizes.num_heads,
                    DV=sizes.value_dim, BLOCK=min(MERGED_COLUMNS, part.constants["BLOCK_DV"]),
                    MOST=power_of_2(sizes.most), ROWS=compiled(rows), **sinks, **self._separate,
                )  # fmt: skip


def compiled(rows: int) -> int:
    """The number of rows for which the kernels of this many rows are compiled."""
    return next(each for each in ROWS if rows <= each)


def row_classes(shape: AttentionShape, capability: int) -> tuple[RowClass, ...]:
    """Narrow rows and wide ones of this shape, or one class for all; capability 0: on the newest
    GPU."""
    size = max(shape.head_dim, shape.value_dim)
    group = shape.num_heads // shape.num_kv_heads

    def of(wide: bool) -> RowClass:
        chosen = tiles(capability, size, shape.dtype.itemsize, group, wide)
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim
        return RowClass(wide, *heads, chosen, PIECES[wide], every=shape.invariant)

    return (of(wide=True),) if shape.invariant else (of(wide=False), of(wide=True))


def create(shape: AttentionShape) -> TritonAttention:
    """The backend for this shape. Raises KernelsUnavailable with the reason if it cannot run."""
    capability = require_triton(shape.dtype)
    require_device(shape.device)
    kv_dtypes = (shape.dtype, *FP8, *(NARROW if shape.dtype == torch.float32 else ()))
    if shape.kv_dtype not in kv_dtypes:
        raise KernelsUnavailable(
            f"the Triton kernels do not take {shape.dtype} with {shape.kv_dtype} in the cache"
        )
    if shape.kv_dtype == torch.float8_e4m3fn and 0 < capability < E4M3_CAPABILITY:
        raise KernelsUnavailable(
            f"compute capability {capability / 10} has no fp8 of the kind e4m3; e5m2 can be in the"
            " cache"
        )
    return TritonAttention(shape, row_classes(shape, capability))
