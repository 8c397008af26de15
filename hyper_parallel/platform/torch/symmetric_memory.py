# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory on torch: its own on CUDA, memory that the ranks of one host share on a CPU."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.platform.checks import check_tensor
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.shared_memory import SharedMemoryHandler, checked_shape


class SymmetricMemoryHandler(SharedMemoryHandler):
    """Makes tensors in memory that can be shared, and shares them with the ranks of a group."""

    def __init__(self, platform: Any) -> None:
        super().__init__(platform)
        self._device_handles: weakref.WeakValueDictionary[int, _DeviceHandle] = (
            weakref.WeakValueDictionary()
        )

    def default_dtype(self) -> torch.dtype:
        return torch.get_default_dtype()

    def itemsize(self, dtype: torch.dtype) -> int:
        return dtype.itemsize

    def tensor_in(
        self, memory: mmap.mmap, sizes: Sequence[int], dtype: torch.dtype, offset: int
    ) -> torch.Tensor:
        start = offset * dtype.itemsize
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return (
            flat[start : start + math.prod(sizes) * dtype.itemsize]
            .view(dtype)
            .view(tuple(sizes))
        )

    def settle(self) -> None:
        """Nothing is pending on a CPU."""

    def empty(
        self, *size: Any, dtype: torch.dtype | None = None, device: Any = None
    ) -> torch.Tensor:
        """A tensor in memory that ``rendezvous`` can share, like torch.empty.

        Untested on hardware: CUDA.
        """
        where = _checked_device(
            "empty", torch.device(self._platform.device() if device is None else device)
        )
        if where.type == "cuda":
            from torch.distributed import _symmetric_memory

            return _symmetric_memory.empty(
                checked_shape(size), dtype=dtype or self.default_dtype(), device=where
            )
        made: torch.Tensor = super().empty(*size, dtype=dtype)
        return made

    def rendezvous(self, tensor: torch.Tensor, group: Any = None) -> Any:
        """Shares ``tensor`` with the group; every rank of it calls. Again on the same group gives the same handle.

        Untested on hardware: CUDA.
        """
        check_tensor(self._platform, "symmetric memory: rendezvous", tensor)
        if _checked_device("rendezvous", tensor.device).type == "cuda":
            from torch.distributed import _symmetric_memory

            resolved = self._platform._group("symmetric memory: rendezvous", group)
            return self._device_handle(_symmetric_memory.rendezvous(tensor, resolved))
        return super().rendezvous(tensor, group)

    def _device_handle(self, native: Any) -> _DeviceHandle:
        handle = self._device_handles.get(id(native))
        if handle is None:
            handle = self._device_handles[id(native)] = _DeviceHandle(native)
        return handle


class _DeviceHandle:
    """torch's own handle, whose waiting is done by the stream and, with timeout_ms=0, has no end.

    Untested on hardware: all of it.
    """

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def close(self) -> None:
        self._native = None


def _checked_device(call: str, device: torch.device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise coded(
            RuntimeError,
            "HP137",
            f"symmetric memory: {call}: not available on device {device.type!r}, only on cpu and cuda",
        )
    return device
