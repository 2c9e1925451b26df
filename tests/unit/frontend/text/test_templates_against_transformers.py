"""Our own chat templates make the same prompts here as with transformers. Published templates are
others' text, so they are compared by ``benchmarks/templates.py``, from a folder."""

from __future__ import annotations

import pytest

from setpoint_testing.chat_templates import CONSTRUCTS, TEMPLATES
from setpoint_testing.template_comparison import CASES, FAULTS, compare

ALL = {**TEMPLATES, **CONSTRUCTS}


@pytest.mark.parametrize("name", ALL)
def test_prompts_are_those_of_transformers(name: str) -> None:
    outcomes = compare(ALL[name])
    assert len(outcomes) == len(CASES)
    assert any(outcome.verdict == "equal" for outcome in outcomes)
    for outcome in outcomes:
        told = f"{outcome.case.name}\n{outcome.theirs}\n---\n{outcome.ours}"
        assert outcome.verdict not in FAULTS, told


def test_differences_are_found() -> None:
    def verdicts(source: str) -> dict[str, str]:
        return {outcome.case.name: outcome.verdict for outcome in compare(source)}

    assert set(verdicts("{{ messages.missing.key }}").values()) == {"both refuse"}
    seen = verdicts("{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}")
    assert [seen[name] for name in ("plain", "call", "parts")] == ["equal", "described", "unread"]
    seen = verdicts("{{ messages[0].content }}{{ range(10) | random }}{{ range(99999) | random }}")
    assert seen["plain"] == "different", "the frontend draws other numbers"
