"""What decides the bits that an engine computes: the version of Setpoint, the weights, the model's
numbers and the options of the data plane. The ranks of a model must agree about it before they
compute together, and cached keys and values depend on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import msgspec

from setpoint.config.groups.parallel import ParallelOptions
from setpoint.core.errors import SetpointError
from setpoint.core.expert_placement import FILE_MIB
from setpoint.core.identity import short_digest, sources_digest, weights_sample
from setpoint.core.operations import LoadWeights
from setpoint.core.plain_file import read_plain
from setpoint.core.version import __version__
from setpoint.core.weightfiles import Identities, identities, weight_files
from setpoint.engine.executor.build_runner import EngineConfig, about_cache_scales

OF_A_NODE = ("model_folder", "num_threads", "quantization_param_path", "seed", "spec")
"""Fields of EngineConfig that may differ: node 0 sends the seed, and the numbers of the spec and
the scales are compared."""
FLAGS = {
    "kv_dtype": "--kv-cache-dtype",
    "capture": "whether steps are captured",
    "graph_sizes": "the sizes of graphs",
    "invariant": "--enable-deterministic-inference",
}
"""Field -> its option, where the names differ."""


@dataclass(slots=True, frozen=True)
class ComputationIdentity:
    engine: EngineConfig
    parallel: ParallelOptions

    @property
    def folder(self) -> Path:
        """The folder of the weights."""
        return Path(self.engine.model_folder)

    @property
    def is_dummy(self) -> bool:
        """Whether the weights are drawn and not read."""
        load_format: str = self.engine.load_format
        return load_format == "dummy"

    def with_weights(self, operation: LoadWeights) -> ComputationIdentity:
        """The computation after other weights have been loaded."""
        folder, load_format = operation.folder, operation.load_format
        return replace(
            self, engine=replace(self.engine, model_folder=folder, load_format=load_format)
        )

    def noted_weights(self) -> Identities:
        """The state of the weights' files now. What is read from a GGUF file is guarded by its
        digest."""
        if self.is_dummy:
            return {}
        try:
            return identities(weight_files(self.folder))
        except (SetpointError, OSError):
            return {}  # who loads them says what is wrong

    def facts(self) -> dict[str, str]:
        """Name -> value, for people to read."""
        config, spec = self.engine, self.engine.spec
        options = {
            FLAGS.get(field.name) or f"--{field.name.replace('_', '-')}": getattr(
                config, field.name
            )
            for field in fields(config)
            if field.name not in OF_A_NODE
        }
        numbers = {f"the model's {name}": value for name, value in asdict(spec).items()}
        numbers["the model's config"] = short_digest(
            msgspec.json.encode(spec.config, order="sorted")
        )
        numbers["the model's quantised"] = short_digest(repr(spec.quantised).encode())
        if config.init_expert_location != "trivial":
            content = read_plain(config.init_expert_location, FILE_MIB)
            numbers["the file of --init-expert-location"] = short_digest(content)
        numbers["the scales of the KV cache"] = short_digest(about_cache_scales(config))
        values = {
            "the version of Setpoint": f"{__version__} (sources {sources_digest()})",
            "the digest of the weights": (
                "none (dummy weights)" if self.is_dummy else weights_sample(self.folder)
            ),
            "--tp-size": self.parallel.tp_size,
            "--nnodes": self.parallel.nnodes,
            **options,
            **numbers,
        }
        return {name: str(value) for name, value in values.items()}
