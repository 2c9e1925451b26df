"""``setpoint compile`` puts what a server would compile into the folder, all of it, and the folder may be
moved."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import triton
from _pytest.capture import CaptureResult

from setpoint import cli
from setpoint.launch.parent import kernel_compilation
from setpoint_testing.absent_gpu import without_interpreter
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.graph_steps import FAMILIES

CONTEXT, STEP_TOKENS = 256, 512
SIZES = [
    "--context-length", str(CONTEXT), "--chunked-prefill-size", str(STEP_TOKENS),
    "--max-running-requests", "70", "--cuda-graph-max-bs-decode", "16",
    "--cuda-graph-max-bs-prefill", "20", "--dtype", "bfloat16",
]  # fmt: skip


def write_model(folder: Path, family: str) -> Path:
    write_tiny(folder, FAMILIES[family].config)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    return folder


@pytest.mark.parametrize(
    ("family", "tp_size"),
    [
        ("llama", 1),
        pytest.param("qwen3_moe", 1, marks=pytest.mark.full),
        pytest.param("gpt_oss", 2, marks=pytest.mark.full),
        pytest.param("deepseek_v2", 1, marks=pytest.mark.full),
    ],
)
def test_a_server_has_nothing_to_compile(
    family: str, tp_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, kernels = write_model(tmp_path / "model", family), tmp_path / "kernels"
    arguments = [
        "compile", str(model), "--target", "sm_90", "-o", str(kernels), "--tp-size", str(tp_size),
    ]  # fmt: skip
    assert cli.main([*arguments, *SIZES]) == 0
    said = capsys.readouterr().out
    assert "attention_pieces" in said
    assert f"TRITON_CACHE_DIR={kernels}" in said
    assert f"Triton: {triton.__version__}, the wheel for cp3" in said

    kernels = kernels.rename(tmp_path / "moved")

    def served() -> tuple[list[str], int]:
        sizes = map(str, (tp_size, CONTEXT, STEP_TOKENS))
        return json.loads(
            without_interpreter(["setpoint_testing.served_steps", str(model), *sizes], kernels)
        )

    compiled, num_read = served()
    assert compiled == []
    assert num_read > 30
    for left_out in ("collect_candidates", "attention_merge"):
        next(kernels.rglob(f"{left_out}.json")).unlink()
    assert sorted(served()[0]) == ["attention_merge", "collect_candidates"]


def refused(
    capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> tuple[int, CaptureResult[str]]:
    return cli.main(["compile", *map(str, arguments)]), capsys.readouterr()


def test_what_cannot_be_compiled_is_refused_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", "llama")
    for arguments, words in (
        ([], "--target is missing"),
        (["--target", "sm_86"], "--target sm_86: the kernels' registers"),
        (["--target", "sm_80", "--device", "cpu"], "--device cpu has no kernels"),
        (["--target", "sm_80", "-o", model / "config.json" / "x"], "cannot be created"),
    ):
        code, said = refused(capsys, model, *arguments)
        assert code == 2
        assert words in said.err
    monkeypatch.setattr(kernel_compilation, "find_spec", lambda name: None)
    code, said = refused(capsys, model, "--target", "sm_90")
    assert code == 2
    assert "pip install triton==" in said.err


@pytest.mark.full
def test_what_the_gpu_lacks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, kernels = write_model(tmp_path / "model", "llama"), tmp_path / "kernels"
    arguments = model, "--target", "sm_80", "-o", kernels, *SIZES
    code, said = refused(capsys, *arguments, "--kv-cache-dtype", "fp8_e4m3")
    assert code == 2
    assert "compute capability 8.0 has no fp8 of the kind e4m3" in said.err
    code, said = refused(capsys, *arguments, "--model-impl", "transformers")
    assert code == 2
    assert "cannot be compiled ahead" in said.err
    shutil.rmtree(kernels)
    kernels.mkdir(mode=0o500)
    if os.access(kernels, os.W_OK):
        pytest.skip("this user may write everywhere")
    code, said = refused(capsys, *arguments)
    assert code == 2
    assert "is not writable" in said.err
