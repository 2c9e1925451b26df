"""Who may import whom (the table of docs/architecture.md); no cycles; and the control plane keeps
torch out of the process."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import setpoint

ROOT = Path(setpoint.__file__).parent

# room -> (rooms of ours it may import, third-party packages it may import). A room is matched by
# its longest prefix. None as the second entry: anything that is a dependency.
ALLOWED: dict[str, tuple[set[str], set[str] | None]] = {
    "core": (set(), {"numpy", "msgspec"}),
    "planning": ({"core"}, set()),
    "observe": ({"core"}, set()),
    "config": ({"core", "planning"}, {"msgspec", "psutil", "yaml"}),
    "checkpoint": ({"core"}, {"numpy", "gguf", "huggingface_hub", "tokenizers"}),
    "ipc": ({"core"}, {"msgspec"}),
    "scheduler": ({"core", "config", "planning", "observe"}, {"numpy"}),
    "frontend": (
        {"core", "config", "observe", "ipc"},
        {
            "fastapi",
            "starlette",
            "pydantic",
            "uvicorn",
            "uvloop",
            "msgspec",
            "tokenizers",
            "jinja2",
            "numpy",
        },
    ),
    "frontend.apis.openai": (
        {"core"}
        | {
            f"frontend.{name}"
            for name in (
                "bodies",
                "chat",
                "config",
                "embedding",
                "http",
                "intake",
                "jobs",
                "refusal",
                "service",
                "text",
            )
        },
        {"fastapi", "msgspec", "numpy"},
    ),
    "engine": (set(), set()),
    "engine.kernels": ({"core", "config", "planning"}, {"torch", "numpy"}),
    "engine.attention": ({"core", "config", "planning", "engine.kernels"}, {"torch", "numpy"}),
    "engine.quant": ({"core", "config", "planning", "engine.kernels"}, {"torch", "numpy"}),
    "engine.sampling": ({"core", "config", "planning", "engine.kernels"}, {"torch", "numpy"}),
    "engine.layers": (
        {"core", "config", "planning", "engine.kernels", "engine.attention", "engine.quant"},
        {"torch", "numpy"},
    ),
    "engine.models": (
        {
            "core",
            "config",
            "planning",
            "engine.kernels",
            "engine.attention",
            "engine.quant",
            "engine.layers",
        },
        {"torch", "numpy", "safetensors"},
    ),
    "engine.models.transformers_model": (
        {
            "core",
            "engine.attention",
            "engine.layers",
            "engine.models.transformers_windows",
            "engine.quant",
        },
        {"torch", "transformers"},
    ),
    "engine.runner": (
        {"core", "config", "planning"}
        | {
            f"engine.{room}"
            for room in ("kernels", "attention", "quant", "sampling", "layers", "models")
        },
        {"torch", "numpy"},
    ),
    "engine.executor": ({"core", "config", "planning", "engine"}, {"torch", "numpy"}),
    "batch": (
        {"core", "config", "observe", "frontend", "launch"},
        {"msgspec", "numpy", "rich", "pyarrow", "uvloop"},
    ),
    "launch": ({""}, None),
    "bench": (
        {"core", "config", "planning", "observe", "checkpoint.source", "frontend.text"},
        {"httptools", "msgspec", "numpy", "rich", "uvloop"},
    ),
    "bench.offline": (
        {"bench", "config", "core", "observe", "frontend.text", "offline"},
        {"msgspec"},
    ),
    "bench.breakdown": ({"bench", "config", "core", "frontend.text", "offline"}, set()),
    "bench.quality": (
        {"bench", "config", "core", "observe", "frontend.text", "offline"},
        {"msgspec", "numpy"},
    ),
    "chat": ({"config", "core", "observe", "offline"}, {"httpx2", "msgspec"}),
    "offline": ({"config", "core", "frontend.calls", "launch.background"}, set()),
    "cli": ({""}, None),
    "testing": ({""}, None),
}
CONTROL_PLANE = (
    "core",
    "planning",
    "observe",
    "config",
    "checkpoint",
    "ipc",
    "scheduler",
    "frontend",
    "batch",
    "cli",
    "launch.server",
    "launch.engine_session",
    "launch.assembly",
    "launch.background",
    "offline",
    "chat",
    "bench",
)
DETERMINISTIC = ("scheduler", "planning")
"""Clock and randomness are injected here, so that a simulator can own them."""


def modules() -> dict[str, ast.Module]:
    """Dotted name below setpoint -> syntax tree."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found[name] = ast.parse(path.read_text(), filename=str(path))
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    """Every imported module, type-checking and function-level ones included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the room"
            assert node.module is not None
            yield node.module
            yield from (
                f"{node.module}.{alias.name}"
                for alias in node.names
                if node.module.startswith("setpoint")
            )


def is_below(name: str, room: str) -> bool:
    return room == "" or name == room or name.startswith(room + ".")


def rule_of(module: str) -> tuple[str, set[str], set[str] | None]:
    rooms = [room for room in ALLOWED if is_below(module, room)]
    assert rooms, (
        f"setpoint.{module} is in no room of the table: add the room with its allowed imports"
    )
    room = max(rooms, key=len)
    return room, *ALLOWED[room]


def top_level_imports(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(node)


MODULES = modules()


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_room_imports_only_what_the_table_allows(module: str) -> None:
    room, ours, third_party = rule_of(module)
    for imported in imports(MODULES[module]):
        if is_below(imported, "setpoint"):
            inner = imported.removeprefix("setpoint").removeprefix(".")
            allowed = inner in ("", "__version__") or any(
                is_below(inner, other) for other in {room, *ours}
            )
            assert allowed, (
                f"setpoint.{module} imports setpoint.{inner}; {room} may import only {sorted(ours)}"
            )
        elif (top := imported.partition(".")[0]) not in sys.stdlib_module_names:
            assert third_party is None or top in third_party, (
                f"setpoint.{module} imports {top}; {room} may use only {third_party}"
            )


def test_the_table_names_only_rooms_that_exist() -> None:
    unused = [room for room in ALLOWED if not any(is_below(module, room) for module in MODULES)]
    assert not unused


def test_no_import_cycles() -> None:
    graph = {
        module: {
            name
            for name in (found.removeprefix("setpoint.") for found in imports(tree))
            if name in MODULES and name != module
        }
        for module, tree in MODULES.items()
    }
    done: set[str] = set()
    for start in graph:
        path: list[str] = []

        def visit(module: str, path: list[str] = path) -> None:
            assert module not in path, (
                f"import cycle: {' -> '.join([*path[path.index(module) :], module])}"
            )
            if module in done:
                return
            path.append(module)
            for other in sorted(graph[module]):
                visit(other)
            path.pop()
            done.add(module)

        visit(start)


@pytest.mark.parametrize(
    "module", [name for name in MODULES if any(is_below(name, room) for room in DETERMINISTIC)]
)
def test_clock_and_randomness_are_injected(module: str) -> None:
    assert not {"time", "random", "datetime", "secrets"} & {
        name.partition(".")[0] for name in imports(MODULES[module])
    }


def test_control_plane_leaves_torch_out() -> None:
    names = [
        f"setpoint.{name}"
        for name in MODULES
        if any(is_below(name, room) for room in CONTROL_PLANE)
    ]
    code = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nheavy ="
        " {'torch', 'transformers', 'triton', 'xgrammar'} &"
        " set(sys.modules)\nsys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_package_loads_its_names_when_they_are_used() -> None:
    code = (
        "import sys, setpoint; assert setpoint.__version__; print(sorted(name for name in"
        " sys.modules if name.startswith('setpoint.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
    code = (
        "import sys; from setpoint import Engine, SamplingParams; print({'torch', 'fastapi',"
        " 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr


def test_pickle_is_never_imported_and_transformers_in_one_place_on_use() -> None:
    for module, tree in MODULES.items():
        if not is_below(module, "testing"):
            found = {name.partition(".")[0] for name in imports(tree)}
            assert not {"pickle", "dill", "cloudpickle"} & found, module
            assert "transformers" not in found or module == "engine.models.transformers_model", (
                module
            )
    tree = MODULES["engine.models.transformers_model"]
    assert not any(name.startswith("transformers") for name in top_level_imports(tree)), (
        "importing it takes seconds"
    )


def test_model_names_stand_only_in_models_and_tables() -> None:
    """A base file that names a model is how engines become unreadable."""
    words = ("llama", "smollm", "qwen", "mistral", "gemma", "deepseek")
    homes = ("engine.models", "checkpoint", "testing")
    for module, tree in MODULES.items():
        if any(is_below(module, home) for home in homes):
            continue
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        assert not [name for name in names if any(word in name.lower() for word in words)], module


def test_device_kinds_are_compared_in_kernels_alone() -> None:
    """Registries look a kind up; all else that differs between devices is in engine/kernels
    (decision 0007)."""
    for module, tree in MODULES.items():
        if is_below(module, "engine.kernels") or is_below(module, "launch"):
            continue
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not {"is_cuda", "is_cpu", "cuda"} & names, module
        if is_below(module, "engine"):
            comparisons = [
                node for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.match_case)
            ]
            words = {
                node.value
                for each in comparisons
                for node in ast.walk(each)
                if isinstance(node, ast.Constant)
            }
            assert not {"cpu", "cuda"} & words, module
