"""Signatures of the libraries' functions that attention backends call, as the packages have them.

``python -m setpoint_testing.library_signatures WHEEL..`` writes them anew from wheels. It reads their
source and imports nothing of them: they need a GPU's libraries.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import zipfile
from functools import cache
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_suffix(".json")
CALLED = {
    "flashinfer/prefill.py": (
        "BatchPrefillWithPagedKVCacheWrapper.__init__",
        "BatchPrefillWithPagedKVCacheWrapper.plan",
        "BatchPrefillWithPagedKVCacheWrapper.run",
    ),
    "sgl_kernel/flash_attn.py": ("flash_attn_with_kvcache",),
}
"""File of a wheel -> names in it."""


@cache
def recorded(name: str) -> Signature:
    """The signature of a function or method by this name."""
    _, parameters = json.loads(RECORDED.read_text())[name]
    return Signature(
        [
            Parameter(
                each["name"],
                getattr(Parameter, each["kind"]),
                default=each.get("default", Parameter.empty),
            )
            for each in parameters
        ]
    )


def version(name: str) -> tuple[str, str]:
    """The package and the version whose function this is."""
    distribution, number = json.loads(RECORDED.read_text())[name][0].split(" ")
    return distribution, number


def read(wheel: Path) -> dict[str, Any]:
    """Name -> (package and version, parameters) of what is called of this wheel."""
    distribution, number, *_ = wheel.name.split("-")
    package = f"{distribution.replace('_', '-')} {number}"
    found = {}
    with zipfile.ZipFile(wheel) as files:
        for file in CALLED.keys() & set(files.namelist()):
            tree = ast.parse(files.read(file))
            for name in CALLED[file]:
                found[name] = (package, [_as_json(each) for each in _parameters(tree, name)])
    return found


def _parameters(tree: ast.Module, name: str) -> list[Parameter]:
    node: Any = tree
    for part in name.split("."):
        # The last one: overloads that only declare types come before it.
        node = [each for each in node.body if getattr(each, "name", None) == part][-1]
    for each in (*node.args.args, *node.args.kwonlyargs, node.args.vararg):
        if each is not None:
            each.annotation = None
    node.decorator_list, node.returns, node.body = [], None, [ast.Pass()]
    names: dict[str, Any] = {}
    module = ast.fix_missing_locations(ast.Module([node], []))
    exec(compile(module, name, "exec"), names)
    return list(inspect.signature(names[name.rpartition(".")[2]]).parameters.values())


def _as_json(parameter: Parameter) -> dict[str, Any]:
    found = {"name": parameter.name, "kind": parameter.kind.name}
    return (
        found if parameter.default is Parameter.empty else {**found, "default": parameter.default}
    )


if __name__ == "__main__":
    found = {name: each for wheel in sys.argv[1:] for name, each in read(Path(wheel)).items()}
    RECORDED.write_text(json.dumps(found) + "\n")
