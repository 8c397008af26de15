# SPDX-License-Identifier: Apache-2.0
"""Saved tensors in host memory: out after forward saved them, back just before backward needs them.

with SwapToHost() as swap:
    loss = model(x).sum()  # swap.swapped_bytes: what now waits in host memory
loss.backward()
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import TensorWeakRef

from hyper_parallel.platform.error_codes import coded

if TYPE_CHECKING:
    from hyper_parallel.platform.swap_storage import SwapStorage

PREFETCH_DEPTH = 2


def streams_of(device: torch.device) -> Any:
    """The device's module (torch.cuda, ...) if it has streams and events, else None."""
    if device.type == "cpu":
        return None  # torch.cpu has stand-ins for streams, but a copy on a CPU is done when it returns
    module = torch.get_device_module(device.type)
    has_streams = all(
        hasattr(module, name)
        for name in ("Stream", "Event", "stream", "current_stream")
    )
    return module if has_streams else None


@functools.cache
def _side_stream(device: torch.device) -> Any:
    return torch.get_device_module(device.type).Stream(device=device)


class HostCopy:
    """One tensor's elements in host memory, and the way back to its device.

    Untested on hardware: both copies run on one side stream, so the way back queues behind the way out without the
    host waiting; the tensor's stream waits for an event before it reads what came back.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        family: TensorWeakRef | None = None,
        storage: SwapStorage | None = None,
        original: Kept | None = None,
    ) -> None:
        """Copies at once; with a storage, when that says so, and ``original`` watches over the tensor until then."""
        self.family = family
        self.before: weakref.ref[HostCopy] | None = None
        self.taken_in: int | None = None  # the run of backward that last took it
        self._device = tensor.device
        self._streams = streams_of(tensor.device)
        self._arriving: tuple[torch.Tensor, Any] | None = None
        self._host: torch.Tensor | None = None
        self._side: Any = None  # the stream of the way out
        # On the device until it is released; whoever has a storage keeps it alive for its copies.
        self._present: torch.Tensor | None = tensor.detach()
        self._original, self._storage = original, storage
        self.nbytes = tensor.nbytes
        if storage is None:
            self.offload()
            self.release()
        else:
            storage.add(self)

    def offload(self, stream: Any = None) -> None:
        """Starts the way out; does nothing if it was started before."""
        if self._host is None:
            self._host = self._out(self._take_present(), stream)

    def release(self) -> None:
        """Lets go of the tensor on the device, whose memory stays until the way out has ended."""
        if self._host is not None:
            self._present = self._original = None

    def start(self, stream: Any = None) -> bool:
        """Starts the way back; False if it was started before and nothing has changed the result since."""
        if self._present is not None:
            return False
        return self._start(stream)[1]

    def wait(self) -> None:
        """Makes the current stream wait for the way back, if it was started."""
        arriving = self._arriving
        if arriving is not None and arriving[1] is not None:
            self._streams.current_stream(self._device).wait_event(arriving[1])

    def take(self) -> torch.Tensor:
        """The tensor on its device, for the current stream to use."""
        if self._present is not None:
            return self._take_present()
        (tensor, event), _ = self._start()
        self.taken_in = torch._C._current_graph_task_id()
        if event is not None:
            current = self._streams.current_stream(self._device)
            current.wait_event(event)
            tensor.record_stream(
                current
            )  # its memory belongs to the side stream and must outlive this use
        return tensor

    def _take_present(self) -> torch.Tensor:
        """The tensor on the device; raises if it was modified since it was saved."""
        assert self._present is not None
        if self._original is not None:
            self._original.take()
        return self._present

    def _start(self, stream: Any = None) -> tuple[tuple[torch.Tensor, Any], bool]:
        arriving = self._arriving  # read once: another thread of backward may forget it
        if arriving is not None and arriving[0]._version == 0:
            return arriving, False
        self._arriving = arriving = self._back(stream)
        return arriving, True

    def forget(self) -> None:
        """Drops what came back; the host copy stays."""
        self._arriving = None

    def _out(self, tensor: torch.Tensor, stream: Any) -> torch.Tensor:
        if self._streams is None:
            return tensor.to(
                "cpu", copy=True
            )  # also from a CPU: the original must be free to go
        self._side = side = stream or _side_stream(self._device)
        side.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(side):
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(side)  # the caller may drop it before the copy has run
        return host

    def _back(self, stream: Any) -> tuple[torch.Tensor, Any]:
        assert self._host is not None
        # .data: an alias whose version starts at 0, so that a change by a careless backward is seen.
        if self._streams is None:
            return self._host.to(self._device, copy=True).data, None
        side = stream or self._side
        if side is not self._side:
            side.wait_stream(self._side)  # the way out may still run there
        event = self._streams.Event()
        with self._streams.stream(side):
            tensor = torch.empty_like(self._host, device=self._device, pin_memory=False)
            tensor.copy_(self._host, non_blocking=True)
            event.record(side)
        return tensor.data, event


class Swapped:
    """What the graph holds instead of a tensor: its elements in host memory and its strides."""

    def __init__(
        self, copy: HostCopy, size: torch.Size, stride: tuple[int, ...]
    ) -> None:
        self.copy, self.size, self.stride = copy, size, stride

    def take(self) -> torch.Tensor:
        return self.copy.take().as_strided(self.size, self.stride)


class Kept:
    """A tensor that stays on its device. Torch does not watch over what hooks return, so the version is kept too."""

    def __init__(self, tensor: torch.Tensor, version: int) -> None:
        self.tensor, self.version = tensor, version

    @staticmethod
    def of(tensor: torch.Tensor) -> Kept:
        # Detached: an output that its own node holds on to would never be freed. The guard lets the alias share the
        # version counter also below autograd, inside a dispatch mode.
        with torch._C._SetExcludeDispatchKeyGuard(
            torch._C.DispatchKey.ADInplaceOrView, False
        ):
            return Kept(tensor.detach(), tensor._version)

    def take(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise coded(
                RuntimeError,
                "HP136",
                f"a tensor of shape {tuple(self.tensor.shape)} that backward needs has been modified by an "
                f"in-place operation: it is at version {self.tensor._version}, saved was version {self.version}. "
                "Clone it before changing it, or change it after backward.",
            )
        return self.tensor


class SwapToHost:
    """A context that keeps saved tensors in host memory until backward; ``policy_fn(tensor)`` says which (None: all).

    Parameters, their views and whatever shares memory with ``spared`` stay where they are. A tensor that several
    operators save is copied once. What backward reads was true when it was saved: a swapped tensor may be modified in
    place afterwards, a kept one may not (an error, as without hooks).
    """

    def __init__(
        self,
        policy_fn: Callable[[Any], bool] | None = None,
        spared: Iterable[torch.Tensor] = (),
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
        self._spared = {pointer for tensor in spared if (pointer := _memory(tensor))}
        self._depth = depth
        self._storage = storage
        self._copies: weakref.WeakValueDictionary[tuple[Any, ...], HostCopy] = (
            weakref.WeakValueDictionary()
        )
        self._last: weakref.ref[HostCopy] | None = None
        # Copies that are back on the device. The graph owns them; this only bounds how many stay there.
        self._returned: deque[weakref.ref[HostCopy]] = deque()
        self._entered: list[torch.autograd.graph.saved_tensors_hooks] = []

    def __enter__(self) -> SwapToHost:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._entered.append(hooks)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> Swapped | Kept:
        return self._swap(tensor) if self._may_leave(tensor) else Kept.of(tensor)

    def _unpack(self, packed: Swapped | Kept) -> torch.Tensor:
        tensor = packed.take()
        if isinstance(packed, Swapped):
            self._prefetch_before(packed.copy)
        return tensor

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        if (
            type(tensor) is not torch.Tensor
            or tensor.layout != torch.strided
            or tensor.is_meta
            or not tensor.numel()
        ):
            return False  # parameters, and what has no memory of the plain kind
        if isinstance(tensor._base, torch.nn.Parameter) or (
            self._spared and _memory(tensor) in self._spared
        ):
            return False
        return self._policy_fn is None or bool(self._policy_fn(tensor))

    def _swap(self, tensor: torch.Tensor) -> Swapped:
        elements, stride, shareable = flat_elements(tensor)
        # Views count their versions together with their base. Other aliases (x.data) do not, so the family is part
        # of the key: a version says nothing across families.
        family = tensor if tensor._base is None else tensor._base
        key = (
            id(family),
            tensor._version,
            elements.data_ptr(),
            elements.numel(),
            elements.dtype,
        )
        copy = self._copies.get(key) if shareable else None
        if copy is None or copy.family is None or copy.family() is not family:
            original = None if self._storage is None else Kept.of(tensor)
            copy = HostCopy(elements, TensorWeakRef(family), self._storage, original)
            copy.before, self._last = self._last, weakref.ref(copy)
            self.swapped_tensors += 1
            self.swapped_bytes += copy.nbytes
            if shareable:
                self._copies[key] = copy
        return Swapped(copy, tensor.size(), stride)

    def _prefetch_before(self, copy: HostCopy) -> None:
        """Brings back what was packed just before: backward asks in reverse order."""
        self._keep_returned(copy)
        for _ in range(self._depth):
            previous = copy.before() if copy.before is not None else None
            if previous is None:
                return
            if previous.taken_in != torch._C._current_graph_task_id():
                self.prefetched += previous.start()
                self._keep_returned(previous)
            copy = previous

    def _keep_returned(self, copy: HostCopy) -> None:
        reference = weakref.ref(copy)
        if reference in self._returned:
            return
        self._returned.append(reference)
        if len(self._returned) > self._depth + 1:
            oldest = self._returned.popleft()()
            if oldest is not None:
                oldest.forget()


def flat_elements(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], bool]:
    """(elements as one dimension, strides that rebuild the tensor from them, whether they are the tensor's own memory).

    An expanded dimension is stored once; a tensor with holes, or one that is lazily conjugated, is packed tight.
    """
    plain = tensor.detach()
    repeats = [
        stride == 0 and size > 1
        for size, stride in zip(plain.shape, plain.stride(), strict=True)
    ]
    plain = plain[tuple(slice(1) if repeat else slice(None) for repeat in repeats)]
    own = not plain.is_conj() and not plain.is_neg() and is_dense(plain)
    if not own:
        plain = plain.resolve_conj().resolve_neg().contiguous()
    stride = tuple(
        0 if repeat else step
        for repeat, step in zip(repeats, plain.stride(), strict=True)
    )
    return plain.as_strided((plain.numel(),), (1,)), stride, own


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _memory(tensor: torch.Tensor) -> int:
    """The address of the tensor's storage, of this rank's shard for a distributed tensor; 0 if it has none."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.layout != torch.strided or local.is_meta:
        return 0
    return local.untyped_storage().data_ptr()
