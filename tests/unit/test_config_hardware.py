"""The probe sees what the process may use, not what the machine has; on made-up /proc and /sys trees."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from setpoint.config import hardware
from setpoint.config.hardware import probe_hardware

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
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(total=16 * 1024 * MIB, available=8 * 1024 * MIB))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_this_machine() -> None:
    seen = probe_hardware()
    assert 1 <= seen.num_cores <= (os.cpu_count() or 1)
    assert 0 < seen.available_bytes <= seen.total_bytes <= psutil.virtual_memory().total


@pytest.mark.usefixtures("machine")
def test_without_cgroups(tmp_path: Path) -> None:
    seen = probe_hardware(tmp_path)
    assert (seen.device, seen.num_cores, seen.total_bytes, seen.available_bytes) == ("cpu", 8, 16 * 1024 * MIB, 8 * 1024 * MIB)


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
    assert (seen.num_cores, seen.total_bytes, seen.available_bytes) == (7, 1000 * MIB, 500 * MIB)


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
    assert (seen.num_cores, seen.total_bytes, seen.available_bytes) == (1, 1000 * MIB, 0)


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
    assert (seen.num_cores, seen.total_bytes, seen.available_bytes) == (8, 16 * 1024 * MIB, 8 * 1024 * MIB)


@pytest.mark.usefixtures("machine")
def test_a_gpu_counts_only_if_torch_can_drive_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _tree(tmp_path, {"dev/nvidiactl": ""})
    monkeypatch.setattr(hardware, "_torch_has_cuda", lambda: False)
    assert probe_hardware(tmp_path).device == "cpu"
    monkeypatch.setattr(hardware, "_torch_has_cuda", lambda: True)
    assert probe_hardware(tmp_path).device == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert probe_hardware(tmp_path).device == "cpu"
