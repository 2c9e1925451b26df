"""Fills a model built on the meta device: from a safetensors folder, or with dummy weights of a seed.

Works module by module: memory is made, filled and handed to the linear method before the next module starts, so that at no
time more than one weight exists twice. Every misfit between checkpoint and model is a CheckpointError that names the tensor.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from setpoint.core.errors import CheckpointError, ConfigError, OutOfMemoryError
from setpoint.core.model import language_tensor
from setpoint.engine.layers.linear import NoHead, TiedHead
from setpoint.engine.quant.base import LinearMethod

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

IGNORED = ("rotary_emb.inv_freq",)
"""Tensor name endings that old checkpoints carry and nobody needs."""

BODY, HEAD = "model.", "lm_head."
"""How names of the decoder's and of the head's tensors begin. A checkpoint of the bare decoder (many of the embedding models) leaves
out the first."""

DUMMY_STD = 0.02
"""Standard deviation of dummy weights (transformers' initializer_range)."""


@dataclass(slots=True, frozen=True)
class Part:
    """A checkpoint tensor and the rows of the parameter it fills."""

    name: str
    begin: int
    shape: tuple[int, ...]


def load_weights(
    model: nn.Module,
    folder: str,
    *,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device,
    method: LinearMethod,
    head_method: LinearMethod,
    seed: int,
    wrapped: bool = False,
) -> int:
    """Give every parameter memory and content; -> bytes held by the weights.

    load_format: "auto" or "safetensors" reads ``folder``; "dummy" draws from ``seed``, each tensor by its own name, so that
    the same model and seed give the same weights everywhere. wrapped: the folder holds a model of more than text, ``model`` is
    its language model. head_method: for the output head, ``method`` for everything else.
    """
    if load_format not in ("auto", "safetensors", "dummy"):
        raise ConfigError(f"Unknown load format {load_format!r}; there are: auto, safetensors, dummy.")
    with ExitStack() as stack:
        source = _Dummy(seed) if load_format == "dummy" else _Checkpoint(Path(folder), stack, wrapped)
        plan = {name: list(_parts(module, name, source.files)) for name, module in model.named_modules()}
        if isinstance(source, _Checkpoint):
            heads = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, TiedHead | NoHead)]
            source.check({part.name: part.shape for parts in plan.values() for _, found in parts for part in found}, optional=heads)
        try:
            return sum(
                _fill(module, plan[name], source, dtype, device, head_method if f"{name}." == HEAD else method)
                for name, module in model.named_modules()
            )
        except RuntimeError as error:
            if "memory" in str(error):
                raise OutOfMemoryError(f"The weights do not fit into the memory of {device}: {error}") from None
            raise


def _parts(module: nn.Module, path: str, stored: Container[str]) -> Iterator[tuple[str, list[Part]]]:
    """Per own parameter of a module: its name and the checkpoint tensors stacked in it. A checkpoint may store the stack as one."""
    stacked: Mapping[str, int] = getattr(module, "parts", {})
    parent = path.rpartition(".")[0]
    for name, parameter in module.named_parameters(recurse=False):
        whole = f"{path}.{name}"
        if not stacked or whole in stored:
            yield name, [Part(whole, 0, tuple(parameter.shape))]
            continue
        begin, parts = 0, []
        for sibling, size in stacked.items():
            parts.append(Part(f"{parent}.{sibling}.{name}", begin, (size, *parameter.shape[1:])))
            begin += size
        yield name, parts


def _fill(
    module: nn.Module,
    parameters: list[tuple[str, list[Part]]],
    source: _Dummy | _Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    method: LinearMethod,
) -> int:
    num_bytes = 0
    for name, parts in parameters:
        memory = torch.empty(getattr(module, name).shape, dtype=dtype, device=device)
        for part in parts:
            source.read_into(part.name, memory[part.begin : part.begin + part.shape[0]])
        setattr(module, name, nn.Parameter(memory, requires_grad=False))
        num_bytes += memory.nbytes
    finish = getattr(module, "finish_loading", None)
    return num_bytes if finish is None else finish(method)


class _Dummy:
    """Weights for tests of speed and plumbing: norms one, biases zero, the rest small and random."""

    files = ()
    """No tensor is stored."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def read_into(self, name: str, memory: torch.Tensor) -> None:
        if memory.dim() == 1:
            memory.fill_(0.0 if name.endswith("bias") else 1.0)
            return
        generator = torch.Generator("cpu").manual_seed(self.seed * 0x9E3779B1 + zlib.crc32(name.encode()))
        values = torch.empty(memory.shape, dtype=torch.float32, device="cpu")
        limit = DUMMY_STD * 3**0.5
        memory.copy_(values.uniform_(-limit, limit, generator=generator))


class _Checkpoint:
    """The safetensors files of a folder, memory-mapped; open as long as the ExitStack it was given."""

    def __init__(self, folder: Path, stack: ExitStack, wrapped: bool) -> None:
        self.folder = folder
        self.files: dict[str, tuple[Path, Any, str]] = {}
        """Tensor name -> its file, open, and the name it has there."""
        for file in _files(folder):
            try:
                handle = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} cannot be read ({error}): truncated or not safetensors; fetch it again.") from None
            names = handle.keys()
            self.files.update({name: (file, handle, name) for name in names})
        if wrapped:
            self.files = {alone: entry for name, entry in self.files.items() if (alone := language_tensor(name)) is not None}
        if not any(name.startswith(BODY) for name in self.files):
            self.files = {name if name.startswith(HEAD) else BODY + name: entry for name, entry in self.files.items()}

    def check(self, wanted: Mapping[str, tuple[int, ...]], *, optional: list[str]) -> None:
        """CheckpointError unless the files hold exactly the wanted tensors in their shapes; ``optional`` ones may be there."""
        for name, shape in wanted.items():
            if name not in self.files:
                raise CheckpointError(f"Tensor {name!r} of shape {list(shape)} is missing in {self.folder}.")
            file, handle, stored = self.files[name]
            found = tuple(handle.get_slice(stored).get_shape())
            if found != shape:
                raise CheckpointError(f"Tensor {name!r} in {file} has shape {list(found)}; the config asks for {list(shape)}.")
        for name, (file, _, stored) in self.files.items():
            if name not in wanted and name not in optional and not name.endswith(IGNORED):
                raise CheckpointError(f"Tensor {stored!r} in {file} belongs to no part of this architecture.")

    def read_into(self, name: str, memory: torch.Tensor) -> None:
        file, handle, stored = self.files[name]
        try:
            memory.copy_(handle.get_tensor(stored))
        except SafetensorError as error:
            raise CheckpointError(f"Tensor {stored!r} in {file} cannot be read: {error}") from None


def _files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that the index names."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}.")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index ({error}).") from None
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{index} names {name}, which is not in the folder.")
    return [folder / name for name in names]
