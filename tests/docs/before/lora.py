# SPDX-License-Identifier: Apache-2.0
"""A mesh and a batch, for docs/lora.md."""

import torch
from torch import nn  # noqa: F401

from hyper_parallel import (  # noqa: F401
    ColwiseParallel,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.tensor_parallel import Replicated  # noqa: F401

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
