"""Compiles the C++ kernels with this machine's compiler and keeps the library in the user's cache.
Does not know torch.

There is one library per level of the instruction set. The level is chosen at run time by what the
processor reports; its library is compiled when it is first used, or at install time by ``python -m
setpoint.engine.kernels.cpu.build``. A library's name contains its level and a hash of sources,
flags and compiler version, so that a stale one cannot be loaded. Its modification time is the time
of its last use, and building one removes the libraries of its level that have not been used for
long.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from setpoint.core.progress import report, reported_to

T = TypeVar("T")
logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent
LEVEL_VARIABLE = "SETPOINT_CPU_ISA"
"""Environment variable that forces a level: one of LEVELS."""
UNUSED_S = 30 * 86400
"""Seconds after which a library that no process has loaded is removed."""
ABANDONED_S = 86400
"""Age in seconds from which objects of a build that was interrupted are not waited for."""
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno")


@dataclass(slots=True, frozen=True)
class Level:
    needs: frozenset[str]
    """Words required in the "flags" line of /proc/cpuinfo."""
    flags: tuple[str, ...]
    """Compiler flags in addition to FLAGS; if empty, the code runs on every machine of the
    architecture."""
    tiles: bool = False
    """Whether it uses matrix tiles, which a process must ask the system for."""
    more: tuple[tuple[str, str], ...] = ()
    """(word of that line, compiler flag that it allows), for faster code with the same results. A
    compiler that does not know one of the flags gets none of them."""
    emulated: bool = False
    """Whether it computes the results of a level that the machine may lack, without its
    instructions: slow, for tests, chosen by name only."""


_AVX2 = frozenset({"avx2", "fma"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
_AVX512_FLAGS = (
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mfma",
    "-mprefer-vector-width=512",
)
_AVX512_BF16 = _AVX2 | _AVX512 | {"avx512_vnni", "avx512_bf16"}
_AVX512_BF16_FLAGS = (*_AVX512_FLAGS, "-mavx512vnni", "-mavx512bf16")
_VBMI = (("avx512vbmi", "-mavx512vbmi"),)
_SCALAR = Level(frozenset(), ())
LEVELS = {
    "x86_64": {
        "amx": Level(
            _AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
            (*_AVX512_BF16_FLAGS, "-DSETPOINT_TILES"),
            tiles=True,
            more=_VBMI,
        ),
        "avx512_bf16": Level(_AVX512_BF16, _AVX512_BF16_FLAGS, more=_VBMI),
        "avx512_vnni": Level(_AVX2 | _AVX512 | {"avx512_vnni"}, (*_AVX512_FLAGS, "-mavx512vnni")),
        "avx512": Level(_AVX2 | _AVX512, _AVX512_FLAGS),
        "avx2": Level(
            _AVX2, ("-mavx2", "-mfma"), more=(("f16c", "-mf16c"), ("avx_vnni", "-mavxvnni"))
        ),
        "scalar": _SCALAR,
        "amx_emulated": Level(
            _AVX512_BF16, (*_AVX512_BF16_FLAGS, "-DSETPOINT_TILES_EMULATED"), emulated=True
        ),
    },
    "aarch64": {"scalar": _SCALAR},
}
"""Machine -> levels, best first."""
_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 0x1023, 18
"""Request and feature numbers from Linux, Documentation/arch/x86/xstate.rst."""


class BuildError(Exception):
    """The kernels cannot be compiled or cannot run here; the message says why."""


class CompileError(BuildError):
    """The compiler failed at one level; another level may work."""


def cache_dir() -> Path:
    """The folder of compiled kernels: $XDG_CACHE_HOME/setpoint/kernels, by default
    ~/.cache/setpoint/kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "setpoint" / "kernels"


def supported_levels() -> list[str]:
    """The levels that this machine can run, best first. Raises BuildError if the kernels do not
    support its architecture."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in LEVELS:
        raise BuildError(
            f"the C++ kernels need Linux on {' or '.join(LEVELS)}; this is {sys.platform} on"
            f" {machine}"
        )
    present = _cpu_flags()
    levels = {name: level for name, level in LEVELS[machine].items() if level.needs <= present}
    for name, level in levels.items():
        if level.tiles and name not in _refused and (why := ask_for_tiles()):
            refuse(name, why)
    return [name for name in levels if name not in _refused]


_refused: dict[str, str] = {}
"""Level -> why it does not run although the processor reports the flags that it needs. Filled by
``refuse``, for the life of the process."""


def refuse(level: str, why: str) -> None:
    """Do not use the level in this process from now on."""
    _refused[level] = why


def ask_for_tiles() -> str:
    """Ask Linux to let this process use matrix tiles. Returns why it may not, or "" if it may.

    The permission holds for the process and its children. Linux refuses it while a signal stack is
    too small to hold the tiles.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0:
        return ""
    return f"Linux does not let this process use matrix tiles: {os.strerror(ctypes.get_errno())}"


