"""The sources of weights: a folder of safetensors files, or numbers drawn from a seed."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from setpoint.core.blocksfile import BLOCKS_FILE, BLOCKS_LINK, read_blocks_table
from setpoint.core.cache_scales import place_of
from setpoint.core.errors import CheckpointError
from setpoint.core.model import BLOCK_KINDS, W8A8, language_tensor
from setpoint.core.quantised import QuantisedMatrix
from setpoint.core.weightfiles import (
    INDEX_NAME,
    SINGLE_NAME,
    Identities,
    identities,
    weight_files,
)
from setpoint.engine.kernels.device import drawn_uniformly
from setpoint.engine.kernels.pinned_ring import WeightCopies
from setpoint.engine.models.blocks_source import in_gguf
from setpoint.engine.models.quantised_source import QuantisedTensor, with_matrices
from setpoint.engine.models.stored_tensors import Slices, StoredTensor, WholeTensor, by_expert
from setpoint.engine.parallel.group import Span
from setpoint.engine.quant.linear_method import BlockMethod, GgufWeight

BODY, HEAD = "model.", "lm_head."
"""Prefixes of the names of the decoder's and of the head's tensors. A checkpoint that holds only a
decoder, as of many embedding models, leaves out the first."""
IGNORED = ("rotary_emb.inv_freq",)
"""Endings of tensor names that old checkpoints contain and no model here uses."""
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Types of stored tensors that are read as numbers."""
NO_ROUNDING = "meet activations that are not rounded to 8 bits as the folder asks"
OWN_SCALES = "have a scale of activations that is not used: each token has its own"
WITHIN_HOST = WeightCopies(torch.device("cpu"))
DUMMY_STD = 0.02
"""Standard deviation of dummy weights (transformers' initializer_range)."""


