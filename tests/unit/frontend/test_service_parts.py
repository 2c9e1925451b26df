"""What serves a model is a record that nobody writes after it was made."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from inspect import isfunction

import pytest

from setpoint.frontend.answering import Answering
from setpoint.frontend.composition import compose
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.service import Service
from setpoint.frontend.text.processor import TextProcessor
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint.ipc.client import EngineClient
from setpoint_testing.byte_tokenizer import make_byte_tokenizer
from setpoint_testing.fake_engine import FixedOptions

CONFIG = FrontendConfig("m", "m", "m", context_len=64, max_req_input_len=60, vocab_size=300)
FROZEN = ("answering", "health", "info", "live", "events")
"""The parts of a service without a state of their own."""


@pytest.mark.parametrize("kind", [Service, Answering])
def test_a_record_of_parts_does_nothing(kind: type) -> None:
    own = {name for name, value in vars(kind).items() if isfunction(value)}
    assert all(name.startswith("_") for name in own), "only what dataclass has made"


def test_no_part_is_filled_in_later() -> None:
    text = TextProcessor(Tokenizer(make_byte_tokenizer()))
    service = compose(CONFIG, EngineClient(), text, FixedOptions())
    records = [service, service.answering.jobs, *(getattr(service, name) for name in FROZEN)]
    for record in records:
        for field in fields(record):
            with pytest.raises(FrozenInstanceError):
                setattr(record, field.name, None)
            assert not isinstance(getattr(record, field.name), list)
