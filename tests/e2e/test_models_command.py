"""``setpoint models`` on tiny models: what it says, and the exit code; it writes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from _pytest.capture import CaptureResult
from gguf.constants import GGMLQuantizationType

from setpoint import cli
from setpoint.checkpoint.source import DEFAULT_MODEL
from setpoint.core.content_digest import cache_folder
from setpoint_testing import tiny_gguf
from setpoint_testing.byte_tokenizer import write_byte_tokenizer
from setpoint_testing.hub import Hub
from setpoint_testing.quantised_folders import quantise
from setpoint_testing.tiny_models import write_tiny_llama

MODEL = tiny_gguf.TinyLlama()


def in_own_process(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "setpoint.cli", "models", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"COLUMNS": "100"} | environ,
    )
    assert "Traceback" not in done.stderr
    return done


@dataclass
class Command:
    """``setpoint models`` in the test's process: a process of its own imports torch for seconds."""

    capture: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str | Path, code: int) -> CaptureResult[str]:
        found = cli.main(["models", *map(str, arguments)])
        said = self.capture.readouterr()
        assert found == code, said
        return said

    def in_json(self, *arguments: str | Path, code: int) -> list[dict[str, Any]]:
        answer = json.loads(self(*arguments, "--json", code=code).out)
        assert answer["machine"]["num_cores"] >= 1
        return list(answer["models"])


