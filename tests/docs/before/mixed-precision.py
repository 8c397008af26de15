# SPDX-License-Identifier: Apache-2.0
"""A small model on two ranks, and a batch, for docs/mixed-precision.md."""

import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    init_device_mesh,
    parallelize_module,  # noqa: F401
)
from hyper_parallel.core.tensor_parallel import Replicated

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
plan = {
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "": Replicated(),
}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(8),
            nn.Linear(8, 32),
            nn.Linear(32, 8),
        )

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def make_model():
    torch.manual_seed(0)
    return Mlp()


x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
