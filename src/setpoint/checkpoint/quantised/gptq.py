"""GPTQ as AutoGPTQ and GPTQModel write it: codes [K · bits / 32, N], zeros [K / group, N · bits /
32], scales [K / group, N], and g_idx [K], the group of each input. Files of the first version have
zeros that are one too small. Source: AutoGPTQ, nn_modules/qlinear/qlinear_cuda_old.py, and
GPTQModel, whose ``dynamic`` gives modules settings of their own by expressions of their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from setpoint.checkpoint.folder.configfile import short_repr
from setpoint.checkpoint.quantised.tensor_headers import (
    CODES,
    SCALES,
    Section,
    StoredTensors,
    first_matches,
    group_of,
)
from setpoint.core.quantised import Codes, QuantisedMatrix

FIRST = "gptq"
"""The first version's name in ``checkpoint_format``."""


def matrices(section: Section, tensors: StoredTensors) -> Iterator[QuantisedMatrix]:
    """The matrices of the folder. Raises CheckpointError for what is not served."""
    named = section.values.get("format", FIRST)  # newer files' name of the key
    version = section.choice("checkpoint_format", (FIRST, "gptq_v2"), named)
    section.choice("pack_dtype", ("int32",), "int32")
    paths = list(tensors.named(".qweight"))
    own = _own_settings(section, paths)
    for path in paths:
        yield _matrix(own.get(path, section), tensors, path, 1 if version == FIRST else 0)


def _matrix(section: Section, tensors: StoredTensors, path: str, offset: int) -> QuantisedMatrix:
    bits = section.choice("bits", (4, 8))
    codes = Codes(f"{path}.qweight", bits, 0, inputs_first=True)
    zeros = Codes(f"{path}.qzeros", bits, 1, inputs_first=True, offset=offset)
    words, outputs = tensors.take(codes.name, CODES).shape
    inputs = words * codes.per_word
    group = group_of(tensors, codes.name, section.group("group_size"), inputs)
    tensors.take_codes(zeros, outputs, inputs // group)
    tensors.take(f"{path}.scales", SCALES, (inputs // group, outputs))
    is_reordered = section.flag("desc_act", default=False) and group < inputs
    order = f"{path}.g_idx" if is_reordered or f"{path}.g_idx" in tensors else ""
    if order:
        tensors.take(order, ("I32",), (inputs,))
    return QuantisedMatrix(
        f"{path}.weight",
        (outputs, inputs),
        codes,
        f"{path}.scales",
        group,
        scales_inputs_first=True,
        zeros=zeros,
        order=order,
        is_symmetric=section.flag("sym", default=False),
        is_reordered=is_reordered,
    )


def _own_settings(section: Section, paths: Sequence[str]) -> dict[str, Section]:
    """Module -> the settings of the folder with those of the first expression that matches it;
    without the modules that none matches."""
    dynamic = section.values.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        section.fail("dynamic", f"must be an object, not {short_repr(dynamic)}")
    settings = {each: values for each, values in dynamic.items() if not each.startswith("-:")}
    expressions = [(section, "dynamic", each.removeprefix("+:")) for each in settings]
    of_expression = list(settings.values())
    found = {}
    for path, index in first_matches(expressions, paths).items():
        values = of_expression[index]
        if not isinstance(values, Mapping):
            section.fail("dynamic", f"must have objects, not {short_repr(values)}")
        found[path] = section.inner("dynamic", {**section.values, **values})
    return found
