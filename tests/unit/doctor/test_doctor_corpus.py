"""The doctor against cases whose cause is known: how often it is right, and that it never advises
what would make it worse. ``pytest -s`` prints the table."""

from __future__ import annotations

import pytest
from doctor_accuracy import (
    PARTS,
    Judged,
    cases,
    documented,
    is_held_out,
    judge_all,
    share,
    table,
    wrong,
)

ENOUGH = 0.95


@pytest.fixture(scope="module")
def judged() -> list[Judged]:
    found = judge_all(cases())
    print("\n" + "\n".join(wrong(found)) + "\n" + table(found))
    return found


@pytest.mark.parametrize("part", PARTS)
def test_the_verdict_is_right(judged: list[Judged], part: str) -> None:
    found = [each for each in judged if each.case.part == part]
    assert share(each.is_right for each in found) >= ENOUGH, wrong(found)


def test_no_advice_makes_it_worse_or_contradicts_another(judged: list[Judged]) -> None:
    assert {each.case.name: each.contradictions for each in judged if each.contradictions} == {}


def test_healthy_servers_are_left_alone(judged: list[Judged]) -> None:
    healthy = [each for each in judged if each.case.cause == "healthy"]
    assert share(each.is_false_alarm for each in healthy) <= 0.02, wrong(healthy)


def test_nothing_is_advised_without_evidence(judged: list[Judged]) -> None:
    assert [each.case.name for each in judged if each.is_unfounded] == []


def test_the_corpus_is_large_and_covers_every_cause() -> None:
    every = cases()
    causes = {case.cause for case in every}
    assert len(every) >= 120
    assert share(case.part != "cases" for case in every) >= 0.2
    for cause in causes:
        assert sum(case.cause == cause for case in every) >= 3, cause
    assert len(causes) >= 18


def test_names_decide_which_cases_are_held_out() -> None:
    ours = [case for case in cases() if case.part != "strangers"]
    assert [case.name for case in ours if is_held_out(case.name) != (case.part == "held_out")] == []


def test_the_documentation_has_the_accuracy(judged: list[Judged]) -> None:
    """``python tests/unit/doctor_accuracy.py`` writes it."""
    assert documented() == table(judged)
