"""The probe sees what the process may use, not what the machine has; on made-up /proc and /sys
trees."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from setpoint.config import gpu_memory, hardware
from setpoint.config.hardware import is_in_memory, probe_hardware
from setpoint.config.options import Options
from setpoint.config.resolve import resolve
from setpoint_testing.specs import tiny_spec

MIB = 1 << 20


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()
    monkeypatch.setattr(
        psutil,
        "virtual_memory",
        lambda: memory._replace(total=16 * 1024 * MIB, available=8 * 1024 * MIB),
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_this_machine() -> None:
    seen = probe_hardware()
    assert 1 <= seen.num_cores <= (os.cpu_count() or 1)
    assert 0 < seen.available_bytes <= psutil.virtual_memory().total


@pytest.mark.usefixtures("machine")
def test_without_cgroups(tmp_path: Path) -> None:
    seen = probe_hardware(tmp_path)
    assert (seen.device, seen.num_cores, seen.available_bytes) == ("cpu", 8, 8 * 1024 * MIB)


@pytest.mark.usefixtures("machine")
def test_cgroup_v2_limits_of_the_group_and_of_those_above(tmp_path: Path) -> None:
    cgroup = "sys/fs/cgroup/"
    root = _tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/me\n",
            cgroup + "cgroup.procs": "",
            cgroup + "pod/cpu.max": "765000 100000\n",
            cgroup + "pod/memory.max": str(1000 * MIB),
            cgroup + "pod/memory.current": str(700 * MIB),
            cgroup + "pod/memory.stat": f"anon 1\ninactive_file {200 * MIB}\n",
            cgroup + "pod/me/cpu.max": "max 100000\n",
            cgroup + "pod/me/memory.max": "max\n",
            cgroup + "pod/me/memory.current": str(600 * MIB),
        },
    )
    seen = probe_hardware(root)
    assert (seen.num_cores, seen.available_bytes) == (7, 500 * MIB)


@pytest.mark.usefixtures("machine")
def test_cgroup_v1_and_a_path_that_only_the_host_sees(tmp_path: Path) -> None:
    cgroup = "sys/fs/cgroup/"
    root = _tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n",
            cgroup + "memory/cgroup.procs": "",
            cgroup + "memory/memory.limit_in_bytes": str(1000 * MIB),
            cgroup + "memory/memory.usage_in_bytes": str(1100 * MIB),
            cgroup + "memory/memory.stat": f"total_inactive_file {50 * MIB}\n",
            cgroup + "cpu,cpuacct/cgroup.procs": "",
            cgroup + "cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
            cgroup + "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    seen = probe_hardware(root)
    assert (seen.num_cores, seen.available_bytes) == (1, 0)


@pytest.mark.usefixtures("machine")
def test_no_limit_in_v1(tmp_path: Path) -> None:
    cgroup = "sys/fs/cgroup/"
    root = _tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/\n1:cpu:/\n",
            cgroup + "memory/cgroup.procs": "",
            cgroup + "memory/memory.limit_in_bytes": "9223372036854771712",
            cgroup + "memory/memory.usage_in_bytes": "1",
            cgroup + "cpu/cgroup.procs": "",
            cgroup + "cpu/cpu.cfs_quota_us": "-1\n",
            cgroup + "cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    seen = probe_hardware(root)
    assert (seen.num_cores, seen.available_bytes) == (8, 8 * 1024 * MIB)


@pytest.mark.usefixtures("machine")
def test_a_gpu_counts_only_if_torch_can_drive_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tree(tmp_path, {"dev/nvidiactl": ""})
    monkeypatch.setattr(hardware, "_torch_has_cuda", lambda: False)
    assert probe_hardware(tmp_path).device == "cpu"
    monkeypatch.setattr(hardware, "_torch_has_cuda", lambda: True)
    assert probe_hardware(tmp_path).device == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    seen = probe_hardware(tmp_path)
    assert (seen.device, seen.gpu_bytes) == ("cpu", None)


DRIVER = """
#include <stddef.h>
#include <stdlib.h>
static int ready = 0;
int cuInit(unsigned flags) { ready = getenv("NO_GPU") == NULL; return ready ? 0 : 100; }
int cuDeviceGetCount(int *count) { *count = 2; return ready ? 0 : 3; }
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return ready ? 0 : 3; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)(device == 40 ? 24 : 80) << 30; return ready ? 0 : 3; }
"""
"""The calls of the CUDA driver that are used, with GPUs of 24 and 80 GiB or none."""


@pytest.mark.usefixtures("machine")
def test_the_driver_is_asked_for_the_memory_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = _tree(tmp_path / "root", {"dev/nvidiactl": ""})
    monkeypatch.setattr(hardware, "_torch_has_cuda", lambda: True)
    (tmp_path / "driver.c").write_text(DRIVER)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler is not None
    subprocess.run(
        [
            compiler,
            "-shared",
            "-fPIC",
            "-o",
            str(tmp_path / gpu_memory.DRIVER),
            str(tmp_path / "driver.c"),
        ],
        check=True,
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    seen = probe_hardware(root)
    assert (seen.gpu_bytes, seen.gpus) == (24 * 1024 * MIB, (24 * 1024 * MIB, 80 * 1024 * MIB))
    assert not caplog.records
    monkeypatch.setenv("NO_GPU", "1")
    assert probe_hardware(root).gpu_bytes is None
    assert caplog.messages == [
        "The GPUs and the size of their memory are not known: the CUDA driver answers cuInit with error 100"
    ]
    caplog.clear()
    (tmp_path / gpu_memory.DRIVER).write_text("no library")
    assert probe_hardware(root).gpu_bytes is None
    assert "not known: " in caplog.messages[0]


def test_the_memory_of_the_gpu_decides_how_large_steps_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hardware, "_torch_has_cuda", lambda: True)
    monkeypatch.setattr(hardware, "visible_gpus", lambda: (24 * 1024 * MIB,))
    config = resolve(Options(), probe_hardware(_tree(tmp_path, {"dev/nvidiactl": ""})), tiny_spec())
    decisions = {decision.field: decision.why for decision in config.decisions}
    assert config.chunked_prefill_size == 4096
    assert decisions["chunked_prefill_size"] == "chosen for a GPU with 24.00 GiB"
    assert decisions["mem_fraction_static"] == (
        "steps of 4096 tokens and 336.00 MiB of graphs leave this share of 24.00 GiB"
    )


@pytest.mark.parametrize(("kind", "expected"), [("tmpfs", True), ("ext4", False), ("", False)])
def test_a_folder_is_in_memory_if_its_file_system_is(
    tmp_path: Path, kind: str, expected: bool
) -> None:
    device = tmp_path.stat().st_dev
    here = (
        f"40 30 {os.major(device)}:{os.minor(device)} / /x rw,relatime shared:1 - {kind} none rw\n"
    )
    lines = f"41 30 0:999999 / /y rw - tmpfs none rw\n{here if kind else ''}"
    root = _tree(tmp_path / "root", {"proc/self/mountinfo": lines})
    assert is_in_memory(tmp_path / "not" / "there", root) is expected
