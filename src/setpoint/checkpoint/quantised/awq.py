"""AWQ as AutoAWQ writes it (version "gemm"): codes of 4 bits [K, N / 8], zeros [K / group, N / 8]
and scales [K / group, N]. Source: AutoAWQ, awq/utils/packing_utils.py and
awq/modules/linear/gemm.py."""

from __future__ import annotations

from collections.abc import Iterator

from setpoint.checkpoint.quantised.tensor_headers import (
    CODES,
    SCALES,
    Section,
    StoredTensors,
    group_of,
)
from setpoint.core.quantised import Codes, QuantisedMatrix

BITS = 4
PER_WORD = 32 // BITS


def matrices(section: Section, tensors: StoredTensors) -> Iterator[QuantisedMatrix]:
    """The matrices of the folder. Raises CheckpointError for what is not served."""
    section.choice("bits", (BITS,), section.values.get("w_bit"))
    section.choice("version", ("gemm", "GEMM"), section.values.get("format", "gemm"))
    group = section.group("group_size", default=section.values.get("q_group_size"))
    for path in list(tensors.named(".qweight")):
        codes = Codes(f"{path}.qweight", BITS, 1, inputs_first=True, interleaved=True)
        zeros = Codes(f"{path}.qzeros", BITS, 1, inputs_first=True, interleaved=True)
        inputs, words = tensors.take(codes.name, CODES).shape
        outputs = words * PER_WORD
        each = group_of(tensors, codes.name, group, inputs)
        tensors.take_codes(zeros, outputs, inputs // each)
        tensors.take(f"{path}.scales", SCALES, (inputs // each, outputs))
        yield QuantisedMatrix(
            f"{path}.weight",
            (outputs, inputs),
            codes,
            f"{path}.scales",
            each,
            scales_inputs_first=True,
            zeros=zeros,
        )
