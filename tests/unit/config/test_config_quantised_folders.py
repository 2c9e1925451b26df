"""--quantization may name what a folder is, and is refused with what to do where it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from setpoint.config.hardware import Hardware
from setpoint.config.options import Options
from setpoint.config.quantization import keeps_blocks
from setpoint.config.resolve import resolve
from setpoint.core.errors import ConfigError
from setpoint.core.model import KeptBlocks, ModelSpec
from setpoint.core.quantised import QUANTIZATIONS, Codes, QuantisedMatrix
from setpoint.planning.memory import GIB
from setpoint_testing.specs import tiny_spec

CPU = Hardware(device="cpu", num_cores=2, available_bytes=20 * GIB)
MATRIX = QuantisedMatrix("a.weight", (64, 64), Codes("a.qweight", 4), "a.scales", 32)


def spec_of(method: str, kind: str = "Q4_0") -> ModelSpec:
    """A folder of this ``quant_method``; "": of plain weights."""
    if not method:
        return tiny_spec(vocab_size=1024, num_parameters=200_000)
    return tiny_spec(
        vocab_size=1024,
        num_parameters=200_000,
        blocks=KeptBlocks(100_000, 60_000, 60_000, (kind,), 0) if kind else None,
        quantised=(MATRIX,),
        config={"quantization_config": {"quant_method": method}},
    )


def why(options: Options, model: ModelSpec) -> str:
    config = resolve(options, CPU, model)
    assert config.options.model.quantization is None
    (decision,) = (each for each in config.decisions if each.field == "quantization")
    return decision.why


@pytest.mark.parametrize("method", QUANTIZATIONS)
def test_the_name_of_a_folder_is_accepted_for_it_only(method: str) -> None:
    names = {name for each in QUANTIZATIONS.values() for name in each}
    for name in names:
        options, matches = Options.of(quantization=name), name in QUANTIZATIONS[method]
        if matches:
            assert f"given as {name}, which is what the folder has; the Q4_0 blocks" in why(
                options, spec_of(method)
            )
        else:
            with pytest.raises(ConfigError, match=rf"this model has {method} weights; leave --q"):
                resolve(options, CPU, spec_of(method))
        if name == "fp8":
            assert resolve(options, CPU, spec_of("")).options.model.quantization == "fp8"
            continue
        with pytest.raises(ConfigError, match="is not quantized; use w8a8_int8 or fp8, which"):
            resolve(options, CPU, spec_of(""))


def test_the_name_of_a_folder_is_refused_for_a_gguf_file_which_needs_none() -> None:
    file = replace(spec_of(""), blocks=KeptBlocks(100_000, 60_000, 60_000, ("Q4_1",), 0))
    with pytest.raises(ConfigError, match="the quantized blocks of a GGUF file; leave --quant"):
        resolve(Options.of(quantization="awq"), CPU, file)


def test_int8_weights_of_a_folder_are_used_as_they_are() -> None:
    options, folder = Options.of(quantization="w8a8_int8"), spec_of("compressed-tensors", "W8A8")
    assert "given as w8a8_int8, which is what the folder has" in why(options, folder)
    assert "of W8A8, as the folder asks" in why(Options(), folder)
    for model in (spec_of("compressed-tensors"), replace(folder, blocks=None)):
        assert resolve(options, CPU, model).options.model.quantization == "w8a8_int8"


def test_a_gpu_multiplies_folders_in_fp8() -> None:
    gpu = Hardware(device="cuda", num_cores=2, available_bytes=20 * GIB)
    for kind, words in (("FP8", "by activations that are rounded to 8 bits"), ("Q4_0", "at load")):
        folder = spec_of("fp8", kind)
        config = resolve(Options.of(dtype="bfloat16"), gpu, folder)
        assert keeps_blocks(config.options, folder) == (kind == "FP8")
        (decision,) = (each for each in config.decisions if each.field == "quantization")
        assert words in decision.why


def test_codes_without_blocks_are_dequantized() -> None:
    assert why(Options(), spec_of("bitsandbytes", "")) == (
        "the codes of the folder are dequantized at load"
    )
