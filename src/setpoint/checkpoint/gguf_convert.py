"""Turns a GGUF file into a Hugging Face-style folder, once: config, safetensors, tokenizer, chat
template.

Quantised matrices are dequantised for every reader of such folders, and kept as they are next to
that (``core.model.BLOCKS_FILE``) for the engine. Works tensor by tensor with numpy, so that memory
stays at one tensor. The result is cached under the user's cache folder by what the file holds,
wherever it lies; a folder that is there is complete. It knows nothing of torch and of how the
weights will be used.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from setpoint.checkpoint import gguf_llama, gguf_tokenizer, safetensors_file
from setpoint.checkpoint.gguf_file import GGUFFile
from setpoint.core.errors import CheckpointError
from setpoint.core.model import BLOCK_BYTES, BLOCKS_FILE
from setpoint.core.progress import report
from setpoint.core.weightfiles import SINGLE_NAME

FORMAT = 3
"""Version of what this module writes; raising it converts every file anew."""

ARCHITECTURES = {"llama": gguf_llama}
"""GGUF's general.architecture -> the module that knows it."""

CHUNK_ELEMENTS = 1 << 22
"""Elements dequantised at a time: 16 MiB of float32, which keeps the working set in cache and the
peak low."""

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def converted_folder(path: Path, *, log: Callable[[str], None]) -> Path:
    """The Hugging Face-style folder of a GGUF file, converted now if it is not in the cache.

    Safe to call from several processes: one converts, the others wait for it. What earlier versions
    of this module made of files of this name is removed then: nothing uses it any more. Raises
    CheckpointError.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "setpoint" / "models"
    name = re.sub(r"[^\w.-]", "_", path.stem)
    folder = root / f"{name}-{_digest(path, root)[:16]}-v{FORMAT}"
    if folder.is_dir():
        return folder
    try:
        with GGUFFile(path) as file:
            root.mkdir(parents=True, exist_ok=True)
            with folder.with_suffix(folder.suffix + ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not folder.is_dir():
                    _convert_into(file, folder, log=log)
                    # Their locks stay: without a file in common two processes would not wait for
                    # each other.
                    for earlier in root.iterdir():
                        of_format = re.fullmatch(
                            rf"{re.escape(name)}-[0-9a-f]{{16}}-v(\d+)", earlier.name
                        )
                        if of_format and int(of_format[1]) < FORMAT:
                            log(
                                f"Removing {earlier}, which an earlier version made of a file of"
                                " this name."
                            )
                            shutil.rmtree(earlier, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"Cannot write the converted model under {root}: {error.strerror or error}. Set"
            " XDG_CACHE_HOME to a folder with enough space."
        ) from None
    return folder


def _convert_into(file: GGUFFile, folder: Path, *, log: Callable[[str], None]) -> None:
    """Build ``folder`` next to its place and rename it there, so that it is either absent or
    complete. The caller has its lock."""
    started = time.monotonic()
    log(f"Converting {file.path.name} once, to {folder} …")
    partial = folder.with_suffix(folder.suffix + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    partial.mkdir()
    try:
        _write_files(file, partial, log=log)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    log(f"Converted {file.path.name} in {time.monotonic() - started:.1f} s.")


def _digest(path: Path, root: Path) -> str:
    """SHA-256 of the file. It takes a second or two per GB, so that it is noted under ``root`` for
    as long as size and time stay."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            place = str(path.resolve())
            known = [place, status.st_size, status.st_mtime_ns]
            note = root / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:16]}.digest"
            with suppress(OSError, ValueError):
                *of, digest = json.loads(note.read_text())
                if of == known:
                    return str(digest)
            report(f"reading {path.name}, to know it again")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from None
    with suppress(
        OSError
    ):  # it is read again next time; a cache that cannot be written is told of where it is needed
        root.mkdir(parents=True, exist_ok=True)
        draft = note.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps([*known, digest]))
        draft.rename(note)
    return digest


