"""The memory model: weights + KV pool + workspace + captured steps. It sizes the pool and gives
advice.

Pure arithmetic on a :class:`ModelSpec` and on byte counts that others measured. Before the weights
are loaded everything is estimated; afterwards the engine's measurements replace estimates. It knows
nothing of devices beyond their kind.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from setpoint.core.cachegroups import CacheLayout, cache_layout
from setpoint.core.errors import OutOfMemoryError
from setpoint.core.footprint import Footprint
from setpoint.core.graph_sizes import NO_GRAPHS, GraphSizes
from setpoint.core.limits import (
    CAPTURED_TOKENS,
    LOGITS_ROWS,
    REFERENCE_SCORES,
    REPORT_BYTES,
    logits_rows,
)
from setpoint.core.model import BLOCK_KINDS, ROUNDED, ModelSpec
from setpoint.core.pagerows import CacheCosts

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

CPU_MEM_FRACTION = 0.8
"""Default of ``mem_fraction_static`` on a CPU. The rest is for a step's workspace, the frontend and
the machine."""

CPU_POOL_BYTES, CPU_POOL_CONTEXTS = 4 * GIB, 4
"""Default ceiling of a CPU pool: the larger of this size and this many contexts. Compute would run
out long before the memory of a larger pool, so the user must ask for one."""

CPU_RESERVE_SHARE, CPU_RESERVE_BYTES = 0.1, GIB
"""Memory that a CPU pool always leaves free: this share of what is available, but no more than this
many bytes."""

USEFUL_TOKENS = 2048
"""Number of tokens for which advice leaves room, or a whole context if that is shorter."""

MOST_OF_MEMORY = 0.95
"""Largest --mem-fraction-static that is advised."""

EXACT = "kv_b"
"""The matrix of attention that is never quantised (decision 0066)."""

INT8_CHANNEL_BYTES = 8
"""Bytes that an output channel of 8-bit weights needs in addition to the weights: its scale and the
sum of its weights."""


@dataclass(slots=True, frozen=True)
class MemoryPlan:
    """The division of the memory, in bytes, and the number of tokens that the pool holds."""

    weights_bytes: int
    kv_bytes: int
    """The pool's tensors, including the dummy page."""
    num_pages: int
    """Number of usable pages; the dummy page does not count."""
    workspace_bytes: int
    """Activations and logits of the largest step, and the runner's tables."""
    graphs_bytes: int
    """Tensors that captured steps keep."""
    pool_tokens: int
    """Number of tokens that the pool holds in sequences of the whole context. With one cache group
    it holds as many in sequences of any length, and the number is a multiple of the page size."""
    limited_by: str
    """The limit that determined the pool's size, in words with numbers; "" if the size was
    asked for."""

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.workspace_bytes + self.graphs_bytes


def weight_bytes(
    spec: ModelSpec,
    dtype_bytes: int,
    *,
    head_copied: bool = False,
    rounded: float = 0.0,
    blocks: bool = False,
) -> int:
    """Bytes of the weights once they are loaded.

    head_copied: a tied embedding is kept twice, packed for the head and unpacked for look-up.
    rounded: bytes of a weight of the layers' matrices and the head, if these are rounded when they
    are loaded; the embedding stays as it is. blocks: a GGUF file's blocks are kept, and an
    embedding among them is kept once.
    """
    kept, embedding = spec.blocks if blocks else None, spec.vocab_size * spec.hidden_size
    copy = (
        embedding
        if head_copied and spec.tie_embeddings and not (kept and kept.embedding_bytes)
        else 0
    )
    wide = (spec.num_parameters + copy) * dtype_bytes
    if kept:
        wide += kept.held_bytes - kept.num_parameters * dtype_bytes
    if not rounded:
        return wide
    hidden, inner = spec.hidden_size, spec.intermediate_size
    matrices = [each for name, each in spec.attention_matrices.items() if name != EXACT]
    # (inner size, how many MLPs in the model have it)
    mlps = [(inner, spec.num_layers)]
    if mixture := spec.mixture:
        sparse = len(mixture.layers)
        mlps = [
            (inner, spec.num_layers - sparse),
            (mixture.size, mixture.num_experts * sparse),
            (mixture.shared_size, sparse if mixture.shared_size else 0),
        ]
    weights = spec.num_layers * sum(inputs * outputs for inputs, outputs in matrices)
    weights += sum(count * 3 * hidden * size for size, count in mlps)
    channels = spec.num_layers * sum(outputs for _, outputs in matrices)
    channels += sum(count * (2 * size + hidden) for size, count in mlps)
    if spec.pooling is None:
        weights += spec.vocab_size * hidden
        channels += spec.vocab_size
    return wide - int(weights * (dtype_bytes - rounded)) + channels * INT8_CHANNEL_BYTES


