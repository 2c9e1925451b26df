"""The tools of ``/v1/responses``: what the model sees of each tool, and the item that represents a
call of it.

A model knows only functions with JSON arguments. Tools that a client runs (functions, custom tools,
shells, patches, also within a namespace) are shown to it as functions. Tools that only a provider
can run are left out, with a warning for the client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from setpoint.core.bounds import convert_field
from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt
from setpoint.core.wording import kind_of
from setpoint.frontend.apis.openai.bodies.tool_fields import ToolSelection
from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.tools import check_name

Fields = dict[str, Any]
"""The fields of an item that hold the called tool and its arguments."""


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    pass


class _GrammarFormat(msgspec.Struct, tag_field="type", tag="grammar"):
    definition: str
    syntax: Literal["lark", "regex"]


class _Custom(msgspec.Struct):
    name: str
    description: str | None = None
    format: _TextFormat | _GrammarFormat | None = None


class _Namespace(msgspec.Struct):
    name: str
    tools: list[Any]
    description: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTool:
    tool: Tool
    """The tool as the model sees it."""
    kind: str
    """The type of the client's tool."""
    name: str
    """Its name within its namespace."""
    namespace: str = ""
    item: Callable[[str], Fields] | None = None
    """Makes the fields of a call's item from the complete arguments. Raises ValidationError if they
    do not fit the tool. None: the item holds the arguments as they are."""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request."""

    tools: Sequence[ClientTool] = ()
    warnings: Sequence[str] = ()
    """Warnings about tools that were left out."""
    _by_name: Mapping[str, ClientTool] = field(default_factory=dict)
    """Name of a tool for the model -> tool."""

    @classmethod
    def of(cls, given: Sequence[Any] | None) -> Toolbox:
        """The tools of a body. Raises RequestError (400); the message names the tool and its
        field."""
        by_name: dict[str, ClientTool] = {}
        warnings: list[str] = []
        for index, raw in enumerate(given or ()):
            for each in _read(raw, f"tools[{index}]", warnings):
                if each.tool.name in by_name:
                    raise RequestError(
                        f"tools[{index}]: two tools have the name {each.tool.name!r}."
                    )
                by_name[each.tool.name] = each
        return cls(list(by_name.values()), warnings, by_name)

    def called(self, name: str) -> ClientTool | None:
        """The tool that a model's call names; None if no tool has this name."""
        return self._by_name.get(name)

    def choice(self, value: Any) -> ToolSelection:
        """A body's ``tool_choice``. Raises RequestError (400)."""
        match value:
            case None | "auto":
                return ToolSelection()
            case "none" | "required":
                return ToolSelection(value)
            case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*given]}:
                names = [
                    self._named(each, f"tool_choice.tools[{n}]") for n, each in enumerate(given)
                ]
                if not any(names):
                    raise RequestError("tool_choice.tools must name a tool that the client runs.")
                return ToolSelection(mode, allowed=tuple(filter(None, names)))
            case {"type": str()}:
                if name := self._named(value, "tool_choice"):
                    return ToolSelection("required", named=name)
        raise RequestError(
            'tool_choice must be auto, none, required, {"type": "function", "name": "f"} (or the'
            ' type of another tool that the client runs), or {"type": "allowed_tools", "mode":'
            ' "auto", "tools": [{"type": "function", "name": "f"}]}.'
        )

    def _named(self, value: Any, where: str) -> str:
        """The model's name for the tool in a choice; "" for a provider's tool."""
        match value:
            case {"type": "function" | "custom" as kind, "name": str(name)}:
                for each in self.tools:
                    if each.kind == kind and name in (each.name, each.tool.name):
                        return each.tool.name
                return name
            case {"type": str(kind)} if kind in _BUILT_IN:
                return kind
            case {"type": str(kind)} if kind not in ("function", "custom"):
                return ""
        raise RequestError(f'{where} must be like {{"type": "function", "name": "f"}}.')


def called_name(item: Mapping[str, Any]) -> str:
    """The model's name for the tool that an item calls."""
    namespace = item.get("namespace")
    return f"{namespace}.{item['name']}" if namespace else str(item["name"])


