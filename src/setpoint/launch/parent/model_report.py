"""What is known about a model before it is loaded: what it is, what it needs, and whether this
machine can serve it (``setpoint models``).

Reads small files and headers; loads, converts and downloads no weights. It asks the functions that
a start asks, so that both give the same answers. How fast the model would be is measured
(``bench.engines.model_pace``).
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path

from setpoint.checkpoint.folder.description import Description
from setpoint.checkpoint.gguf.split_files import parts_of
from setpoint.checkpoint.pooling import check_generates
from setpoint.checkpoint.source import DEFAULT_MODEL, locate
from setpoint.checkpoint.spec import EMBEDDING, EXPERTS, spec_of
from setpoint.config.environment import EnvSettings
from setpoint.config.groups.model import model_overrides
from setpoint.config.options import Options
from setpoint.config.pool import memory_model, resolve_pool
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.blocksfile import read_blocks_table
from setpoint.core.errors import OutOfMemoryError, SetpointError, UnsupportedModelError
from setpoint.core.model import ModelSpec, language_tensor
from setpoint.core.weightfiles import weight_files
from setpoint.launch.parent.configuration import asking_for, check_memory
from setpoint.planning.memory import MemoryModel, MemoryPlan
from setpoint.planning.pace import Stored

logger = logging.getLogger(__name__)

HEAD = "lm_head.weight"


@dataclass(slots=True, frozen=True)
class BlocksOfKind:
    """The matrices in one kind of block, in the files."""

    kind: str
    parameters: int
    num_bytes: int


@dataclass(slots=True, frozen=True)
class Memory:
    """What the model needs, and what this machine gives it."""

    available_bytes: int | None
    """None: the memory of the GPU is not known."""
    needed: MemoryPlan
    """The memory for ``requests`` requests of the whole context at the same time."""
    requests: int
    context_len: int
    kv_token_bytes: int
    """Bytes of a token's keys and values, if no layer has a window."""
    pool: MemoryPlan | None = None
    """What a server would take here; None if it would not start."""
    running: int = 0
    """Requests that may run at the same time in that pool."""
    engines: int = 1
    """A server with these options has so many engines; all other figures are of one of them."""


@dataclass(slots=True, frozen=True)
class Pace:
    """About how fast the model would be on this machine, which runs nothing else."""

    prompt_tokens: int
    first_token_s: float
    decode_tokens_per_s: float
    """The speed of one stream after such a prompt."""
    streams: int
    streams_tokens_per_s: float
    """The speed of so many streams together, each after such a prompt."""


@dataclass(slots=True)
class ModelReport:
    """Written by ``examine``, as far as it gets; ``pace`` by
    ``bench.engines.model_pace``."""

    model: str
    runs: bool = False
    reason: str = ""
    """Why it cannot be served here."""
    too_large: bool = False
    nearest: str = ""
    """The supported architecture whose name is the most like that of an unsupported one."""
    architecture: str = ""
    served_by: str = ""
    """"setpoint", or "transformers" for a model of that library."""
    parameters: int = 0
    active_parameters: int = 0
    """The parameters that a token uses."""
    context_len: int = 0
    """The longest that the model supports."""
    dtype: str = ""
    """The dtype of those weights in memory that are not quantised."""
    quantization: str = ""
    blocks: tuple[BlocksOfKind, ...] = ()
    dequantized_parameters: int = 0
    """The parameters that the folder stores as codes, and that are dequantised at load."""
    disk_bytes: int | None = None
    """None: the weights are not on this machine."""
    memory: Memory | None = None
    pace: Pace | None = None
    disturbed: bool = False
    """Other programs took a good part of the processor while the pace was measured."""
    pace_unknown: str = ""
    """Why there is no pace although the model can be served."""


