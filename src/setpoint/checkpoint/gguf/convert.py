"""Converts a GGUF file once into a Hugging Face-style folder: config, safetensors, tokenizer, chat
template.

Matrices whose blocks can be multiplied stay in the file; the folder has a table of their places
(``core.blocksfile``). Only the rest is written, tensor by tensor with numpy, so that one tensor is
in memory at a time. The result is kept in the user's cache folder under a digest of the file's
content (``conversion_cache``), so that a file that moves is not converted again; a folder that
exists was complete when it was made. This module uses no torch and does not know how the engine
will use the weights.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from setpoint.checkpoint.folder import safetensors_file
from setpoint.checkpoint.folder.description import Description, in_blocks
from setpoint.checkpoint.gguf import tokenizer_files
from setpoint.checkpoint.gguf.architectures import CONVERTED, decoder_of
from setpoint.checkpoint.gguf.config_json import read_config
from setpoint.checkpoint.gguf.conversion_cache import (
    SIZES_FILE,
    damage_of,
    folder_for_path,
    found_folder,
    known_digest,
    new_folder,
    remove_earlier,
    sizes_of,
    unwritable,
)
from setpoint.checkpoint.gguf.header import GGUFFile, GGUFTensor
from setpoint.checkpoint.gguf.refused_files import check_kind
from setpoint.checkpoint.gguf.split_files import open_gguf, parts_of
from setpoint.checkpoint.gguf.tensor_names import Target, targets
from setpoint.core.blocksfile import (
    BlocksTable,
    StoredBlocks,
    digest_of_parts,
    write_blocks_table,
)
from setpoint.core.content_digest import (
    cache_folder,
    content_digest,
    forget_missing,
)
from setpoint.core.errors import CheckpointError
from setpoint.core.file_lock import locked
from setpoint.core.model import BLOCK_KINDS
from setpoint.core.progress import report
from setpoint.core.weightfiles import SINGLE_NAME

CHUNK_ELEMENTS = 1 << 22
"""Number of elements that are dequantised at a time: 16 MiB of float32, so that they stay in the
cache and the peak memory is low."""

LARGEST_EXPONENT = 252
"""The largest exponent of a scale of MXFP4 that is accepted: values with a larger one may be
infinite, and 255 is no number."""

FLOATS = {"F64", "F32", "F16", "BF16"}
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(slots=True, frozen=True)
class _Plan:
    """Everything that will be written, and its size; made from the file's header alone."""

    config: dict[str, Any]
    generation: dict[str, Any]
    tokens: tokenizer_files.GgufVocabulary
    dtype: str
    weights: list[Target]
    """The weights that are written."""
    blocks: list[Target]
    """The weights that stay in the file."""

    @property
    def weight_bytes(self) -> int:
        return sum(info.num_bytes for info in _weight_infos(self))

    @property
    def block_bytes(self) -> int:
        return sum(target.source.num_bytes for target in self.blocks)


def converted_folder(
    path: Path, *, log: Callable[[str], None], admit: Callable[[Description], None] | None = None
) -> Path:
    """The Hugging Face-style folder of a GGUF file. The file is converted now if the cache does not
    contain the folder, or only a damaged one. ``admit`` gets the description of the file's header
    before a conversion, and may refuse by raising.

    A file that cannot be converted is refused before anything is written. Several processes may
    call this at once: one converts and the others wait for it. After a conversion, the folders that
    earlier versions of this module made from the file, or from files of the same name, are removed,
    because nothing uses them any more. Raises CheckpointError.
    """
    root, paths = cache_folder(), parts_of(path)
    noted = known_digest(paths)
    folder = None if noted is None else found_folder(root, noted)
    if folder is not None and not damage_of(folder):
        return folder_for_path(paths, folder)
    with open_gguf(path) as file:
        plan = _plan(file)
        if admit is not None:
            admit(_description(path, plan))
        digests = _digests(file)
        digest = digest_of_parts(digests)
        paths = [part.path for part in file.parts]
        try:
            root.mkdir(parents=True, exist_ok=True)
            with locked(root / f"{digest[:16]}.lock"):
                folder = found_folder(root, digest) or new_folder(root, path, digest)
                if not folder.is_dir() or (damage := damage_of(folder)):
                    if folder.is_dir():
                        log(f"{folder} is damaged ({damage}), so it is made anew.")
                    _convert_into(file, plan, digests, folder, log=log)
                    remove_earlier(root, path, digest, log=log)
                    forget_missing()
            return folder_for_path(paths, folder)
        except OSError as error:
            raise unwritable(root, error) from None


def _digests(file: GGUFFile) -> tuple[str, ...]:
    return tuple(content_digest(part.path, part.handle) for part in file.parts)


