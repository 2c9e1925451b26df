"""The bits of logprobs do not depend on how many threads compute them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from setpoint.engine.kernels.ref import SUM_BLOCK, log_sum_exp


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("vocab", [1, SUM_BLOCK - 1, SUM_BLOCK, 49_152, 151_937])
def test_the_sum_has_one_order(vocab: int, num_rows: int) -> None:
    for seed in range(48 if num_rows == 1 else 4):
        logits = 4 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed))
        found = []
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            found.append(log_sum_exp(logits))
            for row in range(num_rows):  # nor on the rows beside it
                assert torch.equal(log_sum_exp(logits[row : row + 1])[0], found[-1][row])
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        torch.testing.assert_close(found[0], logits.logsumexp(dim=-1, keepdim=True))


def test_rows_with_impossible_tokens() -> None:
    infinite = float("inf")
    logits = torch.tensor([[0.0, -infinite, 0.0], [-infinite, -infinite, -infinite]])
    assert torch.equal(log_sum_exp(logits), logits.logsumexp(dim=-1, keepdim=True))
    logits = torch.tensor([[1.0, float("nan")], [2.0, infinite]])
    assert torch.equal(log_sum_exp(logits).isnan(), logits.logsumexp(dim=-1, keepdim=True).isnan())
