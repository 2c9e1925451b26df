"""Every request leaves the frontend with a seed: the client's, or one that --random-seed determines."""

from __future__ import annotations

import pytest

from setpoint.core.bounds import INT64_MAX, INT64_MIN
from setpoint.core.request import RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.intake import Intake
from setpoint.frontend.telemetry.book import RequestBook
from setpoint.frontend.text.processor import TextProcessor
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint_testing.byte_tokenizer import make_byte_tokenizer
from setpoint_testing.harness import Harness, ids_of


def intake(random_seed: int) -> Intake:
    config = FrontendConfig(
        model_path="org/tiny",
        served_model_name="org/tiny",
        tokenizer_path="/models/tiny",
        context_len=64,
        max_req_input_len=60,
        vocab_size=256,
        random_seed=random_seed,
    )
    return Intake(config, TextProcessor(Tokenizer(make_byte_tokenizer())), RequestBook())


def seeds(drawer: Intake, **sampling: int) -> list[int]:
    params = SamplingParams(max_new_tokens=2, **sampling)  # type: ignore[arg-type]
    return [each.seed for each in drawer.requests(ids_of([1, 2]), params, RequestOptions())]


def test_drawn_seeds_follow_from_the_servers_seed() -> None:
    first, again, other = (
        [*seeds(drawer), *seeds(drawer, n=3), *seeds(drawer)]
        for drawer in (intake(7), intake(7), intake(8))
    )
    assert first == again
    assert len({*first, *other}) == 10


def test_a_given_seed_is_counted_up_and_draws_nothing() -> None:
    drawer = intake(7)
    assert seeds(drawer, n=3, sampling_seed=5) == [5, 6, 7]
    assert seeds(drawer) == seeds(intake(7))


@pytest.mark.parametrize("given", [INT64_MIN, -1, 0, INT64_MAX])
def test_any_64_bit_integer_is_a_seed(given: int) -> None:
    for seed in seeds(intake(0), n=2, sampling_seed=given):
        assert 0 <= seed <= INT64_MAX


def test_the_engine_obeys_the_seed_of_the_request() -> None:
    harness = Harness()
    harness.submit("a", [1, 2, 3], seed=11)
    harness.submit("b", [1, 2, 4], seed=12)
    harness.turn()
    assert [admit.seed for admit in harness.plans[0].admits] == [11, 12]
