"""Memory for weights and the KV pool: huge pages asked for, nothing shared, given back, refused clearly."""

from __future__ import annotations

import re
import weakref
from pathlib import Path

import pytest
import torch

from setpoint.engine.kernels.memory import HUGE_PAGE, PIECE, claim


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
    tensor = claim((num_bytes,), torch.uint8)
    assert "hg" in flags_at(tensor.data_ptr() + num_bytes // 2)


def test_a_large_tensor_begins_with_a_huge_page() -> None:
    assert claim((PIECE + 1,), torch.uint8).data_ptr() % HUGE_PAGE == 0


def test_tensors_lie_side_by_side_and_do_not_overlap() -> None:
    tensors = [claim((rows, 7), dtype) for rows in (1, 3, 1000) for dtype in (torch.uint8, torch.bfloat16, torch.float32)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert (tensor == number).all()
        assert tensor.data_ptr() % 64 == 0
    assert claim((0, 5), torch.float32).shape == (0, 5)
    first, second = claim((100,), torch.uint8), claim((100,), torch.uint8)
    assert second.data_ptr() - first.data_ptr() == 128


def test_it_goes_with_its_last_tensor() -> None:
    tensor = claim((PIECE + HUGE_PAGE,), torch.uint8)
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
        claim((1 << 60,), torch.uint8)
