"""Reads and writes files with NIXL, NVIDIA's library for moving bytes, and one of its plugins for
files. Run with its plugin POSIX only."""

from __future__ import annotations

import importlib
import threading
import time
import uuid
from typing import Any

import numpy as np

from setpoint.tiers.store import StoreError

MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
PLUGINS = ("POSIX", "GDS", "GDS_MT", "HF3FS")
POLL_S = 0.0001


class NixlIO:
    """Implements ``folder_client.FileIO``. One transfer at a time: whether two threads may call an
    agent depends on the plugin."""

    def __init__(self, plugin: str) -> None:
        """Raises StoreError."""
        if plugin not in PLUGINS:
            raise StoreError(f"the setting plugin must be one of {', '.join(PLUGINS)}.")
        api = _library()
        self._name, self._plugin = f"setpoint-{uuid.uuid4()}", plugin
        self._lock = threading.Lock()
        try:
            self._agent: Any = api.nixl_agent(self._name, api.nixl_agent_config(backends=[]))
            self._agent.create_backend(plugin)
        except Exception as error:
            raise StoreError(f"NIXL cannot use its plugin {plugin}: {error!r}.") from None

    def read(self, descriptor: int, size: int) -> memoryview:
        data = np.empty(size, np.uint8)
        self._move("READ", descriptor, data)
        return memoryview(data)

    def write(self, descriptor: int, data: bytes) -> None:
        self._move("WRITE", descriptor, np.frombuffer(data, np.uint8))

    def close(self) -> None:
        """The agent ends with its last reference."""

    def _move(self, direction: str, descriptor: int, data: np.ndarray[Any, Any]) -> None:
        """Raises OSError if the plugin reports an error."""
        agent, backends = self._agent, [self._plugin]
        memory, file = (data.ctypes.data, data.nbytes, 0, ""), (0, data.nbytes, descriptor, "")
        with self._lock:
            here = agent.register_memory([memory], "DRAM", backends=backends)
            there = agent.register_memory([file], "FILE", backends=backends)
            handle = agent.initialize_xfer(direction, here.trim(), there.trim(), self._name)
            try:
                state = agent.transfer(handle)
                while state not in ("DONE", "ERR"):
                    time.sleep(POLL_S)
                    state = agent.check_xfer_state(handle)
            finally:
                agent.release_xfer_handle(handle)
                agent.deregister_memory(there, backends=backends)
                agent.deregister_memory(here, backends=backends)
        if state == "ERR":
            raise OSError(f"NIXL's plugin {self._plugin} failed")


def _library() -> Any:
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise StoreError(
        "NIXL's library is not installed: pip install nixl. On machines without its hardware, the"
        " backend file does the same."
    )
