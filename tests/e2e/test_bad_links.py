"""Two machines with a bad network between them, which are network namespaces here: a link that delays
and loses packets, and one that is cut for a while."""

from __future__ import annotations

from pathlib import Path

import pytest
import two_machines

from setpoint_testing.network import Link, why_no_network
from setpoint_testing.tiny_models import write_tiny_llama

NUM_TOKENS = 16

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    if why := why_no_network():
        pytest.skip(why)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return two_machines.one_process(model, tmp_path_factory.mktemp("alone"), NUM_TOKENS)


def test_delay_and_loss_change_no_answer(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    link = Link(delay_s=0.02, loss=0.01)
    assert two_machines.over(model, tmp_path, link, NUM_TOKENS) == expected
    assert link.num_lost > 10


def test_an_answer_goes_on_after_a_cut(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    answer, server_lives = two_machines.cut(model, tmp_path, Link(delay_s=0.02), NUM_TOKENS)
    assert answer == expected[1]
    assert server_lives
