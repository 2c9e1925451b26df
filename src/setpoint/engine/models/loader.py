"""Fills a model that was built on the meta device, from a safetensors folder or with dummy weights
drawn from a seed.

Works module by module: memory is allocated, filled and passed to the linear method before the next
module starts, so that at most one weight exists twice at any time. Every mismatch between
checkpoint and model is a CheckpointError that names the tensor.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn

from setpoint.core.errors import CheckpointError, ConfigError, OutOfMemoryError
from setpoint.core.progress import report
from setpoint.core.quantised import QuantisedMatrix
from setpoint.core.weightfiles import Identities, identities
from setpoint.engine.kernels.device import lack_of
from setpoint.engine.kernels.host_memory import give_back_heap
from setpoint.engine.kernels.pinned_ring import WeightCopies
from setpoint.engine.layers.linear import NoHead, TiedHead
from setpoint.engine.models.weight_sources import CheckpointFiles, Dummy, Part
from setpoint.engine.parallel.group import Span
from setpoint.engine.quant.linear_method import BlockMethod, GgufWeight, LinearMethod


def load_weights(
    model: nn.Module,
    folder: str,
    *,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device,
    method: LinearMethod,
    exact: LinearMethod,
    blocks: BlockMethod | None,
    seed: int,
    wrapped: bool = False,
    matrices: Sequence[QuantisedMatrix] = (),
    values: torch.dtype = torch.bfloat16,
    only: Container[nn.Module] | None = None,
) -> int:
    """Allocate and fill every parameter. Returns the size of the weights in bytes.

    load_format: "auto" or "safetensors" reads ``folder``; "dummy" draws each tensor from ``seed``
    and its own name: the same on all devices of a kind. wrapped: the folder holds a multimodal
    model, and ``model`` is its language model. matrices: those that it stores as codes and scales.
    exact: the method for layers that are never quantised (``is_exact``). blocks: method for weights
    that the folder also holds as blocks; None: they are loaded in ``dtype``. values: see
    ``CheckpointFiles``. only: the layers to fill, of a model that has been loaded from this folder;
    None: all. They are refused if a file is not the one that the model was loaded from."""
    if load_format not in ("auto", "safetensors", "dummy"):
        raise ConfigError(
            f"Unknown load format {load_format!r}; choose one of auto, safetensors, dummy."
        )
    copies = WeightCopies(device)
    with ExitStack() as stack:
        source: Dummy | CheckpointFiles = Dummy(seed)
        if load_format != "dummy":
            source = CheckpointFiles(
                Path(folder),
                stack,
                wrapped=wrapped,
                with_blocks=blocks is not None,
                fused_experts=getattr(model, "fused_experts", False),
                matrices=matrices,
                values=values,
                copies=copies,
            )
        if only is None:
            model.loaded_files, model.weight_notes = source.identities, source.notes
        else:
            _check_same(model, source.identities)
        modules = [each for each in model.named_modules() if only is None or each[1] in only]
        plan = {name: list(_parts(module, name, source.files)) for name, module in modules}
        if isinstance(source, CheckpointFiles) and only is None:
            _check_tensors(model, plan, source)
        num_bytes = 0
        with _lack_of_memory_told(device):
            for number, (name, module) in enumerate(modules):
                if number % (len(modules) // 20 + 1) == 0:
                    _report_and_trim(100 * number // len(modules))
                how = (exact, None) if getattr(module, "is_exact", False) else (method, blocks)
                num_bytes += _fill(module, plan[name], source, dtype, device, copies, *how)
        _check_same(model, identities(source.identities))
        return num_bytes


@contextmanager
def _lack_of_memory_told(device: torch.device) -> Iterator[None]:
    """Raise OutOfMemoryError where torch cannot allocate on the device."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"The weights do not fit into the memory of {device}: {lack_of(error, device).why}."
            " Free memory or use a smaller model; quantized weights (--quantization fp8) take half"
            " as much, and --tp-size divides them among GPUs."
        ) from None
    except RuntimeError as error:
        if "memory" in str(error):
            raise OutOfMemoryError(
                f"The weights do not fit into the memory of {device}: {error}"
            ) from None
        raise


