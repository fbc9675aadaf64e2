"""qwen4exp in PyTorch, as the pinned llama.cpp computes it: for training, and as an oracle.

    tokens ─► embedding, repeated into C residual streams
              per layer:  [n-gram embeddings, in one layer]
                          mix streams ─► Gated DeltaNet or sparse attention ─► combine
                          mix streams ─► mixture of experts                 ─► combine
              mix streams ─► output matrix ─► logits

Parameters carry the names of the GGUF tensors, so that a state dict *is* the file (``weights`` has
the one exception).  Shapes: B sequences, T tokens, N = B * T, and the letters in ``geometry``.

Rejected: building on a transformers model class (none has this architecture with the indexer and
the n-gram layer, and its cache code would hide what is to be read here); evaluating only the chosen
experts (with eight small ones the gathers cost more than computing all and weighting with zeros).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.owlet.delta import delta_rule, delta_rule_steps
from models.owlet.geometry import PLE_MULTIPLIERS, Geometry
from models.owlet.selection import cell_scores, selected


@dataclass
class Run:
    """How to run, and what a run leaves behind besides its result."""

    sparse: bool = False
    """Restrict attention to what the indexer selects; off while training (all is visible)."""
    top_k: int | None = None
    """Tokens the indexer may select; None: as the geometry says."""
    cpu_order: bool = False
    """Break ties as llama.cpp's CPU code does; slow."""
    steps: bool = False
    """Delta rule step by step."""
    probe: Tensor | None = None
    """(B, P) positions at which the indexer is taught to rank blocks as attention does."""
    indexer_losses: list[Tensor] = field(default_factory=list)
    balance_losses: list[Tensor] = field(default_factory=list)
    layers: list[Tensor] | None = None
    """When a list: the residual streams (B, T, C, D) after each layer are appended."""


def linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


class Weight(nn.Module):
    """A bare tensor called ``weight``, for those that no stock module holds."""

    def __init__(self, *shape: int, fill: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, fill))


def rms(x: Tensor, epsilon: float) -> Tensor:
    """x over its root mean square along the last axis, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


def unit(x: Tensor, epsilon: float) -> Tensor:
    """x over its length along the last axis; epsilon stands under the root."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + epsilon)


def rotate(x: Tensor, positions: Tensor, n_rot: int, base: float) -> Tensor:
    """Rotary embedding of (B, T, heads, d): value i of the first n_rot turns with value i + n_rot/2.

    The architecture numbers tokens on three axes; with text all three carry the position (T,).
    """
    half = n_rot // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions.float()[:, None] * frequency  # (T, half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second, rest = x.float().split([half, half, x.shape[-1] - n_rot], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def mix_streams(
    x: Tensor, gamma: Tensor, down: Tensor, up: Tensor, inject: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor | None]:
    """(N, C, D) streams -> (N, D) block input, and the weights (N, C) its output comes back with.

    Each stream is normalised by itself; a low-rank gate decides how much of each value is read.
    """
    n_streams, n_embd = x.shape[-2:]
    normed = (rms(x, epsilon) * gamma.view(n_streams, n_embd)).flatten(-2)
    gate = F.linear(F.silu(F.linear(normed, down) / n_streams), up)
    mixed = (normed * gate.float().sigmoid()).unflatten(-1, (n_streams, n_embd)).mean(-2)
    if inject is None:
        return mixed, None
    # centred on 1: with a zero injection the output is added to every stream as it is
    return mixed, 2.0 * (F.linear(normed, inject).float() / n_streams).sigmoid()


def combine_streams(x: Tensor, output: Tensor, weights: Tensor) -> Tensor:
    """Add a block's output (N, D) to the streams (N, C, D), weighted per stream (N, C)."""
    return x + output.float()[..., None, :] * weights[..., None]


