"""What tests of OpenAI's routes send, and an engine whose answer they know."""

from __future__ import annotations

from typing import Any

from setpoint_testing.byte_tokenizer import EOS_ID
from setpoint_testing.fake_engine import FakeEngine

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


def says(text: str, **options: Any) -> FakeEngine:
    """An engine that answers everything with ``text`` and EOS."""
    return FakeEngine(
        script=lambda request: [*text.encode(), EOS_ID], eos_ids=frozenset({EOS_ID}), **options
    )
