"""Every variant of the kernels in Triton compiles for the GPUs that are supported, and needs what the
checked-in table says."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton

from setpoint.engine.kernels.triton.absent_gpu import SHARED_BYTES
from setpoint_testing.attention_variants import AGAIN
from setpoint_testing.compiled_triton import CHIPS, recorded, run, variants


@pytest.mark.parametrize(
    ("chip", "only"),
    [
        (90, "llama"),
        (90, "invariant products in torch.bfloat16"),
        *(pytest.param(chip, "", marks=pytest.mark.full) for chip in CHIPS),
    ],
)
def test_kernels_compile_and_need_what_the_table_says(chip: int, only: str, tmp_path: Path) -> None:
    expected = recorded(chip)
    if expected is None:
        pytest.skip(f"no table of what kernels need was made with Triton {triton.__version__}")
    found = run(chip, tmp_path, only)
    part = {call: needs for call, needs in expected.items() if only in call}
    assert found.keys() >= part.keys()
    if not only:
        assert found == expected
    # Among a part of the calls, one may be the first to launch what another launches before it.
    known = {
        (kernel, each)
        for kernels in expected.values()
        for kernel, needs in kernels.items()
        for each in needs
    }
    for call, kernels in found.items():
        for kernel, needs in kernels.items():
            assert {(kernel, each) for each in needs} <= known, call
            assert set(part.get(call, {}).get(kernel, ())) <= set(needs), call
    # One compiled kernel serves all numbers of rows where bits must not depend on them.
    assert not [call for call in found if call.endswith(AGAIN)]
    decoding = {variant.name for variant in variants() if variant.decodes}
    for call, kernels in found.items():
        for needs in (each for variants_needs in kernels.values() for each in variants_needs):
            assert needs.shared_bytes <= SHARED_BYTES[chip], call
            assert needs.spilled_bytes == 0 or call not in decoding, call