def _read(raw: Any, where: str, warnings: list[str], *, namespace: str = "") -> list[ClientTool]:
    kind = raw.get("type") if isinstance(raw, Mapping) else None
    if not isinstance(kind, str):
        raise RequestError(f"{where}.type must be a string, got {kind_of(kind)}.")
    if kind == "function":
        return [_function(convert_field(raw, _Function, where), where, namespace)]
    if kind == "custom":
        return [_custom(convert_field(raw, _Custom, where), where, namespace, warnings)]
    if kind == "namespace" and not namespace:
        group = convert_field(raw, _Namespace, where)
        check_name(group.name, where)
        tools: list[ClientTool] = []
        for index, each in enumerate(group.tools):
            inner = f"{where}.tools[{index}]"
            tools += _read(each, inner, warnings, namespace=group.name)
        return tools
    if kind in _BUILT_IN and not _is_in_container(raw):
        return [_BUILT_IN[kind]]
    warnings.append(
        f"{where}: {excerpt(kind, 64)} was left out, because this server runs no tools; it"
        " supports only tools that the client runs."
    )
    return []


def _function(tool: _Function, where: str, namespace: str) -> ClientTool:
    return ClientTool(
        tool=Tool(
            name=_full_name(tool.name, where, namespace),
            description=tool.description or "",
            parameters=tool.parameters,
            strict=bool(tool.strict),
        ),
        kind="function",
        name=tool.name,
        namespace=namespace,
    )


def _custom(tool: _Custom, where: str, namespace: str, warnings: list[str]) -> ClientTool:
    """A tool that takes one text. A schema can contain a regular expression for the text; no other
    grammar can constrain text within JSON."""
    text: dict[str, Any] = {"type": "string"}
    description, is_constrained = tool.description or "", False
    if isinstance(tool.format, _GrammarFormat):
        definition = tool.format.definition
        is_constrained = tool.format.syntax == "regex"
        if is_constrained:
            text["pattern"] = f"^(?:{definition})$"
        else:
            description += f"\n\nThe input must follow this Lark grammar:\n{definition}"
            warnings.append(
                f"{where}.format: the model sees the Lark grammar, but the input is not"
                " constrained to it."
            )
    parameters = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    name = _full_name(tool.name, where, namespace)
    return ClientTool(
        tool=Tool(name, description.strip(), parameters, strict=is_constrained),
        kind="custom",
        name=tool.name,
        namespace=namespace,
    )


def _full_name(name: str, where: str, namespace: str) -> str:
    check_name(name, where)
    return f"{namespace}.{name}" if namespace else name


def _is_in_container(raw: Mapping[str, Any]) -> bool:
    """Whether a shell runs in a provider's container."""
    environment = raw.get("environment")
    kind = environment.get("type") if isinstance(environment, Mapping) else None
    return kind not in (None, "local")


class _Exec(msgspec.Struct):
    """The arguments of ``local_shell``."""

    command: list[str]
    timeout_ms: int | None = None
    working_directory: str | None = None


class _Commands(msgspec.Struct):
    """The arguments of ``shell``."""

    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class _Patch(msgspec.Struct):
    """The arguments of ``apply_patch``."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str = ""


def _exec_item(arguments: str) -> Fields:
    action = msgspec.json.decode(arguments, type=_Exec)
    given = msgspec.structs.asdict(action)
    return {"action": {"type": "exec", "env": {}, "user": None, **given}}


def _shell_item(arguments: str) -> Fields:
    return {"action": msgspec.structs.asdict(msgspec.json.decode(arguments, type=_Commands))}


def _patch_item(arguments: str) -> Fields:
    operation = msgspec.structs.asdict(msgspec.json.decode(arguments, type=_Patch))
    if operation["type"] == "delete_file":
        del operation["diff"]
    return {"operation": operation}


def _built_in(
    kind: str, description: str, item: Callable[[str], Fields], properties: Fields, *required: str
) -> ClientTool:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    return ClientTool(tool=Tool(kind, description, parameters), kind=kind, name=kind, item=item)


_LIST = {"type": "array", "items": {"type": "string"}}
_BUILT_IN = {
    each.kind: each
    for each in (
        _built_in(
            "local_shell",
            "Runs a program on the user's machine.",
            _exec_item,
            {
                "command": {**_LIST, "description": "The program and its arguments."},
                "timeout_ms": {"type": "integer"},
                "working_directory": {"type": "string"},
            },
            "command",
        ),
        _built_in(
            "shell",
            "Runs shell commands on the user's machine.",
            _shell_item,
            {
                "commands": {**_LIST, "description": "The command lines, in order."},
                "timeout_ms": {"type": "integer"},
                "max_output_length": {"type": "integer"},
            },
            "commands",
        ),
        _built_in(
            "apply_patch",
            "Creates, changes or deletes a file on the user's machine.",
            _patch_item,
            {
                "type": {"enum": ["create_file", "update_file", "delete_file"]},
                "path": {"type": "string"},
                "diff": {"type": "string", "description": "The change, unless it deletes."},
            },
            "type",
            "path",
        ),
    )
}
"""Type -> tool, for the tools that OpenAI's clients run and whose arguments the request does not
describe."""
