# SPDX-License-Identifier: Apache-2.0
"""A checkpoint with torch's names, and a model whose norm has other ones, for docs/shared-checkpoints.md."""

import torch
from torch import nn

from hyper_parallel.core.distributed_checkpoint import ModelState, load, save  # noqa: F401


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(3))


save({"model": {"norm.weight": torch.ones(3)}}, checkpoint_id="runs/a/step-100")
model = nn.ModuleDict({"norm": Norm()})