def _convert_into(
    file: GGUFFile,
    plan: _Plan,
    digests: tuple[str, ...],
    folder: Path,
    *,
    log: Callable[[str], None],
) -> None:
    """Build ``folder`` under a temporary name and rename it, so that it is either absent or
    complete. If there is a damaged one, its files are replaced: servers may use it. The caller
    holds its lock."""
    started = time.monotonic()
    partial = folder.with_suffix(folder.suffix + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    _check_room(file.path, plan, folder.parent)
    log(f"Converting {file.path.name} once, to {folder}: {_sizes(plan)} …")
    partial.mkdir()
    try:
        _write_files(file, plan, digests, partial, log=log)
        if _digests(file) != digests:
            raise CheckpointError(f"{file.path} has changed while it was converted.")
        _write_json(partial / SIZES_FILE, sizes_of(partial))
        if folder.is_dir():
            for each in partial.iterdir():
                each.replace(folder / each.name)
            partial.rmdir()
        else:
            partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    log(f"Converted {file.path.name} in {time.monotonic() - started:.1f} s.")


def _check_room(path: Path, plan: _Plan, root: Path) -> None:
    needed, free = plan.weight_bytes, shutil.disk_usage(root).free
    if free < needed:
        raise CheckpointError(
            f"Converting {path} writes {_size(needed)} below {root}, where {_size(free)} are free."
            " Make room, or set XDG_CACHE_HOME to a folder with enough space."
        )


def _sizes(plan: _Plan) -> str:
    """The sizes in words: "2.0 MB of weights in bfloat16; 91 MB of blocks stay in the file"."""
    said = f"{_size(plan.weight_bytes)} of weights in {plan.dtype}"
    if plan.blocks:
        said += f"; {_size(plan.block_bytes)} of blocks stay in the file"
    widened = {target.source.kind.name for target in plan.weights} - FLOATS - set(BLOCK_KINDS)
    if widened:
        kinds = " and ".join(sorted(widened))
        said += f"; matrices in {kinds} become {plan.dtype}, because no kernel multiplies these"
    return said


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def _plan(file: GGUFFile) -> _Plan:
    """The plan for a file. Raises CheckpointError if the file cannot be converted."""
    check_kind(file, CONVERTED)
    decoder = decoder_of(file)
    config = read_config(file, decoder)
    weights = targets(file, decoder, config)
    tokens = tokenizer_files.read_tokens(file, config["vocab_size"])
    dtype = _dtype(weights)
    config |= {
        "torch_dtype": dtype,
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
        "pad_token_id": tokens.pad,
    }
    generation = {
        "bos_token_id": tokens.bos,
        "eos_token_id": list(tokens.stops),
        "pad_token_id": tokens.pad,
    }
    blocks = [
        target
        for target in weights
        if target.source.kind.name in BLOCK_KINDS and len(target.source.shape) == 2
    ]
    stays = {target.name for target in blocks}
    written = [target for target in weights if target.name not in stays]
    return _Plan(config, generation, tokens, dtype, written, blocks)


def _description(path: Path, plan: _Plan) -> Description:
    """What ``read_description`` will say of the folder."""
    matrices, blocks = in_blocks(_stored_blocks(plan))
    return Description(
        path=path,
        config=plan.config,
        generation_path=path,
        generation=plan.generation,
        tensors=(*_weight_infos(plan), *matrices),
        blocks=blocks,
    )


def _write_files(
    file: GGUFFile,
    plan: _Plan,
    digests: tuple[str, ...],
    folder: Path,
    *,
    log: Callable[[str], None],
) -> None:
    _write_json(folder / "config.json", plan.config)
    _write_json(
        folder / "generation_config.json",
        {key: value for key, value in plan.generation.items() if value is not None},
    )
    context_len = plan.config["max_position_embeddings"]
    tokenizer_files.write(file, plan.tokens, folder, context_len=context_len, log=log)
    chunks = _all_cast(file, plan.weights, plan.dtype)
    safetensors_file.write(folder / SINGLE_NAME, _weight_infos(plan), chunks)
    if plan.blocks:
        _check_scales(file, plan)
        write_blocks_table(folder, BlocksTable(digests, _stored_blocks(plan)))


def _weight_infos(plan: _Plan) -> list[safetensors_file.TensorInfo]:
    return [
        safetensors_file.TensorInfo(
            target.name, target.shape, DTYPES[_stored_as(target, plan.dtype)]
        )
        for target in plan.weights
    ]


def _stored_as(target: Target, dtype: str) -> str:
    return "float32" if target.is_wide else dtype


def _stored_blocks(plan: _Plan) -> dict[str, StoredBlocks]:
    found = {}
    for target in plan.blocks:
        source, (rows, k) = target.source, target.source.shape
        found[target.name] = StoredBlocks(
            source.kind.name, (rows, k), source.offset, target.heads, source.part
        )
    return found


def _check_scales(file: GGUFFile, plan: _Plan) -> None:
    """Raise CheckpointError if a scale of a block that stays in the file is not finite. A finite
    one gives finite values."""
    for number, target in enumerate(plan.blocks):
        report(f"checking the blocks of {file.path.name}, {100 * number // len(plan.blocks)} %")
        kind = BLOCK_KINDS[target.source.kind.name]
        blocks = file.rows(target.source).reshape(-1, kind.num_bytes)
        if target.source.kind.name == "MXFP4" and (blocks[:, 0] > LARGEST_EXPONENT).any():
            raise _not_finite(file, target)
        for at in kind.scales:
            if ((blocks[:, at + 1] & 0x7C) == 0x7C).any():
                raise _not_finite(file, target)


def _not_finite(file: GGUFFile, target: Target) -> CheckpointError:
    return CheckpointError(
        f"{file.path}: tensor {target.source.name!r} has values that are not finite; the file is"
        " damaged."
    )


def _all_cast(file: GGUFFile, weights: list[Target], dtype: str) -> Iterator[bytes]:
    for number, target in enumerate(weights):
        report(f"converting {file.path.name}, {100 * number // len(weights)} %")
        yield from _cast(file, target, _stored_as(target, dtype))


def _rows(file: GGUFFile, target: Target) -> npt.NDArray[np.uint8]:
    """The raw rows of ``target`` in the new order. In every ggml type a row is self-contained, so
    that rows can be reordered before they are dequantised."""
    rows = file.rows(target.source)
    if not target.heads:
        return rows
    return rows.reshape(target.heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _dtype(weights: list[Target]) -> str:
    """The dtype of the converted weights: that of the matrices if they share a 16- or 32-bit float
    type, which loses nothing; otherwise bfloat16.

    Every GGUF file stores norms and routers as F32, but they were trained in the matrices' dtype,
    so they are converted to it too. Dequantised values have more bits than bfloat16; that rounding
    error is small compared with the error of the quantisation, and bfloat16 is the dtype in which
    the models were trained.
    """
    kinds = {
        target.source.kind.name
        for target in weights
        if len(target.source.shape) > 1 and not target.is_router
    }
    return (
        {"F16": "float16", "F32": "float32"}.get(min(kinds), "bfloat16")
        if len(kinds) == 1
        else "bfloat16"
    )


def _cast(file: GGUFFile, target: Target, dtype: str) -> Iterator[bytes]:
    """The bytes of ``target`` in ``dtype``, a chunk of rows at a time."""
    for values in _values(file, target):
        with np.errstate(all="ignore"):
            result = (
                _round_bf16(values)
                if dtype == "bfloat16"
                else values.astype(f"<f{4 if dtype == 'float32' else 2}")
            )
        if not np.isfinite(values if dtype == "bfloat16" else result).all():
            raise CheckpointError(
                f"{file.path}: tensor {target.source.name!r} has values that are not finite in"
                f" {dtype}; the file is damaged."
            )
        yield result.tobytes()


def _values(file: GGUFFile, target: Target) -> Iterator[npt.NDArray[np.float32]]:
    """The values of ``target``, a chunk of rows at a time."""
    if target.values is not None:
        yield _joined(file, target.source, target.values)
        return
    source, rows = target.source, _rows(file, target)
    step = max(1, CHUNK_ELEMENTS // source.shape[-1])
    for start in range(0, source.num_rows, step):
        found = _dequantised(file, source, rows[start : start + step])
        yield found - np.float32(target.offset) if target.offset else found


def _joined(file: GGUFFile, keys: GGUFTensor, values: GGUFTensor) -> npt.NDArray[np.float32]:
    """The rows of ``kv_b_proj`` from the tensors of ``TensorMapping.values``: of each head, those
    for K, then those for V."""
    k, v = (
        _dequantised(file, each, file.rows(each)).reshape(each.shape) for each in (keys, values)
    )
    return np.concatenate((k.swapaxes(1, 2), v), axis=1).reshape(-1, k.shape[1])


def _dequantised(
    file: GGUFFile, tensor: GGUFTensor, rows: npt.NDArray[np.uint8]
) -> npt.NDArray[np.float32]:
    try:
        with np.errstate(all="ignore"):
            found: npt.NDArray[np.float32] = gguf.dequantize(rows, tensor.kind)
            return found
    except NotImplementedError:
        raise CheckpointError(
            f"{file.path}: tensor {tensor.name!r} has type {tensor.kind.name}, which cannot be"
            " dequantised."
        ) from None


def _round_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round finite float32 values to bfloat16 bit patterns: to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype("<u2")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
