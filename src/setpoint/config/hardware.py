"""Finds out what this process may use of the machine: cores by affinity and cgroup quota, memory by
cgroup limit, and whether there is a GPU.

Only this module, ``topology`` and ``gpu_memory`` look at the machine; no other part of config does.
Reads /proc, /sys and psutil; imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from setpoint.config.gpu_memory import visible_gpus
from setpoint.config.topology import UNKNOWN, Topology, read_topology
from setpoint.core.errors import ConfigError


@dataclass(slots=True, frozen=True)
class Hardware:
    """Facts about the machine, as this process sees them."""

    device: str
    """"cuda" where a GPU is visible and the installed torch can drive it, else "cpu"."""
    num_cores: int
    """Cores this process may keep busy: the smaller of its affinity and its cgroup's quota."""
    available_bytes: int
    """Memory the process could still take without swapping, in its container if there is one."""
    gpu_bytes: int | None = None
    """Memory of the GPU that an engine would use, the smallest if it would use several; None if it
    is unknown or there is no GPU."""
    gpus: tuple[int, ...] = ()
    """Memory of each visible GPU; none if they are unknown or there is none."""
    num_engines: int = 1
    """Number of engines that share the machine. The numbers above are the share of one engine."""
    divided_by: str = "--dp-size"
    """The option that says so."""
    topology: Topology = UNKNOWN
    """The cores of the whole machine."""
    quota_cores: int | None = None
    """Cores whose time all engines together get by the cgroup's quota; None: no limit."""

    def divided(self, num_engines: int, *, by: str = "--dp-size") -> Hardware:
        """The share of each engine if ``num_engines`` share the machine. by: the option that says
        so. Raises ConfigError if there are fewer cores."""
        if num_engines > self.num_cores:
            raise ConfigError(
                f"{by} {num_engines} is more than the {self.num_cores} cores that this"
                " process may use, and every engine needs one; lower it."
            )
        return replace(
            self,
            num_cores=self.num_cores // num_engines,
            available_bytes=self.available_bytes // num_engines,
            num_engines=num_engines,
            divided_by=by,
        )


def probe_hardware(root: Path = Path("/")) -> Hardware:
    """Inspect the machine. ``root`` is the folder that contains /proc, /sys and /dev."""
    allowed = (
        os.sched_getaffinity(0)
        if hasattr(os, "sched_getaffinity")
        else set(range(os.cpu_count() or 1))
    )
    quota = min((max(int(each), 1) for each in _cgroup_cores(root)), default=None)
    has_gpu = _has_driver(root, *NVIDIA_FILES) and not why_no_cuda(root)
    gpus = visible_gpus() if has_gpu else ()
    return Hardware(
        device="cuda" if has_gpu else "cpu",
        num_cores=len(allowed) if quota is None else min(len(allowed), quota),
        available_bytes=available_bytes(root),
        gpu_bytes=gpus[0] if gpus else None,
        gpus=gpus,
        topology=read_topology(root, allowed),
        quota_cores=quota,
    )


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process could take now without swapping."""
    import psutil

    return max(min([psutil.virtual_memory().available, *_cgroup_memory(root)]), 0)


def is_in_memory(folder: Path, root: Path = Path("/")) -> bool:
    """Whether files in this folder take memory and not a disk (tmpfs), as far as is known."""
    while not folder.exists():
        folder = folder.parent
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2:3] == [number]:
            return kind.split()[:1] in (["tmpfs"], ["ramfs"])
    return False


def why_no_cuda(root: Path = Path("/")) -> str:
    """Why torch cannot compute on an NVIDIA GPU here, according to files alone; "" if there is no
    known reason."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    if not _has_driver(root, *NVIDIA_FILES, *HOSTED_FILES):
        looked_for = ", ".join(f"/{path}" for path in (*NVIDIA_FILES, *HOSTED_FILES))
        return f"this machine has no NVIDIA GPU or driver (none of {looked_for} exists)"
    if _torch_has_cuda():
        return ""
    return "the installed torch is built without CUDA (it has no lib/libtorch_cuda.so)"


NVIDIA_FILES = ("dev/nvidiactl", "proc/driver/nvidia/version")
"""Device files of NVIDIA's driver on Linux."""
HOSTED_FILES = ("dev/dxg", "dev/nvhost-ctrl")
"""Device files of a GPU that may be NVIDIA's: under the Windows Subsystem for Linux, and on boards
with an integrated GPU."""


def _has_driver(root: Path, *files: str) -> bool:
    return any((root / path).exists() for path in files)


def _torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build, judged by its libraries: finding a package does
    not import it."""
    spec = importlib.util.find_spec("torch")
    return (
        spec is not None
        and spec.origin is not None
        and (Path(spec.origin).parent / "lib/libtorch_cuda.so").exists()
    )


def _cgroup_memory(root: Path) -> Iterator[int]:
    """Limit minus usage of every cgroup at or above this process that has a limit; file pages that
    the kernel could drop count as free."""
    for folder in _cgroup_folders(root, "memory"):
        for limit_file, usage_file, inactive in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _number(folder / limit_file), _number(folder / usage_file)
            if limit is not None and usage is not None:
                yield limit - usage + _stat(folder / "memory.stat", inactive)


def _cgroup_cores(root: Path) -> Iterator[float]:
    """Quota in cores of every cgroup at or above this process that has one."""
    for folder in _cgroup_folders(root, "cpu"):
        words = _text(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            yield int(words[0]) / int(words[1])
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and period is not None and quota > 0:
            yield quota / period


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and its parents, in the v1 hierarchy of ``controller`` and
    in v2.

    Inside a container the path may name a folder that only the host sees; then the mount point
    itself is the container's.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / controllers, root / "sys/fs/cgroup" / controller]
        else:
            continue
        mount = next((folder for folder in mounts if (folder / "cgroup.procs").exists()), None)
        if mount is None:
            continue
        folder = mount / path.lstrip("/")
        while folder != mount:
            if folder.is_dir():
                yield folder
            folder = folder.parent
        yield mount


def _text(path: Path) -> str:
    """The file's content, or "" if the kernel has no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _stat(path: Path, key: str) -> int:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