def _report_and_trim(percent: int) -> None:
    """Report progress, and give back what was read for earlier modules: glibc before 2.38 reuses
    little of it, and with thousands of experts the heap would grow by half of the weights."""
    report(f"loading the weights, {percent} %")
    give_back_heap()


def _check_tensors(
    model: nn.Module, plan: Mapping[str, list[tuple[str, list[Part]]]], source: CheckpointFiles
) -> None:
    """Raise CheckpointError unless the source holds what the plan reads, and nothing else."""
    source.check(
        {part.name: part.shape for parts in plan.values() for _, of in parts for part in of},
        optional=_heads(model),
        unused=getattr(model, "unused", ()),
    )


def _check_same(model: nn.Module, files: Identities) -> None:
    """Raise CheckpointError unless the model was loaded from these files."""
    loaded: Identities = model.loaded_files
    for file in [*loaded, *files]:
        if loaded.get(file) != files.get(file):
            raise CheckpointError(
                f"{file} has changed since the weights were loaded from it; start the server again"
                " or load them again (/update_weights_from_disk)."
            )


def _heads(model: nn.Module) -> list[str]:
    """Names of the head weights that a checkpoint may hold although the model does not use them."""
    return [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, TiedHead | NoHead)
    ]


def _parts(
    module: nn.Module, path: str, stored: Container[str]
) -> Iterator[tuple[str, list[Part]]]:
    """(name, parts of checkpoint tensors that are stacked in it) for each of the module's own
    parameters. A checkpoint may also store the stack as one tensor."""
    stacked: Mapping[str, int] = getattr(module, "parts", {})
    held: list[Span] | None = getattr(module, "held", None)
    parent = path.rpartition(".")[0]
    for name, parameter in module.named_parameters(recurse=False):
        whole, row = f"{path}.{name}", tuple(parameter.shape[1:])
        columns: Span | None = getattr(module, "columns", None) if row else None
        if columns is not None:
            row = (module.in_features,)
        if held is None:
            size = parameter.shape[0]
            yield name, [Part(whole, 0, (size, *row), (0, size))]
            continue
        sizes = list(stacked.values()) or [module.num_rows]
        is_stored_whole = len(sizes) == 1 or whole in stored
        begin, first, parts = 0, 0, []
        for sibling, size, span in zip(stacked or ("",), sizes, held, strict=True):
            if is_stored_whole:
                rows = first + span[0], first + span[1]
                parts.append(Part(whole, begin, (sum(sizes), *row), rows, columns))
            else:
                stored = f"{parent}.{sibling}.{name}"
                parts.append(Part(stored, begin, (size, *row), span, columns))
            begin, first = begin + span[1] - span[0], first + size
        yield name, parts


def _fill(
    module: nn.Module,
    parameters: list[tuple[str, list[Part]]],
    source: Dummy | CheckpointFiles,
    dtype: torch.dtype,
    device: torch.device,
    copies: WeightCopies,
    method: LinearMethod,
    blocks: BlockMethod | None,
) -> int:
    if getattr(module, "is_elsewhere", False):
        return 0
    num_bytes, kept = 0, None
    for name, parts in parameters:
        if name == "weight" and blocks is not None and hasattr(module, "keep_blocks"):
            mixed = getattr(module, "mixes_blocks", False)
            kept = source.read_blocks(parts, blocks, mixed=mixed)
            if kept is not None:
                kept = [GgufWeight(each.kind, copies.send(each.rows)) for each in kept]
                continue
        wide = name in getattr(module, "wide", ())
        own = torch.promote_types(dtype, torch.float32) if wide else dtype
        memory = torch.empty(getattr(module, name).shape, dtype=own, device=device)
        for part in parts:
            source.read_into(part, memory[part.begin : part.begin + part.num_rows])
        setattr(module, name, nn.Parameter(memory, requires_grad=False))
        num_bytes += memory.nbytes
    if kept is not None:
        return module.keep_blocks(blocks, kept)
    finish = getattr(module, "finish_loading", None)
    return num_bytes if finish is None else finish(method)
