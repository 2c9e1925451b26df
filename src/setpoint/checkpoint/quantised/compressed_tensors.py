"""compressed-tensors, as llm-compressor writes it: whole numbers of 4 and 8 bits packed into words
(``weight_packed``), int8 (``weight``) and E4M3, with a scheme for each group of modules in the
config. Source: the compressed-tensors library, compressors/pack_quantized and
quantization/quant_args.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from setpoint.checkpoint.folder.configfile import short_repr
from setpoint.checkpoint.quantised.fp8 import float_matrix
from setpoint.checkpoint.quantised.tensor_headers import (
    CODES,
    SCALES,
    Section,
    StoredTensors,
    first_matches,
    group_of,
)
from setpoint.core.quantised import Activations, Codes, QuantisedMatrix

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
MIXED = "mixed-precision"
"""The format of a folder whose groups have formats of their own."""
CLASS = "Linear"
EXPRESSION = "re:"
ZEROS = "weight_zero_point"
BY_GROUP = (True, "group", "dynamic")
"""Values of ``actorder`` for groups of scattered inputs, which a tensor lists."""
NO_ROUNDING = "meet activations that are not rounded to {bits} bits as the folder asks"


def matrices(section: Section, tensors: StoredTensors) -> Iterator[QuantisedMatrix]:
    """The matrices of the folder. Raises CheckpointError for what is not served."""
    section.choice("format", (*FORMATS, MIXED, "dense"), "dense")
    for key in ("sparsity_config", "transform_config"):
        value = section.values.get(key)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            section.fail(key, f"is {short_repr(value)}, which is not served")
    names = (".weight_packed", ".weight_scale")
    schemes = _schemes(section, {path for name in names for path in tensors.named(name)})
    for name in names:
        for path in list(tensors.named(name)):
            if f"{path}.weight_packed" in tensors.taken or f"{path}.weight" in tensors.taken:
                continue
            if path not in schemes:
                tensors.fail(f"{path}{name}", "belongs to a module of no group of the config")
            scheme = schemes[path]
            if scheme is None:
                tensors.fail(f"{path}{name}", "belongs to a module that the config ignores")
            yield _matrix(scheme, tensors, path)


def _schemes(section: Section, paths: Collection[str]) -> dict[str, Section | None]:
    """Module -> its scheme: of the first group that names it, of one with an expression for it, of
    one for all linear layers, in this order. None: it is ignored. Without modules of no group."""
    groups, ignored = _groups(section), section.names("ignore")
    lists = [(section, "ignore", ignored), *((each, "targets", names) for names, each in groups)]
    expressions = [
        (where, key, name.removeprefix(EXPRESSION))
        for where, key, names in lists
        for name in names
        if name.startswith(EXPRESSION)
    ]
    first = first_matches(expressions, list(paths))
    named = {target: scheme for targets, scheme in reversed(groups) for target in targets}
    not_read = set(ignored)
    found: dict[str, Section | None] = {}
    for path in paths:
        where, key, _ = expressions[first[path]] if path in first else (None, "", "")
        if path in not_read or key == "ignore":
            found[path] = None
        elif scheme := named.get(path) or where or named.get(CLASS):
            found[path] = scheme
    return found


def _groups(section: Section) -> list[tuple[list[str], Section]]:
    """(targets, scheme) of every group."""
    groups = section.values.get("config_groups")
    if not groups and section.values.get("kv_cache_scheme"):
        return []  # the folder has nothing but scales for the KV cache
    if not isinstance(groups, Mapping) or not groups:
        section.fail("config_groups", f"must be an object of groups, not {short_repr(groups)}")
    found = []
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            section.fail("config_groups", f"has a group {short_repr(group)}; it must be an object")
        inner = section.inner(f"config_groups.{name}", group)
        inner.choice("format", FORMATS, FORMATS[0])
        found.append((inner.names("targets"), inner))
    return found


def _matrix(scheme: Section, tensors: StoredTensors, path: str) -> QuantisedMatrix:
    weights = _arguments(scheme, "weights")
    if weights is None:
        scheme.fail("weights", "is missing")
    inputs = _arguments(scheme, "input_activations")
    note = NO_ROUNDING.format(bits=inputs.values.get("num_bits")) if inputs else ""
    if weights.choice("type", ("int", "float"), "int") == "float":
        weights.choice("num_bits", (8,))
        return float_matrix(tensors, path, "weight_scale", _block(weights), note=note)
    bits = weights.choice("num_bits", (4, 8))
    if f"{path}.weight_packed" in tensors:
        codes = Codes(f"{path}.weight_packed", bits, 1)
        outputs, words = tensors.take(codes.name, CODES).shape
        columns = words * codes.per_word
        tensors.check_no_matrix(f"{path}.weight")
    else:
        if bits != 8:
            tensors.fail(f"{path}.weight_scale", f"is of {bits} bits and needs a weight_packed")
        codes = Codes(f"{path}.weight", bits, offset=128)
        outputs, columns = tensors.take(codes.name, ("I8",)).shape
    if f"{path}.weight_shape" in tensors:
        tensors.take(f"{path}.weight_shape", ("I64", "I32"), (2,))
    return _of_integers(tensors, path, codes, (outputs, columns), weights, inputs, note)


def _of_integers(
    tensors: StoredTensors,
    path: str,
    codes: Codes,
    shape: tuple[int, int],
    weights: Section,
    inputs: Section | None,
    note: str,
) -> QuantisedMatrix:
    outputs, columns = shape
    strategy = weights.choice("strategy", ("tensor", "channel", "group"))
    group = columns
    if strategy == "group":
        group = group_of(tensors, codes.name, weights.group("group_size"), columns)
    rows = outputs if strategy == "tensor" else 1
    tensors.take_scales(f"{path}.weight_scale", (outputs // rows, columns // group))
    zeros = None
    if not weights.flag("symmetric", default=True):
        zeros = _zeros(tensors, path, codes.bits, outputs // rows, columns // group)
    elif f"{path}.{ZEROS}" in tensors:
        tensors.fail(f"{path}.{ZEROS}", "holds zeros of a matrix that the config calls symmetric")
    is_scattered = group < columns and weights.values.get("actorder") in BY_GROUP
    order = f"{path}.weight_g_idx" if is_scattered or f"{path}.weight_g_idx" in tensors else ""
    if order:
        tensors.take(order, ("I32",), (columns,))
    activations = None
    if inputs is not None and codes.word_axis is None and zeros is None and group == columns:
        activations = _activations(inputs, tensors, path)
    for name in (f"{path}.input_scale", f"{path}.input_zero_point"):
        if name in tensors:
            tensors.take_scales(name, (1, 1), (*SCALES, "I8"))
    return QuantisedMatrix(
        f"{path}.weight",
        shape,
        codes,
        f"{path}.weight_scale",
        group,
        rows=rows,
        zeros=zeros,
        order=order,
        is_reordered=bool(order),
        activations=activations,
        note="" if activations else note,
    )


def _zeros(tensors: StoredTensors, path: str, bits: int, outputs: int, groups: int) -> Codes:
    """Zeros in words along the outputs or, in older folders and for int8, a byte each."""
    name = f"{path}.{ZEROS}"
    if name in tensors and tensors.dtype(name) == "I8":
        zeros = Codes(name, bits, offset=1 << (bits - 1))
    else:
        zeros = Codes(name, bits, 0)
    tensors.take_codes(zeros, outputs, groups)
    return zeros


def _activations(inputs: Section, tensors: StoredTensors, path: str) -> Activations | None:
    """How the inputs of a matrix in int8 are rounded; None: in a way that has no product here."""
    is_int8 = inputs.values.get("num_bits") == 8 and inputs.values.get("type", "int") == "int"
    if not is_int8 or not inputs.flag("symmetric", default=True):
        return None
    strategy = inputs.values.get("strategy")
    if inputs.values.get("dynamic") is True:
        return Activations() if strategy == "token" else None
    if strategy != "tensor":
        return None
    scale = f"{path}.input_scale"
    tensors.take_scales(scale, (1, 1))
    return Activations(scale)


def _arguments(scheme: Section, key: str) -> Section | None:
    value: Any = scheme.values.get(key)
    if value is not None and not isinstance(value, Mapping):
        scheme.fail(key, f"must be an object, not {short_repr(value)}")
    return None if value is None else scheme.inner(key, value)


def _block(weights: Section) -> tuple[int, int] | None:
    """(outputs, inputs) that share a scale; None: the scales' shape says it."""
    strategy = weights.choice("strategy", ("tensor", "channel", "block", "group"))
    if strategy == "group":
        return 1, weights.group("group_size")
    return weights.pair("block_structure") if strategy == "block" else None