@dataclass(slots=True, frozen=True)
class ModelExamination:
    """A report, and what a measurement of the pace needs; None if the model cannot be served."""

    report: ModelReport
    config: ResolvedConfig | None = None
    spec: ModelSpec | None = None
    stored: tuple[Stored, ...] = ()
    step_bytes: int = 0
    """Bytes of the weights that a step reads."""


@dataclass(slots=True)
class _DescribedError(Exception):
    """Ends ``locate`` before it downloads or converts; no error."""

    description: Description


@dataclass(slots=True, frozen=True)
class Found:
    description: Description
    folder: Path | None = None
    """None: there is no folder yet."""


def examine(options: Options, env: EnvSettings, given: Set[str]) -> ModelExamination:
    """The report on the model of these options. Whatever is wrong with it is in the report; raises
    ConfigError for options that suit no model."""
    model = options.model.model_path
    report = ModelReport(DEFAULT_MODEL if model is None else model)
    asking = asking_for(options, env, given)
    try:
        found = find(options)
        spec = spec_of(found.description, overrides=model_overrides(options.model))
        _describe(report, found.description, spec)
        if found.folder is not None and not options.model.is_embedding:
            check_generates(found.folder, spec, log=logger.warning)
        asked = asking(model=spec, found={})
        config = asked.resolve()
        from setpoint.engine.executor.support import model_code  # imports torch

        report.served_by = model_code(spec, config.options.model.model_impl)
        memory = memory_model(config, spec, model_impl=report.served_by)
        on_cpu = config.options.execution.device == "cpu"
        free = asked.hardware.available_bytes if on_cpu else asked.hardware.gpu_bytes
        _settle(report, config, memory, free)
        check_memory(asked, config, found.description)
        _plan(report, config, memory, free)
    except UnsupportedModelError as error:
        report.reason = str(error)
        report.architecture = report.architecture or error.architecture
        close = difflib.get_close_matches(error.architecture, error.supported, n=1)
        report.nearest = close[0] if close else ""
        return ModelExamination(report)
    except SetpointError as error:
        report.reason, report.too_large = str(error), isinstance(error, OutOfMemoryError)
        return ModelExamination(report)
    report.runs = True
    stored = stored_of(found.description, spec, memory, report.dtype)
    return ModelExamination(report, config, spec, stored, memory.weights_read())


def find(options: Options) -> Found:
    """The description of the model, and its folder if it has one already. Raises SetpointError."""

    def stop(description: Description) -> None:
        raise _DescribedError(description)

    model = options.model
    try:
        source = locate(
            model.model_path,
            revision=model.revision,
            load_format=model.load_format,
            log=logger.info,
            admit=stop,
        )
    except _DescribedError as known:
        return Found(known.description)
    return Found(source.description, source.folder)


def _describe(report: ModelReport, description: Description, spec: ModelSpec) -> None:
    report.architecture = spec.wrapper or spec.architecture
    report.parameters = report.active_parameters = spec.num_parameters
    if mixture := spec.mixture:
        experts = len(mixture.layers) * mixture.expert_parameters(spec.hidden_size)
        unused = experts - experts * mixture.num_chosen // mixture.num_experts
        report.active_parameters -= unused
    report.context_len = spec.context_len
    report.dtype = spec.dtype
    report.blocks = _blocks(description)
    kept = {tensor.name.rpartition(".")[0] for tensor in description.blocks}
    report.dequantized_parameters = sum(
        math.prod(each.shape) for each in description.matrices if each.name not in kept
    )
    if spec.blocks and not description.tensors:
        planned = spec.blocks
        report.blocks = tuple(
            BlocksOfKind(kind, planned.num_parameters, planned.num_bytes) for kind in planned.kinds
        )
    report.disk_bytes = _on_disk(report.model, description)


