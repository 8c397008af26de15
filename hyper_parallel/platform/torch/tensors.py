# SPDX-License-Identifier: Apache-2.0
"""Tensors, dtypes, devices, streams and randomness on torch."""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch.autograd import grad_mode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.weak import WeakTensorKeyDictionary

from hyper_parallel.platform.contract.memory import round_up
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import OpName, Platform
from hyper_parallel.platform.torch import operators
from hyper_parallel.platform.torch.deferred_init import deferred_copy
from hyper_parallel.platform.transform import chunk_span

# The names that checkpoints store, without a framework's prefix.
DTYPES = {
    name: getattr(torch, name)
    for name in (
        "bfloat16", "bool", "complex128", "complex64", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2",
        "int16", "int32", "int64", "int8", "uint16", "uint32", "uint64", "uint8",
    )
}  # fmt: skip
ALIASES = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "int": "int32",
    "long": "int64",
    "bool_": "bool",
}


# Dtypes that numpy does not know, and those of the same size that it does.
_WITHOUT_NUMPY = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}

_MEMORIES: MutableMapping[Any, Any] = WeakTensorKeyDictionary()


class _LeafMemory(dict[Any, Any]):
    """What was made from a leaf, until backward has passed it or other leaves need the room.

    The graph of what is made from a leaf holds the leaf, so what is remembered here would never be freed. When it is
    forgotten depends on the program alone, never on what this rank still refers to: ranks that disagree on what they
    remember disagree on what to communicate.
    """

    _MOST = 8
    _latest: ClassVar[OrderedDict[int, weakref.ref[_LeafMemory]]] = OrderedDict()

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if isinstance(value, torch.Tensor):
            if not value.requires_grad:
                return  # it does not hold the leaf
            value.register_hook(functools.partial(_forget, weakref.ref(self), key))
        latest = _LeafMemory._latest
        latest.pop(id(self), None)
        latest[id(self)] = weakref.ref(self)
        if len(latest) > self._MOST:
            _, reference = latest.popitem(last=False)
            oldest = reference()
            if oldest is not None:
                oldest.clear()


def _forget(memory: weakref.ref[_LeafMemory], key: Any, _: Any) -> None:
    found = memory()
    if found is not None:
        found.pop(key, None)


