"""The contract of ``setpoint doctor --json`` and ``GET /doctor``, as a schema."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from doctor_report_cases import empty_handed_report, finding, healthy_report, report

from setpoint.doctor.contract import contract
from setpoint.doctor.findings import Action, Effect, Report
from setpoint.doctor.observations import Evidence

TEXT, NUMBER = {"type": "string"}, {"type": "number"}
SHARE = {"type": "number", "minimum": 0, "maximum": 1}


def record(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def row(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of}


FINDING = record(
    {
        "cause": TEXT,
        "confidence": SHARE,
        "summary": TEXT,
        "action": record(
            {
                "text": TEXT,
                "flag": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^--[a-z]"}]},
                "direction": {"enum": ["increase", "decrease", "set", None]},
                "value": {},
                "live": {"type": "boolean"},
            }
        ),
        "effect": {
            "anyOf": [
                record(
                    {
                        "figure": TEXT,
                        "low": NUMBER,
                        "expected": NUMBER,
                        "high": NUMBER,
                        "why": TEXT,
                    }
                ),
                record({}),
            ]
        },
        "evidence": row(
            record({"line": {"type": "integer"}, "text": TEXT, "source": TEXT}, "source")
        ),
        "ruled_out": row(record({"cause": TEXT, "why": TEXT})),
        "risk": TEXT,
        "verify": TEXT,
        "falsify": TEXT,
        "share": {"anyOf": [{"type": "null"}, SHARE]},
    }
)
ONE = {
    "verdict": TEXT,
    "summary": TEXT,
    "findings": row(FINDING),
    "evidence": FINDING["properties"]["evidence"],
    "coverage": SHARE,
    "missing": row(TEXT),
    "phases": {
        "type": "object",
        "additionalProperties": row(
            record(
                {
                    "phase": {"enum": ["start-up", "ramp", "steady", "drain", "idle"]},
                    "start": NUMBER,
                    "end": NUMBER,
                }
            )
        ),
    },
    "sources": row(
        record(
            {
                "name": TEXT,
                "kind": {"enum": ["log", "metrics", "server", "recording", "live"]},
                "clock": {"enum": ["timestamps", "estimated", "none"]},
                "generation": TEXT,
                "num_lines": {"type": "integer"},
                "num_batch_lines": {"type": "integer"},
                "num_understood": {"type": "integer"},
                "unknown_fields": {"type": "object", "additionalProperties": {"type": "integer"}},
                "notes": row(TEXT),
            }
        )
    ),
}
SCHEMA = record({"format": {"const": 1}, **ONE, "others": row(record(ONE))})


def sent(of: Report, *others: Report) -> Any:
    return json.loads(json.dumps(contract(of, others), allow_nan=False))


@pytest.mark.parametrize("make", [report, healthy_report, empty_handed_report])
def test_reports_are_of_the_schema(make: Callable[[], Report]) -> None:
    jsonschema.validate(sent(make(), report()), SCHEMA)


def test_the_names_that_programs_rely_on() -> None:
    said = sent(report())
    first = said["findings"][0]
    assert said["verdict"] == first["cause"] == "seq-cap"
    assert said["coverage"] == 1.0
    assert first["action"]["flag"] == "--max-running-requests"
    assert (first["action"]["direction"], first["action"]["value"]) == ("increase", 148)
    assert first["evidence"][0]["line"] == 29
    assert first["ruled_out"][0]["cause"] == "kv-conservative"
    assert first["effect"]["low"] < first["effect"]["expected"] < first["effect"]["high"]


def test_an_action_outside_of_the_server_and_no_prediction() -> None:
    bare = replace(finding(), action=Action("Send more requests at once."), effect=None)
    said = sent(replace(report(), findings=[bare]))
    jsonschema.validate(said, SCHEMA)
    assert said["findings"][0]["action"]["flag"] is None
    assert said["findings"][0]["effect"] == {}


def test_numbers_that_json_has_not_become_null() -> None:
    strange = replace(
        finding(),
        evidence=(Evidence(1, "bytes \udc80 that are no text"),),
        effect=Effect("x", 0.0, math.inf, math.nan, ""),
    )
    said = sent(replace(report(), findings=[strange]))
    assert said["findings"][0]["effect"]["expected"] is None