def experts(x: Tensor, chosen: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """All experts as one wide gated layer: x (N, D), weights chosen (N, E), zero where not chosen.

    gate, up (E, F, D), down (E, D, F).
    """
    n_expert, n_ff, n_embd = gate.shape
    hidden = F.silu(F.linear(x, gate.reshape(-1, n_embd))) * F.linear(x, up.reshape(-1, n_embd))
    hidden = (hidden.unflatten(-1, (n_expert, n_ff)) * chosen[..., None].to(hidden.dtype)).flatten(-2)
    return F.linear(hidden, down.movedim(0, 1).reshape(n_embd, -1))


class Indexer(nn.Module):
    """Scores blocks of r tokens for each query: rectified dot products, summed over I heads."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.g = g
        self.q_proj = linear(g.n_embd, g.indexer_heads * g.indexer_dim)
        self.k_proj = linear(g.n_embd, g.indexer_dim)
        self.q_norm = Weight(g.indexer_dim, fill=1.0)
        self.k_norm = Weight(g.indexer_dim, fill=1.0)

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """x (B, T, D) -> (B, T, T // r) scores of whole blocks; with rows (B, P) those queries only.

        Keys are averaged over a block before they are normalised and rotated to its first position.
        """
        g, r = self.g, self.g.indexer_ratio
        n_tokens = x.shape[1]
        n_blocks = n_tokens // r
        keys = self.k_proj(x)[:, : n_blocks * r].float().unflatten(1, (n_blocks, r)).mean(2)
        keys = rms(keys, g.norm_epsilon) * self.k_norm.weight
        starts = torch.arange(n_blocks, device=x.device) * r
        keys = rotate(keys[:, :, None], starts, g.n_rot, g.rope_base)[:, :, 0]
        query = self.q_proj(x).unflatten(-1, (g.indexer_heads, g.indexer_dim))
        query = rms(query, g.norm_epsilon) * self.q_norm.weight
        query = rotate(query, torch.arange(n_tokens, device=x.device), g.n_rot, g.rope_base)
        if rows is not None:
            query = query.gather(1, rows[..., None, None].expand(-1, -1, *query.shape[2:]))
        score = torch.einsum("bqie,bke->bqik", query, keys).relu()
        return score.sum(2)


class Layer(nn.Module):
    """One layer; ``hc_*`` belong to the streams, ``ffn_*`` to the experts, the rest to the mixer."""

    def __init__(self, g: Geometry, index: int) -> None:
        super().__init__()
        self.g, self.index = g, index
        wide = g.hyper_streams * g.n_embd
        for part in ("attn", "ffn"):
            # the gates start at one half
            setattr(self, f"hc_{part}_norm", Weight(wide, fill=2.0))
            setattr(self, f"hc_{part}_down", linear(wide, g.hyper_rank))
            setattr(self, f"hc_{part}_up", linear(g.hyper_rank, wide))
            setattr(self, f"hc_{part}_inject", linear(wide, g.hyper_streams))
        if g.is_attention(index):
            self.attn_q = linear(g.n_embd, 2 * g.n_head * g.head_dim)
            self.attn_k = linear(g.n_embd, g.n_head_kv * g.head_dim)
            self.attn_v = linear(g.n_embd, g.n_head_kv * g.head_dim)
            self.attn_output = linear(g.n_head * g.head_dim, g.n_embd)
            self.attn_q_norm = Weight(g.head_dim, fill=1.0)
            self.attn_k_norm = Weight(g.head_dim, fill=1.0)
            self.indexer = Indexer(g)
        else:
            keys, values = g.delta_k_heads * g.delta_dim, g.delta_v_heads * g.delta_dim
            self.attn_qkv = linear(g.n_embd, 2 * keys + values)
            self.attn_gate = linear(g.n_embd, values)
            self.ssm_conv1d = Weight(2 * keys + values, g.conv_kernel)
            self.ssm_beta = linear(g.n_embd, g.delta_v_heads)
            self.ssm_alpha = linear(g.n_embd, g.delta_v_heads)
            self.ssm_dt = nn.Module()
            self.ssm_dt.bias = nn.Parameter(torch.zeros(g.delta_v_heads))
            self.ssm_a_log = nn.Parameter(torch.zeros(g.delta_v_heads))
            self.ssm_norm = Weight(g.delta_dim, fill=1.0)
            self.ssm_out = linear(values, g.n_embd)
        if index == g.ple_layer:
            self.ple_key = linear(g.n_embd, wide)
            self.ple_value = linear(g.n_embd, g.n_embd)
            self.ple_norm_key = Weight(wide, fill=1.0)
            self.ple_norm_query = Weight(wide, fill=1.0)
            self.ple_norm_conv = Weight(wide, fill=1.0)
            self.ple_conv1d = Weight(wide, g.ple_kernel)
        self.ffn_gate_inp = linear(g.n_embd, g.n_expert)
        self.ffn_gate_exps = Weight(g.n_expert, g.n_ff_expert, g.n_embd)
        self.ffn_up_exps = Weight(g.n_expert, g.n_ff_expert, g.n_embd)
        self.ffn_down_exps = Weight(g.n_expert, g.n_embd, g.n_ff_expert)
        self.ffn_gate_inp_shexp = Weight(g.n_embd)
        self.ffn_gate_shexp = linear(g.n_embd, g.n_ff_expert)
        self.ffn_up_shexp = linear(g.n_embd, g.n_ff_expert)
        self.ffn_down_shexp = linear(g.n_ff_expert, g.n_embd)

    def forward(self, x: Tensor, ngrams: Tensor, run: Run) -> Tensor:
        """Residual streams (B, T, C, D) -> the same, after both blocks."""
        g, shape = self.g, x.shape
        if self.index == g.ple_layer:
            x = self.add_ngrams(x, ngrams)
        for part in ("attn", "ffn"):
            flat = x.flatten(0, 1)
            block, weights = mix_streams(
                flat,
                getattr(self, f"hc_{part}_norm").weight,
                getattr(self, f"hc_{part}_down").weight,
                getattr(self, f"hc_{part}_up").weight,
                getattr(self, f"hc_{part}_inject").weight,
                g.norm_epsilon,
            )
            assert weights is not None
            if part == "ffn":
                out = self.feed_forward(block, run)
            else:
                block = block.unflatten(0, shape[:2])
                out = self.attend(block, run) if g.is_attention(self.index) else self.delta_net(block, run)
                out = out.flatten(0, 1)
            x = combine_streams(flat, out, weights).view(shape)
        return x

    # -- mixers ----------------------------------------------------------------------------------

    def attend(self, x: Tensor, run: Run) -> Tensor:
        """Gated grouped-query attention over the selected tokens: (B, T, D) -> (B, T, D)."""
        g = self.g
        n_tokens = x.shape[1]
        positions = torch.arange(n_tokens, device=x.device)
        # per head: d values of query, then d of the output's gate
        query, gate = self.attn_q(x).unflatten(-1, (g.n_head, 2, g.head_dim)).unbind(-2)
        key = self.attn_k(x).unflatten(-1, (g.n_head_kv, g.head_dim))
        value = self.attn_v(x).unflatten(-1, (g.n_head_kv, g.head_dim))
        query = rotate(rms(query, g.norm_epsilon) * self.attn_q_norm.weight, positions, g.n_rot, g.rope_base)
        key = rotate(rms(key, g.norm_epsilon) * self.attn_k_norm.weight, positions, g.n_rot, g.rope_base)
        query, key = query.to(value.dtype), key.to(value.dtype)
        if run.probe is not None:
            run.indexer_losses.append(self.indexer_loss(x.detach(), query.detach(), key.detach(), run.probe))
        mask = self.visible(x, run) if run.sparse else None
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=None if mask is None else mask[:, None],
            is_causal=mask is None,
            enable_gqa=g.n_head != g.n_head_kv,
        ).transpose(1, 2)
        return self.attn_output((out * gate.sigmoid()).flatten(-2))

    def visible(self, x: Tensor, run: Run) -> Tensor:
        g = self.g
        scores = cell_scores(self.indexer(x), x.shape[1], g.indexer_ratio)
        return selected(scores, run.top_k or g.indexer_top_k, g.indexer_ratio, cpu_order=run.cpu_order)

    def indexer_loss(self, x: Tensor, query: Tensor, key: Tensor, rows: Tensor) -> Tensor:
        """Divergence of the indexer's ranking from where attention looks, at rows (B, P).

        The target is attention's own weight per whole block before the query's tail, averaged over
        heads.  Nothing flows back into the model: only the indexer learns from this.
        """
        g, r = self.g, self.g.indexer_ratio
        n_tokens = x.shape[1]
        n_blocks = n_tokens // r
        group = g.n_head // g.n_head_kv
        picked = query.gather(1, rows[..., None, None].expand(-1, -1, *query.shape[2:]))
        scores = torch.einsum(
            "bphgd,bkhd->bphgk", picked.unflatten(2, (g.n_head_kv, group)).float(), key.float()
        ).flatten(2, 3)
        future = torch.arange(n_tokens, device=x.device) > rows[..., None]
        weights = (scores * g.head_dim**-0.5).masked_fill(future[:, :, None], -torch.inf).softmax(-1).mean(2)
        target = weights[..., : n_blocks * r].unflatten(-1, (n_blocks, r)).sum(-1)
        block = torch.arange(n_blocks, device=x.device)
        competes = block * r < ((rows + 1) // r * r)[..., None]
        target = target * competes
        known = target.sum(-1, keepdim=True)
        target = target / known.clamp_min(1e-6)
        guess = self.indexer(x, rows).masked_fill(~competes, -1e4).log_softmax(-1)
        divergence = (torch.xlogy(target, target) - target * guess).sum(-1)
        return (divergence * (known[..., 0] > 1e-3)).mean()

    def delta_net(self, x: Tensor, run: Run) -> Tensor:
        """Gated DeltaNet: (B, T, D) -> (B, T, D)."""
        g = self.g
        mixed = F.silu(shifted_sum(self.attn_qkv(x).float(), self.ssm_conv1d.weight, 1))
        keys = g.delta_k_heads * g.delta_dim
        q, k, v = mixed.split([keys, keys, g.delta_v_heads * g.delta_dim], -1)
        q = unit(q.unflatten(-1, (g.delta_k_heads, g.delta_dim)), g.norm_epsilon)
        k = unit(k.unflatten(-1, (g.delta_k_heads, g.delta_dim)), g.norm_epsilon)
        v = v.unflatten(-1, (g.delta_v_heads, g.delta_dim))
        # value head h reads key head h modulo the number of key heads
        repeat = g.delta_v_heads // g.delta_k_heads
        q, k = q.repeat(1, 1, repeat, 1), k.repeat(1, 1, repeat, 1)
        beta = self.ssm_beta(x).float().sigmoid()
        decay = -self.ssm_a_log.exp() * F.softplus(self.ssm_alpha(x).float() + self.ssm_dt.bias)
        with torch.autocast(x.device.type, enabled=False):
            out, _ = (delta_rule_steps if run.steps else delta_rule)(q, k, v, decay, beta)
        gate = self.attn_gate(x).unflatten(-1, (g.delta_v_heads, g.delta_dim)).float().sigmoid()
        return self.ssm_out((rms(out, g.norm_epsilon) * self.ssm_norm.weight * gate).flatten(-2))

    def feed_forward(self, x: Tensor, run: Run) -> Tensor:
        """Experts, the best few per token, and one that every token uses: (N, D) -> (N, D)."""
        g = self.g
        with torch.autocast(x.device.type, enabled=False):
            probability = F.linear(x.float(), self.ffn_gate_inp.weight).softmax(-1)  # (N, E)
            best, index = probability.topk(g.n_expert_used, -1)
            best = best / best.sum(-1, keepdim=True).clamp_min(2.0**-14)
            chosen = torch.zeros_like(probability).scatter(-1, index, best)
            shared_gate = (x.float() @ self.ffn_gate_inp_shexp.weight).sigmoid()[:, None]
        if torch.is_grad_enabled():
            # pushes towards equal use of the experts (Fedus et al., "Switch Transformers", 2021)
            share = (chosen > 0).float().mean(0) / g.n_expert_used
            run.balance_losses.append(g.n_expert * (share * probability.mean(0)).sum())
        routed = experts(x, chosen, self.ffn_gate_exps.weight, self.ffn_up_exps.weight, self.ffn_down_exps.weight)
        shared = self.ffn_down_shexp(F.silu(self.ffn_gate_shexp(x)) * self.ffn_up_shexp(x))
        return routed + shared * shared_gate

    # -- n-gram embeddings -----------------------------------------------------------------------

    def add_ngrams(self, x: Tensor, ngrams: Tensor) -> Tensor:
        """Add looked-up n-gram vectors (B, T, D) to the streams (B, T, C, D).

        Each stream decides by a dot product with its own key how much it takes; a short convolution,
        dilated by the n-gram's length, adds what the n-grams before had to say.
        """
        g = self.g
        streams = (g.hyper_streams, g.n_embd)

        def grouped(y: Tensor, norm: Weight) -> Tensor:
            return rms(y, g.norm_epsilon) * norm.weight.view(streams)

        key = grouped(self.ple_key(ngrams).unflatten(-1, streams), self.ple_norm_key)
        match = (key * grouped(x, self.ple_norm_query)).sum(-1, keepdim=True) * g.n_embd**-0.5
        gate = (match.sign() * match.abs().clamp_min(1e-6).sqrt()).sigmoid()
        gated = self.ple_value(ngrams).float()[:, :, None] * gate
        history = grouped(gated, self.ple_norm_conv).flatten(-2)
        folded = F.silu(shifted_sum(history, self.ple_conv1d.weight, g.ple_ngram))
        return x + gated + folded.unflatten(-1, streams)


def shifted_sum(x: Tensor, kernel: Tensor, dilation: int) -> Tensor:
    """Causal convolution per channel: x (B, T, n), kernel (n, K); the last tap is the present."""
    n_taps, n_tokens = kernel.shape[1], x.shape[1]
    history = (n_taps - 1) * dilation
    padded = F.pad(x, (0, 0, history, 0))
    total = x * kernel[:, -1]
    for tap in range(n_taps - 1):
        total = total + padded[:, tap * dilation : tap * dilation + n_tokens] * kernel[:, tap]
    return total


def ngram_rows(tokens: Tensor, g: Geometry) -> Tensor:
    """Row numbers of the n-gram table: tokens (B, T) -> (B, T, heads).

    A window does not reach across the end of a document: that token and all before it read as one.
    """
    context = [tokens]
    cut = torch.zeros_like(tokens, dtype=torch.bool)
    for distance in range(1, g.ple_ngram):
        before = F.pad(tokens, (distance, 0), value=g.eos_token)[:, : tokens.shape[1]]
        cut = cut | (before == g.eos_token)
        context.append(torch.where(cut, g.eos_token, before))
    rows = []
    mixed = tokens * PLE_MULTIPLIERS[0]
    for n in range(2, g.ple_ngram + 1):
        mixed = mixed ^ (context[n - 1] * PLE_MULTIPLIERS[n - 1])
        first = (n - 2) * g.ple_heads_per_ngram
        for offset, size in g.ple_ranges[first : first + g.ple_heads_per_ngram]:
            rows.append(mixed % size + offset)
    return torch.stack(rows, -1)


class Model(nn.Module):
    """The whole model; see the module's docstring."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.g = g
        wide = g.hyper_streams * g.n_embd
        offset, size = g.ple_ranges[-1]
        self.token_embd = nn.Embedding(g.n_vocab, g.n_embd)
        self.per_layer_token_embd = nn.Embedding(offset + size, g.n_embd // g.ple_heads)
        self.blk = nn.ModuleList(Layer(g, index) for index in range(g.n_layer))
        self.output_hc_norm = Weight(wide, fill=2.0)
        self.output_hc_down = linear(wide, g.hyper_rank)
        self.output_hc_up = linear(g.hyper_rank, wide)
        self.output = linear(g.n_embd, g.n_vocab)

    def hidden(self, tokens: Tensor, run: Run | None = None) -> Tensor:
        """Token ids (B, T) -> what the output matrix reads (B, T, D)."""
        g = self.g
        run = run or Run()
        ngrams = self.per_layer_token_embd(ngram_rows(tokens, g)).flatten(-2)
        x = self.token_embd(tokens)[:, :, None].expand(-1, -1, g.hyper_streams, -1)
        for layer in self.blk:
            x = layer(x, ngrams, run)
            if run.layers is not None:
                run.layers.append(x)
        norm, down, up = self.output_hc_norm, self.output_hc_down, self.output_hc_up
        mixed, _ = mix_streams(x.flatten(0, 1), norm.weight, down.weight, up.weight, None, g.norm_epsilon)
        return mixed.unflatten(0, tokens.shape)

    def forward(self, tokens: Tensor, run: Run | None = None) -> Tensor:
        """Token ids (B, T) -> logits (B, T, V), float32."""
        return self.output(self.hidden(tokens, run)).float()
