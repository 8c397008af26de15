# SPDX-License-Identifier: Apache-2.0
"""A language model with a mixture of experts, for recipes of tests."""

import torch
from torch import nn

from hyper_parallel.core.expert_parallel import FeedForward, MoE


class Block(nn.Module):
    def __init__(self, dim, experts, balance):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        routed = {"score_func": "softmax", "route_norm": True}
        shared = FeedForward(dim, dim)
        self.moe = MoE(dim, dim, experts, 2, False, balance, shared, routed)

    def forward(self, x):
        x = x + torch.tanh(x.roll(1, 1))  # of the token before
        return x + self.moe(self.norm(x))


class Mixture(nn.Module):
    def __init__(self, dim, experts, vocabulary=256, balance=None):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, experts, balance) for _ in range(2))
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
