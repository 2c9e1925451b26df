"""Writes tests/golden/matrices_of_tools.safetensors: matrices as the tools for quantised folders
write them, and the values that the tools make of them.

Needs packages that Setpoint does not: compressed-tensors, bitsandbytes, and the unpacked sources of
AutoAWQ 0.2.9 and AutoGPTQ 0.7.1, whose other parts need a GPU and are not imported:

    python scripts/matrices_of_tools.py AUTOAWQ AUTOGPTQ tests/golden/matrices_of_tools.safetensors
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

OUTPUTS, INPUTS, GROUP = 32, 128, 32
TENSORS: dict[str, torch.Tensor] = {}
SECTIONS: dict[str, Any] = {}


def put(
    case: str, section: dict[str, Any], tensors: dict[str, torch.Tensor], values: torch.Tensor
) -> None:
    """Keep a matrix. section: its ``quantization_config``."""
    SECTIONS[case] = section
    for name, tensor in [*tensors.items(), ("values", values)]:
        TENSORS[f"{case}/{name}"] = tensor.detach().contiguous()


def module_at(folder: Path, path: str, **names: Any) -> types.ModuleType:
    """A module of an unpacked source, without what its packages import."""
    parts = path.split(".")
    for end in range(1, len(parts)):
        package = types.ModuleType(".".join(parts[:end]))
        package.__path__ = [str(folder.joinpath(*parts[:end]))]
        sys.modules.setdefault(package.__name__, package)
    vars(sys.modules[".".join(parts[:-1])]).update(names)
    found = types.ModuleType(path)
    found.__package__ = ".".join(parts[:-1])
    source = folder.joinpath(*parts).with_suffix(".py")
    exec(compile(source.read_text(), str(source), "exec"), vars(found))
    sys.modules[path] = found
    return found


def write_compressed(case: str, form: str, **arguments: Any) -> None:
    """A matrix of compressed-tensors."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    weight, how = torch.randn(OUTPUTS, INPUTS).bfloat16(), scheme.weights
    if how.strategy == "tensor":
        limits = weight.min()[None], weight.max()[None]
    elif how.strategy == "block":
        rows, columns = how.block_structure
        squares = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        limits = squares.amin((1, 3)), squares.amax((1, 3))
    else:
        grouped = weight.unflatten(1, (-1, how.group_size or INPUTS))
        limits = grouped.amin(2), grouped.amax(2)
    scale, zero = calculate_qparams(*limits, how)
    tool = BaseCompressor.get_value_from_registry(form)
    given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    stored = tool.compress(given, scheme)
    section = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
    }
    put(case, section, stored, tool.decompress(dict(stored), scheme)["weight"])


def write_bitsandbytes() -> None:
    import bitsandbytes.functional as tool

    section = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    for kind, nested in (("nf4", True), ("nf4", False), ("fp4", True)):
        codes, state = tool.quantize_4bit(
            torch.randn(OUTPUTS, INPUTS).bfloat16(), quant_type=kind, compress_statistics=nested
        )
        more = {f"weight.{name}": each for name, each in state.as_dict(packed=True).items()}
        case = f"bnb {kind}{' nested' if nested else ''}"
        put(case, section, {"weight": codes} | more, tool.dequantize_4bit(codes, state))
    codes, largest, _ = tool.int8_vectorwise_quant(torch.randn(OUTPUTS, INPUTS).half())
    stored = {
        "weight": codes,
        "SCB": largest,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    values = tool.int8_vectorwise_dequant(codes, largest)
    put("bnb int8", {"quant_method": "bitsandbytes", "load_in_8bit": True}, stored, values)


def rounded(
    weight: torch.Tensor, bits: int, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the weight rounded to codes and back, scales [N, G], zeros [N, G])."""
    grouped, top = weight.unflatten(1, (-1, GROUP)), 2**bits - 1
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / top).half().float()
    zeros = torch.full_like(scales, (top + 1) // 2) if symmetric else (-low / scales).round()
    each, zero = scales[..., None], zeros[..., None]
    values = ((grouped / each).round() + zero).clamp(0, top) - zero
    return (values * each).flatten(1), scales, zeros


def linear_of(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False).half()
    linear.weight.data = weight.half()
    return linear


def write_awq(folder: Path) -> None:
    packing = module_at(folder, "awq.utils.packing_utils")
    gemm = module_at(folder, "awq.modules.linear.gemm")
    values, scales, zeros = rounded(torch.randn(OUTPUTS, INPUTS), 4, symmetric=False)
    packed = gemm.WQLinear_GEMM.from_linear(
        linear_of(values), 4, GROUP, scales=scales.half().T.contiguous(), zeros=zeros.T.contiguous()
    )
    found = packing.dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP)
    section = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    put("awq", section, packed.state_dict(), found.T)


def write_gptq(folder: Path) -> None:
    tool = module_at(
        folder, "auto_gptq.nn_modules.qlinear.qlinear_cuda", GeneralQuantLinear=torch.nn.Module
    )
    for bits, symmetric, desc_act in ((4, True, False), (4, False, True), (8, False, False)):
        place = torch.randperm(INPUTS) if desc_act else torch.arange(INPUTS)
        weight = torch.randn(OUTPUTS, INPUTS)[:, place.argsort()]
        values, scales, zeros = rounded(weight, bits, symmetric=symmetric)
        packed = tool.QuantLinear(bits, GROUP, INPUTS, OUTPUTS, False)
        packed.pack(linear_of(values[:, place]), scales, zeros, (place // GROUP).int())
        section = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": GROUP,
            "sym": symmetric,
            "desc_act": desc_act,
        }
        names = f"{'' if symmetric else ' asymmetric'}{' desc_act' if desc_act else ''}"
        put(f"gptq {bits}{names}", section, packed.state_dict(), packed(torch.eye(INPUTS).half()).T)


def main() -> None:
    torch.manual_seed(0)
    ints, floats = {"type": "int"}, {"type": "float", "num_bits": 8}
    pack, channel = "pack-quantized", {"strategy": "channel"}
    four, eight = ints | {"num_bits": 4, "strategy": "group"}, ints | {"num_bits": 8} | channel
    write_compressed("w4a16", pack, **four, group_size=32)
    write_compressed("w4a16 asymmetric", pack, **four, group_size=64, symmetric=False)
    write_compressed("w8a16 channel", pack, **eight)
    write_compressed("w8a16 asymmetric", pack, **eight, symmetric=False)
    write_compressed("int8", "int-quantized", **eight)
    write_compressed("float channel", "float-quantized", **floats, **channel)
    write_compressed("float tensor", "float-quantized", **floats, strategy="tensor")
    write_compressed(
        "float block", "float-quantized", **floats, strategy="block", block_structure=[16, 64]
    )
    write_bitsandbytes()
    awq, gptq, out = map(Path, sys.argv[1:])
    write_awq(awq)
    write_gptq(gptq)
    save_file(TENSORS, out, {"sections": json.dumps(SECTIONS)})


if __name__ == "__main__":
    main()
