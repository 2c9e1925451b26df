"""The ``param`` of an error: the field that it is about, or nothing."""

from __future__ import annotations

import pytest

from setpoint.frontend.apis import dialects
from setpoint.frontend.apis.openai.openai_errors import error_body
from setpoint.frontend.refusal import Refusal


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("temperature must be at least 0.", "temperature"),
        ("messages[2].content: a string was expected.", "messages[2].content"),
        ("lora_path is not supported.", "lora_path"),
        ("the engine cannot do this.", None),
        ("a template that loops", None),
        ("The body is not JSON.", None),
    ],
)
def test_only_a_field_is_a_param(message: str, param: str | None) -> None:
    """Red before: the first word of any message that began with a small letter."""
    assert dialects.DIALECTS
    assert error_body(Refusal(message=message, status_code=400))["param"] == param
    assert error_body(Refusal(message=message, status_code=503))["param"] is None
