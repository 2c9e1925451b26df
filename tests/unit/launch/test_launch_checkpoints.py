"""Which checkpoints a client may have loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_cases import write

from setpoint.checkpoint import source as sources
from setpoint.checkpoint.read_folder import read_description
from setpoint.checkpoint.source import ModelSource
from setpoint.checkpoint.spec import read_spec
from setpoint.config.options import Options
from setpoint.core.errors import RequestError
from setpoint.launch.parent.checkpoints import LaunchedCheckpoints
from setpoint_testing.tiny_models import write_tiny_llama


def checkpoints(folder: Path, allowed: Path | None) -> LaunchedCheckpoints:
    options = Options.of(
        model_path=str(folder), update_weights_folder=None if allowed is None else str(allowed)
    )
    source = ModelSource(folder, str(folder), "folder", False, read_description(folder))
    return LaunchedCheckpoints(options, source, read_spec(folder))


def refused(found: LaunchedCheckpoints, name: str, load_format: str | None = None) -> RequestError:
    with pytest.raises(RequestError) as error:
        found.find(name, load_format)
    return error.value


def test_the_served_model_may_always_be_read_again(tmp_path: Path) -> None:
    served = write_tiny_llama(tmp_path / "served")
    found = checkpoints(served, None).find(str(served), None)
    assert (found.folder, found.load_format) == (str(served), "auto")
    assert checkpoints(served, None).find(str(served), "dummy").load_format == "dummy"


def test_no_other_folder_without_permission(tmp_path: Path) -> None:
    served, other = (write_tiny_llama(tmp_path / name) for name in ("served", "other"))
    for name in (str(other), "owner/name", "", "/", str(tmp_path / "nowhere")):
        error = refused(checkpoints(served, None), name)
        assert error.status_code == 403
        assert "--update-weights-folder" in error.message


def test_only_folders_below_the_allowed_one(tmp_path: Path) -> None:
    served, allowed = write_tiny_llama(tmp_path / "served"), tmp_path / "allowed"
    write_tiny_llama(allowed / "new", seed=3)
    outside = write_tiny_llama(tmp_path / "allowed-too")
    (allowed / "link").symlink_to(outside)
    found = checkpoints(served, allowed)
    assert found.find(str(allowed / "new"), None).folder == str(allowed / "new")
    for name in (
        str(outside),
        str(allowed / "link"),
        str(allowed / ".." / "allowed-too"),
        "allowed/new",
        "/etc/passwd",
    ):
        assert refused(found, name).status_code == 403, name
    for name in (str(allowed / "nowhere"), str(allowed / "new" / "config.json"), str(allowed)):
        assert refused(found, name).status_code == 400, name
    assert "load_format" in refused(found, str(allowed / "new"), "gguf").message


def test_another_gguf_file_is_refused_with_one_reason(tmp_path: Path) -> None:
    served, allowed = write_tiny_llama(tmp_path / "served"), tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "b.gguf").write_bytes(b"GGUF")
    found = checkpoints(served, allowed)
    only = "Of GGUF files, only the one that the server was started with can be loaded again"
    for name in (str(allowed / "b.gguf"), str(allowed)):
        message = refused(found, name).message
        assert only in message
        assert "does not exist" not in message


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"intermediate_size": 96}, "intermediate_size"),
        ({"num_hidden_layers": 3}, "num_layers is 3 instead of 2"),
        ({"rope_theta": 5e5}, "rope_theta in config.json is 500000.0 instead of 10000.0"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps"),
        ({"tie_word_embeddings": True}, "tie_embeddings"),
    ],
)
def test_another_model_is_refused_by_what_differs(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    served = write_tiny_llama(tmp_path / "served")
    write_tiny_llama(tmp_path / "allowed" / "other", **changed)
    found = checkpoints(served, tmp_path / "allowed")
    assert words in refused(found, str(tmp_path / "allowed" / "other")).message


def test_what_changes_no_computation_may_differ(tmp_path: Path) -> None:
    served = write_tiny_llama(tmp_path / "served")
    write_tiny_llama(tmp_path / "allowed" / "new", torch_dtype="bfloat16", eos_token_id=3)
    found = checkpoints(served, tmp_path / "allowed")
    assert found.find(str(tmp_path / "allowed" / "new"), None).load_format == "auto"


def test_the_license_of_a_gguf_file_is_found_wherever_the_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: the default model, a GGUF file in a package, had none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write(tmp_path / "tiny.gguf", keys={"general.license": "apache-2.0"})
    monkeypatch.setattr(sources, "_package_file", lambda: path)
    monkeypatch.setattr(sources, "_cached_default", lambda *_: None)
    for model_path in (None, str(path)):
        source = sources.locate(model_path, log=lambda line: None)
        options = Options.of(**({} if model_path is None else {"model_path": model_path}))
        found = LaunchedCheckpoints(options, source, read_spec(source.folder))
        assert found.license() == "apache-2.0"
