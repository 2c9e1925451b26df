"""The one description of a matrix that a folder stores as codes and scales: where its numbers are
and what they mean, whatever the tool that wrote them (decision 0080).

``checkpoint`` writes it from the headers and the config; the engine reads the tensors by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEY = "quantization_config"
QUANTIZATIONS = {
    "awq": ("awq", "awq_marlin", "moe_wna16"),
    "gptq": ("gptq", "gptq_marlin", "moe_wna16"),
    "compressed-tensors": ("compressed-tensors",),
    "fp8": ("fp8",),
    "bitsandbytes": ("bitsandbytes",),
    "mxfp4": ("mxfp4",),
}
"""``quant_method`` in a config.json that is served -> values of --quantization that name it."""


def method_of(config: Mapping[str, Any]) -> str:
    """``quant_method`` of a config.json; "": it names none."""
    section = config.get(KEY)
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    return method if isinstance(method, str) else ""


@dataclass(slots=True, frozen=True)
class Codes:
    """A tensor of whole numbers of ``bits`` bits, of [N, X] after what is declared here is
    undone."""

    name: str
    bits: int
    word_axis: int | None = None
    """The stored dimension along which 32 / bits codes share an int32, the first in its lowest
    bits; None: each is a number of its own."""
    inputs_first: bool = False
    """Whether it is stored [X, N]."""
    interleaved: bool = False
    """Whether the codes of a word are in AWQ's order: 0, 2, 4, 6, 1, 3, 5, 7."""
    offset: int = 0
    """Added to what is stored, modulo 2^bits, for the code without a sign."""

    @property
    def per_word(self) -> int:
        return 1 if self.word_axis is None else 32 // self.bits

    def stored_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """The shape of the stored tensor of codes [outputs, inputs]."""
        shape = [inputs, outputs] if self.inputs_first else [outputs, inputs]
        if self.word_axis is not None:
            shape[self.word_axis] = -(-shape[self.word_axis] // self.per_word)
        return tuple(shape)


@dataclass(slots=True, frozen=True)
class NormalTable:
    """The values of the codes of bitsandbytes' NF4 and FP4, of which a byte has two neighbours, the
    first in its high bits: a weight is ``table[code]`` times the scale. The scales may be codes,
    too."""

    table: str
    """Tensor of the 16 values."""
    nested_table: str = ""
    """Tensor of the 256 values that scales may have; "": the scales are stored as they are."""
    nested_scales: str = ""
    nested_block: int = 0
    """Number of scales that share one of ``nested_scales``."""
    nested_offset: float = 0.0
    """Added to every scale."""


@dataclass(slots=True, frozen=True)
class Activations:
    """How the inputs of a product are rounded to 8 bits."""

    scale: str = ""
    """Tensor of the scale of all rows; "": each row has its own, its largest magnitude / 127."""


@dataclass(slots=True, frozen=True)
class QuantisedMatrix:
    """A weight [N, K]: scale · (code - zero)."""

    name: str
    """Its name as a matrix, which ends in ".weight"."""
    shape: tuple[int, int]
    codes: Codes
    scales: str
    """Tensor of the scales."""
    group: int
    """Inputs that share a scale; K: all of a row do."""
    rows: int = 1
    """Outputs that share a scale."""
    factor: float = 1.0
    """Multiplies all scales."""
    scales_inputs_first: bool = False
    """Whether the scales are stored [K / group, N]."""
    zeros: Codes | None = None
    """None: the zero is the middle code."""
    normal: NormalTable | None = None
    """The values of the codes, if they are no whole numbers."""
    is_float: bool = False
    """Whether the codes are numbers of 8 bits in E4M3, without a zero."""
    has_input_scale: bool = False
    """Whether the folder has a scale of its inputs in E4M3."""
    order: str = ""
    """Tensor of the group of each input; "": groups are runs of neighbours."""
    is_symmetric: bool = False
    """Whether the config says that every zero is the middle code. Memory is planned by this."""
    is_reordered: bool = False
    """Whether the config says that groups are not runs of neighbours."""
    activations: Activations | None = None
    """None: inputs are not rounded."""
    tensors: tuple[str, ...] = ()
    """All stored tensors that belong to it, also those that need not be read."""
    note: str = ""
    """What is done otherwise than the folder asks, for the log; "" if nothing is."""

    @property
    def num_scales(self) -> tuple[int, int]:
        """Numbers of scales (along N, along K)."""
        return -(-self.shape[0] // self.rows), -(-self.shape[1] // self.group)

    @property
    def fits_blocks(self) -> bool:
        """Whether blocks of 32 inputs have one scale each."""
        inputs = self.shape[1]
        return inputs % 32 == 0 and (self.group % 32 == 0 or self.group >= inputs)
