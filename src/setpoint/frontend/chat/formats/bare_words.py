"""Numbers and words that models write in other notations than JSON's."""

from __future__ import annotations

import re

MAX_NUMBER_CHARS = 300
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
_DECIMAL = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]*+)(?P<point>\.?)(?P<part>[0-9]*+)(?P<power>(?:[eE][+-]?[0-9]++)?)"
)
_BASED = re.compile(r"(?P<sign>[+-]?)(?P<digits>0[xX][0-9a-fA-F]++|0[oO][0-7]++|0[bB][01]++)")
_GROUPED = re.compile(r"(?<=[0-9a-fA-F])_(?=[0-9a-fA-F])")
WORDS = {"true": "true", "True": "true", "false": "false", "False": "false"} | dict.fromkeys(
    ("null", "None", "none"), "null"
)
"""JSON's words as other languages write them."""


def json_number(text: str) -> str:
    """The JSON of a number in any usual notation: ``07``, ``+1``, ``.5``, ``5.``, ``1_000``,
    ``0x1F``. Empty for what is none, or has no JSON, like infinity."""
    if len(text) > MAX_NUMBER_CHARS:
        return ""
    if _JSON_NUMBER.fullmatch(text):
        return text
    text = _GROUPED.sub("", text)
    if (based := _BASED.fullmatch(text)) is not None:
        value = int(based["digits"], 0)
        return f"-{value}" if based["sign"] == "-" and value else str(value)
    found = _DECIMAL.fullmatch(text)
    if found is None or not (found["whole"] or found["part"]):
        return ""
    sign = "-" if found["sign"] == "-" else ""
    whole = found["whole"].lstrip("0") or "0"
    part = f".{found['part'] or '0'}" if found["point"] else ""
    return f"{sign}{whole}{part}{found['power']}"


def json_word(text: str) -> str:
    """The JSON of a number, of true, false or null in any usual notation; empty for other text."""
    return WORDS.get(text) or json_number(text)
