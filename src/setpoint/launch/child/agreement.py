"""What the ranks of one model must agree about before they compute together: the version of
Setpoint, the weights, the model's numbers and the options of the data plane."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

import msgspec

from setpoint.core.identity import short_digest, sources_digest, weights_sample
from setpoint.core.version import __version__
from setpoint.launch.child.mapping import engine_config
from setpoint.launch.job import EngineJob

OF_A_NODE = ("model_folder", "num_threads", "seed", "spec")
"""Fields of EngineConfig that may differ: node 0 sends the seed, and the numbers of the spec are
compared one by one."""
FLAGS = {"kv_dtype": "--kv-cache-dtype", "capture": "whether steps are captured"}
"""Field -> its option, where the names differ."""


def facts_of(job: EngineJob) -> dict[str, str]:
    """Name -> value, for people to read."""
    parallel, config = job.config.options.parallel, engine_config(job.config, job.spec, job.folder)
    options = {
        FLAGS.get(field.name) or f"--{field.name.replace('_', '-')}": getattr(config, field.name)
        for field in fields(config)
        if field.name not in OF_A_NODE
    }
    numbers = {f"the model's {name}": value for name, value in asdict(job.spec).items()}
    numbers["the model's config"] = short_digest(
        msgspec.json.encode(job.spec.config, order="sorted")
    )
    numbers["the model's quantised"] = short_digest(repr(job.spec.quantised).encode())
    if config.init_expert_location != "trivial":
        content = Path(config.init_expert_location).read_bytes()
        numbers["the file of --init-expert-location"] = short_digest(content)
    values = {
        "the version of Setpoint": f"{__version__} (sources {sources_digest()})",
        "the digest of the weights": (
            "none (dummy weights)"
            if config.load_format == "dummy"
            else weights_sample(Path(job.folder))
        ),
        "--tp-size": parallel.tp_size,
        "--nnodes": parallel.nnodes,
        **options,
        **numbers,
    }
    return {name: str(value) for name, value in values.items()}
