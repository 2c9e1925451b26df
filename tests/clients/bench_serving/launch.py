"""Starts SGLang's ``bench_serving`` from its wheel without SGLang's server: ``sglang.srt`` and what
it needs (torch and hundreds of MB more) are replaced by empty modules, but for the helpers that
parse addresses; so is ``datasets``, which only data sets on the hub need.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
import types
from pathlib import Path
from typing import Any


class Stub(types.ModuleType):
    """Has every name, as a function that does nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: None


class StubFinder:
    """Finds every module below ``sglang.srt``."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "sglang.srt" and not name.startswith("sglang.srt."):
            return None
        real = {
            "sglang.srt.utils.network": "srt/utils/network.py",
        }.get(name)
        if real is not None:
            return importlib.util.spec_from_file_location(name, PACKAGE / real)
        return importlib.util.spec_from_loader(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


found = importlib.util.find_spec("sglang")
assert found is not None
assert found.origin is not None
PACKAGE = Path(found.origin).parent
package = types.ModuleType("sglang")
package.__path__ = [str(PACKAGE)]
sys.modules["sglang"] = package
sys.modules["datasets"] = Stub("datasets")
sys.meta_path.insert(0, StubFinder())  # type: ignore[arg-type]
sys.argv[0] = "bench_serving"
runpy.run_module("sglang.benchmark.serving", run_name="__main__")
