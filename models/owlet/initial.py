"""Weights before training.

Blocks start small against the embedding they are added to (output matrices are scaled down with the
depth), gates start in the middle, and the delta-net's heads start with different memories: from a
few tokens to some thousand.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from models.owlet.geometry import Geometry
from models.owlet.reference import Model

_OUTPUTS = ("attn_output", "ssm_out", "ffn_down_exps", "ffn_down_shexp", "ple_value")


def new_model(g: Geometry, seed: int) -> Model:
    """A model with the weights that this seed gives."""
    torch.manual_seed(seed)
    model = Model(g)
    for name, weight in model.named_parameters():
        last = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if "norm" in last:
            continue
        if last.endswith("conv1d"):
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)
        elif last == "ssm_a_log":
            nn.init.uniform_(weight, math.log(0.5), math.log(8.0))
        elif name.endswith("ssm_dt.bias"):
            steps = torch.empty_like(weight).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            # softplus of the bias is the step
            weight.data = steps + torch.log(-torch.expm1(-steps))
        elif last == "token_embd" or last == "per_layer_token_embd":
            nn.init.normal_(weight, std=0.5)
        elif (
            last == "output"
            or last in ("ffn_gate_inp", "ffn_gate_inp_shexp")
            or (last.endswith(("_inject", "_up")) and "hc_" in last)
        ):
            nn.init.normal_(weight, std=0.02)
        else:
            gain = (2 * g.n_layer) ** -0.5 if last in _OUTPUTS else 1.0
            nn.init.normal_(weight, std=gain * weight.shape[-1] ** -0.5)
    return model