@dataclass(slots=True, frozen=True)
class Part:
    """A checkpoint tensor, and the rows of the parameter that it fills."""

    name: str
    begin: int
    """The first of these rows."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    rows: Span
    """The rows of the tensor that the parameter gets: not all of them if ranks divide it."""
    columns: Span | None = None
    """The columns that it gets; None: all of them."""

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def slices(self) -> Slices:
        """The part of the tensor; (): all of it."""
        if self.num_rows == self.shape[0] and self.columns is None:
            return ()
        rows = slice(*self.rows)
        return (rows,) if self.columns is None else (rows, slice(*self.columns))


class Dummy:
    """Weights for tests without a checkpoint: norms are one, biases zero, and all others small
    random numbers."""

    files = ()
    """Empty: no tensor is stored."""

    def __init__(self, seed: int) -> None:
        """seed: gives the same weights on all devices of a kind."""
        self.seed = seed
        self.identities: Identities = {}
        """Empty: no file is read."""
        self.notes: Counter[str] = Counter()
        """Empty: no matrix is quantised."""

    def read_blocks(self, parts: list[Part], method: BlockMethod, *, mixed: bool) -> None:
        """None: dummy weights have no blocks."""

    def read_into(self, part: Part, memory: torch.Tensor) -> None:
        if memory.dim() == 1:
            memory.fill_(0.0 if part.name.endswith("bias") else 1.0)
            return
        seed = self.seed * 0x9E3779B1 + zlib.crc32(part.name.encode())
        limit = DUMMY_STD * 3**0.5
        # Drawn where they stay: a processor draws 8 billion numbers in a minute.
        drawn = drawn_uniformly(part.shape, -limit, limit, seed=seed, device=memory.device)
        memory.copy_(drawn[part.slices])


class CheckpointFiles:
    """The safetensors files of a folder, memory-mapped, and the GGUF file of which the folder was
    made. They stay open until the given ExitStack is closed."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        *,
        wrapped: bool = False,
        with_blocks: bool = False,
        fused_experts: bool = False,
        matrices: Sequence[QuantisedMatrix] = (),
        values: torch.dtype = torch.bfloat16,
        copies: WeightCopies = WITHIN_HOST,
    ) -> None:
        """fused_experts: the experts of a layer are in one tensor (``stored_tensors``). matrices:
        those that the folder stores as codes and scales. values: the dtype in which a GGUF's blocks
        are read where they are not kept as such, rounded once. copies: to where weights are
        read."""
        self.folder = folder
        files = _files(folder)
        table = read_blocks_table(folder)
        names = [BLOCKS_FILE, *(table.links if table else [BLOCKS_LINK])]
        self.identities = identities([*files, *(folder / name for name in names)])
        """Taken before the files are opened: a file that is replaced meanwhile has another one."""
        opened = _open(files, stack)
        stored: dict[str, Any] = with_matrices(opened, matrices, folder) if matrices else opened
        values, blocks = in_gguf(folder, stack, values)
        if wrapped:
            stored = {
                inner: tensor
                for name, tensor in stored.items()
                if (inner := language_tensor(name)) is not None
            }
        if not any(name.startswith(BODY) for name in stored):
            stored = {
                name if name.startswith(HEAD) else BODY + name: tensor
                for name, tensor in stored.items()
            }
        self.cache_scales: Mapping[str, StoredTensor] = {
            name: stored.pop(name) for name in list(stored) if place_of(name)
        }
        """What may be scales of the KV cache; no parameter of a model."""
        files, in_experts = by_expert(stored) if fused_experts else (stored, {})
        self.files: Mapping[str, StoredTensor] = {**files, **values}
        self.blocks = {**blocks, **in_experts} if with_blocks else {}
        self.quantised: Mapping[str, QuantisedTensor] = {
            name: tensor for name, tensor in files.items() if isinstance(tensor, QuantisedTensor)
        }
        self.notes: Counter[str] = Counter()
        """What was done otherwise than the folder asks -> number of matrices."""
        self._with_blocks = with_blocks
        self._copies = copies

    def check(
        self,
        wanted: Mapping[str, tuple[int, ...]],
        *,
        optional: list[str],
        unused: tuple[str, ...] = (),
    ) -> None:
        """Raise CheckpointError unless the files hold exactly the wanted tensors, in their shapes.
        Those in ``optional``, and those that begin with one of ``unused``, may be there in
        addition."""
        for name, shape in wanted.items():
            if name not in self.files:
                raise CheckpointError(
                    f"Tensor {name!r} of shape {list(shape)} is missing in {self.folder}."
                )
            tensor = self.files[name]
            if tensor.shape != shape:
                raise CheckpointError(
                    f"Tensor {name!r} in {tensor.file} has shape {list(tensor.shape)}; the config"
                    f" asks for {list(shape)}."
                )
        for name, tensor in self.files.items():
            is_known = name in wanted or name in optional or name.startswith(unused)
            if not is_known and not name.endswith(IGNORED) and not self._is_no_bias(name):
                raise CheckpointError(
                    f"Tensor {tensor.name!r} in {tensor.file} does not belong to this architecture."
                )

    def _is_no_bias(self, name: str) -> bool:
        """Whether it is a bias of zeros, which tools write for every module that they quantise."""
        module = name.removesuffix(".bias")
        is_bias = module != name and f"{module}.weight" in self.quantised
        return is_bias and not bool(self.files[name].read().any())

    def read_blocks(
        self, parts: list[Part], method: BlockMethod, *, mixed: bool
    ) -> list[GgufWeight] | None:
        """The blocks of all ``parts``, neighbours of one kind together, if every part is kept as
        blocks of one of the method's kinds (of the same one, unless ``mixed``); otherwise None.
        Blocks cannot be cut, so there are none of some columns."""
        if any(part.columns is not None for part in parts):
            return None
        of_parts = self._kinds_of(parts, method.kinds, mixed=mixed)
        if of_parts is None:
            return None
        for part, kind in zip(parts, of_parts, strict=True):
            self._note(part, kind, rounds=kind in method.rounds)
        return [
            GgufWeight(kind, _together([self._read_part(part, kind) for _, part in neighbours]))
            for kind, neighbours in groupby(zip(of_parts, parts, strict=True), itemgetter(0))
        ]

    def _kinds_of(self, parts: list[Part], kinds: Set[str], *, mixed: bool) -> Sequence[str] | None:
        """The kind in which each part is kept; None: some part has none. W8A8 rounds the inputs of
        a whole stack, so it is for all or for none."""
        possible = [self._offered(part.name, kinds) for part in parts]
        common = [kind for kind in possible[0] if all(kind in each for each in possible)]
        if common and (not mixed or common[0] == W8A8):
            return [common[0]] * len(parts)
        exact = [[kind for kind in each if kind != W8A8] for each in possible]
        return [each[0] for each in exact] if mixed and all(exact) else None

    def _offered(self, name: str, kinds: Set[str]) -> Sequence[str]:
        """The kinds in which a matrix can be kept, the best first."""
        if tensor := self.quantised.get(name):
            return [kind for kind in tensor.kinds() if kind in kinds]
        return [kind for kind in kinds if f"{name}.{kind}" in self.blocks]

    def _read_part(self, part: Part, kind: str) -> torch.Tensor:
        block = BLOCK_KINDS[kind]
        quantised = self.quantised.get(part.name)
        tensor = quantised.blocks(kind) if quantised else self.blocks[f"{part.name}.{kind}"]
        columns, k = part.shape
        expected = columns, block.row_bytes(k)
        found = tensor.read(part.slices)
        if found.dtype != torch.uint8 or tensor.shape != expected or k % block.num_values:
            raise CheckpointError(
                f"Tensor {tensor.name!r} in {tensor.file} has shape {list(tensor.shape)}; the"
                f" config asks for {list(expected)}."
            )
        return found

    def _note(self, part: Part, kind: str, *, rounds: bool = False) -> None:
        """Count what is done otherwise than the folder asks, if it has this matrix as codes. kind:
        of its blocks; "": it is read as values. rounds: whether its method rounds activations."""
        if (tensor := self.quantised.get(part.name)) is None:
            return
        note = tensor.matrix.note or (NO_ROUNDING if tensor.matrix.activations else "")
        if rounds and tensor.matrix.is_float:
            note = OWN_SCALES if tensor.matrix.has_input_scale else ""
        if note:
            self.notes[note] += kind != W8A8
        if self._with_blocks and not kind:
            self.notes[f"are dequantized to bfloat16 when loaded: {tensor.why_no_blocks()}"] += 1

    def read_into(self, part: Part, memory: torch.Tensor) -> None:
        self._note(part, "")
        stored = self.files[part.name]
        values = stored.read(part.slices)
        if values.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"Tensor {stored.name!r} in {stored.file} holds {values.dtype}, which is no type of"
                " weights here. If these are codes of a quantised checkpoint, use the checkpoint"
                " that it was made from."
            )
        self._copies.fill(memory, values)  # of most files a view of the mapped file
        check_finite(memory, stored.name, stored.file)

    def read_all(self) -> dict[str, torch.Tensor]:
        """Every tensor, by its name; those in blocks as values."""
        return {name: tensor.read() for name, tensor in self.files.items()}


