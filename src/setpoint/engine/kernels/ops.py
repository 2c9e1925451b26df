"""The operations that a layer needs besides matrix products and attention, as one protocol.

``kernels.ref`` defines every result; another implementation must agree with it over the shapes of
the kernel tests. Attention and linear layers have interfaces of their own
(``attention.attention_backend``, ``quant.linear_method``) because they are chosen independently.
Knows nothing of models, batches or slots.

Shapes: T tokens, H query heads, Hkv key/value heads, D head dimension. *Rows of q, k and v are
strided*: they are views into one [T, (H + 2 Hkv) D] projection, contiguous over the last two
dimensions only. Arithmetic is done in fp32 (float64 for float64 input) and rounded once on output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from setpoint.engine.kernels.device_sampling import SamplingKernels

SCORINGS = {"softmax": 0, "softmax_of_chosen": 1, "sigmoid": 2}
"""Name of a scoring function -> its number in the C++ code (calls.h, Scoring)."""


class KernelsUnavailable(Exception):
    """Raised by the factory of an implementation that cannot run here; the message is the reason,
    for the log."""


@dataclass(slots=True, frozen=True)
class GateActivation:
    """What a gated MLP makes of the products with gate and up."""

    operation: str
    """An operation of ``Ops``, called as operation(gate_up, *arguments)."""
    arguments: tuple[float, ...] = ()


SILU, GELU_TANH = GateActivation("silu_mul"), GateActivation("gelu_tanh_mul")


@dataclass(slots=True, frozen=True)
class Routing:
    """How the logits of a router choose the experts of a token and weigh them. The experts with the
    largest scores are chosen, the largest first, equal ones by rising id."""

    num_chosen: int
    scoring: str = "softmax"
    """A key of SCORINGS. "softmax": scores and weights are the softmax over all experts
    (Mixtral, Qwen, OLMoE). "softmax_of_chosen": scores are the logits, weights the softmax over the
    chosen ones (gpt-oss). "sigmoid": scores and weights are the sigmoids of the logits
    (DeepSeek-V3). All are computed in at least fp32."""
    normalise: bool = False
    """The weights of a token are divided by their sum."""
    scaling: float = 1.0
    """Factor on the weights after that."""
    num_groups: int = 1
    """The experts are this many groups of neighbours, of which a token may choose from
    ``num_open`` only: those with the largest sums of their ``num_best`` largest scores."""
    num_open: int = 1
    num_best: int = 1

    def __post_init__(self) -> None:
        assert self.scoring in SCORINGS


class Ops(Protocol):
    """Contract: inputs stay unchanged unless stated; outputs may reuse inputs that are said to be
    overwritten."""

    @property
    def sampling(self) -> SamplingKernels | None:
        """The kernels that sample on a device; None: torch does it (``sampling.sampler``)."""
        ...

    def place_tokens(
        self,
        slots: torch.Tensor,
        cu_q: torch.Tensor,
        kv_lens: torch.Tensor,
        known: torch.Tensor,
        page_table: torch.Tensor,
        page_size: int,
        num_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the ids [T] int32, positions [T] int64 and kv_index [T] int64 of the step's T =
        num_tokens tokens.

        slots, kv_lens [n] and cu_q [n + 1], int32, are those of ``AttentionBatch``: row i owns the
        tokens [cu_q[i], cu_q[i + 1]), the last of them at position kv_lens[i] - 1. known
        [num_slots, context] and page_table [num_slots, W], int32, hold the ids and pages of each
        slot. In a captured graph there may be tokens from cu_q[n] on, which are no row's: their
        ids are 0, their positions -1, and their indices 0 (the dummy page).
        """
        ...

    def best_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [S, V] -> index of each row's first maximum, [S] int64; -1 if the maximum is not
        finite or the row has a NaN."""
        ...

    def top_tokens(self, logits: torch.Tensor, count: int) -> torch.Tensor:
        """logits [S, V] -> indices of the ``count`` <= V largest of each row, [S, count] int64: the
        largest first, equal ones by rising index. So the first is that of ``best_tokens``, and the
        result for a smaller count is the beginning of that for a larger one. For a row with a NaN,
        the indices are distinct but arbitrary."""
        ...

    def log_sum_exp(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [R, V] in fp32 or float64 -> the logarithms of their sums of exponentials, [R, 1].
        A row's bits do not depend on the others. Rows of minus infinity give minus infinity."""
        ...

    def mask_tokens(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
        """Set logits [S, V] to -inf in place where a bit of words [R, >= V / 32] int32 is 0. Bit v
        of words[i], counted from the lowest bit of its first word, stands for token v of row
        rows[i]; rows [R] int64."""
        ...

    def soft_cap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """logits [S, V], overwritten -> cap · tanh(logits / cap)."""
        ...

    def embedding(self, ids: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
        """ids [T] int32, weight [V, C] -> weight[ids] · scale, [T, C]. ``scale`` is first rounded
        to fp32 and then to weight's dtype."""
        ...

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> torch.Tensor:
        """x [T, C] or [T, H, C], weight [C] -> x / sqrt(mean(x²) + eps) · (weight + offset) over
        each C, contiguous, in x's dtype.

        Token rows of x may be strided.
        """
        ...

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, C] -> (rms_norm(x + residual), x + residual). The sum is rounded to the
        dtype before it is normalised. x and residual may be overwritten.
        """
        ...

    def rope_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        kv_index: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        """Rotate q and k, write the rotated k and v to the cache, return the rotated q [T, H, D].

        q [T, H, D], k and v [T, Hkv, D]; q and k may be overwritten. cos_sin [max positions, R]
        (fp32; float64 for a float64 model), R <= D even: first R/2 columns cos, last R/2 sin. The
        rotation pairs dimension i with i + R/2 (Hugging Face's layout); dimensions from R on stay.
        positions [T] int64; kv_index [T] int64 = page · page_size + offset; caches [num_pages + 1,
        page_size, Hkv, D], whose dtype may differ from q's. Caches in fp8 (1 byte) get k / k_scale
        and v / v_scale, quotients in fp32, in which values beyond the largest one of the type,
        infinity included, become the largest one. Other caches ignore the scales.
        """
        ...

    def rope_and_store_latent(
        self,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        kv_index: torch.Tensor,
        scale: float = 1.0,
        *,
        interleaved: bool,
    ) -> torch.Tensor:
        """The same for latent attention (``layers.attention.LatentAttention``): rotate q_rope and
        k_rope, write [latent, rotated k_rope] to the cache, return [q_latent, rotated q_rope], [T,
        H, R + P].

        q_latent [T, H, R] and latent [T, R], contiguous; q_rope [T, H, P] and k_rope [T, P],
        strided but for the last dimension; cos_sin [max positions, P]; cache [num_pages + 1,
        page_size, 1, R + P]. A cache in fp8 gets all of them divided by ``scale``. interleaved:
        the rotation pairs the dimensions 2 i and 2 i + 1, which become i and i + P/2 of the result.
        """
        ...

    def route(
        self, logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [T, E], correction [E] in at least fp32, which is added to the scores for the
        choice alone, of groups and of experts -> (ids [T, num_chosen] int32, weights [T,
        num_chosen], fp32 or, for float64, float64). The weights of a row with a NaN are NaN, and
        its ids are valid."""
        ...

    def place_experts(
        self,
        ids: torch.Tensor,
        load: torch.Tensor,
        positions: torch.Tensor | None,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """ids [T, k] int32 -> the slots that hold these experts, [T, k] int32, and one is added to
        load [slots] int64 for each. Row e of places [E, W] int32 has the number n of the slots of
        expert e and then these slots, of which a token at the position p (positions [T] int64)
        takes the one at p mod n. Tokens at position -1 are not counted. Without places, the slot of
        an expert has its number, the result is ids, and positions may be None: all are counted."""
        ...

    def combine(
        self,
        parts: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """parts [T · k, C], those of a token side by side, and weights [T, k] fp32 -> the sum of
        weights · parts of each token, [T, C], summed in the order of k; then ``shared`` [T, C] is
        added, with ``gate`` [T, 1] times its sigmoid."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 F] -> silu(gate) · up, [T, F], with gate the first F columns."""
        ...

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Like ``silu_mul``, with the tanh approximation of GELU: g / 2 · (1 + tanh(√(2 / π) · (g +
        0.044715 g³)))."""
        ...

    def clamped_swiglu_mul(self, gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        """Like ``silu_mul``: g · sigmoid(alpha · g) · (u + 1), with g = min(gate, limit) and u = up
        within ±limit (gpt-oss)."""
        ...
