"""Linear layers on the C++ kernel (kernels/cpu/products/linear.cpp): one panel layout of the weight
serves one row and thousands. bf16 and fp32.

A row's result is bit for bit the same in any batch and on any number of threads, because every
output is one sum in the order of K; oneDNN would choose another order for another number of rows.
"""

from __future__ import annotations

import ctypes

import torch

from setpoint.engine.kernels.cpu.calls import LinearCall
from setpoint.engine.kernels.cpu.library import DTYPES, Kernels, load
from setpoint.engine.kernels.host_memory import in_huge_pages
from setpoint.engine.kernels.ops import GateActivation, KernelsUnavailable

PANEL = 32
"""Output columns in a panel (panels.h, kPanel)."""

GATES = {"silu_mul": 1, "gelu_tanh_mul": 2, "clamped_swiglu_mul": 3}
"""Operation of a gate -> its number in the C++ code (panels.h, Gate)."""


def gate_fields(gate: GateActivation | None) -> dict[str, float]:
    """The fields of a call that name its gate; None: it has none."""
    if gate is None:
        return {}
    alpha, limit = gate.arguments or (0.0, 0.0)
    return {"gate": GATES[gate.operation], "alpha": alpha, "limit": limit}


class PanelWeight:
    """A weight in panels that multiplies x. Implements ``quant.linear_method.PackedWeight``."""

    def __init__(
        self,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        kernels: Kernels,
        *,
        columns: int,
        k: int,
        dtype: torch.dtype,
        gate: GateActivation | None = None,
        blocks: int = 0,
        rounded: bool = False,
    ) -> None:
        """packed: the panels, made of words or, with ``blocks``, of blocks of that kind, which meet
        activations of 8 bits if ``rounded``. gate: see
        ``GatedMethod.pack_gated``; ``packed`` and ``bias`` are then interleaved by
        ``interleave``."""
        self.columns, self.k, self.dtype = columns, k, dtype
        self._panels = packed
        self._bias = bias
        self.kernels = kernels
        self.num_bytes = packed.nbytes + (0 if bias is None else bias.nbytes)
        self.call = LinearCall(
            weight=packed.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            columns=columns,
            k_words=k * dtype.itemsize // 4,
            out_row=columns,
            dtype=DTYPES[dtype],
            blocks=blocks,
            rounded=rounded,
            **gate_fields(gate),
        )
        self._call_address = ctypes.addressof(self.call)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((len(x), self.columns), dtype=self.dtype)
        self.multiply(x, out.data_ptr())
        return out

    def multiply(self, x: torch.Tensor, out: int) -> None:
        """Write the products to the memory at ``out``, in rows of ``call.out_row`` elements."""
        assert x.dtype == self.dtype
        assert x.shape[1] == self.k
        assert x.is_contiguous()
        call = self.call
        call.x = x.data_ptr()
        call.out = out
        call.rows = len(x)
        call.threads = torch.get_num_threads()
        self.kernels.linear(self._call_address)


def panels(weight: torch.Tensor, k_multiple: int = 1) -> torch.Tensor:
    """[N, K], with rows of whole 32-bit words -> [ceil(N / PANEL), K words, PANEL] int32 words,
    padded with zeros past N, and past K to a multiple of ``k_multiple`` words."""
    words = weight.contiguous().view(torch.int32)
    missing, missing_k = -len(words) % PANEL, -words.shape[1] % k_multiple
    if missing or missing_k:
        words = torch.nn.functional.pad(words, (0, missing_k, 0, missing))
    by_panel = words.view(-1, PANEL, words.shape[1]).transpose(1, 2)
    return in_huge_pages(tuple(by_panel.shape), torch.int32).copy_(by_panel)


def interleave(stacked: torch.Tensor, width: int) -> torch.Tensor:
    """[2F, ...], gate above up -> ``width`` rows of gate, ``width`` rows of up, and so on, padded
    with zeros to whole panels."""
    halves = stacked.view(2, -1, *stacked.shape[1:])
    missing = -halves.shape[1] % (PANEL // 2)
    if missing:
        halves = torch.cat((halves, halves.new_zeros((2, missing, *halves.shape[2:]))), dim=1)
    return halves.unflatten(1, (-1, width)).transpose(0, 1).flatten(0, 2).contiguous()


class PanelLinear:
    """Implements ``quant.linear_method.GatedMethod``."""

    copies = True

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.level = kernels.level

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PanelWeight:
        columns, k = weight.shape
        return PanelWeight(
            self._panels(weight), bias, self._kernels, columns=columns, k=k, dtype=weight.dtype
        )

    def pack_gated(
        self, weight: torch.Tensor, bias: torch.Tensor | None, gate: GateActivation
    ) -> PanelWeight:
        columns, k = weight.shape
        width = self._kernels.vector_columns
        packed, bias = (
            self._panels(interleave(weight, width)),
            None if bias is None else interleave(bias, width),
        )
        return PanelWeight(
            packed, bias, self._kernels, columns=columns // 2, k=k, dtype=weight.dtype, gate=gate
        )

    def _panels(self, weight: torch.Tensor) -> torch.Tensor:
        return panels(weight, self._kernels.k_multiple if weight.dtype == torch.bfloat16 else 1)


def create(dtype: torch.dtype, *, level: str | None = None) -> PanelLinear:
    """The method at the given instruction level (None: the best). Raises KernelsUnavailable with
    the reason if it cannot run."""
    if dtype not in DTYPES:
        raise KernelsUnavailable(f"the C++ kernels take bf16 and fp32, not {dtype}")
    return PanelLinear(load(level))
