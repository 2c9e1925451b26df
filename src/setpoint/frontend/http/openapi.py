"""The routes in ``/openapi.json``, for generated clients and fuzzers: bodies have the schemas of
the structs that they are decoded to. FastAPI cannot know them, because no route declares its body
as a parameter: ``bodies`` reads and refuses them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI

from setpoint.core.sampling import SamplingParams

_REF = "#/components/schemas/{name}"
_CARRIED = "x-schemas"
"""Key under which a route carries the schemas of its body until the document is assembled."""


def add_route(
    router: APIRouter,
    path: str,
    handler: Callable[..., Any],
    *methods: str,
    body: type[msgspec.Struct] | None = None,
) -> None:
    """Add one route for each method, because every operation of the document needs its own id.
    body: the struct that the body is decoded to."""
    for method in methods:
        extra = None if body is None else _body_of(body)
        shown = method != "HEAD"
        router.add_api_route(
            path,
            handler,
            methods=[method],
            response_model=None,
            include_in_schema=shown,
            openapi_extra=extra,
        )


@cache
def _body_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """``openapi_extra`` of a route whose body is decoded to a ``kind``."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template=_REF)
    if "sampling_params" in kind.__struct_fields__:
        components["SamplingParams"] = _sampling_schema()
        one = {"$ref": _REF.format(name="SamplingParams")}
        field = components[kind.__name__]["properties"]["sampling_params"]
        components[kind.__name__]["properties"]["sampling_params"] = {
            "anyOf": [one, {"type": "array", "items": one}, {"type": "null"}],
            **{key: value for key, value in field.items() if key == "default"},
        }
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        _CARRIED: components,
    }


def describe_bodies(app: FastAPI) -> None:
    """Make the document of ``app`` contain the schemas that its routes name."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for path in document["paths"].values():
            for operation in path.values():
                schemas.update(
                    operation.pop(_CARRIED, {})
                )  # already removed when the document is requested again
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _sampling_schema() -> dict[str, Any]:
    """The schema of SamplingParams as clients may write them, which is looser than the struct in
    four places."""
    _, components = msgspec.json.schema_components([SamplingParams], ref_template=_REF)
    schema: dict[str, Any] = components["SamplingParams"]
    for name in ("stop", "stop_regex", "stop_token_ids"):
        several = schema["properties"][name]
        schema["properties"][name] = {"anyOf": [several["items"], several, {"type": "null"}]}
    schema["properties"]["logit_bias"] = {
        "anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]
    }
    return schema
