"""Messages in the words of Python."""

from __future__ import annotations

import pytest

from setpoint.config.keywords import as_keywords, naming_keywords
from setpoint.core.errors import ConfigError, ContextLengthError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "raise --max-total-tokens or lower --page-size.",
            "raise max_total_tokens or lower page_size.",
        ),
        ("start it with --is-embedding, please", "start it with is_embedding=True, please"),
        ("say --json-model-override-args '{}'", "say json_model_override_args '{}'"),
        ("a--b and -- and --", "a--b and -- and --"),
    ],
)
def test_flags_become_keywords(text: str, expected: str) -> None:
    assert as_keywords(text) == expected


def test_errors_of_a_block_name_keywords() -> None:
    with pytest.raises(ConfigError, match=r"^page_size must be at least 1\.$"), naming_keywords():
        raise ConfigError("--page-size must be at least 1.")
    with (
        pytest.raises(ContextLengthError, match="allow_auto_truncate=True") as error,
        naming_keywords(),
    ):
        raise ContextLengthError("Enable --allow-auto-truncate.")
    assert error.value.message == str(error.value)
