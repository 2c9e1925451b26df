"""The interface of linear methods. After loading, a method owns the weight, in the layout that it
multiplies fastest.

Works on one weight matrix at a time. Does not know which layer the weight belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from setpoint.core.errors import ConfigError
from setpoint.core.model import BLOCKS_INT8
from setpoint.engine.kernels.kernel_registry import ChosenKernel, choose, resolve
from setpoint.engine.kernels.ops import GateActivation, KernelsUnavailable


class PackedWeight(Protocol):
    """One weight [N, K] and its bias, in the method's own layout.

    A class that multiplies in a type other than x's declares it for measurements: ``product =
    "int8"``.
    """

    num_bytes: int
    """Bytes that it holds, including the bias."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K], contiguous -> x · weightᵀ + bias, [T, N] in x's dtype."""
        ...


class InvariantProduct(Protocol):
    """A weight of any kind that can also multiply on a GPU so that a row has the same bits in every
    batch. Needs Triton."""

    def invariant(self, *args: torch.Tensor) -> torch.Tensor:
        """Does what calling the weight does."""
        ...


class LinearMethod(Protocol):
    copies: bool
    """True if ``pack`` makes a copy in another layout. A weight that is shared with an embedding
    then takes memory twice."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        """Take a loaded weight [N, K] and its bias [N]. The caller drops its own references."""
        ...


@dataclass(slots=True, frozen=True)
class GgufWeight:
    """A weight [N, K] as a GGUF file stores it (``core.blocksfile``)."""

    kind: str
    """The kind of block, a key of ``core.model.BLOCK_KINDS``."""
    rows: torch.Tensor
    """uint8 [N, bytes of K values]."""


class PackedRows(PackedWeight, Protocol):
    """A weight that can also return its rows, so that a tied embedding and head are held once."""

    def rows(self, ids: torch.Tensor, scale: float) -> torch.Tensor:
        """The rows of the weight for ids [T] times ``scale``, [T, K], as ``Ops.embedding``."""
        ...


class BlockMethod(Protocol):
    """Multiplies by blocks as they are. Contract: unless it rounds activations (``rounds``), the
    result is bit for bit that of the best "unquant" LinearMethod on the bfloat16 values in the
    converted folder."""

    rounds: Set[str]
    """The kinds that are multiplied by activations of 8 bits."""

    kinds: Set[str]
    """The kinds of blocks that it takes."""

    def pack(self, blocks: GgufWeight, bias: torch.Tensor | None) -> PackedRows:
        """Take a loaded weight and its bias [N]. The caller drops its own references."""
        ...

    def pack_stack(self, stack: Sequence[GgufWeight], bias: torch.Tensor | None) -> PackedWeight:
        """Like ``pack``, for matrices one above the other whose kinds may differ; ``bias`` is that
        of all."""
        ...


@runtime_checkable
class GatedBlockMethod(BlockMethod, Protocol):
    """A method that activates gated layers, too."""

    def pack_gated(
        self, blocks: GgufWeight, bias: torch.Tensor | None, gate: GateActivation
    ) -> PackedWeight:
        """Like ``GatedMethod.pack_gated``."""
        ...


@runtime_checkable
class GatedMethod(LinearMethod, Protocol):
    """A method that multiplies and activates a gated layer in one operation, so that its [T, 2F]
    products are never stored."""

    def pack_gated(
        self, weight: torch.Tensor, bias: torch.Tensor | None, gate: GateActivation
    ) -> PackedWeight:
        """Like ``pack``, for the stacked weights of gate and up, [2F, K]; calling the result gives
        [T, F].

        gate: the operation of ``Ops`` that it replaces. It is applied to products that were not
        rounded before.
        """
        ...


METHODS = {
    "plain": "setpoint.engine.quant.plain:create",
    "packed": "setpoint.engine.quant.packed:create",
    "cpu": "setpoint.engine.quant.cpu_linear:create",
    "w8a8_int8_cpu": "setpoint.engine.quant.w8a8_int8_cpu:create",
    "w8a8_int8": "setpoint.engine.quant.rounded:create_int8",
    "w8a8_int8_ref": "setpoint.engine.quant.w8a8_int8:create",
    "fp8": "setpoint.engine.quant.rounded:create_fp8",
    "fp8_cpu": "setpoint.engine.quant.fp8:create",
    "fp8_ref": "setpoint.engine.quant.fp8:create_reference",
}
"""Name -> factory ``create(dtype) -> LinearMethod``. The factory raises KernelsUnavailable with the
reason if the method cannot run."""

PREFERENCE = {
    ("cpu", "unquant"): ("cpu", "packed", "plain"),
    ("cuda", "unquant"): ("plain",),
    ("cpu", "w8a8_int8"): ("w8a8_int8_cpu", "w8a8_int8_ref"),
    ("cuda", "w8a8_int8"): ("w8a8_int8", "w8a8_int8_ref"),
    ("cpu", "fp8"): ("fp8_cpu", "fp8_ref"),
    ("cuda", "fp8"): ("fp8",),
    ("cpu", BLOCKS_INT8): ("cpu", "packed", "plain"),
}
"""(device type, quantization) -> names, best first. The last one runs everywhere, but
that of fp8 on GPUs."""


def choose_linear(
    device: torch.device, dtype: torch.dtype, quantization: str | None
) -> ChosenKernel[LinearMethod]:
    """The best method for this device and dtype. quantization: the option of that name; None means
    "unquant". Raises ConfigError if no method exists."""
    key = (device.type, quantization or "unquant")
    if key not in PREFERENCE:
        raise ConfigError(
            f"Quantization {quantization!r} does not run on {device.type}; supported:"
            f" {', '.join(map('/'.join, PREFERENCE))}."
        )
    return choose(METHODS, PREFERENCE[key], dtype)


BLOCK_METHODS = {
    "cpu": "setpoint.engine.quant.blocks:create",
    "cuda": "setpoint.engine.quant.rounded:create_blocks",
}
"""Device type -> factory ``create(dtype, rounded=…) -> BlockMethod``. The factory raises
KernelsUnavailable if the method cannot run."""


def choose_blocks(
    device: torch.device, dtype: torch.dtype, quantization: str | None = None
) -> BlockMethod | None:
    """The method for blocks on this device and in this dtype; None: there is none, and blocks are
    loaded in dtype like every other weight. Raises ConfigError if there is none although the option
    ``quantization`` asks for one."""
    if quantization not in (None, BLOCKS_INT8):
        return None
    rounded = quantization == BLOCKS_INT8
    try:
        if device.type not in BLOCK_METHODS:
            raise KernelsUnavailable(f"it does not run on {device.type}")
        method: BlockMethod = resolve(BLOCK_METHODS[device.type])(dtype, rounded=rounded)
    except KernelsUnavailable as error:
        if rounded:
            raise ConfigError(
                f"--quantization {BLOCKS_INT8} cannot be used here: {error}."
            ) from error
        return None
    return method
