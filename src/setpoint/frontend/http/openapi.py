"""The routes as OpenAPI describes them, for generated clients and fuzzers: bodies and queries have
the schemas of the classes that they are decoded to."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from setpoint.core.sampling import SamplingParams
from setpoint.core.version import __version__
from setpoint.frontend.http.api_routes import ApiRoute

_REF = "#/components/schemas/{name}"
_ANSWER = {
    "description": "Successful Response",
    "content": {"application/json": {"schema": {}}},
}
_FAULT = {
    "description": "Validation Error",
    "content": {"application/json": {"schema": {"$ref": _REF.format(name="HTTPValidationError")}}},
}
_FAULT_SCHEMAS = {
    "HTTPValidationError": {
        "properties": {
            "detail": {
                "items": {"$ref": _REF.format(name="ValidationError")},
                "type": "array",
                "title": "Detail",
            }
        },
        "type": "object",
        "title": "HTTPValidationError",
    },
    "ValidationError": {
        "properties": {
            "loc": {
                "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                "type": "array",
                "title": "Location",
            },
            "msg": {"type": "string", "title": "Message"},
            "type": {"type": "string", "title": "Error Type"},
            "input": {"title": "Input"},
            "ctx": {"type": "object", "title": "Context"},
        },
        "type": "object",
        "required": ["loc", "msg", "type"],
        "title": "ValidationError",
    },
}


def document_route(routes: Sequence[ApiRoute]) -> Route:
    """The route of the document about ``routes``, which is made when it is first asked for."""

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(_without_nulls(_document(routes)))

    async def document(request: Request) -> Response:
        return Response(encoded(), media_type="application/json")

    return Route("/openapi.json", document)


def _document(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    """The document about the routes that have a tag."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = dict(_FAULT_SCHEMAS)
    for route in routes:
        if route.tag is not None:
            (method,) = route.methods
            operation = _operation(route, method)
            if route.body is not None:
                content, found = _schema_of(route.body)
                schemas |= found
                operation["requestBody"] = {
                    "content": {"application/json": {"schema": content}},
                    "required": True,
                }
            operation["responses"] = {"200": _ANSWER}
            if "parameters" in operation:
                operation["responses"]["422"] = _FAULT
            paths.setdefault(route.path_format, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Setpoint", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(route: ApiRoute, method: str) -> dict[str, Any]:
    """What the document says about a route, besides its body and its answers."""
    operation: dict[str, Any] = {"tags": [route.tag], "summary": _title(route.name)}
    if route.endpoint.__doc__:
        operation["description"] = inspect.cleandoc(route.endpoint.__doc__)
    place = re.sub(r"\W", "_", route.name + route.path_format)
    operation["operationId"] = f"{place}_{method.lower()}"
    if parameters := list(_parameters(route)):
        operation["parameters"] = parameters
    return operation


def _parameters(route: ApiRoute) -> Iterator[dict[str, Any]]:
    for name in route.param_convertors:
        yield _parameter("path", name, {"type": "string"})
    if route.query is not None:
        _, components = msgspec.json.schema_components([route.query], ref_template=_REF)
        for name, schema in components[route.query.__name__]["properties"].items():
            yield _parameter("query", name, schema)


def _parameter(place: str, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "in": place,
        "required": place == "path",
        "schema": {**schema, "title": _title(name)},
    }


def _without_nulls(value: Any) -> Any:
    """The value without keys that are null: a default of null says what a missing one says."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _title(name: str) -> str:
    return name.replace("_", " ").title()


@cache
def _schema_of(kind: type[msgspec.Struct]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of a body that is decoded to a ``kind``, and the schemas that it names."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template=_REF)
    if "sampling_params" in kind.__struct_fields__:
        components["SamplingParams"] = _sampling_schema()
        one = {"$ref": _REF.format(name="SamplingParams")}
        field = components[kind.__name__]["properties"]["sampling_params"]
        components[kind.__name__]["properties"]["sampling_params"] = {
            "anyOf": [one, {"type": "array", "items": one}, {"type": "null"}],
            **{key: value for key, value in field.items() if key == "default"},
        }
    return schema, components


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
