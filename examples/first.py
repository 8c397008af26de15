"""A model written for one device, put on a mesh by a plan of a few lines: the same loss, the same gradients."""

import torch
from torch import nn

from hyper_parallel import Replicate, Shard, distribute_tensor, get_platform, init_device_mesh
from hyper_parallel.core.shard import ShardingPlan, shard_module

platform = get_platform()
platform.init_process_group()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def model():
    torch.manual_seed(0)  # the same numbers on every rank
    return nn.Sequential(nn.Linear(16, 30), nn.GELU(), nn.Linear(30, 4))


# The first layer's columns and the second one's rows over tp, the batch over dp. Sizes need not divide.
plan = ShardingPlan(
    plan={
        "0.*": [Replicate(), Shard(0)],
        "2.weight": [Replicate(), Shard(1)],
        "2.bias": [Replicate(), Replicate()],
    },
    input_plan={"": ("dp", "None")},
)
many, one = shard_module(model(), mesh, plan), model()

x, labels = torch.randn(10, 16), torch.randint(4, (10,))
loss = nn.functional.cross_entropy(many(x), distribute_tensor(labels, mesh, [Shard(0), Replicate()]))
loss.backward()
truth = nn.functional.cross_entropy(one(x), labels)
truth.backward()

torch.testing.assert_close(loss.full_tensor(), truth)
for mine, true in zip(many.parameters(), one.parameters(), strict=True):
    torch.testing.assert_close(mine.grad.full_tensor(), true.grad)
print(f"rank {mesh.rank}: {tuple(many[0].weight.local_shape)} of {tuple(many[0].weight.shape)}, loss {loss.item():.4f}")
platform.destroy_process_group()