def activation_bytes(spec: ModelSpec, *, num_tokens: int, dtype_bytes: int) -> int:
    """Peak bytes of the temporaries of a forward pass of ``num_tokens`` tokens, without logits.

    Each token needs the residual, a layer's input and its normalised form, and in addition either
    attention's temporaries (``ModelSpec.attention_numbers``) or the MLP's (gate, up, their product,
    and that product again in the layout of the matrix product), whichever are larger. Of a mixture
    these are the inner values and the outputs of the experts that a token uses, and one expert's
    rows side by side.
    """
    largest = max(spec.attention_numbers, 4 * spec.intermediate_size)
    if mixture := spec.mixture:
        sparse = (mixture.num_chosen + 1) * (3 * mixture.size + spec.hidden_size)
        largest = max(largest, sparse + 3 * mixture.shared_size + spec.hidden_size)
    return num_tokens * dtype_bytes * (3 * spec.hidden_size + largest)


SORTED_COPIES = 6
"""Copies of logits, in float32 or wider, that exist while a vocabulary is sorted and summed."""

CANDIDATE_BYTES = 8 * 8192
"""Bytes of a row's list of candidates in the kernels that sample, tokens and weights."""


def sampling_bytes(
    spec: ModelSpec, *, num_sampling: int, dtype_bytes: int, by_kernels: bool
) -> int:
    """Peak bytes of sampling ``num_sampling`` rows. Logits are in the model's dtype.

    by_kernels: a device's kernels sample (``engine.sampling.device_sampler``). They need a copy of
    the logits that are edited, in float32, and the candidates of each row, but sort nothing; what
    is reported of rows is computed for REPORT_BYTES of them at a time. Otherwise the whole
    vocabulary of all rows is sorted.
    """
    wide = max(dtype_bytes, 4) * spec.vocab_size
    logits = num_sampling * dtype_bytes * spec.vocab_size
    if not by_kernels:
        return logits + SORTED_COPIES * num_sampling * wide
    reported = min(num_sampling * wide, max(REPORT_BYTES, wide))
    return logits + num_sampling * (wide + CANDIDATE_BYTES) + SORTED_COPIES * reported


