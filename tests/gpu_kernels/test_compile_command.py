"""``setpoint compile`` puts what a server would compile into the folder, all of it, and the folder may be
moved."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from _pytest.capture import CaptureResult

from setpoint import cli
from setpoint.launch.parent import kernel_compilation
from setpoint_testing import gguf_families
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
        (["--target", "sm_90", "--attention-backend", "fa3"], "fa3: the kernels of libraries are"),
        (
            ["--target", "sm_90", "--decode-attention-backend", "flashinfer"],
            "--decode-attention-backend flashinfer: the kernels of libraries are not compiled",
        ),
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
def test_the_products_of_a_gguf_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that no server has loaded before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, _ = gguf_families.write_model(tmp_path, "llama/dense", gguf_families.mixed)
    arguments = "compile", str(model), "--target", "sm_90", "-o", str(tmp_path / "kernels"), *SIZES
    assert cli.main([*arguments]) == 0
    assert "kernels for sm_90" in capsys.readouterr().out


@pytest.mark.full
def test_steps_that_are_not_captured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, kernels = write_model(tmp_path / "model", "llama"), tmp_path / "kernels"
    arguments = "compile", str(model), "--target", "sm_90", "-o", str(kernels), *SIZES
    assert cli.main([*arguments, "--disable-cuda-graph"]) == 0
    assert "attention_pieces" in capsys.readouterr().out
    assert cli.main([*arguments, "--attention-backend", "torch_ref"]) == 0
    said = capsys.readouterr().out
    assert "rms_norm_rows" in said
    assert "attention_" not in said
    assert ", 0 of them compiled" in said


def test_a_command_that_is_interrupted_says_what_is_kept(tmp_path: Path) -> None:
    model, kernels = write_model(tmp_path / "model", "llama"), tmp_path / "kernels"
    arguments = "compile", str(model), "--target", "sm_90", "-o", str(kernels), *SIZES
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"{code}; from setpoint import cli; sys.exit(cli.main())",
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("   1 so far ")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        rest, errors = process.communicate()
    assert process.returncode == 130
    num_kernels = 1 + len(rest.splitlines())
    (line,) = errors.splitlines()
    assert line.startswith(
        f"Interrupted after {num_kernels} kernels, {num_kernels} of them compiled"
    )
    assert f"The folder {kernels} keeps them" in line


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
