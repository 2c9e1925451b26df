"""Fills a model built on the meta device: from a safetensors folder, or with dummy weights of a
seed.

Works module by module: memory is made, filled and handed to the linear method before the next
module starts, so that at no time more than one weight exists twice. Every misfit between checkpoint
and model is a CheckpointError that names the tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterator, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from setpoint.core.errors import CheckpointError, ConfigError, OutOfMemoryError
from setpoint.core.model import BLOCK, BLOCK_BYTES, BLOCKS_FILE, language_tensor
from setpoint.core.progress import report
from setpoint.core.weightfiles import INDEX_NAME, SINGLE_NAME, weight_files
from setpoint.engine.layers.linear import NoHead, TiedHead
from setpoint.engine.quant.base import BlockMethod, Blocks, LinearMethod

IGNORED = ("rotary_emb.inv_freq",)
"""Tensor name endings that old checkpoints carry and nobody needs."""

BODY, HEAD = "model.", "lm_head."
"""How names of the decoder's and of the head's tensors begin. A checkpoint of the bare decoder
(many of the embedding models) leaves out the first."""

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
    blocks: BlockMethod | None,
    seed: int,
    wrapped: bool = False,
) -> int:
    """Give every parameter memory and content; -> bytes held by the weights.

    load_format: "auto" or "safetensors" reads ``folder``; "dummy" draws from ``seed``, each tensor
    by its own name, so that the same model and seed give the same weights everywhere. wrapped: the
    folder holds a model of more than text, ``model`` is its language model. blocks: for weights
    that the folder holds as blocks too; None: they are loaded in dtype.
    """
    if load_format not in ("auto", "safetensors", "dummy"):
        raise ConfigError(
            f"Unknown load format {load_format!r}; choose one of auto, safetensors, dummy."
        )
    with ExitStack() as stack:
        if load_format == "dummy":
            source: _Dummy | _Checkpoint = _Dummy(seed)
        else:
            source = _Checkpoint(
                Path(folder), stack, wrapped=wrapped, with_blocks=blocks is not None
            )
        plan = {
            name: list(_parts(module, name, source.files)) for name, module in model.named_modules()
        }
        if isinstance(source, _Checkpoint):
            found = (part for parts in plan.values() for _, of in parts for part in of)
            source.check({part.name: part.shape for part in found}, optional=_heads(model))
        try:
            modules, num_bytes = list(model.named_modules()), 0
            for number, (name, module) in enumerate(modules):
                if number % (len(modules) // 20 + 1) == 0:
                    report(f"loading the weights, {100 * number // len(modules)} %")
                num_bytes += _fill(module, plan[name], source, dtype, device, method, blocks)
            return num_bytes
        except RuntimeError as error:
            if "memory" in str(error):
                raise OutOfMemoryError(
                    f"The weights do not fit into the memory of {device}: {error}"
                ) from None
            raise


def _heads(model: nn.Module) -> list[str]:
    """Names of head weights that a checkpoint may hold and the model does not use."""
    return [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, TiedHead | NoHead)
    ]


def _parts(
    module: nn.Module, path: str, stored: Container[str]
) -> Iterator[tuple[str, list[Part]]]:
    """Per own parameter of a module: its name and the checkpoint tensors stacked in it. A
    checkpoint may store the stack as one."""
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
    blocks: BlockMethod | None,
) -> int:
    num_bytes, kept = 0, None
    for name, parts in parameters:
        if name == "weight" and blocks is not None and hasattr(module, "keep_blocks"):
            kept = source.read_blocks(parts, blocks.kinds)
            if kept is not None:
                continue
        memory = torch.empty(getattr(module, name).shape, dtype=dtype, device=device)
        for part in parts:
            source.read_into(part.name, memory[part.begin : part.begin + part.shape[0]])
        setattr(module, name, nn.Parameter(memory, requires_grad=False))
        num_bytes += memory.nbytes
    if kept is not None:
        return module.keep_blocks(blocks, kept)
    finish = getattr(module, "finish_loading", None)
    return num_bytes if finish is None else finish(method)


class _Dummy:
    """Weights for tests of speed and plumbing: norms one, biases zero, the rest small and
    random."""

    files = ()
    """No tensor is stored."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def read_blocks(self, parts: list[Part], kinds: Set[str]) -> None:
        """There are none."""

    def read_into(self, name: str, memory: torch.Tensor) -> None:
        if memory.dim() == 1:
            memory.fill_(0.0 if name.endswith("bias") else 1.0)
            return
        generator = torch.Generator("cpu").manual_seed(
            self.seed * 0x9E3779B1 + zlib.crc32(name.encode())
        )
        values = torch.empty(memory.shape, dtype=torch.float32, device="cpu")
        limit = DUMMY_STD * 3**0.5
        memory.copy_(values.uniform_(-limit, limit, generator=generator))


