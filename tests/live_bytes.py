# SPDX-License-Identifier: Apache-2.0
"""How many bytes of tensors live at once, for tests of memory on PyTorch."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


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
        self._seen = {
            at: (ref, size)
            for at, (ref, size) in self._seen.items()
            if not ref.expired()
        }
        self.peak = max(self.peak, sum(size for _, size in self._seen.values()))
        return out