def why_no_better(level: str) -> str:
    """Why no better level than this one runs; empty if none is expected to."""
    levels = LEVELS[platform.machine()]
    flags = _cpu_flags()
    # Most processors have no matrix tiles. Nobody can change that, so it is not worth a message at
    # each start.
    better = [
        name
        for name in list(levels)[: list(levels).index(level)]
        if not levels[name].tiles or levels[name].needs <= flags
    ]
    if not better:
        return ""
    possible = choose_level()
    if possible in better:
        return f"{LEVEL_VARIABLE} asks for it; this machine can run {possible}"
    if better[-1] in _refused:
        return _refused[better[-1]]
    missing = sorted(levels[better[-1]].needs - flags)
    return f"this CPU has no {', '.join(missing)}, which {better[-1]} needs"


def is_emulated(level: str) -> bool:
    """Whether the level, of any machine, is emulated, so that its speed says nothing about a
    machine."""
    return any(levels[level].emulated for levels in LEVELS.values() if level in levels)


def choose_level(name: str = "") -> str:
    """The named level, or the best one if the name is empty. Raises BuildError if this machine
    lacks it."""
    levels = supported_levels()
    if name in _refused:
        raise BuildError(f"this machine cannot run the level {name!r}: {_refused[name]}")
    if name and name not in levels:
        raise BuildError(
            f"this machine cannot run the level {name!r}; it can run {', '.join(levels)}"
        )
    if name:
        return name
    for level in levels:
        if not is_emulated(level):
            return level
    raise BuildError("; ".join(_refused.values()))


def find_compiler() -> str:
    """$CXX or g++. Raises BuildError if there is none."""
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise BuildError(f"no C++ compiler: {name!r} is not on the PATH")
    return path


def library_path(compiler: str, level: str, *, more: bool = True) -> Path:
    """The library's path in the cache for these sources, flags and compiler, whether it is built or
    not. more: with the level's further flags that this processor allows."""
    digest = hashlib.sha256(_run([compiler, "--version"]).encode())
    digest.update(repr((FLAGS, _flags(level, more=more))).encode())
    for source in sorted([*SOURCE_DIR.rglob("*.cpp"), *SOURCE_DIR.rglob("*.h")]):
        name = str(source.relative_to(SOURCE_DIR))
        digest.update(name.encode() + b"\0" + source.read_bytes())
    return cache_dir() / f"{level}-{digest.hexdigest()[:16]}.so"


def compile_library(compiler: str, level: str, target: Path, *, more: bool = True) -> None:
    """Compile and link to ``target``, which appears complete or not at all; concurrent builds
    replace each other's files, which are equal. Objects that an interrupted build has finished are
    used. Raises CompileError.

    It is linked without an OpenMP runtime: the process already has torch's, and a second one would
    keep a second pool of threads spinning on the same cores (``library`` binds torch's).
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    finished = target.parent / f"objects-{library_path(compiler, level, more=more).stem}"
    finished.mkdir(exist_ok=True)
    try:
        _compile_to(target, finished, compiler, level, more=more)
    except CompileError:
        shutil.rmtree(finished, ignore_errors=True)  # it would fail again
        raise
    shutil.rmtree(finished, ignore_errors=True)  # a concurrent build has links of its own


def _compile_to(target: Path, finished: Path, compiler: str, level: str, *, more: bool) -> None:
    """finished: the folder of complete objects, which the next build finds if this one is
    interrupted."""
    with _scratch(target.parent) as scratch:
        objects = {source: f"{scratch}/{source.stem}.o" for source in _sources()}
        missing = {source: built for source, built in objects.items() if not _take(finished, built)}
        before = len(objects) - len(missing)
        _report_compiled(level, before, len(objects))
        command = [compiler, *FLAGS, *_flags(level, more=more), "-iquote", str(SOURCE_DIR), "-c"]
        with contextlib.closing(_compiled(command, missing)) as compiled:
            for number, built in enumerate(compiled, before + 1):
                _keep(finished, built)
                _report_compiled(level, number, len(objects))
        library = f"{scratch}/library.so"
        _run([compiler, "-shared", "-o", library, *objects.values()])
        os.replace(library, target)


def _compiled(command: list[str], missing: dict[Path, str]) -> Generator[str, None, None]:
    """Compile each source to its object, and yield the objects in the order in which they are
    complete. As many at a time as this process has cores: each takes hundreds of MB. Raises
    CompileError."""
    waiting = list(missing.items())[::-1]
    running: dict[Future[tuple[int, str]], tuple[subprocess.Popen[str], str]] = {}
    num_cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(num_cores, thread_name_prefix="compiled") as threads:
        try:
            while waiting or running:
                while waiting and len(running) < num_cores:
                    source, built = waiting.pop()
                    process = subprocess.Popen(
                        [*command, "-o", built, str(source)],
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                    running[threads.submit(_output_of, process)] = process, built
                for end in wait(running, return_when=FIRST_COMPLETED).done:
                    _, built = running.pop(end)
                    code, output = end.result()
                    if code:
                        raise CompileError(f"{command[0]} failed: {_first_error(output)}")
                    yield built
        finally:
            for process, _ in running.values():
                process.kill()  # nothing happens to one that has ended


def _sources() -> list[Path]:
    return sorted(SOURCE_DIR.rglob("*.cpp"))


def _take(finished: Path, built: str) -> bool:
    """Link an object that an interrupted build has finished to its place; whether there is one."""
    try:
        os.link(finished / Path(built).name, built)
    except OSError:
        return False
    return True


def _keep(finished: Path, built: str) -> None:
    """Link a complete object to where the next build finds it if this one is interrupted."""
    with contextlib.suppress(OSError):  # it is there, or the file system has no links
        os.link(built, finished / Path(built).name)


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[str]:
    """A folder that is locked for as long as this process lives, so that a later build can tell
    whether its process was killed."""
    with _locked(folder):
        scratch = tempfile.TemporaryDirectory(dir=folder, prefix="build-")
        lock = os.open(scratch.name, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with scratch:
            yield scratch.name
    finally:
        os.close(lock)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other builds from taking a folder that is not locked yet for an abandoned one."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _remove_abandoned() -> None:
    """Remove what builds left whose process was killed."""
    folder = cache_dir()
    with _locked(folder):
        for scratch in folder.glob("build-*"):
            with contextlib.suppress(OSError):  # locked, already gone, or another user's
                lock = os.open(scratch, os.O_RDONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(scratch)
                finally:
                    os.close(lock)
    for objects in folder.glob("objects-*"):
        with contextlib.suppress(OSError):
            if objects.stat().st_mtime < time.time() - ABANDONED_S:
                shutil.rmtree(objects)


def _output_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit status and the output of a compiler, once it has ended."""
    output, _ = process.communicate()
    return process.returncode, output


