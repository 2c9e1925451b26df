"""What the ranks of one model must agree about before they compute together: the version of
Setpoint, the weights, the model's numbers and the options of the data plane."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import BinaryIO

import msgspec

from setpoint.core.blocksfile import read_blocks_table
from setpoint.core.version import PACKAGE, __version__
from setpoint.core.weightfiles import weight_files
from setpoint.launch.child.mapping import engine_config
from setpoint.launch.job import EngineJob

SAMPLES, SAMPLE_BYTES = 64, 4096
"""How many pieces of each file of weights are compared, besides its size and its table of
tensors."""
OF_A_NODE = ("model_folder", "num_threads", "seed", "spec")
"""Fields of EngineConfig that may differ: node 0 sends the seed, and the numbers of the spec are
compared one by one."""
FLAGS = {"kv_dtype": "--kv-cache-dtype", "capture": "whether steps are captured"}
"""Field -> its option, where the names differ."""
SOURCES = ("*.py", "*.cpp", "*.h")


def facts_of(job: EngineJob) -> dict[str, str]:
    """Name -> value, for people to read."""
    parallel, config = job.config.options.parallel, engine_config(job.config, job.spec, job.folder)
    options = {
        FLAGS.get(field.name) or f"--{field.name.replace('_', '-')}": getattr(config, field.name)
        for field in fields(config)
        if field.name not in OF_A_NODE
    }
    numbers = {f"the model's {name}": value for name, value in asdict(job.spec).items()}
    numbers["the model's config"] = _digest(msgspec.json.encode(job.spec.config, order="sorted"))
    numbers["the model's quantised"] = _digest(repr(job.spec.quantised).encode())
    if config.init_expert_location != "trivial":
        content = Path(config.init_expert_location).read_bytes()
        numbers["the file of --init-expert-location"] = _digest(content)
    values = {
        "the version of Setpoint": f"{__version__} (sources {sources_digest()})",
        "the digest of the weights": (
            "none (dummy weights)"
            if config.load_format == "dummy"
            else weights_digest(Path(job.folder))
        ),
        "--tp-size": parallel.tp_size,
        "--nnodes": parallel.nnodes,
        **options,
        **numbers,
    }
    return {name: str(value) for name, value in values.items()}


@cache
def sources_digest() -> str:
    """A digest of this package's sources, because two commits may have the same version."""
    whole = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in PACKAGE.rglob(pattern)):
        whole.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:12]


def weights_digest(folder: Path) -> str:
    """A digest of the names, shapes and sizes of all tensors and of samples of their content. It
    takes milliseconds, and it differs between checkpoints that were trained apart. Raises
    CheckpointError if files are missing."""
    whole = hashlib.sha256()
    for path in weight_files(folder):
        with path.open("rb") as file:
            size = path.stat().st_size
            table = int.from_bytes(file.read(8), "little")  # how a safetensors file begins
            whole.update(file.read(min(table, size)))
            _sample(file, file.tell(), size, whole)
    if (blocks := read_blocks_table(folder)) is not None:
        whole.update(msgspec.json.encode(blocks))
    return whole.hexdigest()[:12]


def _sample(file: BinaryIO, begin: int, size: int, whole: hashlib._Hash) -> None:
    whole.update(size.to_bytes(8, "little"))
    for number in range(SAMPLES):
        file.seek(begin + max(size - begin - SAMPLE_BYTES, 0) * number // (SAMPLES - 1))
        whole.update(file.read(SAMPLE_BYTES))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