class _Checkpoint:
    """The safetensors files of a folder, memory-mapped; open as long as the ExitStack it was
    given."""

    def __init__(self, folder: Path, stack: ExitStack, *, wrapped: bool, with_blocks: bool) -> None:
        self.folder = folder
        self.files = _open(_files(folder), stack)
        blocks = folder / BLOCKS_FILE
        self.blocks = _open([blocks] if with_blocks and blocks.is_file() else [], stack)
        if wrapped:
            self.files = {
                alone: entry
                for name, entry in self.files.items()
                if (alone := language_tensor(name)) is not None
            }
        if not any(name.startswith(BODY) for name in self.files):
            self.files = {
                name if name.startswith(HEAD) else BODY + name: entry
                for name, entry in self.files.items()
            }

    def check(self, wanted: Mapping[str, tuple[int, ...]], *, optional: list[str]) -> None:
        """CheckpointError unless the files hold exactly the wanted tensors in their shapes;
        ``optional`` ones may be there."""
        for name, shape in wanted.items():
            if name not in self.files:
                raise CheckpointError(
                    f"Tensor {name!r} of shape {list(shape)} is missing in {self.folder}."
                )
            file, handle, stored = self.files[name]
            found = tuple(handle.get_slice(stored).get_shape())
            if found != shape:
                raise CheckpointError(
                    f"Tensor {name!r} in {file} has shape {list(found)}; the config asks for"
                    f" {list(shape)}."
                )
        for name, (file, _, stored) in self.files.items():
            if name not in wanted and name not in optional and not name.endswith(IGNORED):
                raise CheckpointError(
                    f"Tensor {stored!r} in {file} does not belong to this architecture."
                )

    def read_blocks(self, parts: list[Part], kinds: Set[str]) -> Blocks | None:
        """What ``parts`` hold together, if all of it is kept as blocks of one of ``kinds``."""
        kind = next(
            (kind for kind in kinds if all(f"{part.name}.{kind}" in self.blocks for part in parts)),
            None,
        )
        if kind is None:
            return None
        rows = []
        for part in parts:
            file, handle, stored = self.blocks[f"{part.name}.{kind}"]
            found, expected = (
                _read(file, handle, stored),
                (part.shape[0], part.shape[1] // BLOCK * BLOCK_BYTES[kind]),
            )
            if found.dtype != torch.uint8 or found.shape != expected or part.shape[1] % BLOCK:
                raise CheckpointError(
                    f"Tensor {stored!r} in {file} has shape {list(found.shape)}; the config asks"
                    f" for {list(expected)}."
                )
            rows.append(found)
        return Blocks(kind, rows[0] if len(rows) == 1 else torch.cat(rows))

    def read_into(self, name: str, memory: torch.Tensor) -> None:
        file, handle, stored = self.files[name]
        memory.copy_(_read(file, handle, stored))


def _open(files: list[Path], stack: ExitStack) -> dict[str, tuple[Path, Any, str]]:
    """Tensor name -> its file, open as long as the stack, and the name it has there."""
    found = {}
    for file in files:
        try:
            handle = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file} cannot be read ({error}): truncated or not safetensors; fetch it again."
            ) from None
        names = handle.keys()
        found.update({name: (file, handle, name) for name in names})
    return found


def _read(file: Path, handle: Any, stored: str) -> torch.Tensor:
    try:
        return handle.get_tensor(stored)
    except SafetensorError as error:
        raise CheckpointError(f"Tensor {stored!r} in {file} cannot be read: {error}") from None


def _files(folder: Path) -> list[Path]:
    files = weight_files(folder)
    if not files:
        raise CheckpointError(f"{folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}.")
    return files