def captured_bytes(spec: ModelSpec, dtype_bytes: int, *, num_groups: int = 1) -> int:
    """Bytes of the tensors of a captured step (``engine.runner.replay_way``) with CAPTURED_TOKENS
    tokens, of which LOGITS_ROWS sample.

    A tensor that is no longer needed gives its memory to a later tensor of exactly its size
    (``kernels.cpu.capture.Arena``). So the step keeps, of each size, the largest number of tensors
    that exist at one moment; ``moments`` lists the moments with the most. From the second layer on,
    the residual stream, a layer's input and its form after attention exist while the MLP runs; the
    MLP's output is one more, and a norm after it another. Every cache group has its own
    ``kv_index`` of the step's tokens; ids and positions exist once.
    """
    token = CAPTURED_TOKENS * dtype_bytes
    ids, index, hidden, inner = (
        4 * CAPTURED_TOKENS,
        8 * CAPTURED_TOKENS,
        token * spec.hidden_size,
        token * spec.intermediate_size,
    )
    moments = [
        [ids, ids, index] if num_groups > 1 else [],
        [ids, hidden],
        *([hidden, hidden, hidden, *live] for live in _attention_moments(spec, token)),
        *_mlp_moments(spec, token, hidden, inner),
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
    # Positions and kv_index exist as long as the program.
    places = (1 + num_groups) * index
    return sum(size * count for size, count in most.items()) + places


def _attention_moments(spec: ModelSpec, token: int) -> list[list[int]]:
    """The moments of ``captured_bytes`` in a layer's attention, without what exists around it."""
    if (latent := spec.latent) is None:
        q, kv = token * spec.num_heads * spec.head_dim, token * spec.num_kv_heads * spec.head_dim
        return [[q + 2 * kv, q] + [q, kv] * (spec.head_norms or spec.whole_norms)]
    of_heads, low = token * spec.num_heads, token * latent.q_rank
    query, rank = of_heads * latent.query_size, of_heads * latent.rank
    own = [query, token * spec.head_dim, token * latent.rank]
    return [
        [low, low, query] if low else [query],
        [*own, rank, of_heads * spec.head_dim, rank],
        [*own, rank, of_heads * latent.value_size],
    ]


def _mlp_moments(spec: ModelSpec, token: int, hidden: int, inner: int) -> list[list[int]]:
    """The moments of ``captured_bytes`` in an MLP and in a mixture. token: bytes of an element of
    all tokens. The ids of a token's experts and their weights have four bytes each, as have the
    ids of the step's tokens, which exist as well."""
    dense = [hidden, hidden, hidden, inner, hidden]
    if spec.mixture is None:
        return [dense]
    mixture, streams = spec.mixture, [4 * CAPTURED_TOKENS, hidden, hidden, hidden]
    choice = 4 * CAPTURED_TOKENS * mixture.num_chosen
    parts = token * mixture.num_chosen * spec.hidden_size
    chosen = [*streams, choice, choice]
    moments = [
        [*streams, token * mixture.num_experts, choice, choice],
        [*chosen, token * mixture.num_chosen * mixture.size, parts],
        [*chosen, parts, hidden],
    ]
    if mixture.shared_size:
        shared = [token * mixture.shared_size, hidden]
        gate = [token] if mixture.shared_is_gated else []
        moments += [[*chosen, parts, *shared], [*chosen, parts, hidden, *gate, hidden]]
    return [dense, *moments] if len(mixture.layers) < spec.num_layers else moments


def reference_attention_bytes(
    spec: ModelSpec, *, num_tokens: int, context_len: int, dtype_bytes: int
) -> int:
    """Bytes that ``torch_ref`` needs for one row: four temporaries of the size of a block's scores,
    and the row's gathered K and V."""
    wide = max(dtype_bytes, 4)
    scores = min(REFERENCE_SCORES, spec.num_heads * num_tokens * context_len)
    gathered = context_len * spec.num_kv_heads * (spec.head_dim + spec.value_dim)
    return wide * (4 * scores + gathered)


def table_bytes(num_slots: int, *, context_len: int, page_size: int, num_groups: int = 1) -> int:
    """Bytes of the runner's int32 tables: token ids [slots, context] and, for each cache group,
    pages [slots, ceil(context / page)]."""
    return 4 * num_slots * (context_len + num_groups * -(-context_len // page_size))


def max_running_requests(pool_tokens: int, context_len: int, requested: int | None = None) -> int:
    """Most requests that may run at the same time in a pool of this size
    (docs/sglang/options.md#pool-limits). Each needs at least two tokens."""
    wanted = (
        requested
        if requested is not None
        else min(max(int(pool_tokens / context_len * 512), 2048), 4096)
    )
    return min(wanted, pool_tokens // 2)


GRAPH_ROW_BYTES, GRAPH_BYTES = 2 * MIB, 8 * MIB
"""Memory of all graphs of decode steps for each row of the largest, and memory of each graph of
other steps, by SGLang's estimate."""


def graph_bytes(sizes: GraphSizes) -> int:
    """Estimated memory of the graphs of a GPU."""
    return GRAPH_ROW_BYTES * max(sizes.rows, default=0) + GRAPH_BYTES * len(sizes.tokens)


def auto_mem_fraction(gpu_bytes: int, *, step_tokens: int, graphs_bytes: int) -> float:
    """Default of ``mem_fraction_static`` on a GPU with ``gpu_bytes`` of memory, by SGLang's formula
    (docs/sglang/options.md#memory-share)."""
    reserved = 512 * MIB + 1.5 * MIB * max(step_tokens, 2048) + 128 * MIB + graphs_bytes
    if gpu_bytes > 60 * GIB:
        reserved = max(reserved, 10 * GIB)
    return round((gpu_bytes - reserved) / gpu_bytes, 3)


@dataclass(slots=True, frozen=True)
class MemoryModel:
    """Everything that determines the use of memory, except its size."""

    spec: ModelSpec
    device: str
    """"cpu" or "cuda"."""
    dtype_bytes: int
    quantization: str | None
    """``--quantization``."""
    blocks_kept: bool
    """True: blocks of a GGUF file, if the model has any, are kept as they are."""
    kv_element_bytes: int
    head_copied: bool
    """True: linear weights are packed, so that a tied embedding takes memory twice."""
    reference_attention: bool
    """True: attention is ``torch_ref``, which gathers K and V and needs room for scores. On a GPU
    sampling may then be torch's, too."""
    page_size: int
    context_len: int
    step_tokens: int
    """Most tokens of a step that computes prompt tokens."""
    mem_fraction_static: float
    fraction_given: bool
    """True if the user chose ``mem_fraction_static``."""
    max_total_tokens: int | None
    requested_slots: int | None
    """``max_running_requests`` as the user gave it."""
    captured: bool = False
    """True: small steps are recorded once and replayed, on a CPU."""
    graph_sizes: GraphSizes = NO_GRAPHS
    """The sizes of the graphs of a GPU."""

    @property
    def layout(self) -> CacheLayout:
        return cache_layout(self.spec, self.context_len)

    @property
    def costs(self) -> CacheCosts:
        """The costs of sequences in a pool of this layout."""
        return CacheCosts(self.layout.page_row, self.page_size, self.step_tokens)

    def weights(self) -> int:
        """Estimated bytes of the weights once they are loaded."""
        rounded = 1.0 if self.quantization in ROUNDED else 0.0
        if self.quantization == "fp8" and self.device == "cpu":
            rounded = BLOCK_KINDS["FP8"].row_bytes(32) / 32
        return weight_bytes(
            self.spec,
            self.dtype_bytes,
            head_copied=self.head_copied,
            rounded=rounded,
            blocks=self.blocks_kept,
        )

    def weights_read(self) -> int:
        """Estimated bytes of the weights that a step reads, whatever its tokens are: all but an
        embedding that is not the head as well, of which it looks up some rows."""
        spec, kept = self.spec, self.spec.blocks if self.blocks_kept else None
        in_blocks = kept.embedding_bytes if kept else 0
        table = in_blocks or spec.vocab_size * spec.hidden_size * self.dtype_bytes
        is_head = spec.tie_embeddings and spec.pooling is None
        if is_head and (in_blocks or not self.head_copied):
            return self.weights()
        return self.weights() - table

    def experts_share(self) -> float:
        """The share of ``weights_read`` that belongs to experts."""
        if (mixture := self.spec.mixture) is None:
            return 0.0
        experts = len(mixture.layers) * mixture.expert_parameters(self.spec.hidden_size)
        kept = self.spec.blocks if self.blocks_kept else None
        if kept is None:
            return experts / self.spec.num_parameters
        wide = (experts - kept.experts_parameters) * self.dtype_bytes
        return (wide + kept.experts_bytes) / self.weights_read()

    def workspace(
        self, pool_tokens: int, footprint: Footprint | None = None, *, requests: int | None = None
    ) -> int:
        """Bytes of the largest step's temporaries and of the tables, with a pool of ``pool_tokens``
        tokens and so many requests; None: as many as may run at the same time in that pool. The
        measurements in ``footprint`` replace estimates.

        On a CPU only the parts of the tables that sequences use take memory: the entries for the
        tokens of a full pool, and in each table one memory page (4 KiB) at the border of each
        slot's row.
        """
        wanted = self.requested_slots if requests is None else requests
        num_slots = max_running_requests(pool_tokens, self.context_len, wanted)
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
            4 * self.spec.num_rotaries * self.context_len * self.spec.rope_dim
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
        rows, sampling = max(self.step_tokens, num_slots), min(num_slots, logits_rows(self.device))
        total += sampling_bytes(
            self.spec,
            num_sampling=sampling,
            dtype_bytes=self.dtype_bytes,
            by_kernels=self.device != "cpu" and not self.reference_attention,
        )
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
        """Size the pool as in docs/sglang/options.md#pool-limits: by the memory that is free after
        loading the weights, less the share that neither weights nor pool may use.

        available_bytes: free memory before the weights are loaded. available_after_load: free
        memory measured afterwards; None: the weights are not loaded yet. footprint: other
        measurements of the engine, used in place of estimates. The pool also leaves room for the
        workspace and captured steps, on a CPU also for a reserve; there it stays under a ceiling
        unless the user sets its size.
        Raises OutOfMemoryError if one page and the dummy page do not fit.
        """
        rest = (
            available_after_load
            if available_after_load is not None
            else available_bytes - self.weights()
        )
        weights = max(available_bytes - rest, 0)
        limits = self._option_limits(available_bytes, rest)
        layout, costs = self.layout, self.costs
        page = layout.page_bytes(self.page_size, self.kv_element_bytes)

        def capacity(pool_bytes: int) -> int:
            pages = max(pool_bytes // page - 1, 0)  # one page is the dummy page
            return costs.capacity(pages * self.page_size, self.context_len)

        workspace = self.workspace(capacity(min(limits)[0]), footprint)
        measured = None if footprint is None else footprint.captured
        graphs = self._captured() if measured is None else measured
        parts = {"workspace": workspace, "captured steps": graphs}
        if self.device == "cpu":
            parts["reserve"] = min(round(available_bytes * CPU_RESERVE_SHARE), CPU_RESERVE_BYTES)
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

    def needed(self, requests: int) -> MemoryPlan:
        """Estimates the memory for so many requests of the whole context, whatever is available."""
        num_tokens = requests * self.context_len
        layout = self.layout
        pool = self.costs.pool_for(num_tokens, self.context_len)
        num_pages = max(-(-pool // self.page_size), len(layout.groups))
        return MemoryPlan(
            weights_bytes=self.weights(),
            kv_bytes=(num_pages + 1) * layout.page_bytes(self.page_size, self.kv_element_bytes),
            workspace_bytes=self.workspace(num_tokens, requests=requests),
            graphs_bytes=self._captured(),
            num_pages=num_pages,
            pool_tokens=num_tokens,
            limited_by="",
        )

    def share_with_room(self, available_bytes: int, rest: int) -> float | None:
        """The smallest hundredth for ``mem_fraction_static`` that is safe to advise: with room for
        the weights, for USEFUL_TOKENS and for what else a start takes; None if MOST_OF_MEMORY is
        too little. rest: what the weights leave of ``available_bytes``."""
        page = self.layout.page_bytes(self.page_size, self.kv_element_bytes)
        tokens = self.costs.pool_for(min(self.context_len, USEFUL_TOKENS), self.context_len)
        pages = max(-(-tokens // self.page_size), len(self.layout.groups)) + 1
        besides = min(available_bytes * CPU_RESERVE_SHARE, CPU_RESERVE_BYTES)
        needed = available_bytes - rest + pages * page + besides
        share = math.ceil(100 * needed / available_bytes) / 100
        return share if share <= MOST_OF_MEMORY else None

    def _captured(self) -> int:
        """Estimated bytes of the tensors that captured steps keep."""
        if not self.captured:
            return graph_bytes(self.graph_sizes)
        return captured_bytes(self.spec, self.dtype_bytes, num_groups=len(self.layout.groups))

    def _option_limits(self, available_bytes: int, rest: int) -> list[tuple[int, str]]:
        """(bytes with the dummy page, name) of each upper limit that the options set for the
        pool."""
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
            share = self.share_with_room(available, rest)
            advice = (
                "Free memory or use a smaller model"
                if share is None
                else f"Raise --mem-fraction-static to {share:g} or more"
            )
        else:
            options = ["--chunked-prefill-size", "--max-running-requests"]
            options += ["--cuda-graph-max-bs-decode"] if self.graph_sizes.rows else []
            advice = f"Free memory, or lower {' or '.join(options)}"
        return (
            f"There is no room for one page of KV cache: of {format_bytes(available)} available the"
            f" weights take {format_bytes(available - rest)}, and {format_bytes(max(left, 0))}"
            f" remain for the pool ({limited_by}), but one page of {self.page_size} tokens and the"
            f" dummy page need {format_bytes(needed)}. {advice}."
        )


def format_bytes(num_bytes: float) -> str:
    """``num_bytes`` in a readable unit: "812.00 MiB", "3.52 GiB"."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"