def _report_compiled(level: str, number: int, total: int) -> None:
    report(
        f"compiling the C++ kernels for {level}, once on this machine, {number} of {total} files"
        " done"
    )


def ensure_built(level: str) -> Path:
    """The cached library, compiled now if it is missing. Raises BuildError if that is impossible,
    and OSError if the cache is not writable."""
    compiler = find_compiler()
    return _with_possible_flags(level, lambda more: _ensure_built(compiler, level, more=more))


def compile_to(target: Path, level: str) -> None:
    """Compile the library to a path outside the cache. Raises BuildError."""
    compiler = find_compiler()
    _with_possible_flags(level, lambda more: compile_library(compiler, level, target, more=more))


def _with_possible_flags(level: str, build: Callable[[bool], T]) -> T:
    """The result of ``build(True)``, with the level's further flags that this processor allows. If
    the compiler fails with them, the result of ``build(False)``, and the log says so."""
    further = set(_flags(level, more=True)) - set(_flags(level, more=False))
    if further:
        try:
            return build(True)
        except CompileError as error:
            logger.warning(
                "The C++ kernels for %s are compiled without %s: %s",
                level,
                " ".join(sorted(further)),
                error,
            )
    return build(False)


def _ensure_built(compiler: str, level: str, *, more: bool) -> Path:
    target = library_path(compiler, level, more=more)
    with contextlib.suppress(OSError):  # it does not exist, or belongs to another user
        os.utime(target)
    if not target.exists():
        compile_library(compiler, level, target, more=more)
        _remove_unused(level)
        _remove_abandoned()
    return target


def _remove_unused(level: str) -> None:
    """Remove libraries of this level that have not been used for long, with the measurements made
    for them. A process that has loaded one keeps it; one that is about to load it compiles its own
    (``library.load``)."""
    for library in cache_dir().glob(f"{level}-*.so"):
        with contextlib.suppress(OSError):  # already gone, or another user's
            if library.stat().st_mtime < time.time() - UNUSED_S:
                for measured in cache_dir().glob(f"{library.stem}-*.json"):
                    measured.unlink()
                library.unlink()


def _cpu_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def _flags(level: str, *, more: bool) -> tuple[str, ...]:
    chosen = LEVELS[platform.machine()][level]
    present = _cpu_flags()
    return (*chosen.flags, *(flag for word, flag in chosen.more if more and word in present))


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{command[0]} failed: {_first_error(done.stdout + done.stderr)}")
    return done.stdout


def _first_error(output: str) -> str:
    lines = output.splitlines()
    return next(
        (line for line in lines if "error" in line), lines[-1] if lines else "no message"
    ).strip()


def main() -> int:
    """Build the library. Returns 0 even if that is impossible, so that no installation fails: a
    machine without the library still works."""
    path = None
    try:
        with reported_to(lambda doing: print(doing, flush=True)):
            while path is None:
                level = choose_level()
                try:
                    path = ensure_built(level)
                except CompileError as error:
                    refuse(level, f"{level} cannot be compiled: {error}")
    except (BuildError, OSError) as error:
        print(f"C++ kernels not built ({error}); the torch implementations will run instead.")
    else:
        print(f"C++ kernels: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
