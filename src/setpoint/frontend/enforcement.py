"""Prepares clients' JSON schemas for the grammar libraries, and tells clients what is not
enforced."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec

from setpoint.core.constraint import Constraint, compile_refusal
from setpoint.core.errors import RequestError
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.telemetry.book import RequestBook
from setpoint.schemas.reading import ANY_JSON, checked_schema
from setpoint.schemas.report import LossReport
from setpoint.schemas.rewriting import needs_rewriting, rewritten
from setpoint.schemas.xml_parameters import not_enforced

NUM_REMEMBERED = 64
"""Rewritten schemas that are kept: clients send the same ones again and again."""


class Enforcement:
    """Rewrites one schema at a time, in a thread: a large one takes a second."""

    def __init__(self, book: RequestBook) -> None:
        self._book = book
        self._turn = asyncio.Semaphore()

    async def applied(
        self, sampling: SamplingParams, *, strict: bool = False
    ) -> tuple[SamplingParams, list[str]]:
        """The sampling parameters with their schemas rewritten, and warnings for the client about
        what is not enforced. strict: that is refused instead.

        Raises RequestError (400), also for a schema that is not valid.
        """
        constraint = sampling.constraint
        if constraint is None or constraint.kind not in ("json_schema", "structural_tag"):
            return sampling, []
        text, report = await self._rewritten(constraint)
        if report.unenforced and strict:
            raise RequestError(
                f"{compile_refusal('json_schema')}strict is true, but {report.unenforced}. Leave"
                " that out of the schema, or send strict: false."
            )
        self._book.unenforced_schemas += bool(report.unenforced)
        if text != constraint.text:
            sampling = msgspec.structs.replace(sampling, **{constraint.kind: text})
        return sampling, report.warnings

    async def check_strict(self, schema: dict[str, Any], name: str) -> None:
        """Raise RequestError (400) for the schema of a strict tool if a part of it cannot be
        enforced. name: the tool's."""
        report = (await self._rewritten(Constraint("json_schema", json.dumps(schema))))[1]
        if report.unenforced:
            raise RequestError(
                f"The tool {name!r} has strict: true, but {report.unenforced} in its parameters."
                " Leave that out, or send strict: false."
            )

    async def _rewritten(self, constraint: Constraint) -> tuple[str, LossReport]:
        tree = _tree(constraint)
        if not any(
            needs_rewriting(schema) or (_is_xml(node) and any(not_enforced(schema)))
            for node, _, schema in _schemas_in(tree)
        ):
            return constraint.text, LossReport()
        async with self._turn:
            return await asyncio.to_thread(_rewritten, constraint)


def _tree(constraint: Constraint) -> Any:
    """The JSON of a constraint: a list with the schema, or a structural tag. Nothing if it is not
    valid: whoever compiles it says so."""
    if constraint.text == ANY_JSON:
        return []
    try:
        tree = json.loads(constraint.text)
    except (ValueError, RecursionError):
        return []
    return [{"json_schema": tree}] if constraint.kind == "json_schema" else tree


def _schemas_in(tree: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The schemas in a tree: where each is, under which key, and itself."""
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, list):
            todo += node
        elif isinstance(node, dict):
            for key, value in node.items():
                # The legacy form of a structural tag has "schema" between "begin" and "end".
                if key == "json_schema" or (key == "schema" and "begin" in node):
                    if isinstance(value, dict):
                        yield node, key, value
                else:
                    todo.append(value)


def _is_xml(node: dict[str, Any]) -> bool:
    """Whether the schema of a format is one of parameters in XML."""
    return node.get("style") == "qwen_xml" or node.get("type") == "qwen_xml_parameter"


@lru_cache(NUM_REMEMBERED)
def _rewritten(constraint: Constraint) -> tuple[str, LossReport]:
    tree, report = _tree(constraint), LossReport()
    found: Any = tree
    for node, key, schema in list(_schemas_in(tree)):
        try:
            result = rewritten(checked_schema(schema))
        except RequestError as error:
            raise RequestError(compile_refusal(constraint.kind) + error.message) from None
        if _is_xml(node):
            if not (isinstance(result.schema, dict) and "properties" in result.schema):
                continue  # parameters in XML need one list of properties; others are refused
            report.lose(not_enforced(result.schema))
        node[key] = result.schema
        report.add(result.report)
    if constraint.kind == "json_schema":
        found = tree[0]["json_schema"]
    return json.dumps(found), report