@pytest.fixture
def models(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("COLUMNS", "100")
    return Command(capsys)


def lines(text: str) -> dict[str, str]:
    """Label -> the first line of its paragraph."""
    found = {}
    for line in text.splitlines()[1:]:
        label, _, value = line.strip().partition("  ")
        found[label] = value.strip()
    return found


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    tensors = tiny_gguf.gguf_tensors(MODEL, MODEL.weights())
    kind = GGMLQuantizationType.Q8_0
    return tiny_gguf.write(tmp_path / "tiny.gguf", tensors, tiny_gguf.metadata(MODEL), kind=kind)


def large_file(folder: Path) -> Path:
    """A GGUF file with a whole header and a hole in place of the weights, too large for this
    machine."""
    model = tiny_gguf.TinyLlama(
        num_layers=80 * (psutil.virtual_memory().total // (100 << 30) + 1),
        hidden_size=8192,
        intermediate_size=28_672,
        num_heads=64,
        num_kv_heads=8,
    )
    return tiny_gguf.write_header(folder / "large.gguf", model)


@pytest.mark.full
def test_the_default_model() -> None:
    done = in_own_process()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(DEFAULT_MODEL)
    found = lines(done.stdout)
    assert found["runs here"] == "yes"
    assert found["architecture"].startswith("LlamaForCausalLM, up to 8,192 tokens")
    assert found["parameters"] == "135 million"
    assert "for a request of 8,192 tokens" in found["memory"]
    assert "tokens in" in found["KV pool here"]
    assert found["speed"].startswith(("about ", "unknown: "))


def test_a_gguf_file_is_not_converted(models: Command, gguf_file: Path) -> None:
    path = gguf_file.rename(gguf_file.with_name(f"{uuid4()}.gguf"))
    arguments = (path, "--context-length", "64", "--max-running-requests", "4")
    (found,) = models.in_json(*arguments, code=0)
    assert not list(cache_folder().glob(f"*{path.stem}*"))
    assert found["runs"]
    assert found["disk_bytes"] == path.stat().st_size
    (kind,) = found["blocks"]
    assert kind["kind"] == "Q8_0"
    memory = found["memory"]
    assert (memory["requests"], memory["context_len"]) == (4, 64)
    assert memory["needed"]["pool_tokens"] == 4 * 64
    pace = found["pace"]
    assert (pace is None) == bool(found["pace_unknown"])
    if pace is not None:
        assert (pace["prompt_tokens"], pace["streams"]) == (32, 4)
        assert all(value > 0 for value in pace.values())


def test_a_start_and_this_command_agree_on_an_option_that_cannot_be_honoured(
    models: Command, gguf_file: Path
) -> None:
    (found,) = models.in_json(gguf_file, "--tp-size", "3", code=1)
    assert "tp-size" in found["reason"]
    refused = models(gguf_file, "--page-size", "0", code=2)
    assert "--page-size must be at least 1" in refused.err
    refused = models(gguf_file, "--model-path", gguf_file, code=2)
    assert "not by both" in refused.err


@pytest.mark.full
def test_a_folder_whose_codes_are_dequantised_at_load_is_said(
    models: Command, tmp_path: Path
) -> None:
    """Red before: "bfloat16", as of a folder that is not quantised."""
    model = write_tiny_llama(tmp_path / "model", hidden_size=64, intermediate_size=128)
    write_byte_tokenizer(model)
    for form, words in (("nf4", "in codes that are dequantized to bfloat16"), ("awq", "in INT4Z")):
        quantised, _ = quantise(model, tmp_path / form, form)
        shown = " ".join(models(quantised, code=0).out.split())
        assert words in shown
        assert ("dequantized" in shown) == (form == "nf4")


@pytest.mark.full
def test_several_of_which_some_cannot_be_served(
    models: Command, gguf_file: Path, tmp_path: Path
) -> None:
    unknown = tmp_path / "unknown"
    write_tiny_llama(unknown, architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next")
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(gguf_file.read_bytes()[:-1000])
    keys = tiny_gguf.metadata(MODEL) | {"general.type": "adapter"}
    adapter = tiny_gguf.write(tmp_path / "adapter.gguf", {}, keys)
    foreign = tiny_gguf.write(tmp_path / "foreign.gguf", {}, {}, arch="qwen35")
    names = (gguf_file, unknown, large_file(tmp_path), damaged, adapter, foreign, "llama3:8b")
    missing = tmp_path / "missing"
    found = models.in_json(*names, missing, code=1)
    assert [each["runs"] for each in found] == [True] + [False] * 7
    _, other, large, cut, part, strange, ollama, nothing = found
    assert other["architecture"] == "Qwen3NextForCausalLM"
    assert other["nearest"] == "Qwen3ForCausalLM"
    assert large["too_large"]
    assert large["memory"]["pool"] is None
    assert "What would fit here: " in large["reason"]
    assert "is truncated" in cut["reason"]
    assert "a LoRA adapter" in part["reason"]
    assert (strange["architecture"], strange["nearest"]) == ("qwen35", "qwen3")
    assert "a name of Ollama's library" in ollama["reason"]
    assert "no such folder or file" in nothing["reason"]
    assert all(each["pace"] is None for each in found[1:])


def test_the_table_of_several(models: Command, gguf_file: Path, tmp_path: Path) -> None:
    done = models(gguf_file, large_file(tmp_path), "llama3:8b", code=1)
    head, one, two, three, *rest = done.out.splitlines()
    assert head.split() == ["model", "parameters", "precision", "needs", "about", "here"]
    assert one.split()[0] == "tiny.gguf"
    assert one.split()[-1] == "yes"
    assert two.rstrip().endswith("too large")
    assert three.split() == ["llama3:8b", "no"]
    assert "What would fit here: " in " ".join(rest)
    assert max(map(len, done.out.splitlines())) <= 100


@pytest.mark.full
def test_the_table_names_models_as_they_were_given_unless_a_path_is_long(
    models: Command, gguf_file: Path, tmp_path: Path
) -> None:
    """Red before: "nope" of some/nope, and the same name twice of two folders; "Got:" in the reason."""
    environ = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub")}
    out = in_own_process(str(gguf_file), "some/nope", **environ).stdout
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["tiny.gguf", "some/nope"]
    assert "Cannot get some/nope from the hub (" in out
    assert "Got:" not in out
    first, second = tmp_path / "a" / "same", tmp_path / "b" / "same"
    for folder in (first, second):
        write_tiny_llama(folder)
    done = models(f"{first}/", f"{second}/", code=0)
    assert "a/same" in done.out
    assert "b/same" in done.out
    assert models(f"{first}/", gguf_file, code=0).out.splitlines()[1].split()[0] == "same"


def test_the_table_says_what_its_needs_are_of(models: Command, gguf_file: Path) -> None:
    """Red before: the advice to set the option that was set."""
    options = ("--context-length", "128", "--max-running-requests", "3", "--dp-size", "2")
    done = " ".join(models(gguf_file, gguf_file, *options, code=0).out.split())
    assert '"needs" is the memory of 3 requests of 128 tokens for each of 2 engines.' in done
    assert "--context-length" not in done


def test_figures_of_one_of_several_engines_say_so(models: Command, gguf_file: Path) -> None:
    """Red before: "tokens in …" of the KV pool without whether that is for each engine."""
    found = lines(models(gguf_file, "--dp-size", "2", code=0).out)
    for label in ("memory", "free memory", "KV pool here"):
        assert "each of 2 engines" in found[label], found[label]
    assert "engines" not in models(gguf_file, code=0).out
    (report,) = models.in_json(gguf_file, "--dp-size", "2", code=0)
    assert report["memory"]["engines"] == 2


PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_example_of_the_page_is_what_the_command_says(models: Command) -> None:
    """Red before: "memory 661.85 MiB". Free memory and speed are those of the machine, and a start
    adds small files on its disk."""
    shown = (
        PAGE.read_text(encoding="utf-8").partition("    HuggingFaceTB/")[2].partition("\n\n*")[0]
    )
    of_page = lines(shown)
    printed = lines(models("--num-threads", "1", code=0).out)
    for label in ("runs here", "architecture", "parameters", "precision", "memory"):
        assert of_page[label] == printed[label]


def test_names_send_nothing_to_the_terminal(models: Command, tmp_path: Path) -> None:
    """Red before: control sequences in a file's name, and its markup in the table."""
    one, two = tmp_path / "a\x1b[31m\n.gguf", tmp_path / "[red]b.gguf"
    for path in (one, two):
        path.write_bytes(b"GGUF")
    for names in ((one,), (one, two)):
        done = models(*names, code=1)
        assert r"a\x1b[31m\n.gguf" in done.out
        assert all(char.isprintable() for char in done.out.replace("\n", ""))
    assert done.out.splitlines()[2].split() == ["[red]b.gguf", "no"]
    assert [each["model"] for each in models.in_json(one, "", code=1)] == [str(one), ""]
    refused = subprocess.run(
        [sys.executable, "-m", "setpoint.cli", "serve", "--model-path", one],
        capture_output=True,
        text=True,
    )
    assert refused.stderr.startswith("setpoint: error: ")
    assert "\x1b" not in refused.stderr


@pytest.mark.full
def test_a_context_for_which_the_memory_has_no_room_is_said(
    models: Command, gguf_file: Path
) -> None:
    """Red before: "yes", beside a memory that this machine does not have."""
    words = "the memory has room for 64 tokens, not for a request of 256"
    done = models(gguf_file, "--max-total-tokens", "64", code=0)
    assert f"yes, but {words}" in " ".join(done.out.split())
    done = models(gguf_file, gguf_file, "--max-total-tokens", "64", code=0)
    assert f"runs here, but {words}." in " ".join(done.out.split())
    assert '"needs" is the memory of a request of the whole context' in done.out


def test_a_device_that_is_not_there_is_refused() -> None:
    """Red before: "runs here: yes", and a start refused it."""
    refused = in_own_process("--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert refused.returncode == 2
    assert "--device cuda was asked for, but CUDA_VISIBLE_DEVICES hides" in refused.stderr


@pytest.mark.full
def test_a_reader_that_leaves_is_no_error(gguf_file: Path) -> None:
    """Red before: a traceback."""
    arguments = [sys.executable, "-u", "-m", "setpoint.cli", "models", str(gguf_file)]
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as closed:
        done = subprocess.run(arguments, stdout=closed, stderr=subprocess.PIPE, timeout=240)
    assert b"Traceback" not in done.stderr
    assert done.returncode == 0


@pytest.mark.full
def test_of_a_model_of_the_hub_only_small_files_are_read(tiny_model: Path, tmp_path: Path) -> None:
    files: dict[str, bytes | int] = {file.name: file.read_bytes() for file in tiny_model.iterdir()}
    with Hub("owner/tiny", files).running() as hub:
        home = str(tmp_path / "hub")
        done = in_own_process("owner/tiny", "--json", HF_ENDPOINT=hub.url, HF_HOME=home)
        assert done.returncode == 0, done.stdout + done.stderr
        (found,) = json.loads(done.stdout)["models"]
    assert found["runs"]
    assert found["disk_bytes"] is None
    assert found["parameters"] > 0
    assert "model.safetensors" not in hub.fetched()
