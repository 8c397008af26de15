"""A model written for one device, distributed on a mesh by a short plan: the same loss, the same gradients."""

import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    get_platform,
    init_device_mesh,
    loss_parallel,
    parallel_table,
    parallelize_module,
    replicate,
)

platform = get_platform()
platform.init_process_group()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def model():
    torch.manual_seed(0)  # the same numbers on every rank
    return nn.Sequential(nn.Linear(16, 30), nn.GELU(), nn.Linear(30, 5))


# Shard the outputs of layer 0 and the inputs of layer 2 along tp, and the batch along dp. Sizes need not divide evenly.
plan = {
    "0": ColwiseParallel(),
    "2": RowwiseParallel(),
}
many = replicate(parallelize_module(model(), mesh["tp"], plan), mesh["dp"])

x, labels = torch.randn(10, 16), torch.randint(5, (10,))
mine = slice(
    5 * mesh.get_local_rank("dp"), 5 * mesh.get_local_rank("dp") + 5
)  # this rank's part of the batch
with loss_parallel():
    loss = nn.functional.cross_entropy(many(x[mine]), labels[mine])
loss.backward()

one = model()
truth = nn.functional.cross_entropy(one(x), labels)
truth.backward()
torch.testing.assert_close(loss.full_tensor(), truth)
for mine, true in zip(many.parameters(), one.parameters(), strict=True):
    torch.testing.assert_close(mine.grad.full_tensor(), true.grad)
if mesh.rank == 0:
    print(parallel_table(many))
print(
    f"rank {mesh.rank}: {tuple(many[0].weight.local_shape)} of {tuple(many[0].weight.shape)}, loss {loss.item():.4f}"
)
platform.destroy_process_group()
