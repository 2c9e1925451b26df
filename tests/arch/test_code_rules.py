"""Where words may stand: names of models, and kinds of devices. And where tests stand."""

from __future__ import annotations

import ast
from pathlib import Path

from package_source import is_below, modules

import setpoint


def test_model_names_stand_only_in_models_and_tables() -> None:
    """A base file that names a model is how engines become unreadable."""
    words = ("llama", "smollm", "qwen", "mistral", "gemma", "deepseek")
    homes = ("engine.models", "checkpoint", "frontend.chat.formats")
    for module, tree in modules().items():
        if any(is_below(module, home) for home in homes):
            continue
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        lowered = [name.lower().replace("ollama", "") for name in names]  # a program, not a model
        assert not [name for name in lowered if any(word in name for word in words)], module


def test_device_kinds_are_compared_in_kernels_alone() -> None:
    """Registries look a kind up; all else that differs between devices is in engine/kernels
    (decision 0007)."""
    for module, tree in modules().items():
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


def test_types_are_learned_by_one_thread_at_a_time() -> None:
    """msgspec's own ``convert`` ends the process where two threads use a class for the first time
    (``core.conversion``)."""
    calls = {
        module
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "msgspec.convert"
    }
    assert calls == {"core.conversion"}


def test_unit_tests_mirror_the_source() -> None:
    """``tests/unit/PACKAGE`` tests the package of that name; modules beside the packages help several."""
    tests = Path(__file__).parents[1] / "unit"
    source = Path(setpoint.__file__).parent
    assert not list(tests.glob("test_*.py"))
    for test in tests.rglob("test_*.py"):
        package = test.parent.relative_to(tests)
        assert (source / package).is_dir() or str(package) in ("benchmarks", "setpoint_testing"), (
            test
        )
