"""A linear layer that is cut along its contraction over all ranks, with the gradient of one device."""

import torch

from hyper_parallel import get_platform

platform = get_platform()
platform.init_process_group()
rank, ranks = platform.get_rank(), platform.get_world_size()

torch.manual_seed(0)  # the same numbers on every rank
x, weight = torch.randn(6, 10), torch.randn(3, 10)

# Each rank holds some columns, unevenly: 10 on 4 ranks are 3, 3, 3 and 1. The products are added up over the ranks
# while the rows of the result are spread over them, in one reduce-scatter; its backward is an all-gather.
shard = platform.chunk(weight, 1, ranks, rank).clone().requires_grad_()
partial = platform.chunk(x, 1, ranks, rank) @ shard.T
rows = platform.differentiable_reduce_scatter(partial, ranks, 0, "sum", None)
(rows**2).sum().backward()

# The same on one device.
whole = weight.clone().requires_grad_()
((x @ whole.T) ** 2).sum().backward()
torch.testing.assert_close(shard.grad, platform.chunk(whole.grad, 1, ranks, rank))
print(f"rank {rank} of {ranks}: {shard.shape[1]} columns, gradient as on one device", flush=True)
platform.destroy_process_group()
