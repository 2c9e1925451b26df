"""Writes the 8-bit copy of a model that vLLM serves: int8 weights with a scale per output channel,
activations quantised per token.

    python benchmarks/peers/quantize_w8a8.py MODEL FOLDER

The weights of linear layers are rounded to nearest, symmetrically, in the compressed-tensors
format. Nothing is calibrated: the scales of activations are computed at run time. MODEL is what
`setpoint serve --model-path` takes.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from setpoint.checkpoint.source import locate


def quantized(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with projections [out, in] as int8 and ``NAME_scale`` [out, 1] beside them;
    everything else is unchanged."""
    found: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if not name.endswith("_proj.weight"):
            found[name] = weight
            continue
        scale = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        found[name] = (weight.float() / scale).round().to(torch.int8)
        found[f"{name}_scale"] = scale.to(weight.dtype)
    return found


def config_entry() -> dict[str, object]:
    def numbers(strategy: str, dynamic: bool) -> dict[str, object]:
        return {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": strategy,
            "dynamic": dynamic,
        }

    group = {
        "targets": ["Linear"],
        "weights": numbers("channel", False),
        "input_activations": numbers("token", True),
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def main() -> None:
    model, target = sys.argv[1], Path(sys.argv[2])
    source = locate(model, log=print).folder
    target.mkdir(parents=True, exist_ok=True)
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        weights |= load_file(path)
    save_file(quantized(weights), target / "model.safetensors", metadata={"format": "pt"})
    for path in [*source.glob("*.json"), *source.glob("*.jinja")]:
        if "safetensors" not in path.name:
            shutil.copy(path, target)
    config = json.loads((source / "config.json").read_text())
    # Last, since a folder with a config counts as complete.
    (target / "config.json").write_text(
        json.dumps(config | {"quantization_config": config_entry()}, indent=1)
    )


if __name__ == "__main__":
    main()
