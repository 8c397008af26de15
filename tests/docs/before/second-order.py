# SPDX-License-Identifier: Apache-2.0
"""A small model on two ranks, and a batch, for docs/second-order.md."""

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
    "0": ColwiseParallel(),
    "2": RowwiseParallel(),
    "": Replicated(),
}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()


x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
