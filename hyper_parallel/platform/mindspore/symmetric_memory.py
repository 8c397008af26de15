# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory on MindSpore: memory that the ranks of one host share on a CPU; an accelerator offers none."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import mindspore
import numpy as np

from hyper_parallel.platform.checks import check_tensor
from hyper_parallel.platform.containers import tree_map
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.mindspore import private
from hyper_parallel.platform.mindspore.swap import memory_address
from hyper_parallel.platform.mindspore.tensors import (
    DTYPE_NAMES,
    FLOAT8,
    device_name,
    numpy_dtype,
)
from hyper_parallel.platform.shared_memory import SharedMemoryHandler


class SymmetricMemoryHandler(SharedMemoryHandler):
    """Makes tensors in memory that can be shared, and shares them with the ranks of a group.

    What writes to a tensor in place writes there: ``t[i] = x``, ``copy_``, ``ops.assign``. Others that MindSpore calls
    in place, such as ``add_``, return a new tensor on a CPU.
    """

    def default_dtype(self) -> Any:
        return mindspore.float32

    def itemsize(self, dtype: Any) -> int:
        if dtype in FLOAT8:
            raise coded(
                ValueError,
                "HP137",
                f"symmetric memory: MindSpore cannot make a tensor of {DTYPE_NAMES[dtype]} in memory that is "
                "there; share bytes (uint8)",
            )
        return int(numpy_dtype(dtype).itemsize)

    def tensor_in(
        self, memory: mmap.mmap, sizes: Sequence[int], dtype: Any, offset: int
    ) -> Any:
        elements = np.frombuffer(memory, np.uint8)[offset * self.itemsize(dtype) :]
        kind = numpy_dtype(dtype)
        flat = elements[: math.prod(sizes) * kind.itemsize].view(kind)
        return SharedTensor(mindspore.Tensor.from_numpy(flat.reshape(tuple(sizes))))

    def settle(self) -> None:
        """Operators run later than they are called, on a CPU too: what others may read must have been written."""
        private.executor().sync()

    def empty(self, *size: Any, dtype: Any = None, device: Any = None) -> Any:
        """A tensor in memory that ``rendezvous`` can share, like mint.empty."""
        _check_device("empty", device_name(device))
        return super().empty(*size, dtype=dtype)

    def rendezvous(self, tensor: Any, group: Any = None) -> Any:
        """Shares ``tensor`` with the group; every rank of it calls. Again on the same group gives the same handle."""
        check_tensor(self._platform, "symmetric memory: rendezvous", tensor)
        _check_device("rendezvous", "meta" if tensor.is_meta else tensor.device)
        return super().rendezvous(tensor, group)


class SharedTensor(mindspore.Tensor):
    """A tensor in shared memory, and its views.

    Where operators are recorded for backward, setting an item would give a plain tensor other memory, in silence.
    """

    _plain: Any

    def __new__(cls, plain: Any) -> SharedTensor:
        made = mindspore.Tensor._make_subclass(cls, plain)
        made._plain = plain
        return made

    def __init__(self, *_: Any) -> None:
        """Nothing is left to do: the framework's own would copy."""

    def __setitem__(self, index: Any, value: Any) -> Any:
        with private.no_grad()():
            self._plain[index] = value
        return self

    def __getitem__(self, index: Any) -> Any:
        return self._shared_too(self._plain[index])

    def __fallback__(
        self,
        func: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return tree_map(self._shared_too, super().__fallback__(func, args, kwargs))

    def _shared_too(self, made: Any) -> Any:
        is_view = type(made) is mindspore.Tensor and memory_address(
            made
        ) == memory_address(self._plain)
        return SharedTensor(made) if is_view else made


def _check_device(call: str, device: str) -> None:
    if device != "CPU":
        raise coded(
            RuntimeError,
            "HP137",
            f"symmetric memory: {call}: not available on device {device!r}: MindSpore has none on an accelerator; "
            "exchange tensors with isend and irecv, or all_gather_into_tensor",
        )
