"""Tensors in open safetensors files, and the tensors of single experts within those of all experts
of a layer.

Everything here has the interface of ``StoredTensor``, so that a model finds the tensors of an
expert under the names that other checkpoints give them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError

from setpoint.core.errors import CheckpointError
from setpoint.core.model import MXFP4_SUFFIXES
from setpoint.engine.quant.dequantised import dequantised
from setpoint.engine.quant.linear_method import GgufWeight

Slices = tuple[slice, ...]


class StoredTensor(Protocol):
    @property
    def file(self) -> Path: ...

    @property
    def name(self) -> str:
        """Its name in the file."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, slices: Slices = ()) -> torch.Tensor:
        """The tensor, or a part of it: of its rows, of its rows and columns. Raises CheckpointError
        if it cannot be read."""
        ...


@dataclass(slots=True, frozen=True)
class WholeTensor:
    """Implements StoredTensor: a tensor as it is stored."""

    file: Path
    handle: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.handle.get_slice(self.name).get_shape())

    def read(self, slices: Slices | tuple[int, ...] = ()) -> torch.Tensor:
        try:
            if not slices:
                return self.handle.get_tensor(self.name)
            return self.handle.get_slice(self.name)[slices]
        except SafetensorError as error:
            raise CheckpointError(
                f"Tensor {self.name!r} in {self.file} cannot be read: {error}"
            ) from None


@dataclass(slots=True, frozen=True)
class ExpertRows:
    """Where the values of an expert are: rows ``first``, ``first + step``, … of it."""

    expert: int
    first: int = 0
    step: int = 1

    def rows_of(self, count: int) -> int:
        return len(range(self.first, count, self.step))

    def span(self, rows: slice, count: int) -> slice:
        """The stored rows around ``rows``, of a matrix with ``count`` stored rows."""
        begin, end, _ = rows.indices(self.rows_of(count))
        return slice(begin * self.step, end * self.step)


@dataclass(slots=True, frozen=True)
class ExpertTensor:
    """Implements StoredTensor: the matrix [N, K] of an expert in a tensor [E, K, step · N], or its
    bias [N] in [E, step · N]."""

    whole: WholeTensor
    place: ExpertRows

    @property
    def file(self) -> Path:
        return self.whole.file

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def shape(self) -> tuple[int, ...]:
        _, *inputs, rows = self.whole.shape
        return self.place.rows_of(rows), *inputs

    def read(self, slices: Slices = ()) -> torch.Tensor:
        rows, *columns = slices or (slice(None),)
        _, *inputs, count = self.whole.shape
        index = (self.place.expert, *(slice(None) for _ in inputs), self.place.span(rows, count))
        values = self.whole.read(index)[..., self.place.first :: self.place.step]
        return values.T[:, *columns] if inputs else values


LARGEST_SCALE = 252
"""Values with a larger scale may be infinite, and 255 is no number."""


@dataclass(slots=True, frozen=True)
class ExpertBlocks:
    """Implements StoredTensor: the matrix [N, K] of an expert in blocks of MXFP4, as OpenAI stores
    them: codes [E, step · N, K / 32, 16], of two neighbours in a byte, the first in its low bits,
    and scales [E, step · N, K / 32].

    as_values: whether it is read as bf16 values, [N, K], or as the blocks of
    ``core.model.BLOCK_KINDS``, uint8 [N, K / 32 · 17]."""

    codes: WholeTensor
    scales: WholeTensor
    place: ExpertRows
    as_values: bool

    @property
    def file(self) -> Path:
        return self.codes.file

    @property
    def name(self) -> str:
        return self.codes.name

    @property
    def shape(self) -> tuple[int, ...]:
        _, rows, blocks, _ = self.codes.shape
        return self.place.rows_of(rows), blocks * (32 if self.as_values else 17)

    def read(self, slices: Slices = ()) -> torch.Tensor:
        rows, *columns = slices or (slice(None),)
        index = (self.place.expert, self.place.span(rows, self.codes.shape[1]))
        packed, scales = (
            tensor.read(index)[self.place.first :: self.place.step]
            for tensor in (self.codes, self.scales)
        )
        if scales.numel() and int(scales.max()) > LARGEST_SCALE:
            raise CheckpointError(
                f"Tensor {self.scales.name!r} in {self.scales.file} has a scale of"
                f" {int(scales.max())}; the largest supported value is {LARGEST_SCALE}."
            )
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
        halves = codes[..., :16] | codes[..., 16:] << 4
        found = torch.cat((scales[..., None], halves), dim=-1).flatten(1)
        if not self.as_values:
            return found
        return dequantised(GgufWeight("MXFP4", found))[:, *columns]


FUSED = {
    "gate_up_proj": (("gate_proj", 0, 2), ("up_proj", 1, 2)),
    "down_proj": (("down_proj", 0, 1),),
}
"""A tensor of all experts of a layer -> the matrices of an expert that it has: (name, the first of
its rows, how far they are apart)."""


def by_expert(
    stored: Mapping[str, WholeTensor],
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """(the tensors with each expert's in place of those of all experts, the blocks among them as
    "NAME.MXFP4"). For checkpoints like those of gpt-oss: gate and up alternate in one matrix."""
    tensors: dict[str, StoredTensor] = {}
    blocks: dict[str, StoredTensor] = {}
    codes_end, scales_end = MXFP4_SUFFIXES
    for name, tensor in stored.items():
        prefix, _, last = name.rpartition(".experts.")
        fused = last.removesuffix("_bias").removesuffix(codes_end).removesuffix(scales_end)
        if not prefix or fused not in FUSED or len(tensor.shape) < 2:
            tensors[name] = tensor
        elif last.endswith(codes_end):
            scales = stored.get(name.removesuffix(codes_end) + scales_end)
            shape = tensor.shape
            if scales is None or scales.shape != shape[:-1] or len(shape) != 4 or shape[3] != 16:
                raise CheckpointError(
                    f"Tensor {name!r} in {tensor.file} of shape {list(shape)} needs scales"
                    f" {scales_end!r} of one dimension less."
                )
            for part, place in _places(prefix, fused, tensor):
                tensors[f"{part}.weight"] = ExpertBlocks(tensor, scales, place, as_values=True)
                blocks[f"{part}.weight.MXFP4"] = ExpertBlocks(
                    tensor, scales, place, as_values=False
                )
        elif not last.endswith(scales_end):
            kind = "bias" if last.endswith("_bias") else "weight"
            for part, place in _places(prefix, fused, tensor):
                tensors[f"{part}.{kind}"] = ExpertTensor(tensor, place)
    return tensors, blocks


def _places(prefix: str, fused: str, tensor: WholeTensor) -> Iterator[tuple[str, ExpertRows]]:
    """(path of a layer of an expert, its place) for everything in a tensor of all experts."""
    for expert in range(tensor.shape[0]):
        for name, first, step in FUSED[fused]:
            yield f"{prefix}.experts.{expert}.{name}", ExpertRows(expert, first, step)