def _write_files(file: GGUFFile, folder: Path, *, log: Callable[[str], None]) -> None:
    if (file.get("split.count", int) or 1) > 1:
        raise CheckpointError(
            f"{file.path} is one part of a split model. Merge the parts with llama.cpp's gguf-split"
            " --merge first."
        )
    name = file.require("general.architecture", str)
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise CheckpointError(
            f"{file.path}: GGUF architecture {name!r} is not supported (supported:"
            f" {', '.join(ARCHITECTURES)})."
        )
    config = architecture.read_config(file)
    targets = architecture.targets(file, config)
    tokens = gguf_tokenizer.read_tokens(file, config["vocab_size"])
    dtype = _dtype(targets)
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
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {key: value for key, value in generation.items() if value is not None},
    )
    gguf_tokenizer.write(
        file, tokens, folder, context_len=config["max_position_embeddings"], log=log
    )
    infos = [
        safetensors_file.TensorInfo(target.name, target.source.shape, DTYPES[dtype])
        for target in targets
    ]
    safetensors_file.write(folder / SINGLE_NAME, infos, _all_cast(file, targets, dtype))
    _write_blocks(
        file, [target for target in targets if target.source.kind.name in BLOCK_BYTES], folder
    )


def _all_cast(file: GGUFFile, targets: list[gguf_llama.Target], dtype: str) -> Iterator[bytes]:
    for number, target in enumerate(targets):
        report(f"converting {file.path.name}, {100 * number // len(targets)} %")
        yield from _cast(file, target, dtype)


def _write_blocks(file: GGUFFile, targets: list[gguf_llama.Target], folder: Path) -> None:
    """The raw rows of ``targets``, whose values were found finite when they were dequantised."""
    if not targets:
        return
    infos = []
    for target in targets:
        source = target.source
        shape = (source.num_rows, source.num_bytes // source.num_rows)
        infos.append(safetensors_file.TensorInfo(f"{target.name}.{source.kind.name}", shape, "U8"))
    safetensors_file.write(
        folder / BLOCKS_FILE, infos, (_rows(file, target).tobytes() for target in targets)
    )


def _rows(file: GGUFFile, target: gguf_llama.Target) -> npt.NDArray[np.uint8]:
    """Raw, in the new order: a row is self-contained in every ggml type, so rows can move before
    dequantisation."""
    rows = file.rows(target.source)
    return rows if target.row_order is None else rows[target.row_order]


def _dtype(targets: list[gguf_llama.Target]) -> str:
    """The dtype that loses nothing where one exists: that of the matrices if they share a 16- or
    32-bit float, else bfloat16.

    Norms are stored as F32 in every GGUF but were trained in the matrices' dtype, so they follow.
    Dequantised values have more bits than bfloat16 keeps; that error is small compared with the
    quantisation's own, and bfloat16 is what the models were made in.
    """
    kinds = {target.source.kind.name for target in targets if len(target.source.shape) > 1}
    return (
        {"F16": "float16", "F32": "float32"}.get(min(kinds), "bfloat16")
        if len(kinds) == 1
        else "bfloat16"
    )


def _cast(file: GGUFFile, target: gguf_llama.Target, dtype: str) -> Iterator[bytes]:
    """The bytes of ``target`` in ``dtype``, a chunk of rows at a time."""
    source, rows = target.source, _rows(file, target)
    step = max(1, CHUNK_ELEMENTS // source.shape[-1])
    for start in range(0, source.num_rows, step):
        try:
            with np.errstate(all="ignore"):
                values = gguf.dequantize(rows[start : start + step], source.kind)
                result = (
                    _round_bf16(values)
                    if dtype == "bfloat16"
                    else values.astype(f"<f{4 if dtype == 'float32' else 2}")
                )
        except NotImplementedError:
            raise CheckpointError(
                f"{file.path}: tensor {source.name!r} has type {source.kind.name}, which cannot be"
                " dequantised."
            ) from None
        if not np.isfinite(values if dtype == "bfloat16" else result).all():
            raise CheckpointError(
                f"{file.path}: tensor {source.name!r} has values that are not finite in {dtype};"
                " the file is damaged."
            )
        yield result.tobytes()


def _round_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Finite float32 to bfloat16 bit patterns, to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype("<u2")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
