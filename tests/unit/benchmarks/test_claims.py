"""What README claims about speed is the newest result (benchmarks/claims.py)."""

from __future__ import annotations

import copy
import json

from chart import chart
from claims import PAGE, PICTURE, kernels_changed_since, newest_result, section, with_newest_result


def test_readme_has_the_newest_result() -> None:
    """If this fails: python benchmarks/claims.py."""
    page = PAGE.read_text()
    assert "<!-- end of measured -->" in page
    assert page == with_newest_result(page)


def test_the_picture_is_of_the_newest_result() -> None:
    """If this fails: python benchmarks/claims.py."""
    assert PICTURE.read_text() == chart(json.loads(newest_result().read_text()))


def test_a_page_says_when_the_kernels_have_changed() -> None:
    result = json.loads(newest_result().read_text())
    assert "The kernels have changed since" in section(result, changed=True)
    assert "The kernels have changed since" not in section(result, changed=False)


def test_git_tells_whether_the_kernels_have_changed() -> None:
    assert kernels_changed_since("HEAD") in (False, None)  # None: a copy without history
    assert kernels_changed_since("no-such-commit") is None


def test_a_contender_without_an_answer_has_no_figure() -> None:
    result = copy.deepcopy(json.loads(newest_result().read_text()))
    result["samples"]["W2"]["vLLM"] = []
    (row,) = (line for line in section(result, changed=False).splitlines() if "vLLM, bf16" in line)
    assert row.split("|")[5].strip() == "–"
