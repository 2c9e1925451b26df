"""The memory model: weights + KV pool + workspace + graphs. The one that sizes the pool is the one
that gives advice.

Pure arithmetic on a :class:`ModelSpec` and byte counts that others measured. It serves before the
weights are loaded (everything is then estimated) and after (what the engine has measured then takes
the estimates' place). It knows nothing of devices beyond their kind.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from setpoint.core.cachegroups import CacheLayout, cache_layout
from setpoint.core.errors import OutOfMemoryError
from setpoint.core.footprint import Footprint
from setpoint.core.limits import CAPTURED_TOKENS, LOGITS_ROWS, REFERENCE_SCORES
from setpoint.core.model import ModelSpec
from setpoint.core.pagerows import CacheCosts

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

CPU_MEM_FRACTION = 0.8
"""``mem_fraction_static`` on a CPU if not given: the rest is for a step's workspace, the frontend
and the machine."""

CPU_POOL_BYTES, CPU_POOL_CONTEXTS = 4 * GIB, 4
"""A CPU pool is not made larger than the larger of these unless it is asked for: compute runs out
long before."""

CPU_RESERVE_SHARE, CPU_RESERVE_BYTES = 0.1, GIB
"""What a CPU pool always leaves to the machine: this share of the available memory, at most these
bytes."""

INT8_CHANNEL_BYTES = 8
"""Of an output channel of 8-bit weights, in addition to the weights: its scale and the sum of its
weights."""


@dataclass(slots=True, frozen=True)
class MemoryPlan:
    """Where the memory goes, in bytes, and how many tokens the pool holds."""

    weights_bytes: int
    kv_bytes: int
    """The pool's tensors, dummy page included."""
    num_pages: int
    """Usable pages, the dummy page is not among them."""
    workspace_bytes: int
    """Activations and logits of the largest step, and the runner's tables."""
    graphs_bytes: int
    """Tensors of the captured step, which it keeps."""
    pool_tokens: int
    """Tokens that the pool holds in sequences of the whole context; with one cache group in any
    sequences, and a multiple of the page size."""
    limited_by: str
    """What kept the pool from being larger, in words with numbers."""


