# SPDX-License-Identifier: Apache-2.0
"""A model on four ranks for docs/data.md."""

import torch
import torch.nn.functional as F  # noqa: F401, N812 - everyone's name for it
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.tensor_parallel import Replicated, replicate

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
plan = {
    "0": ColwiseParallel(),
    "2": RowwiseParallel(),
    "": Replicated(),
}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3))


model = replicate(parallelize_module(make_model(), mesh["tp"], plan), mesh["dp"])
features = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))
values = torch.randn(10, 3, generator=torch.Generator().manual_seed(2))