def _settle(
    report: ModelReport, config: ResolvedConfig, memory: MemoryModel, free: int | None
) -> None:
    """Write what the options make of the model."""
    report.dtype = config.options.model.dtype
    report.quantization = config.options.model.quantization or ""
    requests = config.options.scheduling.max_running_requests or 1
    report.memory = Memory(
        available_bytes=free,
        needed=memory.needed(requests),
        requests=requests,
        context_len=config.context_len,
        kv_token_bytes=memory.spec.kv_bytes_per_token(config.kv_element_bytes),
        engines=config.options.parallel.dp_size,
    )


def _plan(
    report: ModelReport, config: ResolvedConfig, memory: MemoryModel, free: int | None
) -> None:
    """Write the pool that a server would have. Raises OutOfMemoryError if it would have none."""
    if free is None:
        return
    plan = memory.plan(free)
    pool = resolve_pool(config, plan.pool_tokens)
    seen = report.memory
    assert seen is not None, "_settle comes before"
    report.memory = replace(seen, pool=plan, running=pool.max_running_requests)


def _blocks(description: Description) -> tuple[BlocksOfKind, ...]:
    """The kinds of blocks, the one with the most bytes first."""
    parameters: dict[str, int] = {}
    num_bytes: dict[str, int] = {}
    sizes = {tensor.name: tensor.num_elements for tensor in description.tensors}
    for tensor in description.blocks:
        name, _, kind = tensor.name.rpartition(".")
        parameters[kind] = parameters.get(kind, 0) + sizes.get(name, 0)
        num_bytes[kind] = num_bytes.get(kind, 0) + tensor.num_bytes
    kinds = sorted(num_bytes, key=lambda kind: -num_bytes[kind])
    return tuple(BlocksOfKind(kind, parameters[kind], num_bytes[kind]) for kind in kinds)


def _on_disk(model: str, description: Description) -> int | None:
    """Bytes of the weights' files; None if they are not here."""
    named, path = Path(model).expanduser(), description.path
    if named.is_file() or path.suffix != ".json":
        files = parts_of(named if named.is_file() else path)
    else:
        folder = path.parent
        table = read_blocks_table(folder)
        links = [folder / link for link in table.links] if table else []
        files = [*weight_files(folder, complete=False), *links]
    return sum(each.stat().st_size for each in files if each.exists()) or None


def stored_of(
    description: Description, spec: ModelSpec, memory: MemoryModel, dtype: str
) -> tuple[Stored, ...]:
    """The matrices that a step multiplies by, by the kind in which they are held. dtype: that of
    the weights that are not quantised."""
    plain = {"w8a8_int8": "int8", "fp8": "FP8"}.get(memory.quantization or "", dtype)
    if not description.tensors:
        head = spec.vocab_size * spec.hidden_size
        mixture, experts = spec.mixture, 0
        if mixture is not None:
            experts = len(mixture.layers) * mixture.expert_parameters(spec.hidden_size)
        tables = head if spec.tie_embeddings else 2 * head
        layers = spec.num_parameters - tables - experts
        if memory.blocks_kept and spec.blocks:
            return Stored(spec.blocks.kinds[0], layers, experts), Stored(plain, 0, 0, head)
        return (Stored(plain, layers, experts, head),)
    kinds = {}
    if memory.blocks_kept:
        kinds = dict(each.name.rpartition(".")[::2] for each in description.blocks)
    found: dict[str, Stored] = {}
    for tensor in description.tensors:
        name = language_tensor(tensor.name) if spec.wrapper else tensor.name
        if name is None or len(tensor.shape) < 2 or (spec.tie_embeddings and name == HEAD):
            continue
        count, kind = tensor.num_elements, kinds.get(tensor.name, plain)
        old = found.get(kind, Stored(kind))
        part = "experts" if EXPERTS in name else "layers"
        if name == HEAD or (name == EMBEDDING and spec.tie_embeddings):
            part = "head"
        elif name == EMBEDDING:
            continue  # a step looks up some of its rows
        found[kind] = replace(old, **{part: getattr(old, part) + count})
    return tuple(found.values())
