"""Lets the folder move in which Triton keeps what it compiles: a variant is found by where the
folder is, not by where it was filled."""

from __future__ import annotations

import json
import os

import triton
from triton.runtime.cache import FileCacheManager


class MovableFolder(FileCacheManager):  # type: ignore[misc]
    """Triton's own manager of files, which notes for each variant the whole paths of its files."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Name -> path of the files of a variant; None if one is missing."""
        note = self.get_file(f"__grp__{filename}")
        if note is None:
            return None
        try:
            with open(note) as file:
                names = json.load(file)["child_paths"]
        except (OSError, ValueError, KeyError):
            return None  # it was cut off, and is written again
        paths = {name: self.get_file(os.path.basename(path)) for name, path in names.items()}
        return None if None in paths.values() else paths


def let_folder_move() -> None:
    """Have Triton find what it has compiled in this way from now on."""
    triton.knobs.cache.manager_class = MovableFolder
