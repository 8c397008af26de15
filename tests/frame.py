# SPDX-License-Identifier: Apache-2.0
"""The few framework calls that the backend tests need, so that they can be written once for every framework."""

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# What a reduction over the ranks gives, from their tensors stacked.
REDUCTIONS = {
    "sum": lambda x: x.sum(0),
    "avg": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "prod": lambda x: x.prod(0),
}


def draw(*shape, seed=0):
    """Numbers of both signs without ties, the same on every rank for the same seed."""
    return np.random.default_rng(seed).standard_normal(shape)


def leaf(array):
    """A float64 tensor that gets a gradient."""
    return torch.tensor(np.asarray(array), dtype=torch.float64, requires_grad=True)


def backward(outputs, weights):
    """Backward of the sum of ``output * weight`` over all pairs."""
    loss = sum((output * torch.as_tensor(weight)).sum() for output, weight in zip(outputs, weights, strict=True))
    loss.backward()


def equal(actual, expected):
    """Equal in shape and in value to float64 accuracy."""
    torch.testing.assert_close(
        torch.as_tensor(actual).detach(), torch.as_tensor(expected).detach(), rtol=1e-12, atol=1e-12
    )


def check_on_this_rank(collective, simulate, inputs, rank):
    """Compares a collective with ``simulate``: every rank's output from every rank's input, in one process.

    Forward, and the gradient of a randomly weighted sum over all ranks: what this rank's input owes to every output.
    """
    mine = leaf(inputs[rank])
    output = collective(mine)
    everyone = [leaf(x) for x in inputs]
    expected = simulate(everyone)
    equal(output, expected[rank])
    weights = [draw(*y.shape, seed=100 + r) for r, y in enumerate(expected)]
    backward([output], [weights[rank]])
    backward(expected, weights)
    equal(mine.grad, everyone[rank].grad)


class LiveBytes(TorchDispatchMode):
    """The bytes that live at once in storages that operators touch in this context; those on meta have none."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves((args, kwargs, out)):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._seen = {at: (ref, size) for at, (ref, size) in self._seen.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._seen.values()))
        return out