class Tensors(Platform):
    """The part of the contract that is about single tensors and the devices they lie on."""

    def get_op_name(self, func: Any) -> str:
        if isinstance(func, torch._ops.OpOverload):
            func = func.overloadpacket
        name = getattr(func, "__name__", None)
        if name is None:
            raise TypeError(
                f"get_op_name: expected an operator, got {type(func).__name__} {func!r}"
            )
        if (
            name == "__get__"
        ):  # a property such as Tensor.T, which arrives as its getter
            return str(func.__self__.__name__)
        return str(name)

    def op_name_of(self, func: Any) -> OpName:
        return operators.op_name_of(func)

    def canonical_kwargs(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        return operators.canonical_kwargs(keywords)

    def operator(self, name: str) -> Callable[..., Any]:
        return operators.function(name)

    def is_tensor(self, obj: Any) -> bool:
        return isinstance(obj, torch.Tensor)

    def is_floating_point(self, tensor: Any) -> bool:
        return bool(tensor.is_floating_point())

    def chunk(self, data: Any, split_dim: int, split_size: int, index: int) -> Any:
        if (
            not isinstance(split_size, int)
            or split_size < 1
            or not 0 <= index < split_size
        ):
            raise coded(
                ValueError,
                "HP139",
                f"chunk: index must be 0 to split_size - 1, got index {index!r} of split_size {split_size!r}",
            )
        if not -data.dim() <= split_dim < data.dim():
            raise coded(
                ValueError,
                "HP139",
                f"chunk: split_dim {split_dim} is not a dim of shape {tuple(data.shape)}",
            )
        return data.narrow(
            split_dim, *chunk_span(data.shape[split_dim], split_size, index)
        )

    def chunks(self, data: Any, split_dim: int, split_size: int) -> list[Any]:
        first = self.chunk(data, split_dim, split_size, 0)
        size = data.shape[split_dim]
        spans = (chunk_span(size, split_size, place) for place in range(1, split_size))
        # Not split(): what it returns cannot be modified in place where gradients are recorded.
        return [first, *(data.narrow(split_dim, *span) for span in spans)]

    def clone(self, tensor: Any) -> Any:
        # Without data, what a copy must keep is how its numbers will be drawn.
        twin = deferred_copy(tensor) if tensor.is_meta else None
        return (
            tensor.detach().clone(memory_format=torch.contiguous_format)
            if twin is None
            else twin
        )

    def in_memory_format_of(self, like: Any, tensor: Any) -> Any:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        wanted = formats.get(like.dim())
        if (
            wanted is None
            or like.is_meta
            or like.is_contiguous()
            or not like.is_contiguous(memory_format=wanted)
        ):
            return tensor
        return tensor.contiguous(memory_format=wanted)

    def cat(self, tensors: Sequence[Any], dim: int = 0) -> Any:
        return torch.cat(tuple(tensors), dim)

    def construct_strided_slice(
        self, x: Any, begin: Sequence[int], end: Sequence[int], stride: Sequence[int]
    ) -> Any:
        if not len(begin) == len(end) == len(stride) == x.dim():
            raise coded(
                ValueError,
                "HP139",
                f"construct_strided_slice: begin {list(begin)}, end {list(end)} and stride {list(stride)} must "
                f"have one entry for each dim of shape {tuple(x.shape)}",
            )
        for dim, (first, last, step) in enumerate(zip(begin, end, stride, strict=True)):
            if step == 0:
                raise coded(
                    ValueError,
                    "HP139",
                    f"construct_strided_slice: the stride of dim {dim} is 0",
                )
            x = _slice_dim(x, dim, slice(first, last, step))
        return x

    def tensor_type_cast(self, input_data: Any, cast_type: str) -> Any:
        return input_data.to(self._dtype("tensor_type_cast", cast_type))

    def str_to_dtype(self, dtype_str: str) -> Any:
        return self._dtype("str_to_dtype", dtype_str)

    def _dtype(self, call: str, name: Any) -> torch.dtype:
        if isinstance(name, torch.dtype):
            return name
        bare = str(name).rpartition(".")[2].lower() if isinstance(name, str) else None
        dtype: torch.dtype | None = (
            DTYPES.get(ALIASES.get(bare, bare)) if bare is not None else None
        )
        if dtype is None:
            raise coded(
                ValueError,
                "HP138",
                f"{call}: unknown dtype {name!r}; known are {', '.join(sorted([*DTYPES, *ALIASES]))}",
            )
        return dtype

    def get_tensor_storage_size(self, tensor: Any) -> int:
        local = self._local(tensor)
        return int(local.numel() * local.element_size())

    def get_element_size(self, tensor: Any) -> int:
        return int(self._local(tensor).element_size())

    def tensor_to_numpy(self, tensor: Any) -> Any:
        host = self._local(tensor).detach().resolve_conj().resolve_neg().cpu()
        narrow = host.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
        return host.float().numpy() if narrow else host.numpy()

    def host_tensor(self, tensor: Any) -> Any:
        local = self._local(tensor).detach()
        return local.resolve_conj().resolve_neg().to("cpu").contiguous()

    def tensor_memory(self, tensor: Any) -> Any:
        if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
            return None
        if tensor.dtype in _WITHOUT_NUMPY:
            tensor = tensor.view(_WITHOUT_NUMPY[tensor.dtype])
        return tensor.detach().numpy().view(f"V{tensor.element_size()}")

    def memory_key(self, tensor: Any) -> Any:
        local = self._local(tensor)
        return (
            local.untyped_storage()._cdata,
            local.storage_offset(),
            local.dtype,
            tuple(local.shape),
            local.stride(),
        )

    def tensor_from_bytes(self, data: Any, dtype: str, shape: Sequence[int]) -> Any:
        wanted = self._dtype("tensor_from_bytes", dtype)
        flat = (
            torch.from_numpy(data.reshape(-1)).view(wanted)
            if data.size
            else torch.empty(0, dtype=wanted)
        )
        return flat.view(tuple(shape))

    def pack_bytes(self, header: bytes, tensors: Sequence[Any]) -> Any:
        pieces = [_bytes_of(header, self.device())] if header else []
        for tensor in tensors:
            stored = tensor.detach().resolve_conj().resolve_neg().contiguous()
            # Not view(-1): with one element or none, the strides may be any.
            flat = stored.as_strided((stored.numel(),), (1,)).view(torch.uint8)
            pieces.append(flat)
            gap = round_up(flat.numel()) - flat.numel()
            if gap:
                pieces.append(flat.new_zeros(gap))
        if not pieces:
            return torch.empty(0, dtype=torch.uint8, device=self.device())
        return torch.cat(pieces)

    def unpack_bytes(
        self, packed: Any, start: int, specs: Sequence[tuple[str, Sequence[int]]]
    ) -> list[Any]:
        start, tensors = round_up(start), []
        for name, shape in specs:
            dtype = self._dtype("unpack_bytes", name)
            stop = start + math.prod(shape) * dtype.itemsize
            is_all = start == 0 and stop == packed.shape[0]
            # Each has a version of its own: one may change in place, and backward may need the others.
            piece = packed if is_all else packed[start:stop].data
            tensors.append(piece.view(dtype).view(shape))
            start += round_up(stop - start)
        return tensors

    def list_to_size(self, size_list: Sequence[int]) -> Any:
        return torch.Size(size_list)

    def arange(
        self,
        start: Any,
        end: Any = None,
        step: Any = 1,
        dtype: Any = None,
        device: Any = None,
    ) -> Any:
        if end is None:
            start, end = 0, start
        return torch.arange(start, end, step, dtype=dtype, device=device)

    def zeros(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        return torch.zeros(size, dtype=dtype, device=device)

    def ones(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        return torch.ones(size, dtype=dtype, device=device)

    def empty(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        return torch.empty(size, dtype=dtype, device=device)

    def full(
        self, size: Any, fill_value: Any, dtype: Any = None, device: Any = None
    ) -> Any:
        return torch.full(size, fill_value, dtype=dtype, device=device)

    def rand(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        return torch.rand(size, dtype=dtype, device=device)

    def randn(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        return torch.randn(size, dtype=dtype, device=device)

    def full_like(self, tensor: Any, fill_value: Any, dtype: Any = None) -> Any:
        return torch.full_like(tensor, fill_value, dtype=dtype)

    def empty_like(
        self,
        tensor: Any,
        *,
        dtype: Any = None,
        device: Any = None,
        pin_memory: bool = False,
    ) -> Any:
        """Untested on hardware: pinned memory."""
        pinned = pin_memory and torch.accelerator.is_available()
        return torch.empty_like(tensor, dtype=dtype, device=device, pin_memory=pinned)

    def new_tensor(self, tensor_shape: Any, tensor_type: Any, device: Any) -> Any:
        return torch.empty(tensor_shape, dtype=tensor_type, device=device)

    def new_zero_parameter(
        self, param_shape: Any, param_type: Any, requires_grad: bool, device: Any
    ) -> Any:
        zeros = torch.zeros(param_shape, dtype=param_type, device=device)
        return torch.nn.Parameter(zeros, requires_grad=requires_grad)

    def requires_grad(self, tensor: Any) -> bool:
        return bool(tensor.requires_grad)

    def set_requires_grad(self, tensor: Any, requires_grad: bool) -> Any:
        return tensor.requires_grad_(requires_grad)

    def detach(self, tensor: Any) -> Any:
        return tensor.detach()

    def copy_into(self, target: Any, source: Any, non_blocking: bool = False) -> None:
        target.copy_(source, non_blocking)

    def copy_all(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        if targets:
            torch._foreach_copy_(list(targets), list(sources))

    def add_into(self, target: Any, source: Any) -> None:
        target += source

    def divide_by(self, tensor: Any, number: float) -> None:
        tensor /= number

    def changed(self, target: Any, source: Any, non_blocking: bool = False) -> Any:
        return target.copy_(source, non_blocking)

    def assign(self, target: Any, index: Any, value: Any) -> Any:
        # torch drops the graph of a tensor that is replaced as a whole, but not that of the base of a view.
        target.view_as(target)[index] = value
        return target

    def set_tensor_requires_grad(self, input_tensor: Any) -> Any:
        if not input_tensor.is_leaf:
            raise coded(
                ValueError,
                "HP139",
                "set_tensor_requires_grad: the tensor was computed from others; detach() it first",
            )
        return input_tensor.requires_grad_()

    def no_grad(self) -> AbstractContextManager[Any]:
        return torch.no_grad()

    def replayed_views(self) -> AbstractContextManager[Any]:
        # A view whose base was changed is else taken again by as_strided, whose gradient is cut off if it is empty.
        return grad_mode._force_original_view_tracking(True)

    def recording(self, on: bool) -> AbstractContextManager[Any]:
        return torch.set_grad_enabled(on)

    def gradients(
        self, function: Callable[..., Any], inputs: Sequence[Any]
    ) -> list[Any]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        return list(torch.autograd.grad(function(*leaves), leaves))

    def second_gradients(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        directions: Sequence[Any],
    ) -> Any:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        pairs = [
            (leaf, v)
            for leaf, v in zip(leaves, directions, strict=True)
            if v is not None
        ]
        loss = function(*leaves)
        firsts = torch.autograd.grad(
            loss, [leaf for leaf, _ in pairs], create_graph=True, allow_unused=True
        )
        found = [
            (g * v).sum()
            for g, (_, v) in zip(firsts, pairs, strict=True)
            if g is not None and g.requires_grad
        ]
        if not found:
            return None
        return list(
            torch.autograd.grad(
                sum(found), leaves, allow_unused=True, materialize_grads=True
            )
        )

    def is_recording_disabled(self) -> bool:
        return not torch.is_grad_enabled()

    def without_autocast(self, tensor: Any) -> AbstractContextManager[Any]:
        device = tensor.device.type
        is_on = torch.is_autocast_enabled(device)
        return torch.autocast(device, enabled=False) if is_on else nullcontext()

    def is_recorded(self, tensor: Any) -> bool:
        return bool(tensor.requires_grad and torch.is_grad_enabled())

    def call_where_empty(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))

    def attention_by_operators(self) -> AbstractContextManager[Any]:
        return sdpa_kernel(SDPBackend.MATH)

    def keep_in_graph(self, result: Any, operands: Sequence[Any]) -> Any:
        # Only empty shards need it, and importing the platform is to stay light.
        from hyper_parallel.platform.torch import ties

        return ties.keep_in_graph(
            result,
            [x for x in operands if self.is_recorded(x) and x.is_floating_point()],
        )

    def is_dense(self, tensor: Any) -> bool:
        return tensor.layout is torch.strided

    def can_view(
        self, shape: Sequence[int], strides: Sequence[int], new_shape: Sequence[int]
    ) -> bool:
        tensor = torch.empty_strided(tuple(shape), tuple(strides), device="meta")
        try:
            tensor.view(tuple(new_shape))
        except RuntimeError:
            return False
        return True

    def is_meta(self, tensor: Any) -> bool:
        return bool(tensor.is_meta)

    def alias(self, tensor: Any) -> Any:
        return tensor.data

    def release_memory(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        if storage.resizable():  # an array of numpy in the same memory keeps it
            storage.resize_(0)

    def restore_memory(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        if storage.resizable():
            offset = tensor.storage_offset() * tensor.element_size()
            storage.resize_(offset + tensor.nbytes)

    def version_of(self, tensor: Any) -> int | None:
        return None if tensor.is_inference() else tensor._version

    def versions_of(self, tensors: Sequence[Any]) -> tuple[int | None, ...]:
        try:
            return tuple([tensor._version for tensor in tensors])
        except RuntimeError:  # of a tensor that was made in inference mode
            return super().versions_of(tensors)

    def note_change(self, tensor: Any) -> None:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)

    def memory_of(self, tensor: Any) -> MutableMapping[Any, Any]:
        # Beside the tensor, not on it: what is on it would be saved and copied with it.
        memory = _MEMORIES.get(tensor)
        if memory is None:
            memory = _MEMORIES[tensor] = _LeafMemory() if tensor.is_leaf else {}
        return memory

    # --- devices and randomness

    def device_type(self) -> str:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator.type if accelerator is not None else "cpu"

    def device(self, index: int | None = None) -> Any:
        """Untested on hardware: the index of an accelerator."""
        kind = self.device_type()
        if kind == "cpu":
            return torch.device("cpu")
        return torch.device(
            kind, int(os.environ.get("LOCAL_RANK", "0")) if index is None else index
        )

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self) -> Any:
        """Untested on hardware: an accelerator's generator."""
        return (
            self._device_module().get_rng_state()
            if self.device_type() != "cpu"
            else torch.get_rng_state()
        )

    def draw_seed(self) -> int:
        return int(
            torch.randint(2**62, (), dtype=torch.int64)
        )  # of the host: asking a device would wait for it

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Untested on hardware: an accelerator's generator beside the host's."""
        host = torch.default_generator.get_state()
        is_on_host = self.device_type() == "cpu"
        device = None if is_on_host else self.get_rng_state()
        if is_on_host:  # torch's own function asks every kind of device
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(host)
            if device is not None:
                self.set_rng_state(device)

    @contextmanager
    def reseeding(self) -> Iterator[Callable[[int], AbstractContextManager[Any]]]:
        # To save and restore the host's generator takes longer than a small operator, so that is done once.
        if self.device_type() != "cpu":
            yield self.seeded
            return
        host = torch.default_generator.get_state()
        nothing: AbstractContextManager[Any] = nullcontext()

        def seed_only(seed: int) -> AbstractContextManager[Any]:
            torch.default_generator.manual_seed(seed)
            return nothing

        try:
            yield seed_only
        finally:
            torch.default_generator.set_state(host)

    def set_rng_state(self, state: Any) -> None:
        """Untested on hardware: an accelerator's generator."""
        if self.device_type() != "cpu":
            self._device_module().set_rng_state(state)
        else:
            torch.set_rng_state(state)

    def get_rng_states(self) -> dict[str, Any]:
        """Untested on hardware: an accelerator's generator."""
        return {"cpu": torch.get_rng_state(), self.device_type(): self.get_rng_state()}

    def set_rng_states(self, states: Mapping[str, Any]) -> None:
        """Untested on hardware: an accelerator's generator."""
        if "cpu" in states:
            torch.set_rng_state(states["cpu"])
        if self.device_type() in states:
            self.set_rng_state(states[self.device_type()])

    # --- streams and profiling

    def new_stream(self) -> Any:
        """Untested on hardware: an accelerator's stream."""
        return (
            Stream() if self.device_type() == "cpu" else self._device_module().Stream()
        )

    def get_stream_context(self) -> Callable[[Any], AbstractContextManager[Any]]:
        """Untested on hardware: an accelerator's streams."""
        return self._device_module().stream

    def get_current_stream(self) -> Any:
        """Untested on hardware: an accelerator's stream."""
        current = self._device_module().current_stream()
        return _DEFAULT_STREAM if type(current) is torch.cpu.Stream else current

    def new_event(self) -> Any:
        """Untested on hardware: an accelerator's event."""
        return Event() if self.device_type() == "cpu" else self._device_module().Event()

    def _device_module(self) -> Any:
        return torch.get_device_module(self.device_type())

    def profiler_record(self, name: str) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(name)


@functools.lru_cache(maxsize=64)
def _bytes_of(header: bytes, device: torch.device) -> torch.Tensor:
    """Bytes as a tensor, which nobody changes, of a size that tensors can be packed behind."""
    data = bytearray(header.ljust(round_up(len(header)), b"\0"))
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def _slice_dim(x: torch.Tensor, dim: int, cut: slice) -> torch.Tensor:
    first, last, step = cut.indices(x.shape[dim])
    if step > 0:
        return x[(slice(None),) * dim + (slice(first, max(first, last), step),)]
    # torch has no negative steps; picking the indices is differentiable and right for an empty range too.
    return x.index_select(dim, torch.arange(first, last, step, device=x.device))


class Stream(torch.cpu.Stream):
    """A CPU's stream: work is done when the call returns, so there is nothing to order or to wait for."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def synchronize(self) -> None:
        """Returns at once."""

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True

    def wait_event(self, event: Any) -> None:
        """Returns at once."""

    def record_event(self, event: Any = None) -> Event:  # type: ignore[override]
        """An event that has happened."""
        return event or Event()


_DEFAULT_STREAM = Stream()  # torch's own default CPU stream is no context manager


class Event(torch.cpu.Event):
    """A CPU's event: it has happened when it is recorded."""

    def __enter__(self) -> Event:
        return self

    def __exit__(self, *exc: object) -> None:
        return None
