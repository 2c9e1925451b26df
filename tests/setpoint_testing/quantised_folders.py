"""Writes tiny models as the tools for quantised folders do, and the same models dequantised.

The layouts are written here from the tools' sources, independently of the reader under test; the
values are computed directly from the codes, before they are packed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from setpoint_testing.goldens import GOLDENS

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours each place of a word has (AutoAWQ, packing_utils.py)."""
NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.39491748, -0.28444138, -0.18477343, -0.09105003, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
"""bitsandbytes, functional.py, get_4bit_type("nf4")."""


@dataclass(slots=True)
class Written:
    """A matrix in a format."""

    tensors: Tensors
    """The stored tensors, by the ending that follows the module's name."""
    values: torch.Tensor
    """fp32 [N, K], before they are rounded to bf16."""


Writer = Callable[[torch.Tensor], Written]


def whole_numbers(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [N, K], zeros [N, G], both without a sign, scales [N, G], values [N, K])."""
    grouped, top = weight.unflatten(1, (-1, group)), (1 << bits) - 1
    if symmetric:
        scales = grouped.abs().amax(2) / (top // 2)
        zeros = torch.full_like(scales, (top + 1) // 2)
    else:
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scales = (high - low) / top
        zeros = (-low / scales).round()
    scales = scales.clamp(min=1e-4).to(dtype)
    each = scales.float().unsqueeze(2)
    codes = ((grouped / each).round() + zeros.unsqueeze(2)).clamp(0, top)
    values = (codes - zeros.unsqueeze(2)) * each
    return codes.flatten(1).int(), zeros.int(), scales, values.flatten(1)


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[R, n] -> int32 [R, ceil(n · bits / 32)], the first code in the lowest bits."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per_word))
    shifts = torch.arange(0, 32, bits)
    found = (padded.unflatten(1, (-1, per_word)) << shifts).sum(2)
    return torch.where(found >= 1 << 31, found - (1 << 32), found).int()


def awq(weight: torch.Tensor, *, group: int = 32) -> Written:
    codes, zeros, scales, values = whole_numbers(
        weight, 4, group, symmetric=False, dtype=torch.float16
    )

    def packed(numbers: torch.Tensor) -> torch.Tensor:
        by_inputs = numbers.T.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1)
        return words(by_inputs, 4)

    tensors = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales.T.contiguous()}
    return Written(tensors, values)


def gptq(
    weight: torch.Tensor,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    version: int = 1,
    desc_act: bool = False,
) -> Written:
    inputs = weight.shape[1]
    place = torch.arange(inputs)
    if desc_act:  # input i is quantised as number place[i]
        place = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    codes, zeros, scales, values = whole_numbers(
        weight[:, place.argsort()], bits, group, symmetric=symmetric, dtype=torch.float16
    )
    stored_zeros = (zeros - int(version == 1)) & (1 << bits) - 1
    tensors = {
        "qweight": words(codes[:, place], bits).T.contiguous(),
        "qzeros": words(stored_zeros.T, bits),
        "scales": scales.T.contiguous(),
        "g_idx": (place // group).int(),
    }
    return Written(tensors, values[:, place])


def packed(
    weight: torch.Tensor,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    ordered: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Written:
    """compressed-tensors, "pack-quantized". group: -1 for one scale for each output."""
    inputs = weight.shape[1]
    group = inputs if group == -1 else group
    place = torch.arange(inputs)
    if ordered:
        place = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    codes, zeros, scales, values = whole_numbers(
        weight[:, place.argsort()], bits, group, symmetric=symmetric, dtype=dtype
    )
    tensors = {
        "weight_packed": words(codes[:, place], bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    if ordered:
        tensors["weight_g_idx"] = (place // group).int()
    return Written(tensors, values[:, place])


def int8(weight: torch.Tensor, *, static: bool = False) -> Written:
    """compressed-tensors, "int-quantized"."""
    codes, _, scales, values = whole_numbers(
        weight, 8, weight.shape[1], symmetric=True, dtype=torch.float32
    )
    tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
    if static:
        tensors["input_scale"] = torch.tensor([0.05])
    return Written(tensors, values)


def e4m3(weight: torch.Tensor, *, block: tuple[int, int] | None = None, ending: str) -> Written:
    """A scale for each block of (outputs, inputs); None: one for all."""
    rows, group = block or weight.shape
    outputs, inputs = weight.shape
    grid = torch.nn.functional.pad(weight, (0, -inputs % group, 0, -outputs % rows))
    scales = grid.unflatten(0, (-1, rows)).unflatten(2, (-1, group)).abs().amax((1, 3)) / 448
    each = scales.repeat_interleave(rows, 0).repeat_interleave(group, 1)[:outputs, :inputs]
    codes = (weight / each).to(torch.float8_e4m3fn)
    stored = scales.reshape(1) if block is None else scales
    return Written({"weight": codes, ending: stored}, codes.float() * each)


def nf4(weight: torch.Tensor, *, nested: bool = False, block: int = 64) -> Written:
    table, flat = torch.tensor(NF4), weight.reshape(-1, block)
    largest = flat.abs().amax(1)
    codes = ((flat / largest[:, None]).unsqueeze(2) - table).abs().argmin(2)
    tensors = {"weight.quant_map": table, "weight.absmax": largest}
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": block,
        "dtype": "bfloat16",
        "shape": list(weight.shape),
    }
    scales = largest
    if nested:
        offset, levels = float(largest.mean()), torch.linspace(-1, 1, 256)
        runs = torch.nn.functional.pad(largest - offset, (0, -len(largest) % 256)).view(-1, 256)
        tops = runs.abs().amax(1)
        steps = ((runs / tops[:, None]).unsqueeze(2) - levels).abs().argmin(2)
        stored = steps.flatten()[: len(largest)]
        scales = levels[stored] * tops.repeat_interleave(256)[: len(largest)] + offset
        tensors |= {
            "weight.absmax": stored.to(torch.uint8),
            "weight.nested_absmax": tops,
            "weight.nested_quant_map": levels,
        }
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    pairs = codes.flatten().view(-1, 2)
    tensors["weight"] = (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)[:, None]
    text = json.dumps(state).encode()
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    return Written(tensors, (table[codes] * scales[:, None]).view(weight.shape))


def llm_int8(weight: torch.Tensor) -> Written:
    """bitsandbytes, LLM.int8()."""
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round()
    tensors = {
        "weight": codes.to(torch.int8),
        "SCB": largest,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return Written(tensors, codes * (largest / 127)[:, None])


def _compressed(form: str, weights: dict[str, Any], inputs: Any = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _ints(bits: int, strategy: str, *, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": 32 if strategy == "group" else None,
        **more,
    }


def _gptq(bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False, **more}


GROUP, CHANNEL = partial(_ints, strategy="group"), partial(_ints, strategy="channel")
FLOATS = {"num_bits": 8, "type": "float", "symmetric": True}
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = TOKEN | {"strategy": "tensor", "dynamic": False}
LLAMA = next(each.config for each in GOLDENS if each.config["model_type"] == "llama") | {
    "hidden_size": 64,
    "intermediate_size": 128,
}
MIXTURE = next(each.config for each in GOLDENS if each.config["model_type"] == "qwen3_moe") | {
    "hidden_size": 64,
    "moe_intermediate_size": 64,
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "uint8"}

FORMATS: dict[str, tuple[Writer, dict[str, Any], str]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, "INT4Z"),
    "gptq": (gptq, _gptq(sym=True), "Q4_0"),
    "gptq asymmetric": (partial(gptq, symmetric=False), _gptq(sym=False), "INT4Z"),
    "gptq_v2": (
        partial(gptq, symmetric=False, version=2),
        _gptq(sym=False, checkpoint_format="gptq_v2"),
        "INT4Z",
    ),
    "gptq 8 bits": (partial(gptq, bits=8), _gptq(8, sym=True), "Q8_0"),
    "gptq 8 bits asymmetric": (
        partial(gptq, bits=8, symmetric=False),
        _gptq(8, sym=False),
        "INT8Z",
    ),
    "gptq desc_act": (partial(gptq, desc_act=True), _gptq(sym=True) | {"desc_act": True}, ""),
    "w4a16": (packed, _compressed("pack-quantized", GROUP(4)), "Q4_0"),
    "w4a16 fp32 scales": (
        partial(packed, dtype=torch.float32),
        _compressed("pack-quantized", GROUP(4)),
        "INT8Z",
    ),
    "w4a16 asymmetric": (
        partial(packed, symmetric=False),
        _compressed("pack-quantized", GROUP(4, symmetric=False)),
        "INT4Z",
    ),
    "w4a16 channel": (
        partial(packed, group=-1),
        _compressed("pack-quantized", CHANNEL(4)),
        "Q4_0",
    ),
    "w4a16 actorder": (
        partial(packed, ordered=True),
        _compressed("pack-quantized", GROUP(4, actorder="group")),
        "",
    ),
    "w8a16": (partial(packed, bits=8), _compressed("pack-quantized", GROUP(8)), "Q8_0"),
    "w8a16 asymmetric": (
        partial(packed, bits=8, group=-1, symmetric=False),
        _compressed("pack-quantized", CHANNEL(8, symmetric=False)),
        "INT8Z",
    ),
    "w8a8 dynamic": (int8, _compressed("int-quantized", CHANNEL(8), TOKEN), "W8A8"),
    "w8a8 static": (
        partial(int8, static=True),
        _compressed("int-quantized", CHANNEL(8), STATIC),
        "W8A8",
    ),
    "fp8 tensor": (partial(e4m3, ending="weight_scale"), FP8, "FP8"),
    "fp8 blocks": (
        partial(e4m3, block=(128, 128), ending="weight_scale_inv"),
        FP8 | {"weight_block_size": [128, 128]},
        "FP8",
    ),
    "float-quantized": (
        lambda weight: e4m3(weight, block=(1, weight.shape[1]), ending="weight_scale"),
        _compressed("float-quantized", FLOATS | {"strategy": "channel"}, FLOATS),
        "FP8",
    ),
    "nf4": (nf4, BNB, ""),
    "nf4 nested": (partial(nf4, nested=True), BNB, ""),
    "llm.int8": (llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "INT8Z"),
}
"""Name -> (how a matrix is written, ``quantization_config``, the kind of block that keeps it)."""


def is_quantised(name: str) -> bool:
    """Whether the tools quantise a tensor of this name: all matrices but embeddings, heads and
    routers."""
    return name.endswith("_proj.weight")


def quantise(folder: Path, to: Path, form: str) -> tuple[Path, Path]:
    """(the model in ``folder`` in this format, the same dequantised to bf16), below ``to``."""
    write, section, _ = FORMATS[form]
    stored, plain = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not is_quantised(name):
            stored[name] = plain[name] = tensor.bfloat16()
            continue
        written = write(tensor.float())
        module = name.removesuffix("weight")
        stored |= {module + ending: each for ending, each in written.tensors.items()}
        plain[name] = written.values.bfloat16()
    config = json.loads((folder / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    return (
        save(to / "quantised", stored, config | {"quantization_config": section}),
        save(to / "plain", plain, config),
    )


def save(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
    """Write a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
