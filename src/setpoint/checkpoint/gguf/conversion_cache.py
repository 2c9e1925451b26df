"""The cache of converted GGUF files: which folders there are, whether they are whole, and the
folder for each path of a file. Reads only names, sizes and digests.

A conversion is named by the content of its file, ``NAME-DIGEST-vFORMAT``, where NAME is for people
only. In it is a folder of links for each path from which the file is served.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from setpoint.core.blocksfile import BLOCKS_FILE, digest_of_parts, link_to_part
from setpoint.core.content_digest import name_of_path, noted_digest, state_of
from setpoint.core.errors import CheckpointError
from setpoint.core.jsonfile import read_object

FORMAT = 8
"""Version of the conversions. Raise it to convert every file again."""

SIZES_FILE = "conversion.json"
"""Name of the file with the name and size of every other one that was written."""


def unwritable(root: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"Cannot write the converted model under {root}: {error.strerror or error}. Set"
        " XDG_CACHE_HOME to a folder with enough space."
    )


def known_digest(parts: Sequence[Path]) -> str | None:
    """The digest of a file in these parts, if it is known without reading them."""
    found = []
    for path in parts:
        with suppress(OSError), path.open("rb") as file:
            found.append(noted_digest(path, state_of(file)))
    known = [digest for digest in found if digest is not None]
    return digest_of_parts(known) if len(known) == len(parts) else None


def new_folder(root: Path, path: Path, digest: str) -> Path:
    """The folder that is to be made from a file with this digest."""
    return root / f"{_safe(path)}-{digest[:16]}-v{FORMAT}"


def _safe(path: Path) -> str:
    """The file's name without what a folder's name should not have."""
    return re.sub(r"[^\w.-]", "_", path.stem)


def found_folder(root: Path, digest: str) -> Path | None:
    """The folder that was made from a file with this digest, whatever its name was."""
    return next(iter(sorted(root.glob(f"*-{digest[:16]}-v{FORMAT}"))), None)


def sizes_of(folder: Path) -> dict[str, int]:
    return {each.name: each.stat().st_size for each in folder.iterdir() if each.is_file()}


def _recorded_sizes(folder: Path) -> dict[str, int]:
    """Name of a file -> its bytes, as written. Raises CheckpointError if that is unreadable."""
    return read_object(folder / SIZES_FILE)


def damage_of(folder: Path) -> str:
    """How the files of a conversion differ in number or size from those that were written; "" if
    they do not."""
    try:
        recorded = _recorded_sizes(folder)
    except CheckpointError:
        return f"{SIZES_FILE} is missing or unreadable"
    found = sizes_of(folder)
    for name, size in recorded.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != size:
            return f"{name} has {found[name]} bytes instead of {size}"
    return ""


def folder_for_path(parts: Sequence[Path], folder: Path) -> Path:
    """The folder that a server of this file reads: links to the files of the conversion, and to
    the file itself, or to its parts. Servers of two copies share a conversion and not a path. It is
    the conversion's own folder if nothing is read from the file any more."""
    if not (folder / BLOCKS_FILE).exists():
        return folder
    own = folder / f"of-{name_of_path(parts[0])}"
    links = {name: f"../{name}" for name in _recorded_sizes(folder)}
    links |= {link_to_part(part): str(path.resolve()) for part, path in enumerate(parts)}
    try:
        own.mkdir(exist_ok=True)
        for name, target in links.items():
            link = own / name
            if not link.is_symlink() or os.readlink(link) != target:
                draft = own / f"{name}.{os.getpid()}"
                draft.symlink_to(target)
                draft.replace(link)
    except OSError as error:
        raise unwritable(folder.parent, error) from None
    return own


def remove_earlier(root: Path, path: Path, digest: str, *, log: Callable[[str], None]) -> None:
    """Remove the folders that earlier formats made from files of this name or content."""
    same = rf"({re.escape(_safe(path))}-[0-9a-f]{{16}}|.*-{digest[:16]})-v(\d+)"
    for earlier in root.iterdir():
        of_format = re.fullmatch(same, earlier.name)
        if of_format and int(of_format[2]) < FORMAT:
            log(
                f"Removing {earlier}, which an earlier version of Setpoint made from a file of the"
                " same name."
            )
            shutil.rmtree(earlier, ignore_errors=True)
