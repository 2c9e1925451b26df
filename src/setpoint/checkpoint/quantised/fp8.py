"""``quant_method`` "fp8": matrices in E4M3 with one scale (``weight_scale``), one for each output,
or one for each block of 128 by 128 (``weight_scale_inv``, as DeepSeek and Qwen publish them).

Despite its name weight_scale_inv is multiplied by. Source: transformers,
integrations/finegrained_fp8.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from setpoint.checkpoint.quantised.tensor_headers import Section, StoredTensors
from setpoint.core.quantised import Codes, QuantisedMatrix

E4M3 = "F8_E4M3"
SCALE, BLOCK_SCALE = "weight_scale", "weight_scale_inv"
INPUT_SCALES = "input_scale", "activation_scale"
NOTE = "meet activations that are not rounded to 8 bits as the folder asks"


def matrices(section: Section, tensors: StoredTensors) -> Iterator[QuantisedMatrix]:
    """The matrices of the folder. Raises CheckpointError for what is not served."""
    section.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    section.choice("fmt", ("e4m3",), "e4m3")
    block = None
    if section.values.get("weight_block_size") is not None:
        block = section.pair("weight_block_size")
    for path in list(tensors.named(".weight")):
        if tensors.dtype(f"{path}.weight") == E4M3:
            yield float_matrix(tensors, path, SCALE if block is None else BLOCK_SCALE, block, NOTE)


def float_matrix(
    tensors: StoredTensors, path: str, scale: str, block: tuple[int, int] | None, note: str
) -> QuantisedMatrix:
    """The matrix in E4M3 of a module. block: outputs and inputs that share a scale (-1: all
    inputs); None: the shape of the scales says whether all share one or those of an output do."""
    codes, scales = Codes(f"{path}.weight", 8), f"{path}.{scale}"
    outputs, inputs = shape = tensors.take(codes.name, (E4M3,)).shape
    if block is None:
        is_one = scales in tensors and all(each == 1 for each in tensors.shape(scales))
        block = outputs if is_one else 1, inputs
    rows, group = min(block[0], outputs), inputs if block[1] == -1 else min(block[1], inputs)
    tensors.take_scales(scales, (-(-outputs // rows), -(-inputs // group)))
    names = [f"{path}.{name}" for name in INPUT_SCALES if f"{path}.{name}" in tensors]
    for name in names:
        tensors.take_scales(name, (1, 1))
    return QuantisedMatrix(
        f"{path}.weight",
        (shape[0], shape[1]),
        codes,
        scales,
        group,
        rows=rows,
        is_float=True,
        has_input_scale=bool(names),
        note=note,
    )
