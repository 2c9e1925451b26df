"""What ranks compare before they compute together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from resolving import decide
from safetensors.numpy import load_file, save_file

from setpoint.checkpoint.spec import read_spec
from setpoint.config.hardware import Hardware
from setpoint.config.options import Options
from setpoint.core.errors import CheckpointError
from setpoint.core.identity import engine_digest, sources_digest, weights_sample
from setpoint.launch.child.computation_identity import ComputationIdentity
from setpoint.launch.child.mapping import computation_of
from setpoint.launch.job import EngineJob
from setpoint_testing.tiny_models import write_tiny_llama

CPU = Hardware(device="cpu", num_cores=8, available_bytes=1 << 34)


def computation(folder: Path, hardware: Hardware = CPU, **options: object) -> ComputationIdentity:
    spec = read_spec(folder)
    config = decide(Options.of(tp_size=2, **options), hardware, spec)
    return computation_of(EngineJob(config, spec, str(folder), None, None, None, False))


def differing(one: ComputationIdentity, other: ComputationIdentity) -> set[str]:
    a, b = one.facts(), other.facts()
    return {name for name in {*a, *b} if a.get(name) != b.get(name)}


def test_machines_may_differ(tmp_path: Path) -> None:
    one, other = (write_tiny_llama(tmp_path / name) for name in ("a", "b"))
    more = replace(CPU, num_cores=64)
    assert not differing(
        computation(one, random_seed=1), computation(other, more, random_seed=2, node_rank=0)
    )


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"dtype": "float32"}, {"--dtype", "--kv-cache-dtype"}),
        ({"quantization": "w8a8_int8"}, {"--quantization"}),
        ({"page_size": 4}, {"--page-size"}),
        ({"load_format": "dummy"}, {"--load-format", "the digest of the weights"}),
        ({"disable_cuda_graph": True}, {"whether steps are captured"}),
    ],
)
def test_options_may_not(options: dict, names: set[str], tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    assert differing(computation(folder), computation(folder, **options)) == names


def test_other_weights_and_other_models(tmp_path: Path) -> None:
    one = write_tiny_llama(tmp_path / "a")
    tuned = write_tiny_llama(tmp_path / "b", seed=1)
    assert differing(computation(one), computation(tuned)) == {"the digest of the weights"}
    wider = write_tiny_llama(tmp_path / "c", intermediate_size=96)
    assert {"the model's intermediate_size", "the model's config"} <= differing(
        computation(one), computation(wider)
    )


def with_scale(folder: Path, scale: float) -> Path:
    """The model, with this scale of the KV cache in every layer."""
    folder.mkdir()
    tensors = load_file(write_tiny_llama(folder.with_name("plain")) / "model.safetensors")
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.kv_scale"
        tensors[name] = np.array([scale], np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((folder.with_name("plain") / "config.json").read_text())
    return folder


def test_other_scales_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of the weights need not show them."""
    one, other = (with_scale(tmp_path / str(each), each) for each in (0.5, 0.25))
    plain, scales = tmp_path / "plain", {"the scales of the KV cache"}
    monkeypatch.setattr(
        "setpoint.launch.child.computation_identity.weights_sample", lambda folder: ""
    )
    fp8 = {"kv_cache_dtype": "fp8_e4m3"}
    assert not differing(computation(one), computation(other))
    assert not differing(computation(one, **fp8), computation(one, **fp8))
    assert differing(computation(one, **fp8), computation(other, **fp8)) == scales
    assert differing(computation(one, **fp8), computation(plain, **fp8)) == scales
    paths = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    for path, scale in zip(paths, (0.5, 0.5, 0.25), strict=True):
        layers = {str(layer): scale for layer in range(2)}
        cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": layers, "1": layers}}
        path.write_text(json.dumps({"model_type": "llama", "kv_cache": cache}))
    first, same, third = (
        computation(plain, quantization_param_path=str(path), **fp8) for path in paths
    )
    assert not differing(first, same)
    assert differing(first, third) == scales
    assert engine_digest(first.facts()) != engine_digest(third.facts())


def test_the_digest_of_weights(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    before = weights_sample(folder)
    assert before == weights_sample(folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    changed = weights_sample(folder)
    assert changed != before
    path.write_bytes(data[:4])  # no table at all
    assert weights_sample(folder) not in (before, changed)
    path.unlink()
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "gone.safetensors"}}'
    )
    with pytest.raises(CheckpointError, match="gone"):
        weights_sample(folder)


def test_the_digest_of_the_sources_is_that_of_this_commit() -> None:
    assert len(sources_digest()) == 12
