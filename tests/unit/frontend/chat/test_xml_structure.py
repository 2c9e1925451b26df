"""Which schemas of tools a format of elements can be held to."""

from __future__ import annotations

from typing import Any

import pytest

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.formats.format_registry import tool_format


@pytest.mark.parametrize("required", [3, None, "a", [["a"]], [{}], ["b"]])
def test_a_wrong_list_of_required_arguments_is_no_structure(required: Any) -> None:
    """Red before: a list inside the list was an internal error."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": required}
    tool = Tool(name="f", description="", parameters=schema, strict=True)
    form = tool_format("qwen3_coder")
    assert form.structure([tool], required=True, parallel=True) is None