def check_finite(weights: torch.Tensor, name: str, file: Path) -> None:
    """Raise CheckpointError for weights that are no numbers or infinite: the model would answer
    nothing. Reading them once for their smallest and largest one takes less time than the copy from
    the file, and is four times as fast as asking each. The meta device has none."""
    if weights.numel() == 0 or weights.is_meta:
        return
    least, most = torch.aminmax(weights)
    if not bool(torch.isfinite(torch.stack((least, most))).all()):
        bad = int((~torch.isfinite(weights)).sum())
        raise CheckpointError(
            f"Tensor {name!r} in {file} has {bad} of {weights.numel()} numbers that are NaN or"
            f" infinite as {str(weights.dtype).removeprefix('torch.')}; fetch it again, or make it"
            " again."
        )


def values_in(folder: Path, matrices: Sequence[QuantisedMatrix]) -> dict[str, torch.Tensor]:
    """Every tensor of a quantised folder under its own name, these matrices as values."""
    with ExitStack() as stack:
        found = with_matrices(_open(_files(folder), stack), matrices, folder)
        return {name: tensor.read() for name, tensor in found.items()}


def _together(matrices: list[torch.Tensor]) -> torch.Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices)


def _open(files: list[Path], stack: ExitStack) -> dict[str, WholeTensor]:
    """Tensor name -> the tensor. The stack closes the files."""
    found: dict[str, WholeTensor] = {}
    for file in files:
        try:
            handle = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file} cannot be read ({error}): truncated or not safetensors; fetch it again."
            ) from None
        names = handle.keys()
        for name in names:
            if name in found:
                raise CheckpointError(
                    f"Tensor {name!r} is both in {found[name].file} and in {file}; one of them is"
                    " from another model."
                )
            found[name] = WholeTensor(file, handle, name)
    return found


def _files(folder: Path) -> list[Path]:
    files = weight_files(folder)
    if not files:
        raise CheckpointError(f"{folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}.")
    return files
