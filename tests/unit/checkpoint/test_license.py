"""The license of a model is read from its files."""

from __future__ import annotations

from pathlib import Path

from setpoint.checkpoint.license import MAX_BYTES, license_of


def test_a_license_file_is_read(tmp_path: Path) -> None:
    assert license_of(tmp_path) == license_of(tmp_path / "none") == ""
    (tmp_path / "LICENSE").write_text("Do as you like.\n")
    assert license_of(tmp_path) == "Do as you like.\n"
    (tmp_path / "LICENSE").write_bytes(b"x" * (MAX_BYTES + 1))
    assert license_of(tmp_path) == ""
    assert license_of(tmp_path / "LICENSE") == "", "no GGUF file"
