# SPDX-License-Identifier: Apache-2.0
"""A training on a mesh, and a folder of Hugging Face, for docs/checkpoints.md."""

import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.distributed_checkpoint.hugging_face import save_hugging_face
from hyper_parallel.core.tensor_parallel import replicate

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
plan = {
    "0": ColwiseParallel(),
    "1": RowwiseParallel(),
}
torch.manual_seed(0)
model = replicate(
    parallelize_module(
        nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), mesh["tp"], plan
    ),
    mesh["dp"],
)
optimizer = torch.optim.AdamW(model.parameters())
loss = model(torch.ones(2, 4)).pow(2).mean()
loss.backward()
optimizer.step()
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
step, loss = 100, loss.item()


class Loader:
    """A data loader that knows where it is."""

    place = 7

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


loader = Loader()
save_hugging_face(model.state_dict(), "llama-3-8b")
