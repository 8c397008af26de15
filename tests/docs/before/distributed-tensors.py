# SPDX-License-Identifier: Apache-2.0
"""A model whose two halves cost a reduction each, for docs/distributed-tensors.md."""

import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.dtensor.ledger import CommunicationLedger  # noqa: F401
from hyper_parallel.core.tensor_parallel import Replicated

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
columns, rows = (
    ColwiseParallel(),
    RowwiseParallel(),
)
halves = [nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16), nn.Linear(16, 8)]
model = parallelize_module(
    nn.Sequential(nn.LayerNorm(8), *halves),
    mesh,
    {"[13]": columns, "[24]": rows, "": Replicated()},
)
x = torch.ones(3, 8)
