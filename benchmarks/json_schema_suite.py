"""What becomes of the schemas of JSON-Schema-Test-Suite: accepted or refused, and whether their
grammars accept the values that they should.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python benchmarks/json_schema_suite.py JSON-Schema-Test-Suite/tests/draft2020-12 [--verbose]

Each value is walked through the grammar as compact JSON. Objects stay open here, whereas a server
closes them, so grammars accept properties that a schema does not list.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

from setpoint.core.errors import RequestError
from setpoint_testing.schema_grammar import SchemaGrammar


def judged(group: dict[str, Any]) -> tuple[Counter[str], list[str]]:
    """What became of one schema and its values, and lines about what is not as it should be."""
    try:
        grammar = SchemaGrammar(group["schema"])
    except RequestError as error:
        has_valid = any(test["valid"] for test in group["tests"])
        outcome = "refused" if has_valid else "refused, and nothing satisfies it"
        return Counter([outcome]), [f"refused: {error.message}"] if has_valid else []
    counts = Counter(["warned" if grammar.report.lost else "enforced"])
    lines = list(grammar.report.warnings)
    for test in group["tests"]:
        accepts = grammar.accepts(test["data"])
        if accepts and not test["valid"]:
            counts["invalid values accepted, with a warning" if grammar.report.lost else WRONG] += 1
            lines.append(f"accepts {json.dumps(test['data'])}: {test['description']}")
        if test["valid"] and not accepts:
            counts["valid values not accepted"] += 1
            lines.append(f"does not accept {json.dumps(test['data'])}: {test['description']}")
    return counts, lines


WRONG = "INVALID VALUES ACCEPTED"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    with mock.patch("setpoint.grammar.schema.lists_all", return_value=False):
        for path in sorted(options.folder.glob("*.json")):
            for group in json.loads(path.read_text(encoding="utf-8")):
                found, lines = judged(group)
                counts += found
                if options.verbose:
                    for line in lines:
                        print(f"{path.stem}: {group['description']}: {line}")
    for outcome, count in counts.most_common():
        print(f"{count:5} {outcome}")


if __name__ == "__main__":
    main()
