"""How the C++ kernels are built, chosen and loaded, and what happens where they cannot be."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import psutil
import pytest
import torch

from setpoint.engine.kernels.cpu import build, calls, library
from setpoint.engine.kernels.kernel_registry import choose_ops
from setpoint.engine.kernels.ops import KernelsUnavailable


def run_python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints: loading the library is once per process."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


QUICK_BUILD = """
from setpoint.engine.kernels.cpu import build, library
build.FLAGS = tuple(flag.replace("-O3", "-O0") for flag in build.FLAGS)
"""
"""For a library that is loaded, not used."""


CHOOSE = """
import torch
from setpoint.engine.kernels.kernel_registry import choose_ops
choice = choose_ops(torch.device('cpu'), torch.bfloat16)
print(choice.name, '|', choice.fallback)
"""


def test_without_a_compiler_the_reference_runs_and_says_why(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    library._load.cache_clear()
    choice = choose_ops(torch.device("cpu"), torch.bfloat16)
    assert choice.name == "ref"
    assert choice.fallback == "cpu: no C++ compiler: 'no-such-compiler' is not on the PATH"


def test_a_failing_compiler_is_a_reason(tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo odd 1.0 && exit\necho "x.cpp:1: error: odd'
        ' machine"; exit 1\n'
    )
    compiler.chmod(0o755)
    output = run_python(CHOOSE, CXX=str(compiler), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert output.startswith("ref | cpu: ")
    assert "error: odd machine" in output
    assert not list((tmp_path / "cache/setpoint/kernels").iterdir())


def compiler_without(folder, *words):
    """A compiler that refuses command lines with one of these words."""
    compiler = folder / "g++"
    cases = "|".join(f"*{word}*" for word in words)
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in {cases}) echo "g++: error: unrecognized option"; exit 1;; esac\n'
        f'exec {build.find_compiler()} "$@"\n'
    )
    compiler.chmod(0o755)
    return str(compiler)


LEVEL_AND_WHY = """
from setpoint.engine.kernels.cpu import build, library
kernels = library.load()
print(kernels.level, '|', build.why_no_better(kernels.level))
"""


@pytest.mark.full
def test_a_compiler_that_is_too_old_for_the_best_level_gets_the_next_one_with_the_reason(tmp_path):
    levels = [level for level in build.supported_levels() if not build.is_emulated(level)]
    if levels == ["scalar"]:
        pytest.skip("this machine has one level only")
    compiler = compiler_without(tmp_path, "-mavx")
    output = run_python(QUICK_BUILD + LEVEL_AND_WHY, CXX=compiler, XDG_CACHE_HOME=str(tmp_path))
    level, why = output.strip().split(" | ")
    assert level == "scalar"
    assert why.startswith("the C++ kernels for avx2 cannot be compiled: ")
    assert "unrecognized option" in why


def test_a_forced_level_that_cannot_be_compiled_has_one_reason_however_often_it_is_asked_for(
    tmp_path,
):
    code = (
        f"{QUICK_BUILD}for _ in range(2):\n    try:\n        library.load('avx2')\n"
        "    except library.KernelsUnavailable as error:\n        print(error)\n"
    )
    if "avx2" not in build.supported_levels():
        pytest.skip("this machine has no such level")
    compiler = compiler_without(tmp_path, "-mavx")
    first, second = run_python(code, CXX=compiler, XDG_CACHE_HOME=str(tmp_path)).splitlines()
    assert "unrecognized option" in first
    assert "unrecognized option" in second


LAYOUTS = ("base/simd.h", "step/calls.h", "step/layouts.cpp")


def copy_layouts(sources: Path) -> None:
    for name in LAYOUTS:
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(build.SOURCE_DIR / name, sources / name)


def test_a_compiler_that_does_not_know_a_further_flag_builds_the_level_without_it(
    monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(build, "_cpu_flags", lambda: {"avx2", "fma", "f16c", "avx_vnni"})
    sources = tmp_path / "sources"  # one file in the place of all kernels, which take long
    copy_layouts(sources)
    monkeypatch.setattr(build, "SOURCE_DIR", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler_without(tmp_path, "-mavxvnni"))
    compiler = build.find_compiler()
    built = build.ensure_built("avx2")
    assert built == build.library_path(compiler, "avx2", more=False)
    assert built.exists()
    assert not build.library_path(compiler, "avx2").exists()
    assert "are compiled without -mavxvnni -mf16c: " in caplog.text
    build.compile_to(tmp_path / "elsewhere.so", "avx2")
    assert (tmp_path / "elsewhere.so").exists()


@pytest.mark.full
def test_an_unwritable_cache_is_logged_and_the_kernels_run(tmp_path):
    (tmp_path / "setpoint").write_text("a file where a folder should be")
    code = f"import sys; sys.stderr = sys.stdout\n{QUICK_BUILD}print(library.load('scalar').level)"
    log, level = run_python(code, XDG_CACHE_HOME=str(tmp_path)).splitlines()
    assert "compiling the C++ kernels for this process only" in log
    assert level == "scalar"


def test_a_level_can_be_forced_and_an_unknown_one_is_refused(monkeypatch):
    monkeypatch.setenv("SETPOINT_CPU_ISA", "scalar")
    assert library.load().level == "scalar"
    with pytest.raises(KernelsUnavailable, match="cannot run the level 'sse9'"):
        library.load("sse9")


def test_one_openmp_runtime_and_torch_free_build():
    code = (
        "import torch; from setpoint.engine.kernels.cpu import library;"
        " library.load()\nprint(len({l.split()[-1] for l in open('/proc/self/maps') if 'omp' in"
        " l.rsplit('/', 1)[-1]}))"
    )
    assert run_python(code).strip() == "1"
    assert (
        run_python(
            "import sys; from setpoint.engine.kernels.cpu import build; print('torch' in"
            " sys.modules)"
        ).strip()
        == "False"
    )


def test_the_cached_library_is_found_by_its_sources(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = build.find_compiler()
    before = build.library_path(compiler, "scalar")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert build.library_path(compiler, "scalar") != before
    assert before.parent == tmp_path / "setpoint" / "kernels"


def test_a_new_library_removes_those_of_its_level_that_nobody_used_for_long(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        build, "compile_library", lambda compiler, level, target, more: target.write_bytes(b"")
    )
    build.cache_dir().mkdir(parents=True)
    long_ago = time.time() - build.UNUSED_S - 60
    unused, recent, other = (
        build.cache_dir() / name for name in ("avx2-1.so", "avx2-2.so", "avx512-3.so")
    )
    used = build.ensure_built("avx2")
    measured = build.cache_dir() / "avx2-1-processor.json"
    for path in (unused, measured, recent, other):
        path.write_bytes(b"")
    for path in (used, unused, other):
        os.utime(path, (long_ago, long_ago))
    assert build.ensure_built("avx2") == used
    assert unused.exists(), "nothing was built"
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    new = build.ensure_built("avx2")
    assert set(build.cache_dir().iterdir()) == {used, recent, other, new}


@pytest.mark.full
def test_a_library_that_is_removed_before_it_is_loaded_is_compiled_again():
    code = (
        f"from pathlib import Path\n{QUICK_BUILD}"
        "build.ensure_built = lambda level: Path('/gone.so'); print(library.load('scalar').level)"
    )
    assert run_python(code).strip() == "scalar"


def test_another_architecture_declines_with_a_reason(monkeypatch):
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    with pytest.raises(build.BuildError, match="this is linux on riscv64"):
        build.choose_level()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("float eps, offset;", "float offset, eps;"), "NormCall.eps f 64 4, C++ has NormCall.eps"),
        (("int64_t rows, cols, group", "int64_t rows, cols, more, group"), "NormCall"),
        (("float eps, offset;", "int32_t eps; float offset;"), "C++ has NormCall.eps i 64 4"),
        (
            ("int64_t rows, cols, group", "int32_t rows; int64_t cols, group"),
            "NormCall.rows i 32 8",
        ),
    ],
)
def test_a_library_that_reads_other_structs_is_refused(tmp_path, change, words):
    copy_layouts(tmp_path)
    text = (tmp_path / "step/calls.h").read_text()
    before, struct, after = text.partition("struct NormCall {")
    assert change[0] in after
    (tmp_path / "step/calls.h").write_text(before + struct + after.replace(*change, 1))
    table = (tmp_path / "step/layouts.cpp").read_text()
    if "more" in change[1]:
        with pytest.raises(subprocess.CalledProcessError) as failed:
            compiled(tmp_path)
        assert "list every field" in failed.value.stderr
        table = table.replace('"NormCall",\n        {', '"NormCall",\n        {FIELD(more), ')
        (tmp_path / "step/layouts.cpp").write_text(table)
    with pytest.raises(
        KernelsUnavailable, match="Python callers differ: Python has NormCall"
    ) as no:
        library.Kernels(compiled(tmp_path), "scalar")
    assert words in str(no.value)


def compiled(folder):
    target = folder / "layouts.so"
    command = [
        build.find_compiler(),
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-iquote",
        ".",
        "-o",
        target,
        "step/layouts.cpp",
    ]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return target


def test_every_struct_of_a_kernel_is_compared():
    used = {kernel.call for kernel in library.KERNELS.values()}
    assert used <= set(calls.STRUCTS)
    mirrored = {
        each
        for each in vars(calls).values()
        if isinstance(each, type) and issubclass(each, ctypes.Structure)
    }
    assert mirrored == set(calls.STRUCTS)


def test_a_compiler_that_fails_leaves_nothing_open(tmp_path):
    """Neither a process nor a pipe, of the files that were being compiled beside the one."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in --version) exit;; *attention.cpp*) sleep 1; exit 1;; *rows.cpp*) exit 0;; esac\n'
        "exec sleep 600\n"
    )
    compiler.chmod(0o755)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        with pytest.raises(build.BuildError, match="failed"):
            build.compile_library(str(compiler), "scalar", tmp_path / "x.so")
        gc.collect()
    assert not [child for child in psutil.Process().children() if child.name() == "sleep"]