def weight_bytes(
    spec: ModelSpec,
    dtype_bytes: int,
    *,
    head_copied: bool = False,
    int8: bool = False,
    blocks: bool = False,
) -> int:
    """The weights as loaded.

    ``head_copied``: a tied embedding is kept twice, packed as output head and plain for look-up.
    ``int8``: the matrices of layers and head take one byte per weight, the embedding stays as it
    is. ``blocks``: those of a GGUF are kept, an embedding among them once.
    """
    kept, embedding = spec.blocks if blocks else None, spec.vocab_size * spec.hidden_size
    copy = (
        embedding
        if head_copied and spec.tie_embeddings and not (kept and kept.embedding_bytes)
        else 0
    )
    wide = (spec.num_parameters + copy) * dtype_bytes
    if kept:
        wide += kept.num_bytes - kept.num_parameters * dtype_bytes
    if not int8:
        return wide
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, qkv_size = (
        spec.num_heads * spec.head_dim,
        (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim,
    )
    weights = spec.num_layers * hidden * (qkv_size + q_size + 3 * inner)
    channels = spec.num_layers * (qkv_size + 2 * inner + 2 * hidden)
    if spec.pooling is None:
        weights += spec.vocab_size * hidden
        channels += spec.vocab_size
    return wide - weights * (dtype_bytes - 1) + channels * INT8_CHANNEL_BYTES


def activation_bytes(spec: ModelSpec, *, num_tokens: int, dtype_bytes: int) -> int:
    """Peak of the temporaries of a forward pass of ``num_tokens`` rows, without logits.

    Per row the residual, a layer's input and its normed form, and on top either attention's (q, k,
    v and its output) or the MLP's (gate, up, their product, and that once more in the layout of the
    matrix product), whichever is larger.
    """
    qkv = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return num_tokens * dtype_bytes * (3 * spec.hidden_size + max(qkv, 4 * spec.intermediate_size))


def sampling_bytes(spec: ModelSpec, *, num_sampling: int, dtype_bytes: int) -> int:
    """Peak of sampling ``num_sampling`` rows: logits exist in the model's dtype, and while a token
    is drawn from all of the sorted vocabulary six times more in float32 or wider."""
    return num_sampling * spec.vocab_size * (dtype_bytes + 6 * max(dtype_bytes, 4))


def captured_bytes(spec: ModelSpec, dtype_bytes: int, *, num_groups: int = 1) -> int:
    """The tensors of a captured step (``engine.runner.ways.replay``) of CAPTURED_TOKENS tokens,
    LOGITS_ROWS of which sample.

    The memory of one goes to a later one of just its size (``kernels.cpu.capture.Arena``), so of
    each size there are as many as live at the same moment; the moments at which most do are listed.
    From the second layer on the residual stream, a layer's input and what it became after attention
    live while the MLP runs; its output is one more, and a norm behind it another. Every cache group
    has places for the step's tokens; of those after the first, ids and positions are not kept.
    """
    token = CAPTURED_TOKENS * dtype_bytes
    ids, index, hidden, inner = (
        4 * CAPTURED_TOKENS,
        8 * CAPTURED_TOKENS,
        token * spec.hidden_size,
        token * spec.intermediate_size,
    )
    q, kv = token * spec.num_heads * spec.head_dim, token * spec.num_kv_heads * spec.head_dim
    moments = [
        [ids, ids] if num_groups > 1 else [],
        [ids, hidden],
        [hidden, hidden, hidden, q + 2 * kv, q] + [q, kv] * spec.head_norms,
        [hidden, hidden, hidden, inner, hidden],
        [hidden] * (3 + spec.num_norms // 2),
    ]
    if spec.pooling is None:
        moments.append(
            [
                hidden,
                *(
                    LOGITS_ROWS * each
                    for each in (spec.hidden_size * dtype_bytes, spec.vocab_size * dtype_bytes, 8)
                ),
            ]
        )
    most: Counter[int] = Counter()
    for live in moments:
        most |= Counter(live)
    # for as long as there is a program
    positions_and_places = (1 + num_groups + (num_groups > 1)) * index
    return sum(size * count for size, count in most.items()) + positions_and_places


def reference_attention_bytes(
    spec: ModelSpec, *, num_tokens: int, context_len: int, dtype_bytes: int
) -> int:
    """What ``torch_ref`` needs for one row: four score-sized temporaries of a block, and the row's
    gathered K and V."""
    wide = max(dtype_bytes, 4)
    scores = min(REFERENCE_SCORES, spec.num_heads * num_tokens * context_len)
    return wide * (4 * scores + 2 * context_len * spec.num_kv_heads * spec.head_dim)


def table_bytes(num_slots: int, *, context_len: int, page_size: int, num_groups: int = 1) -> int:
    """The runner's int32 tables: token ids [slots, context] and, for each cache group, pages
    [slots, ceil(context / page)]."""
    return 4 * num_slots * (context_len + num_groups * -(-context_len // page_size))


def max_running_requests(pool_tokens: int, context_len: int, requested: int | None = None) -> int:
    """How many requests may run at once in a pool of this size
    (docs/sglang/options.md#pool-limits); each needs at least two tokens."""
    wanted = (
        requested
        if requested is not None
        else min(max(int(pool_tokens / context_len * 512), 2048), 4096)
    )
    return min(wanted, pool_tokens // 2)


def auto_mem_fraction(gpu_bytes: int, *, step_tokens: int) -> float:
    """Default ``mem_fraction_static`` of a GPU with ``gpu_bytes`` in all: SGLang's formula
    (docs/sglang/options.md#memory-share)."""
    reserved = 512 * MIB + 1.5 * MIB * max(step_tokens, 2048) + 128 * MIB
    if gpu_bytes > 60 * GIB:
        reserved = max(reserved, 10 * GIB)
    return round((gpu_bytes - reserved) / gpu_bytes, 3)


@dataclass(slots=True, frozen=True)
class MemoryModel:
    """All that decides how memory is used, but for the memory itself."""

    spec: ModelSpec
    device: str
    """"cpu" or "cuda"."""
    dtype_bytes: int
    quantization: str | None
    """``--quantization``."""
    blocks_kept: bool
    """Blocks of a GGUF stay as they are where the model has some."""
    kv_element_bytes: int
    head_copied: bool
    """Linear weights are packed, so that a tied embedding exists twice."""
    reference_attention: bool
    """Attention is ``torch_ref``, which gathers and needs room for scores."""
    page_size: int
    context_len: int
    step_tokens: int
    """Most rows of a step with prompt tokens in it."""
    mem_fraction_static: float
    fraction_given: bool
    """The user chose ``mem_fraction_static``."""
    max_total_tokens: int | None
    requested_slots: int | None
    """``max_running_requests`` as the user gave it."""
    captured: bool = False
    """Small steps are captured once and replayed."""

    @property
    def layout(self) -> CacheLayout:
        return cache_layout(self.spec, self.context_len)

    @property
    def costs(self) -> CacheCosts:
        """Of sequences in a pool of this layout."""
        return CacheCosts(self.layout.page_row, self.page_size, self.step_tokens)

    def weights(self) -> int:
        """Estimated: what they will take once loaded."""
        int8 = self.quantization == "w8a8_int8"
        return weight_bytes(
            self.spec,
            self.dtype_bytes,
            head_copied=self.head_copied,
            int8=int8,
            blocks=self.blocks_kept,
        )

    def workspace(self, pool_tokens: int, footprint: Footprint | None = None) -> int:
        """Temporaries of the largest step, and the tables, with a pool of ``pool_tokens``; measured
        as far as there is a footprint.

        On a CPU the tables are mapped but touched only where sequences stand: counted are the
        tokens of a full pool and the border memory page (4 KiB) of each slot's row in every table.
        """
        num_slots = max_running_requests(pool_tokens, self.context_len, self.requested_slots)
        groups = len(self.layout.groups)
        tables = table_bytes(
            num_slots,
            context_len=self.context_len,
            page_size=self.page_size,
            num_groups=groups,
        )
        if self.device == "cpu":
            entries = pool_tokens + groups * (pool_tokens // self.page_size)
            touched = 4 * entries + (1 + groups) * 4 * KIB * num_slots
            tables = min(tables, touched)
        total = tables + (
            4 * self.spec.num_rotaries * self.context_len * self.spec.head_dim
            if footprint is None
            else footprint.rotations
        )
        if self.reference_attention:
            total += reference_attention_bytes(
                self.spec,
                num_tokens=self.step_tokens,
                context_len=self.context_len,
                dtype_bytes=self.dtype_bytes,
            )
        rows, sampling = max(self.step_tokens, num_slots), min(num_slots, LOGITS_ROWS)
        total += sampling_bytes(self.spec, num_sampling=sampling, dtype_bytes=self.dtype_bytes)
        if footprint is None or footprint.activations is None:
            return total + activation_bytes(
                self.spec, num_tokens=rows, dtype_bytes=self.dtype_bytes
            )
        return total + footprint.activations * rows // footprint.step_tokens

    def plan(
        self,
        available_bytes: int,
        *,
        available_after_load: int | None = None,
        footprint: Footprint | None = None,
    ) -> MemoryPlan:
        """Size the pool as in docs/sglang/options.md#pool-limits: what is free after the weights,
        less the share kept for neither of them.

        available_bytes: free before the weights are loaded; available_after_load: measured after,
        None = not loaded yet; footprint: what else the engine has measured, in place of estimates.
        On a CPU the pool also leaves room for the workspace and a reserve,
        and without a wish of the user it stays under a ceiling. Raises OutOfMemoryError if there is
        no room for one page (and the dummy page).
        """
        rest = (
            available_after_load
            if available_after_load is not None
            else available_bytes - self.weights()
        )
        weights = max(available_bytes - rest, 0)
        limits = self._wishes(available_bytes, rest)
        layout, costs = self.layout, self.costs
        page = layout.page_bytes(self.page_size, self.kv_element_bytes)

        def capacity(pool_bytes: int) -> int:
            pages = max(pool_bytes // page - 1, 0)  # one page is the dummy
            return costs.capacity(pages * self.page_size, self.context_len)

        workspace = self.workspace(capacity(min(limits)[0]), footprint)
        graphs = self._captured() if footprint is None else footprint.captured
        if self.device == "cpu":
            reserve = min(round(available_bytes * CPU_RESERVE_SHARE), CPU_RESERVE_BYTES)
            parts = {"workspace": workspace, "captured steps": graphs, "reserve": reserve}
            words = "memory available, less " + ", ".join(
                f"{format_bytes(size)} of {what}" for what, size in parts.items() if size
            )
            limits.append((rest - sum(parts.values()), words))

        pool_bytes, limited_by = min(limits)
        num_pages = pool_bytes // page - 1
        if num_pages < len(layout.groups):
            raise OutOfMemoryError(self._no_room(available_bytes, rest, pool_bytes, limited_by))
        return MemoryPlan(
            weights_bytes=weights,
            kv_bytes=(num_pages + 1) * page,
            workspace_bytes=workspace,
            graphs_bytes=graphs,
            num_pages=num_pages,
            pool_tokens=capacity(pool_bytes),
            limited_by=limited_by,
        )

    def _captured(self) -> int:
        """Estimated."""
        if not self.captured:
            return 0
        return captured_bytes(self.spec, self.dtype_bytes, num_groups=len(self.layout.groups))

    def _wishes(self, available_bytes: int, rest: int) -> list[tuple[int, str]]:
        """Pool bytes (dummy page included) allowed by the options, each with its name."""
        page = self.layout.page_bytes(self.page_size, self.kv_element_bytes)

        token = page // self.page_size
        static = rest - round(available_bytes * (1 - self.mem_fraction_static))
        limits = [
            (
                static,
                (
                    f"--mem-fraction-static {self.mem_fraction_static:g} of"
                    f" {format_bytes(available_bytes)}"
                ),
            )
        ]
        if self.max_total_tokens is not None:
            limits.append(
                (
                    self.max_total_tokens * len(self.layout.groups) * token + page,
                    f"--max-total-tokens {self.max_total_tokens}",
                )
            )
        elif self.device == "cpu" and not self.fraction_given:
            contexts = self.costs.pool_for(CPU_POOL_CONTEXTS * self.context_len, self.context_len)
            ceiling = max(CPU_POOL_BYTES, contexts * token)
            limits.append(
                (ceiling + page, f"the default ceiling of a CPU pool, {format_bytes(ceiling)}")
            )
        return limits

    def _no_room(self, available: int, rest: int, left: int, limited_by: str) -> str:
        page = self.layout.page_bytes(self.page_size, self.kv_element_bytes)
        needed = (len(self.layout.groups) + 1) * page
        if rest < needed:
            advice = "Free memory or use a smaller model"
        elif limited_by.startswith("--mem-fraction-static"):
            advice = "Raise --mem-fraction-static"
        else:
            advice = "Free memory, or lower --chunked-prefill-size or --max-running-requests"
        return (
            f"no room for one page of KV cache: of {format_bytes(available)} available the weights"
            f" take {format_bytes(available - rest)}, and {format_bytes(max(left, 0))} remain for"
            f" the pool ({limited_by}), but one page of {self.page_size} tokens and the dummy page"
            f" need {format_bytes(needed)}. {advice}."
        )


def format_bytes(num_bytes: float) -> str:
    """``num_bytes`` for people: "812.00 MiB", "3.52 GiB"."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"
