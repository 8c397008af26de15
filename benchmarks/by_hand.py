# SPDX-License-Identifier: Apache-2.0
"""Communication as people write it by hand for tensor parallel: autograd functions around torch's collectives."""

import torch
import torch.distributed as dist


class Summed(torch.autograd.Function):
    """Parts in, their sum out; the gradient is the same for all parts."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Copied(torch.autograd.Function):
    """The same on every rank; the gradient comes in parts."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return Summed.forward(ctx, grad)


class Gathered(torch.autograd.Function):
    """Shards of the sequence in, all of it out; the gradient comes in parts, of which each rank gets its shard."""

    @staticmethod
    def forward(ctx, x):
        x = x.transpose(0, 1).contiguous()
        whole = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
        dist.all_gather_into_tensor(whole, x)
        return whole.transpose(0, 1)

    @staticmethod
    def backward(ctx, grad):
        return Scattered.forward(ctx, grad)


class Scattered(torch.autograd.Function):
    """Parts in, each rank's shard of the sum's sequence out."""

    @staticmethod
    def forward(ctx, x):
        x = x.transpose(0, 1).contiguous()
        shard = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
        dist.reduce_scatter_tensor(shard, x)
        return shard.transpose(0, 1)

    @staticmethod
    def backward(ctx, grad):
        return Gathered.forward(ctx, grad)
