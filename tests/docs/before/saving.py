# SPDX-License-Identifier: Apache-2.0
"""A model on two ranks, for docs/saving.md."""

from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    get_platform,
    init_device_mesh,
    parallelize_module,
)

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
plan = {
    "0": ColwiseParallel(use_local_output=False),
    "1": RowwiseParallel(use_local_output=False),
}
model = parallelize_module(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), mesh, plan)
rank = get_platform().get_rank()
