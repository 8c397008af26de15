# SPDX-License-Identifier: Apache-2.0
"""A small model on a mesh of data and tensor parallel axes, trained by hosts or by a pool of ranks.

As a script it is a rank of a launcher's job: python small_training.py TP STEPS TIMEOUT; each rank prints its losses.
"""

import json
import os
import sys

import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    get_platform,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.tensor_parallel import Replicated, replicate
from hyper_parallel.core.training import training_step

ROWS = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def train(tp, steps):
    """Yields the loss of every step, which all ranks have."""
    platform = get_platform()
    dp = platform.get_world_size() // tp
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Block()
    plan = {
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(use_local_output=False),
        "": Replicated(),
    }
    parallelize_module(model, mesh["tp"], plan)
    replicate(model, mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    part = slice(mesh.get_local_rank("dp") * ROWS // dp, None)
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(ROWS, 16)[part][: ROWS // dp]

        def loss_of(x=x):
            return (model(x) - 1).square().mean()

        loss, _ = training_step(model, optimizer, loss_of, max_norm=1.0)
        yield loss


def collect(tp, steps):
    """The losses, for a pool of ranks."""
    return list(train(tp, steps))


def main():
    tp, steps, timeout = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    get_platform().init_process_group(timeout=timeout)
    for loss in train(tp, steps):
        # In one call, since the ranks of a host write to one pipe.
        os.write(1, f"{json.dumps(loss)}\n".encode())
    get_platform().destroy_process_group()


if __name__ == "__main__":
    main()
