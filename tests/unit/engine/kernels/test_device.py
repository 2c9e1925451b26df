"""What is said of a device that is not there, and of memory that it does not have."""

from __future__ import annotations

import pytest
import torch

from setpoint.core.errors import ConfigError
from setpoint.core.lack import Lack
from setpoint.engine.kernels.device import check_device, drawn_uniformly, lack_of

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.mark.parametrize(("visible", "said"), [(None, "is not set"), ("7", "is '7'")])
def test_what_was_looked_for_is_told(
    visible: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError) as raised:
        check_device(torch.device("cuda"))
    words = str(raised.value)
    assert f"torch {torch.__version__} (built for CUDA " in words
    assert f"CUDA_VISIBLE_DEVICES {said}." in words
    assert "driver" in words
    check_device(CPU)


@pytest.mark.parametrize(
    ("text", "lack"),
    [
        (
            "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15"
            " GiB of which 1.03 GiB is free. Including non-PyTorch memory, this process has more",
            Lack(
                "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of"
                " 79.15 GiB of which 1.03 GiB is free",
                int(2.5 * GIB),
            ),
        ),
        ("CUDA out of memory. Tried to allocate 20.00 MiB.", Lack("CUDA out of memory. Tried to"
         " allocate 20.00 MiB", 20 << 20)),
        ("HIP out of memory\nmore", Lack("HIP out of memory")),
        ("", Lack("out of memory")),
    ],
)  # fmt: skip
def test_a_failed_allocation_in_numbers(text: str, lack: Lack) -> None:
    assert lack_of(torch.OutOfMemoryError(text), CPU) == lack


def test_a_share_that_leaves_room() -> None:
    assert Lack("", 2 * GIB, 80 * GIB).less_static == "0.03 (2048 MiB)"
    assert Lack("", 1, 80 * GIB).less_static == "0.01 (1 MiB)"
    assert Lack("", 2 * GIB).less_static == "0.05"


def test_draws_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first, again, other = (
        drawn_uniformly((3, 4), -1.0, 1.0, seed=seed, device=CPU) for seed in (5, 5, 6)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    before = torch.get_rng_state()
    drawn_uniformly((3, 4), -1.0, 1.0, seed=5, device=CPU)
    assert torch.equal(torch.get_rng_state(), before), "draws of others stay as they are"
    assert drawn_uniformly((3,), 0.0, 1.0, seed=5, device=torch.device("meta")).is_meta
