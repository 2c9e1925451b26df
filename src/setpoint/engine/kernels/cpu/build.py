"""Compiles the C++ kernels with this machine's compiler and keeps the library in the user's cache. Does not know torch.

The file's name is a hash of sources, flags and compiler version, so that a stale library cannot be loaded. ``python -m
setpoint.engine.kernels.cpu.build`` builds at install time; otherwise the first use does.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE_DIR = Path(__file__).parent
COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wall", "-Wextra")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512")
LEVEL_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "scalar": (),
        "avx2": ("-mavx2", "-mfma"),
        "avx512": _AVX512,
        "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    },
    "aarch64": {"scalar": ()},
}
"""Machine -> level -> flags of the level's own translation unit; everything else is compiled for the machine's baseline."""


class BuildError(Exception):
    """The kernels cannot be compiled here; the message says why."""


def cache_dir() -> Path:
    """Where compiled kernels live: $XDG_CACHE_HOME/setpoint/kernels, by default ~/.cache/setpoint/kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "setpoint" / "kernels"


def find_compiler() -> str:
    """$CXX or g++. BuildError if there is none."""
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise BuildError(f"no C++ compiler: {name!r} is not on the PATH")
    return path


def library_path(compiler: str) -> Path:
    """Where the library of these sources, flags and compiler belongs in the cache, built or not."""
    digest = hashlib.sha256(_run([compiler, "--version"]).encode())
    digest.update(repr((COMMON_FLAGS, _levels())).encode())
    for source in sorted([*SOURCE_DIR.glob("*.cpp"), *SOURCE_DIR.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return cache_dir() / f"{digest.hexdigest()[:16]}.so"


def compile_library(compiler: str, target: Path) -> None:
    """Compile and link to ``target``, which appears whole or not at all: concurrent builds replace each other's equal files.

    Linked without an OpenMP runtime: the process already has torch's, and a second one would keep a second pool of threads
    spinning on the same cores (``library`` binds it).
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        jobs = [("api", [str(SOURCE_DIR / "api.cpp")])]
        jobs += [(level, [f"-DSP_LEVEL={level}", *flags, str(SOURCE_DIR / "isa.cpp")]) for level, flags in _levels().items()]
        commands = [[compiler, *COMMON_FLAGS, "-c", "-o", f"{scratch}/{name}.o", *arguments] for name, arguments in jobs]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands]
        outputs = [process.communicate()[0] for process in running]
        for process, output in zip(running, outputs, strict=True):
            if process.returncode:
                raise BuildError(f"{compiler} failed: {_first_error(output)}")
        library = f"{scratch}/library.so"
        _run([compiler, "-shared", "-o", library, *(f"{scratch}/{name}.o" for name, _ in jobs)])
        os.replace(library, target)


def ensure_built() -> Path:
    """The cached library, compiled now if it is missing. BuildError if that is impossible, OSError if the cache is not writable."""
    compiler = find_compiler()
    target = library_path(compiler)
    if not target.exists():
        compile_library(compiler, target)
    return target


def _levels() -> dict[str, tuple[str, ...]]:
    machine = platform.machine()
    if sys.platform != "linux" or machine not in LEVEL_FLAGS:
        raise BuildError(f"the C++ kernels are written for Linux on {' and '.join(LEVEL_FLAGS)}, this is {sys.platform} on {machine}")
    return LEVEL_FLAGS[machine]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {_first_error(done.stdout + done.stderr)}")
    return done.stdout


def _first_error(output: str) -> str:
    lines = output.splitlines()
    return next((line for line in lines if "error" in line), lines[-1] if lines else "no message").strip()


def main() -> int:
    try:
        path = ensure_built()
    except (BuildError, OSError) as error:
        print(f"C++ kernels not built ({error}); the torch implementations will run instead.")
        return 0
    print(f"C++ kernels: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
