"""Host memory: huge pages asked for, nothing shared, given back, refused clearly; pages found
before they are written."""

from __future__ import annotations

import mmap
import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from setpoint.engine.kernels import host_memory as memory
from setpoint.engine.kernels.host_memory import (
    HUGE_PAGE,
    PIECE,
    in_huge_pages,
    populate,
    why_small_pages,
)


def flags_at(address: int) -> set[str]:
    """The kernel's flags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    return set()


@pytest.mark.parametrize("num_bytes", [3 * HUGE_PAGE, PIECE + HUGE_PAGE])
def test_it_asks_for_huge_pages(num_bytes: int) -> None:
    tensor = in_huge_pages((num_bytes,), torch.uint8)
    assert "hg" in flags_at(tensor.data_ptr() + num_bytes // 2)


def test_a_large_tensor_begins_with_a_huge_page() -> None:
    assert in_huge_pages((PIECE + 1,), torch.uint8).data_ptr() % HUGE_PAGE == 0


def test_tensors_lie_side_by_side_and_do_not_overlap() -> None:
    tensors = [
        in_huge_pages((rows, 7), dtype)
        for rows in (1, 3, 1000)
        for dtype in (torch.uint8, torch.bfloat16, torch.float32)
    ]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert (tensor == number).all()
        assert tensor.data_ptr() % 64 == 0
    assert in_huge_pages((0, 5), torch.float32).shape == (0, 5)
    first, second = in_huge_pages((100,), torch.uint8), in_huge_pages((100,), torch.uint8)
    assert second.data_ptr() - first.data_ptr() == 128


def test_it_goes_with_its_last_tensor() -> None:
    tensor = in_huge_pages((PIECE + HUGE_PAGE,), torch.uint8)
    view = tensor[5:]
    mapping = tensor.data_ptr()
    del tensor
    assert "hg" in flags_at(mapping)
    assert view.sum() == 0, "a fresh mapping is zero, and still there"
    gone = weakref.ref(view)
    del view
    assert gone() is None
    assert "hg" not in flags_at(mapping)


def test_too_much_is_an_error_that_names_the_bytes() -> None:
    with pytest.raises(RuntimeError, match=str(1 << 60)):
        in_huge_pages((1 << 60,), torch.uint8)


@pytest.mark.parametrize(
    ("switch", "reason"),
    [
        ("always [madvise] never", ""),
        ("[always] madvise never", ""),
        ("always madvise [never]", "switched off"),
    ],
)
def test_a_system_that_gives_none_is_told(
    switch: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SWITCH", tmp_path / "enabled")
    assert "no transparent huge pages" in why_small_pages()
    (tmp_path / "enabled").write_text(switch + "\n")
    assert reason in why_small_pages()
    assert bool(why_small_pages()) == bool(reason)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_populated_memory_is_resident_and_holds_what_it_held() -> None:
    mib = 1 << 20
    # Pages of its own: memory that was in use before may still be resident.
    memory = torch.frombuffer(mmap.mmap(-1, 64 * mib), dtype=torch.uint8)
    memory[5 * mib] = 7
    before = resident_bytes()
    try:
        populate(memory[: 32 * mib])
    except OSError as error:
        pytest.skip(f"this system cannot: {error}")
    assert 28 * mib < resident_bytes() - before < 37 * mib
    assert memory[5 * mib] == 7


def test_what_the_system_does_not_do_is_an_error_with_its_reason() -> None:
    not_mapped = SimpleNamespace(data_ptr=lambda: mmap.PAGESIZE, nbytes=mmap.PAGESIZE)
    with pytest.raises(OSError, match=r"memory|argument|address"):
        populate(not_mapped)
