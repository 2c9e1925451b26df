"""A storage class that was written for SGLang's --hicache-storage-backend dynamic: ``exists``,
``get`` and ``set`` with names of text and values that are tensors of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from setpoint.tiers.store import Bytes


def sglang_config(rank: int, num_ranks: int, model: str, extra: dict[str, Any]) -> SimpleNamespace:
    """What SGLang gives such a class as its first argument."""
    return SimpleNamespace(
        tp_rank=rank,
        tp_size=num_ranks,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        dp_rank=0,
        dp_size=1,
        is_mla_model=False,  # every rank has blocks of its own
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=model,
        tp_lcm_size=None,
        should_split_heads=False,
        extra_config=extra,
    )


class SGLangClient:
    """Implements ``remote_store.Client``. Values have the size of a block with its header: such a
    class is told where to put the bytes."""

    def __init__(self, storage: Any, size: int, empty: Callable[[int], Any]) -> None:
        """empty: makes a tensor of so many bytes."""
        self.place = type(storage).__qualname__
        self._storage, self._size, self._empty = storage, size, empty

    def check(self) -> None:
        """Making the storage was its own check."""

    def num_leading(self, names: Sequence[str]) -> int:
        if hasattr(self._storage, "batch_exists"):
            return int(self._storage.batch_exists(list(names)))
        return next(
            (index for index, name in enumerate(names) if not self._storage.exists(name)),
            len(names),
        )

    def get(self, name: str) -> memoryview | None:
        found = self._storage.get(name, self._empty(self._size))
        return None if found is None else memoryview(found.numpy())

    def head(self, name: str, size: int) -> bytes | None:
        found = self.get(name)
        return None if found is None else bytes(found[:size])

    def put(self, name: str, value: bytes) -> bool:
        tensor = self._empty(len(value))
        target: Bytes = tensor.numpy()
        target[:] = memoryview(value)
        return self._storage.set(name, tensor) is not False

    def remove(self, name: str) -> None:
        """The interface removes everything or nothing: a damaged block stays, and is a miss."""
        raise NotImplementedError("classes of SGLang's interface cannot remove single values")

    def names(self) -> None:
        """The interface has no such method."""

    def close(self) -> None:
        close = getattr(self._storage, "close", None)
        if close is not None:
            close()
