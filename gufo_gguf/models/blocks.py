"""Parts that several architectures share, as tensors of one layer ``blk``.

Gains: random weights make a model whose answer barely depends on what it read, unless attention
is peaked and every block's output weighs as much as the residual it is added to.  So queries and
keys get a gain above one, and the last matrix of a block doubles its output.
"""

from __future__ import annotations

from gufo_gguf.models.tensors import Tensor, kernel, matrix, norm, router, table, vector
from gufo_gguf.models.tokenizer import vocabulary

QUERY_GAIN = 2.0
"""On queries and on keys each: scores get a standard deviation of about 4."""
BLOCK_GAIN = 2.0
LOGIT_GAIN = 3.0


def embedding(n_embd: int, n_vocab: int, std: float = 1.0) -> Tensor:
    return table("token_embd", n_embd, n_vocab, std)


def output(n_embd: int, n_vocab: int) -> Tensor:
    """Never tied to the embedding: a tied random model mostly repeats its last token."""
    return matrix("output", n_embd, n_vocab, gain=LOGIT_GAIN, zero_rows=vocabulary(n_vocab).quiet)


def attention(
    blk: str, n_embd: int, n_head: int, n_head_kv: int, head_dim: int, *, gated: bool = False, qk_norm: bool = True
) -> list[Tensor]:
    """Query, key, value and output; ``gated``: the query projection also holds an output gate."""
    direct_gain = 1.0 if qk_norm else QUERY_GAIN
    tensors = [
        matrix(f"{blk}.attn_q", n_embd, n_head * head_dim * (2 if gated else 1), gain=direct_gain),
        matrix(f"{blk}.attn_k", n_embd, n_head_kv * head_dim, gain=direct_gain),
        matrix(f"{blk}.attn_v", n_embd, n_head_kv * head_dim),
        matrix(f"{blk}.attn_output", n_head * head_dim, n_embd, gain=BLOCK_GAIN),
    ]
    if qk_norm:
        tensors += [
            norm(f"{blk}.attn_q_norm", head_dim, gain=QUERY_GAIN),
            norm(f"{blk}.attn_k_norm", head_dim, gain=QUERY_GAIN),
        ]
    return tensors


def delta_net(
    blk: str, n_embd: int, k_heads: int, v_heads: int, dim: int, conv_kernel: int, *, fused_ba: bool = False
) -> list[Tensor]:
    """Gated DeltaNet: (dim x dim) state per value head, convolution over q, k and v.

    ``fused_ba``: beta and alpha come out of one matrix (qwen3next).
    """
    key_dim, value_dim = k_heads * dim, v_heads * dim
    conv_dim = 2 * key_dim + value_dim
    gates = (
        [matrix(f"{blk}.ssm_ba", n_embd, 2 * v_heads)]
        if fused_ba
        else [matrix(f"{blk}.ssm_beta", n_embd, v_heads), matrix(f"{blk}.ssm_alpha", n_embd, v_heads)]
    )
    return [
        matrix(f"{blk}.attn_qkv", n_embd, conv_dim),
        matrix(f"{blk}.attn_gate", n_embd, value_dim),
        kernel(f"{blk}.ssm_conv1d", conv_kernel, conv_dim),
        *gates,
        *_decay(blk, (v_heads,)),
        norm(f"{blk}.ssm_norm", dim),
        matrix(f"{blk}.ssm_out", value_dim, n_embd, gain=BLOCK_GAIN),
    ]


def mamba2(
    blk: str, n_embd: int, n_inner: int, n_state: int, n_head: int, n_group: int, conv_kernel: int
) -> list[Tensor]:
    """Mamba-2 mixer: (n_state x n_inner) state, convolution over x, B and C."""
    conv_dim = n_inner + 2 * n_group * n_state
    return [
        matrix(f"{blk}.ssm_in", n_embd, n_inner + conv_dim + n_head),
        # a small convolution keeps SiLU near its linear part: with positive means the state of any
        # long text would be the same
        kernel(f"{blk}.ssm_conv1d", conv_kernel, conv_dim, gain=0.4),
        vector(f"{blk}.ssm_conv1d.bias", conv_dim, low=-0.05, high=0.05),
        *_decay(blk, (1, n_head)),
        vector(f"{blk}.ssm_d", 1, n_head, low=0.05, high=0.15),
        norm(f"{blk}.ssm_norm", n_inner // n_group, n_group),
        matrix(f"{blk}.ssm_out", n_inner, n_embd, gain=BLOCK_GAIN),
    ]


def _decay(blk: str, shape: tuple[int, ...]) -> list[Tensor]:
    """Per head, the state decays by exp(a * softplus(x + dt)) a token.

    With these ranges heads forget over some ten to some thousand tokens: a checkpoint's state
    must matter long after it was restored.
    """
    return [
        vector(f"{blk}.ssm_a", *shape, low=-0.25, high=-0.01),
        vector(f"{blk}.ssm_dt.bias", shape[-1], low=-4.0, high=-1.0),
    ]


def dense_ffn(blk: str, n_embd: int, n_ff: int) -> list[Tensor]:
    return [
        matrix(f"{blk}.ffn_gate", n_embd, n_ff),
        matrix(f"{blk}.ffn_up", n_embd, n_ff),
        matrix(f"{blk}.ffn_down", n_ff, n_embd, gain=BLOCK_GAIN),
    ]


def moe_ffn(blk: str, n_embd: int, n_expert: int, n_ff_exp: int, n_ff_shared: int) -> list[Tensor]:
    """Routed experts and one gated shared expert."""
    return [
        router(f"{blk}.ffn_gate_inp", n_embd, n_expert),
        matrix(f"{blk}.ffn_gate_exps", n_embd, n_ff_exp, n_expert),
        matrix(f"{blk}.ffn_up_exps", n_embd, n_ff_exp, n_expert),
        matrix(f"{blk}.ffn_down_exps", n_ff_exp, n_embd, n_expert, gain=BLOCK_GAIN),
        router(f"{blk}.ffn_gate_inp_shexp", n_embd),
        matrix(f"{blk}.ffn_gate_shexp", n_embd, n_ff_shared),
        matrix(f"{blk}.ffn_up_shexp", n_embd, n_ff_shared),
        matrix(f"{blk}.ffn_down_shexp", n_ff_shared, n_embd, gain=BLOCK_GAIN),
    ]


def rope_sections(n_rot: int) -> list[int]:
    """Rotary pairs for the three position axes; with text all three carry the same position."""
    pairs = n_rot // 2
    return [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0]
