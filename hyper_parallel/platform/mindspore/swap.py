# SPDX-License-Identifier: Apache-2.0
"""Saved tensors in host memory: out after forward saved them, back just before backward needs them.

with SwapToHost() as swap:
    loss = model(x).sum()  # swap.swapped_bytes: what now waits in host memory
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import mindspore
import numpy as np
from mindspore import ops

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.mindspore.tensors import host_memory
from hyper_parallel.platform.swap_storage import SwapStorage

PREFETCH_DEPTH = 2


class HostCopy:
    """One tensor's elements in host memory, and the way back to its device.

    Untested on hardware: copies to and from an accelerator.
    """

    def __init__(
        self,
        tensor: Any,
        before: HostCopy | None,
        storage: SwapStorage | None = None,
    ) -> None:
        """Copies at once; with a storage, when that says so."""
        self.before = None if before is None else weakref.ref(before)
        self.nbytes = int(tensor.nbytes)
        self._device = tensor.device
        self._arriving: Any = None
        self._host: Any = None
        # On the device until it is released. An alias: a graph that held its own output would never be freed.
        self._present = ops.stop_gradient(tensor)
        self._storage = storage
        if storage is None:
            self.offload()
            self.release()
        else:
            self._mark = mark_of(self._present)
            storage.add(self)

    def offload(self, stream: Any = None) -> None:  # noqa: ARG002 - MindSpore chooses the stream
        """Copies the tensor to host memory; does nothing if that was done before."""
        if self._host is not None:
            return
        present = self._take_present()
        # Also from a CPU: the original must be free to go.
        self._host = (
            np.array(present.asnumpy())
            if self._device == "CPU"
            else present.move_to("CPU", blocking=True)
        )

    def release(self) -> None:
        """Lets go of the tensor on the device, if there is a copy of it."""
        if self._host is not None:
            self._present = None

    def wait(self) -> None:
        """Does nothing: MindSpore orders the way back before what uses it."""

    def _take_present(self) -> Any:
        """The tensor on the device; raises if it was modified since it was saved."""
        if self._storage is not None and self._mark != mark_of(self._present):
            raise coded(
                RuntimeError,
                "HP136",
                f"a tensor of shape {tuple(self._present.shape)} that backward needs has been modified by an "
                "in-place operation. Clone it before changing it, or change it after backward.",
            )
        return self._present

    def start(self, stream: Any = None) -> bool:  # noqa: ARG002 - MindSpore chooses the stream
        """Starts the way back; False if it was started before."""
        if self._present is not None or self._arriving is not None:
            return False
        if self._device == "CPU":
            self._arriving = mindspore.Tensor(self._host)
        else:
            self._arriving = self._host.move_to(self._device, blocking=False)
        return True

    def take(self) -> Any:
        """The tensor on its device; the host copy stays, for a backward that comes again."""
        if self._present is not None:
            return self._take_present()
        self.start()
        arrived, self._arriving = self._arriving, None
        return arrived


class SwapToHost:
    """A context that packs saved tensors into host memory. ``spared``: tensors whose memory stays where it is.

    Tensors without data stay, and those for which ``policy_fn(tensor)`` is false.
    """

    def __init__(
        self,
        policy_fn: Callable[[Any], bool] | None = None,
        spared: Iterable[Any] = (),
        depth: int = PREFETCH_DEPTH,
        storage: SwapStorage | None = None,
    ) -> None:
        if policy_fn is not None and not callable(policy_fn):
            raise coded(
                ValueError,
                "HP136",
                f"policy_fn must be a function of a tensor that returns a bool, or None; got {policy_fn!r}",
            )
        self.swapped_tensors = 0
        self.swapped_bytes = 0
        self.prefetched = 0
        self._policy_fn = policy_fn
        self._spared = {memory_address(tensor) for tensor in spared}
        self._depth = depth
        self._storage = storage
        self._last: weakref.ref[HostCopy] | None = None
        self._entered: list[Any] = []

    def __enter__(self) -> SwapToHost:
        hooks = mindspore.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._entered.append(hooks)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().__exit__(*error)

    def _pack(self, tensor: Any) -> Any:
        if not self._may_leave(tensor):
            return tensor
        before = None if self._last is None else self._last()
        copy = HostCopy(tensor, before, self._storage)
        self._last = weakref.ref(copy)
        self.swapped_tensors += 1
        self.swapped_bytes += copy.nbytes
        return copy

    def _unpack(self, packed: Any) -> Any:
        if not isinstance(packed, HostCopy):
            return packed
        taken = packed.take()
        self._prefetch_before(packed)
        return taken

    def _may_leave(self, tensor: Any) -> bool:
        if (
            tensor.is_meta
            or not tensor.numel()
            or memory_address(tensor) in self._spared
        ):
            return False
        return self._policy_fn is None or bool(self._policy_fn(tensor))

    def _prefetch_before(self, copy: HostCopy) -> None:
        """Brings back what was packed just before: backward asks in reverse order."""
        for _ in range(self._depth):
            previous = copy.before() if copy.before is not None else None
            if previous is None:
                return
            self.prefetched += previous.start()
            copy = previous


def mark_of(tensor: Any) -> int:
    """A number that changes when the tensor is modified. MindSpore does not count all changes, so bytes are compared.

    Untested on hardware: an accelerator's own count of changes.
    """
    memory = host_memory(tensor)
    if memory is None:
        return int(tensor._version)
    return zlib.crc32(np.ascontiguousarray(memory).data)


def memory_address(tensor: Any) -> int:
    """The address of the tensor's storage, of this rank's shard for a distributed tensor; 0 if it has none."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return 0 if local.is_meta else int(local.untyped_storage().data_ptr())
