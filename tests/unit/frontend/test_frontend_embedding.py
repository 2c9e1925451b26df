"""Vectors as clients get them: cut, normalised, or refused."""

from __future__ import annotations

import numpy as np
import pytest

from setpoint.core.errors import RequestError
from setpoint.core.model import Pooling
from setpoint.frontend.embedding import check_dimensions, finished_vector

STATE = np.array([3.0, -4.0, 12.0, 0.5], np.float32)


def pooling(*, normalize: bool = True, lengths: tuple[int, ...] | None = ()) -> Pooling:
    return Pooling("last", normalize, 4, lengths, "test")


def test_a_vector_is_scaled_to_length_one_after_it_is_cut() -> None:
    np.testing.assert_allclose(
        np.linalg.norm(finished_vector(STATE.tobytes(), pooling())), 1, rtol=1e-6
    )
    np.testing.assert_allclose(
        finished_vector(STATE.tobytes(), pooling(), 2), [0.6, -0.8], rtol=1e-6
    )
    np.testing.assert_array_equal(
        finished_vector(STATE.tobytes(), pooling(normalize=False), 3), STATE[:3]
    )
    np.testing.assert_array_equal(finished_vector(bytes(16), pooling()), np.zeros(4, np.float32))


def test_large_states_do_not_overflow() -> None:
    vector = finished_vector((STATE * np.float32(1e37)).tobytes(), pooling())
    np.testing.assert_allclose(vector, STATE / np.linalg.norm(STATE), rtol=1e-6)


@pytest.mark.parametrize(
    ("dimensions", "lengths", "words"),
    [
        (2, None, "not trained"),
        (0, (), "1 to 4"),
        (5, (), "1 to 4"),
        (-1, (), "1 to 4"),
        (3, (1, 2), "1, 2"),
        (0, None, "not trained"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(
    dimensions: int, lengths: tuple[int, ...] | None, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        check_dimensions(dimensions, pooling(lengths=lengths))


def test_lengths_that_make_sense() -> None:
    check_dimensions(None, pooling(lengths=None))
    check_dimensions(4, pooling(lengths=None))
    check_dimensions(1, pooling())
    check_dimensions(2, pooling(lengths=(1, 2)))
