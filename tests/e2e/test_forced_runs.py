"""Forced tokens on a real model: the output is that of a run that samples every token. Requests with
logprobs are such runs."""

from __future__ import annotations

from typing import Any

import pytest

from setpoint_testing.neartie import Greedy, Tally
from setpoint_testing.server_process import ServerProcess

MASKED = -1e9
"""A masked token has no logprob."""
TEXT = {"type": "string", "maxLength": 12}
ORDER = {
    "type": "object",
    "properties": {
        "customer_identifier": TEXT,
        "shipping_address": {
            "type": "object",
            "properties": {"street_name": TEXT, "country": {"enum": ["Germany", "France"]}},
            "required": ["street_name", "country"],
        },
        "payment_method": {"enum": ["credit_card", "bank_transfer", "invoice"]},
    },
    "required": ["customer_identifier", "shipping_address", "payment_method"],
}
CALL = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": '<tool_call>\n{"name": "ship", "arguments": ',
        "content": {"type": "json_schema", "json_schema": ORDER},
        "end": "}\n</tool_call>",
    },
}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": ORDER},
    "tag": {"structural_tag": CALL},
    "expression": {"regex": r"Dear (Mr|Mrs) [A-Z][a-z]{2,8},\nthank you for your order\."},
    "grammar": {
        "ebnf": 'root ::= ("yes" | "no") ", for one of the following reasons: " [a-z ]{3,20} "."'
    },
}
PROMPTS = [f"Order {index} of a customer in Berlin: shoes." for index in range(3)]


def num_steps(server: ServerProcess) -> int:
    return sum(server.state()["totals"]["steps"].values())


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_forced_tokens_leave_greedy_outputs_as_they_are(smol: ServerProcess, kind: str) -> None:
    sampling = {"max_new_tokens": 120, "temperature": 0, **CONSTRAINTS[kind]}
    before = num_steps(smol)
    sampled = smol.generate(
        text=PROMPTS, sampling_params=sampling, return_logprob=True, top_logprobs_num=2
    )
    between = num_steps(smol)
    answers = smol.generate(text=PROMPTS, sampling_params=sampling)
    tally = Tally()
    for index, (answer, reference) in enumerate(zip(answers, sampled, strict=True)):
        tops = [
            [MASKED if entry[0] is None else entry[0] for entry in position]
            for position in reference["meta_info"]["output_top_logprobs"]
        ]
        tally.check(str(index), answer["output_ids"], Greedy.of_top(reference["output_ids"], tops))
    print(tally)
    assert num_steps(smol) - between < between - before
