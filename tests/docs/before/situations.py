# SPDX-License-Identifier: Apache-2.0
"""A model, a plan and a batch, for docs/situations.md."""

import torch
from torch import nn

from hyper_parallel import (  # noqa: F401
    ColwiseParallel,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.tensor_parallel import Replicated, replicate

plan = {
    "0": ColwiseParallel(),
    "2": RowwiseParallel(),
    "": Replicated(),
}
batch = (torch.ones(4, 6),)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3))


def loss(model, x):
    return model(x).pow(2).mean()


def training_on(mesh):
    model = replicate(parallelize_module(make_model(), mesh["tp"], plan), mesh["dp"])
    return model, torch.optim.AdamW(model.parameters())
