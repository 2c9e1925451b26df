"""The parts that model declarations are made of: attention block, gated MLP, pre-norm layer,
decoder, causal language model.

A declaration picks parts and options and combines them; a family whose layer has another structure
writes its own layer from the same parts. The module tree has the checkpoint's names, so the mapping
of weights is the tree itself plus the stacked projections (``Linear.parts``). C: hidden size, T:
tokens of the step, H heads of size D.

Contract: a layer is called as ``layer(x, residual, ctx) -> (x, residual)``, both [T, C]; residual
is None at the first layer. The branch output x and the residual stream stay separate, so that each
addition is fused with the next norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from setpoint.core.cache_scales import LayerScales
from setpoint.core.model import ModelSpec
from setpoint.engine.attention.attention_backend import AttentionVariant
from setpoint.engine.layers.attention import LatentAttention, PagedAttention
from setpoint.engine.layers.context import Backends, ForwardContext
from setpoint.engine.layers.linear import Linear, TiedHead
from setpoint.engine.layers.module import Layer
from setpoint.engine.layers.norm import RMSNorm
from setpoint.engine.layers.rotary import RotaryEmbedding
from setpoint.engine.layers.token_embedding import Embedding
from setpoint.engine.parallel.group import Span, head_spans
from setpoint.engine.quant.linear_method import LinearMethod


class SelfAttention(Layer):
    """x [T, C] -> [T, C]. head_norm: takes D and returns the norm that each head of q and of k gets
    before the rotation; whole_norm: takes H · D and returns the norm that all heads of q, and all
    of k, get together; None: no such norm. sinks: whether each head has a sink
    (``AttentionVariant``)."""

    def __init__(
        self,
        spec: ModelSpec,
        attend: PagedAttention,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        head_norm: Callable[[int], Layer] | None = None,
        whole_norm: Callable[[int], Layer] | None = None,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.head_dim = spec.head_dim
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        """Heads of q, k and v that this rank computes."""
        self.widths: tuple[int, ...] = ()
        """Size of all heads of q of each rank; written by ``split``."""
        self.qkv_proj = Linear(
            spec.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=qkv_bias,
        )
        self.q_norm = self.k_norm = None
        self.is_whole_norm = whole_norm is not None
        if head_norm is not None:
            self.q_norm, self.k_norm = head_norm(spec.head_dim), head_norm(spec.head_dim)
        elif whole_norm is not None:
            self.q_norm, self.k_norm = whole_norm(q_size), whole_norm(kv_size)
        self.sinks: nn.Parameter | None = (
            nn.Parameter(torch.empty(spec.num_heads), requires_grad=False) if sinks else None
        )
        self.num_rows = spec.num_heads
        """Sinks in the checkpoint."""
        self.held: list[Span] = [(0, spec.num_heads)]
        """The heads of q of this rank, whose sinks it holds; written by ``split``."""
        self.attend = attend
        self.o_proj = Linear(q_size, spec.hidden_size, bias=out_bias, divides_inputs=True)

    def split(self, rank: int, size: int) -> None:
        """Compute only the heads of one of ``size`` ranks."""
        assert not self.is_whole_norm, "ModelSpec.rank_counts"
        num_heads, num_kv_heads, _ = self.heads
        of_ranks = head_spans(num_heads, num_kv_heads, size)
        counts = [(q[1] - q[0], kv[1] - kv[0]) for q, kv in of_ranks]
        self.widths = tuple(count * self.head_dim for count, _ in counts)
        self.heads = [counts[rank][0], counts[rank][1], counts[rank][1]]
        self.held = [of_ranks[rank][0]]
        if self.sinks is not None:
            self.sinks = nn.Parameter(self.sinks.new_empty(counts[rank][0]), requires_grad=False)
        q, kv = (
            [(begin * self.head_dim, end * self.head_dim) for begin, end in each]
            for each in zip(*of_ranks, strict=True)
        )
        self.qkv_proj.spans = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        self.o_proj.input_spans = q

    def finish_loading(self, method: LinearMethod) -> int:
        """Pass the loaded sinks to the attention. Returns the bytes held afterwards."""
        if self.sinks is None:
            return 0
        num_bytes = self.attend.take_sinks(self.sinks.data)
        self.sinks = None
        return num_bytes

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        q, k, v = self.qkv_proj(x, ctx).view(len(x), -1, self.head_dim).split(self.heads, dim=1)
        if self.is_whole_norm:
            q, k = (
                norm(heads.flatten(1), None, ctx.ops)[0].view(heads.shape)
                for norm, heads in ((self.q_norm, q), (self.k_norm, k))
            )
        elif self.q_norm is not None:
            q, k = self.q_norm(q, None, ctx.ops)[0], self.k_norm(k, None, ctx.ops)[0]
        return self.o_proj.of_shares(self.attend(q, k, v, ctx), self.widths, ctx)


class PreNormLayer(Layer):
    """A layer with a norm before each of its two branches and none after them."""

    def __init__(
        self, spec: ModelSpec, eps: float, attention: Layer, mlp: Layer, *, mlp_name: str = "mlp"
    ) -> None:
        """mlp_name: what the checkpoint calls it."""
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, eps)
        setattr(self, mlp_name, mlp)
        self._mlp_name = mlp_name

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm(x, residual, ctx.ops)
        x = self.self_attn(x, ctx)
        x, residual = self.post_attention_layernorm(x, residual, ctx.ops)
        return self.__dict__[self._mlp_name](x, ctx), residual


class Decoder(Layer):
    """ids [T] -> the last hidden states [T, C], normalised."""

    def __init__(self, embed_tokens: Layer, layers: Iterable[Layer], norm: Layer) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x, residual = self.embed_tokens(input_ids, ctx), None
        for layer in self.layers:
            x, residual = layer(x, residual, ctx)
        return self.norm(x, residual, ctx.ops)[0]


class CausalLM(Layer):
    """The model that the runner runs: a decoder and its head. softcap: cap of the logits
    (``Ops.soft_cap``); None: they are not capped."""

    fused_experts = False
    """Whether a checkpoint has the experts of a layer in one tensor (``stored_tensors``)."""

    def __init__(
        self,
        rotaries: Sequence[RotaryEmbedding],
        model: Decoder,
        lm_head: Layer,
        *,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.unused: tuple[str, ...] = ()
        """Prefixes of tensors that a checkpoint may hold although the model does not use them."""
        self.rotaries = rotaries
        self.model = model
        self.lm_head = lm_head
        self.softcap = softcap

    @property
    def decoder(self) -> Decoder:
        return self.model

    @property
    def variants(self) -> dict[int, AttentionVariant]:
        """Layer -> its attention variant."""
        return {
            module.layer: module.variant
            for module in self.model.modules()
            if isinstance(module, PagedAttention | LatentAttention)
        }

    def take_cache_scales(self, scales: LayerScales) -> None:
        """Store K and V of these layers in a cache in fp8 divided by their scales."""
        for module in self.model.modules():
            if isinstance(module, PagedAttention | LatentAttention) and module.layer in scales:
                module.take_scales(*scales[module.layer])

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids [T] -> the last hidden states [T, C], normalised."""
        return self.model(input_ids, ctx)

    def logits(self, hidden: torch.Tensor, backends: Backends) -> torch.Tensor:
        """hidden [S, C] -> [S, V] on rank 0, and the rank's own part on the others."""
        logits = backends.group.gather_logits(self.lm_head(hidden, backends), self.lm_head.widths)
        return logits if self.softcap is None else backends.ops.soft_cap(logits, self.softcap)


def causal_lm(
    spec: ModelSpec, eps: float, layers: Iterable[Layer], *, unused: tuple[str, ...] = ()
) -> CausalLM:
    """The usual model around ``layers``: an embedding without a scale, RMSNorm, and a head with a
    matrix of its own or the embedding's. unused: see ``CausalLM``."""
    embed_tokens = Embedding(spec.vocab_size, spec.hidden_size)
    model = Decoder(embed_tokens, layers, RMSNorm(spec.hidden_size, eps))
    rotary = RotaryEmbedding.from_config(spec.config, spec.rope_dim)
    causal = CausalLM([rotary], model, head(spec, embed_tokens))
    causal.unused = unused
    return causal


def head(spec: ModelSpec, embed_tokens: Embedding) -> Layer:
    """A head with the embedding's matrix if the checkpoint ties them, else with a matrix of its
    own."""
    return (
        TiedHead(embed_tokens) if spec.tie_embeddings else Linear(spec.hidden_size, spec.vocab_size)
    )
