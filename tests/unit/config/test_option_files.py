"""Options that name a file of text: what is no plain file, or is too large, is refused at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from setpoint.batch.entry import BatchError
from setpoint.batch.jsonl import open_input
from setpoint.bench import comparison, prompt_sets
from setpoint.bench.engines import quality
from setpoint.config.bench import DatasetOptions
from setpoint.config.commandline import parse
from setpoint.config.commands import SERVE
from setpoint.config.groups.tiers import TierOptions, storage_config
from setpoint.core.cache_scales import scales_in_file
from setpoint.core.errors import ConfigError
from setpoint.core.expert_placement import first_placements
from setpoint.frontend.text.template_source import find_chat_template

EXTRA = "--hicache-storage-backend-extra-config"


def read_extra(path: str) -> None:
    storage_config(TierOptions(hicache_storage_backend_extra_config=f"@{path}"))


def read_placements(path: str) -> None:
    first_placements(path, num_layers=1, num_experts=2, num_slots=2, num_ranks=1)


def read_scales(path: str) -> None:
    scales_in_file(path, num_layers=1, rank=0, num_ranks=1, model_type="llama")


def read_dataset(path: str) -> None:
    list(prompt_sets._read(DatasetOptions(dataset_name="custom", dataset_path=path)))


READERS: dict[str, tuple[int, Callable[[str], object]]] = {
    "--config": (1, lambda path: parse(SERVE, ["--config", path])),
    "--chat-template": (1, lambda path: find_chat_template("/", override=path)),
    EXTRA: (1, read_extra),
    "--init-expert-location": (64, read_placements),
    "--quantization-param-path": (1, read_scales),
    "--compare": (1024, lambda path: comparison._read(path, flag="--compare")),
    "--text-file": (1024, quality._texts),
    "--dataset-path": (4096, read_dataset),
}
"""Option -> the most MiB of its file, and what reads that."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("option", READERS)
def test_a_file_of_an_option_is_plain_and_of_limited_size(tmp_path: Path, option: str) -> None:
    """Red before: a pipe without a writer was waited for without an end, and a device filled the
    memory of a process that SIGTERM did not end."""
    most, read = READERS[option]
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    with large.open("wb") as file:
        file.truncate((most << 20) + 1)  # takes no room
    os.mkfifo(pipe)
    for path in (large, pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match=f"plain file of at most {most} MiB") as caught:
            read(str(path))
        assert str(caught.value).startswith((option, f"{option}: "))
        assert str(path) in str(caught.value)


def test_a_plain_file_behind_a_link_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{{ messages }}")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert find_chat_template("/", override=str(tmp_path / "link")) == "{{ messages }}"


@pytest.mark.timeout(60)
def test_a_batch_waits_for_no_pipe(tmp_path: Path) -> None:
    """Red before: it did, in silence."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BatchError, match="is not a regular file"):
        open_input(tmp_path / "pipe")
