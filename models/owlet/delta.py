"""The Gated DeltaNet rule, twice: step by step as it is defined, and in chunks as it is trained.

Per head, with a state S of shape (s, s), row = key axis, column = value axis:

    S <- exp(g_t) S                        decay, g_t <= 0
    u  = beta_t (v_t - k_t^T S)            what the state does not say yet about k_t
    S <- S + k_t u^T
    o_t = S^T q_t / sqrt(s)

Chunked form.  Inside a chunk of n tokens with cumulative decay G_i = g_1 + ... + g_i, unrolling the
rule gives a unit lower triangular system for all u of the chunk at once:

    (I + A) U = diag(beta) (V - diag(exp G) K S_0),   A_ij = beta_i exp(G_i - G_j) k_i.k_j  for j < i

so that U = W - Y S_0 with two right-hand sides solved together, and the state after the chunk is an
affine function of the state before it:

    S_n = (exp(G_n) I - Kd^T Y) S_0 + Kd^T W,         Kd_i = exp(G_n - G_i) k_i

Only that last line is sequential: one small matrix product per chunk.  All else runs over every
chunk in parallel.  (Yang et al., "Gated Delta Networks", 2024, derive the same.)
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
"""Tokens per chunk; a power of two well below the head size's square keeps the solve cheap."""


def delta_rule_steps(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Token after token: slow, and the definition that the chunked form is tested against.

    q, k, v (B, T, H, s); g, beta (B, T, H); state (B, H, s, s).  Returns outputs (B, T, H, s) and
    the state after the last token.
    """
    n_batch, n_tokens, n_head, size = q.shape
    state = q.new_zeros(n_batch, n_head, size, size) if state is None else state
    outputs = []
    for t in range(n_tokens):
        state = state * g[:, t].exp()[..., None, None]
        missing = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], missing * beta[:, t, :, None])
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * size**-0.5)
    return torch.stack(outputs, 1), state


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same in chunks of CHUNK tokens; shapes as in ``delta_rule_steps``, computed in float32.

    Padding tokens have k = 0, beta = 0 and g = 0: they change neither the state nor another output.
    """
    n_batch, n_tokens, n_head, size = q.shape
    n_chunks = -(-n_tokens // CHUNK)
    n_padding = n_chunks * CHUNK - n_tokens

    def chunked(x: Tensor) -> Tensor:
        """(B, T, H, ...) -> (B, H, chunks, CHUNK, ...)"""
        x = x.float()
        if n_padding:
            x = torch.cat([x, x.new_zeros(n_batch, n_padding, *x.shape[2:])], 1)
        return x.unflatten(1, (n_chunks, CHUNK)).movedim(3, 1)

    q, k, v, g, beta = chunked(q), chunked(k), chunked(v), chunked(g), chunked(beta)
    q = q * size**-0.5
    total = g.cumsum(-1)  # G: (B, H, c, n)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    # masked before exp: above the diagonal the difference is positive and could overflow
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()

    keys_beta = k * beta[..., None]
    system = (keys_beta @ k.mT * decay).tril(-1)  # A; the solve takes the unit diagonal for granted
    right = torch.cat([v * beta[..., None], keys_beta * total.exp()[..., None]], -1)
    w, y = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(size, -1)

    k_end = k * (total[..., -1:] - total).exp()[..., None]  # Kd
    eye = torch.eye(size, device=q.device)
    carry = total[..., -1].exp()[..., None, None] * eye - k_end.mT @ y  # (B, H, c, s, s)
    added = k_end.mT @ w

    state = q.new_zeros(n_batch, n_head, size, size) if state is None else state.float()
    flat = state.flatten(0, 1)
    carries, addeds = carry.flatten(0, 1).unbind(1), added.flatten(0, 1).unbind(1)
    before = []
    for chunk in range(n_chunks):
        before.append(flat)
        flat = torch.baddbmm(addeds[chunk], carries[chunk], flat)
    starts = torch.stack(before, 1).unflatten(0, (n_batch, n_head))  # state before each chunk

    u = w - y @ starts
    out = (q * total.exp()[..., None]) @ starts + (q @ k.mT * decay) @ u
    out = out.movedim(1, 3).flatten(1, 2)[:, :n_tokens]
    return out, flat.unflatten(0, (n_batch, n_head))
