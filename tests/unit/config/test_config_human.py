"""Human integers mean what SGLang's mean (docs/sglang/options.md#integers)."""

from __future__ import annotations

import pytest

from setpoint.config.groups.human import parse_human_int


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("4096", 4096),
        ("-1", -1),
        ("32k", 32_000),
        ("1.5k", 1_500),
        ("0.001M", 1_000),
        ("2M", 2_000_000),
        ("1G", 10**9),
        ("1T", 10**12),
        ("32Ki", 32_768),
        ("1Mi", 2**20),
        ("1Gi", 2**30),
        ("1Ti", 2**40),
        (" 7 ", 7),
    ],
)
def test_means(text: str, value: int) -> None:
    assert parse_human_int(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "k",
        "32K",
        "32m",
        "32ki",
        "1.5Ki",
        "1.5",
        "1.0005k",
        "1e3",
        "0x10",
        "32 k",
        "１２",
        "1_000",
        "nan",
        "32kB",
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"integer|whole|decimals"):
        parse_human_int(text)
