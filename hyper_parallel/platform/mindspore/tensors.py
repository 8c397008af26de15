# SPDX-License-Identifier: Apache-2.0
"""Tensors, dtypes, devices, streams and randomness on MindSpore."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mindspore
import numpy as np
from mindspore import mint, ops

from hyper_parallel.platform import packing
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.mindspore import deferred_tensor, private, versions
from hyper_parallel.platform.mindspore.cpu import randomness
from hyper_parallel.platform.platform import Platform
from hyper_parallel.platform.transform import chunk_span

# The names that checkpoints store, without a framework's prefix.
DTYPES = {
    name: getattr(mindspore, "bool_" if name == "bool" else name)
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
    "float8e4m3fn": "float8_e4m3fn",
    "float8e5m2": "float8_e5m2",
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FLOATS = frozenset(dtype for name, dtype in DTYPES.items() if "float" in name)
FLOAT8 = frozenset(dtype for name, dtype in DTYPES.items() if name.startswith("float8"))
_BFLOAT16 = (
    mindspore.Tensor([0.0], mindspore.bfloat16).asnumpy().dtype
)  # numpy learns it from MindSpore

# What MindSpore calls the devices, and what we call them.
_KINDS = {"CPU": "cpu", "Ascend": "npu", "GPU": "cuda"}
_DEVICES = {
    "cpu": "CPU",
    "npu": "Ascend",
    "ascend": "Ascend",
    "cuda": "GPU",
    "gpu": "GPU",
    "meta": "meta",
}

# By identity: a tensor is not compared by ``==`` here, which would compare its elements.
_MEMORIES: dict[int, tuple[weakref.ref[Any], MutableMapping[Any, Any]]] = {}


class Tensors(Platform):
    """The part of the contract that is about single tensors and the devices they lie on."""

    def is_tensor(self, obj: Any) -> bool:
        return isinstance(obj, mindspore.Tensor)

    def is_floating_point(self, tensor: Any) -> bool:
        return tensor.dtype in _FLOATS

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
        if not -data.ndim <= split_dim < data.ndim:
            raise coded(
                ValueError,
                "HP139",
                f"chunk: split_dim {split_dim} is not a dim of shape {tuple(data.shape)}",
            )
        start, size = chunk_span(data.shape[split_dim], split_size, index)
        if data.is_meta:
            shape = [
                size if dim == split_dim % data.ndim else length
                for dim, length in enumerate(data.shape)
            ]
            return deferred_tensor.derived(
                data, shape, lambda whole: mint.narrow(whole, split_dim, start, size)
            )
        return mint.narrow(data, split_dim, start, size)

    def clone(self, tensor: Any) -> Any:
        return self._like(tensor, self._copied)

    def _copied(self, x: Any) -> Any:
        if x.is_meta:
            return deferred_tensor.derived(x, x.shape, self._copied)
        # On a CPU there is no kernel for clone(), and copy() divides by one, which changes the bits of some that are
        # not a number.
        made = self.empty(x.shape, x.dtype, x.device)
        _fill(made, x)  # nobody has it yet
        return made

    def cat(self, tensors: Sequence[Any], dim: int = 0) -> Any:
        return mint.cat(tuple(tensors), dim)

    def construct_strided_slice(
        self, x: Any, begin: Sequence[int], end: Sequence[int], stride: Sequence[int]
    ) -> Any:
        if not len(begin) == len(end) == len(stride) == x.ndim:
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

    def _dtype(self, call: str, name: Any) -> Any:
        if not isinstance(name, str):
            if name in DTYPE_NAMES:
                return name
            bare = None
        else:
            bare = name.rpartition(".")[2].lower()
        dtype = DTYPES.get(ALIASES.get(bare, bare)) if bare is not None else None
        if dtype is None:
            raise coded(
                ValueError,
                "HP138",
                f"{call}: unknown dtype {name!r}; known are {', '.join(sorted([*DTYPES, *ALIASES]))}",
            )
        return dtype

    def get_tensor_storage_size(self, tensor: Any) -> int:
        return int(self._local(tensor).nbytes)

    def get_element_size(self, tensor: Any) -> int:
        return int(self._local(tensor).itemsize)

    def tensor_to_numpy(self, tensor: Any) -> Any:
        found = self._local(tensor).asnumpy()
        return found.astype(np.float32) if found.dtype == _BFLOAT16 else found

    def host_tensor(self, tensor: Any) -> Any:
        """Untested on hardware: from an accelerator."""
        local = self.detach(self._local(tensor))
        return (local if local.device == "CPU" else local.move_to("CPU")).contiguous()

    def tensor_memory(self, tensor: Any) -> Any:
        return host_memory(tensor)

    def memory_key(self, tensor: Any) -> Any:
        local = self._local(tensor)
        return local.data_ptr(), local.dtype, tuple(local.shape), tuple(local.stride())

    def tensor_from_bytes(self, data: Any, dtype: str, shape: Sequence[int]) -> Any:
        wanted = self._dtype("tensor_from_bytes", dtype)
        if (
            wanted in FLOAT8
        ):  # numpy does not know them; what MindSpore calls a view it does not change in place
            return (
                mindspore.Tensor.from_numpy(data.reshape(-1))
                .view(wanted)
                .reshape(tuple(shape))
            )
        return mindspore.Tensor.from_numpy(
            data.reshape(-1).view(numpy_dtype(wanted)).reshape(tuple(shape))
        )

    def pack_bytes(self, header: bytes, tensors: Sequence[Any]) -> Any:
        return packing.pack_bytes(self, header, tensors)

    def unpack_bytes(
        self, packed: Any, start: int, specs: Sequence[tuple[str, Sequence[int]]]
    ) -> list[Any]:
        return packing.unpack_bytes(self, packed, start, specs)

    def list_to_size(self, size_list: Sequence[int]) -> Any:
        return tuple(size_list)

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
        numbers = np.arange(start, end, step)
        dtype = dtype or (
            mindspore.int64 if numbers.dtype.kind in "iu" else mindspore.float32
        )
        return self._made(numbers, dtype, device)

    def zeros(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        return self.full(size, 0, dtype or mindspore.float32, device)

    def ones(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        return self.full(size, 1, dtype or mindspore.float32, device)

    def empty(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        return mint.empty(
            _sizes(size), dtype=dtype or mindspore.float32, device=usable_device(device)
        )

    def full(
        self, size: Any, fill_value: Any, dtype: Any = None, device: Any = None
    ) -> Any:
        """Untested on hardware: made on an accelerator."""
        dtype = dtype or {bool: mindspore.bool_, int: mindspore.int64}.get(
            type(fill_value), mindspore.float32
        )
        where = usable_device(device)
        if (
            where == "CPU"
        ):  # mint has no kernel for some dtypes, nor for a tensor without dims
            return self._made(np.full(_sizes(size), fill_value), dtype, where)
        return (
            self.empty(size, dtype, where)
            if where == "meta"
            else mint.full(_sizes(size), fill_value, dtype=dtype)
        )

    def rand(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        """Untested on hardware: drawn on an accelerator."""
        return self._drawn(mint.rand, np.random.Generator.random, size, dtype, device)

    def randn(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        """Untested on hardware: drawn on an accelerator."""
        return self._drawn(
            mint.randn, np.random.Generator.standard_normal, size, dtype, device
        )

    def _drawn(
        self, by_device: Any, by_numpy: Any, size: Any, dtype: Any, device: Any
    ) -> Any:
        dtype, where = dtype or mindspore.float32, usable_device(device)
        if where == "meta":
            return self.empty(size, dtype, where)
        if where != "CPU":
            return by_device(*_sizes(size), dtype=dtype)
        kind = np.float64 if dtype == mindspore.float64 else np.float32
        return self._made(by_numpy(randomness.draw(), _sizes(size), kind), dtype, where)

    def _made(self, array: Any, dtype: Any, device: Any) -> Any:
        """A tensor of an array's values."""
        where = usable_device(device)
        if where == "meta":
            return self.empty(array.shape, dtype, where)
        if dtype in FLOAT8:
            raise coded(
                ValueError,
                "HP138",
                f"MindSpore cannot make a tensor of {DTYPE_NAMES[dtype]}, only load one from a checkpoint",
            )
        return mindspore.Tensor(np.asarray(array).astype(numpy_dtype(dtype)))

    def full_like(self, tensor: Any, fill_value: Any, dtype: Any = None) -> Any:
        return self._like(
            tensor, lambda x: self.full(x.shape, fill_value, dtype or x.dtype, x.device)
        )

    def empty_like(
        self,
        tensor: Any,
        *,
        dtype: Any = None,
        device: Any = None,
        pin_memory: bool = False,  # noqa: ARG002
    ) -> Any:
        """MindSpore pins host memory by itself where it copies, so ``pin_memory`` says nothing to it."""
        return self._like(
            tensor, lambda x: self.empty(x.shape, dtype or x.dtype, device or x.device)
        )

    def _like(self, tensor: Any, make: Callable[[Any], Any]) -> Any:
        """What is made from this rank's elements, laid out as the tensor is."""
        made = make(self._local(tensor))
        return (
            tensor.layout.tensor(made, tuple(tensor.shape))
            if isinstance(tensor, self.DTensorBase)
            else made
        )

    def new_tensor(self, tensor_shape: Any, tensor_type: Any, device: Any) -> Any:
        return self.empty(tensor_shape, tensor_type, device)

    def new_zero_parameter(
        self, param_shape: Any, param_type: Any, requires_grad: bool, device: Any
    ) -> Any:
        return mindspore.Parameter(
            self.zeros(param_shape, param_type, device), requires_grad=requires_grad
        )

    # --- gradients of a single tensor

    def set_tensor_requires_grad(self, input_tensor: Any) -> Any:
        if not private.is_leaf(input_tensor):
            raise coded(
                ValueError,
                "HP139",
                "set_tensor_requires_grad: the tensor was computed from others; mindspore.ops.stop_gradient() it "
                "first (torch's detach() it first)",
            )
        return self.set_requires_grad(input_tensor, True)

    def requires_grad(self, tensor: Any) -> bool:
        return private.requires_grad(tensor)

    def set_requires_grad(self, tensor: Any, requires_grad: bool) -> Any:
        if isinstance(tensor, mindspore.Parameter):
            tensor.requires_grad = requires_grad
        else:
            tensor.requires_grad_(requires_grad)
        return tensor

    def detach(self, tensor: Any) -> Any:
        return self._like(tensor, _detached)

    def copy_into(self, target: Any, source: Any, non_blocking: bool = False) -> None:  # noqa: ARG002
        versions.note_change_of(target)
        _fill(target, source)

    def copy_part(
        self, tensor: Any, slices: tuple[slice, ...], shape: tuple[int, ...]
    ) -> Any:
        def take(whole: Any) -> Any:
            return self.clone(whole[slices].contiguous())

        if self.is_meta(tensor):
            return deferred_tensor.derived(tensor, shape, take)
        return take(tensor)

    def changed(self, target: Any, source: Any, non_blocking: bool = False) -> Any:
        if self.is_recorded(target) or self.is_recorded(
            source
        ):  # in place it is refused, lost or not recorded
            return (
                source if source.dtype == target.dtype else source.to(target.dtype)
            ).copy()
        self.copy_into(target, source, non_blocking)
        return target

    def assign(self, target: Any, index: Any, value: Any) -> Any:
        return self.operator("setitem")(target, index, value)

    def is_dense(self, tensor: Any) -> bool:
        return self.is_tensor(tensor)  # sparse ones of MindSpore are no Tensor

    def is_meta(self, tensor: Any) -> bool:
        return bool(tensor.is_meta)

    def alias(self, tensor: Any) -> Any:
        return mindspore.Tensor(tensor)

    def release_memory(self, tensor: Any) -> None:
        tensor.untyped_storage().resize_(0)

    def restore_memory(self, tensor: Any) -> None:
        tensor.untyped_storage().resize_(tensor.nbytes)

    counts_changes = False
    releases_saved_tensors = False

    def version_of(self, tensor: Any) -> int | None:
        return versions.version_of(tensor)

    def note_change(self, tensor: Any) -> None:
        versions.note_change_of(tensor)

    def mark_escaped(self, tensor: Any) -> None:
        versions.show(tensor)

    def mark_alias(self, tensor: Any, source: Any) -> None:
        versions.show_with(tensor, source)

    def memory_of(self, tensor: Any) -> MutableMapping[Any, Any]:
        # Beside the tensor, not on it: what is on it would be copied with it.
        key = id(tensor)
        found = _MEMORIES.get(key)
        if found is None or found[0]() is not tensor:
            memory: MutableMapping[Any, Any] = {}
            found = _MEMORIES[key] = (
                weakref.ref(tensor, lambda gone: _forget(key, gone)),
                memory,
            )
        return found[1]

    # --- devices and randomness

    def device_type(self) -> str:
        return _KINDS[mindspore.get_context("device_target")]

    def device(self, index: int | None = None) -> Any:  # noqa: ARG002 - a process has one device
        """The name of the device: a process of MindSpore has one alone, which ``mindspore.set_device`` chooses."""
        return str(mindspore.get_context("device_target"))

    def manual_seed(self, seed: int) -> None:
        mindspore.set_seed(
            randomness.framework_seed(seed)
        )  # initialisers and data sets too
        mindspore.manual_seed(randomness.framework_seed(seed))
        randomness.reseed(seed)

    def get_rng_state(self) -> Any:
        """Untested on hardware: an accelerator's generator."""
        return (
            self._host_state()
            if self.device_type() == "cpu"
            else mindspore.get_rng_state()
        )

    def draw_seed(self) -> int:
        return int(randomness.draw().integers(2**62))

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Untested on hardware: an accelerator's generator."""
        device = None if self.device_type() == "cpu" else mindspore.get_rng_state()
        with randomness.seeded(seed):
            if device is not None:
                mindspore.manual_seed(randomness.framework_seed(seed))
            try:
                yield
            finally:
                if device is not None:
                    mindspore.set_rng_state(device)

    def set_rng_state(self, state: Any) -> None:
        """Untested on hardware: an accelerator's generator."""
        if self.device_type() == "cpu":
            randomness.put_back(self.tensor_to_numpy(state))
        else:
            mindspore.set_rng_state(state)

    def get_rng_states(self) -> dict[str, Any]:
        """Untested on hardware: an accelerator's generator."""
        return {"cpu": self._host_state(), self.device_type(): self.get_rng_state()}

    def set_rng_states(self, states: Mapping[str, Any]) -> None:
        """Untested on hardware: an accelerator's generator."""
        if "cpu" in states:
            randomness.put_back(self.tensor_to_numpy(states["cpu"]))
        if self.device_type() in states:
            self.set_rng_state(states[self.device_type()])

    def _host_state(self) -> Any:
        return mindspore.Tensor(randomness.state())

    # --- streams and profiling

    def new_stream(self) -> Any:
        """Untested on hardware: an accelerator's stream."""
        return Stream() if self.device_type() == "cpu" else mindspore.runtime.Stream()

    def get_stream_context(self) -> Callable[[Any], AbstractContextManager[Any]]:
        """Untested on hardware: an accelerator's streams."""
        return _current if self.device_type() == "cpu" else mindspore.runtime.StreamCtx

    def get_current_stream(self) -> Any:
        """Untested on hardware: an accelerator's stream."""
        return (
            _STREAMS[-1]
            if self.device_type() == "cpu"
            else mindspore.runtime.current_stream()
        )

    def new_event(self) -> Any:
        """Untested on hardware: an accelerator's event."""
        return Event() if self.device_type() == "cpu" else mindspore.runtime.Event()

    @contextmanager
    def profiler_record(self, name: str) -> Iterator[None]:
        """A context that shows as ``name`` in the framework's profiler, which has no marks on a CPU.

        Untested on hardware: the marks of mstx.
        """
        if self.device_type() != "npu":
            yield
            return
        mark = mindspore.profiler.mstx.range_start(name)
        try:
            yield
        finally:
            mindspore.profiler.mstx.range_end(mark)


def tensor(
    data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> Any:
    """A tensor of Python values, an array or a tensor, as ``torch.tensor`` makes it."""
    made = mindspore.Tensor(data, dtype)
    if device is not None:
        made = made.to(usable_device(device))
    if requires_grad:
        made.requires_grad_()
    return made


def host_memory(tensor: Any) -> Any:
    """The elements of a tensor as an array of bytes that shares its memory; None if a CPU does not reach it."""
    return np.asarray(_Memory(tensor)) if tensor.device == "CPU" else None


def device_name(device: Any) -> str:
    """The name that MindSpore has for a device; of the process's own where none is given."""
    if device is None:
        return str(mindspore.get_context("device_target"))
    name = _DEVICES.get(str(device).partition(":")[0].lower())
    if name is None:
        raise coded(
            ValueError,
            "HP138",
            f"{device!r} is no device of MindSpore; expected one of {', '.join(_DEVICES)}",
        )
    return name


def usable_device(device: Any) -> str:
    """MindSpore's name of a device on which this process can have tensors; a ValueError for any other."""
    name, own = device_name(device), device_name(None)
    if name not in (own, "CPU", "meta"):
        places = ", ".join(dict.fromkeys((own, "CPU", "meta")))
        raise coded(
            ValueError,
            "HP138",
            f"device {str(device)!r} is not the one in use: this process has tensors on {places}; "
            "mindspore.set_device chooses another at its start",
        )
    return name


def _detached(x: Any) -> Any:
    return (
        deferred_tensor.derived(x, x.shape, lambda data: data)
        if x.is_meta
        else ops.stop_gradient(x)
    )


def numpy_dtype(dtype: Any) -> Any:
    """What numpy has for a dtype that is not one of the float8."""
    return _BFLOAT16 if dtype == mindspore.bfloat16 else np.dtype(DTYPE_NAMES[dtype])


def _fill(target: Any, source: Any) -> None:
    """Untested on hardware: on an accelerator."""
    if target.device != "CPU":
        target.copy_(source)
        return
    # A copy_ into a view is lost on a CPU, or refused.
    cast = source if source.dtype == target.dtype else source.to(target.dtype)
    host_memory(target)[...] = host_memory(cast)


def _sizes(size: Any) -> tuple[int, ...]:
    return (size,) if isinstance(size, int) else tuple(int(length) for length in size)


def _slice_dim(x: Any, dim: int, cut: slice) -> Any:
    first, last, step = cut.indices(x.shape[dim])
    count = len(range(first, last, step))
    if not count or 0 in x.shape:  # where backward of a slice fails
        return mint.split(x, [count, x.shape[dim] - count], dim)[0]
    if (
        step < 0
    ):  # MindSpore has no negative steps: the same elements from the other end, turned round
        return _flipped(
            _slice_dim(x, dim, slice(first + (count - 1) * step, first + 1, -step)), dim
        )
    return x[(slice(None),) * dim + (slice(first, last, step),)]


def _flipped(x: Any, dim: int) -> Any:
    if 0 in x.shape:  # of which the kernel would end the process
        return x
    if (
        x.dtype == mindspore.bfloat16
    ):  # no kernel on a CPU; float32 holds each of its numbers
        return mint.flip(x.to(mindspore.float32), (dim,)).to(mindspore.bfloat16)
    return mint.flip(x, (dim,))


def _forget(key: int, gone: Any) -> None:
    if key in _MEMORIES and _MEMORIES[key][0] is gone:
        del _MEMORIES[key]


class _Memory:
    """The memory of a tensor as numpy asks for it. ``asnumpy()`` would copy where there are gaps between elements."""

    def __init__(self, tensor: Any) -> None:
        private.executor().sync()  # operators that have yet to write there
        size = int(tensor.itemsize)
        self._tensor = tensor  # numpy keeps this object, and so the memory, alive
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), False),
            "strides": tuple(step * size for step in tensor.stride()),
        }


class _Nothing:
    """What a CPU's streams and events have in common: work is done when it is asked for."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def synchronize(self) -> None:
        """Returns at once."""

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True


class Stream(_Nothing):
    """A CPU's stream: operators run in the order in which they were called, so there is nothing to order."""

    def wait_stream(self, stream: Any) -> None:
        """Returns at once."""

    def wait_event(self, event: Any) -> None:
        """Returns at once."""

    def record_event(self, event: Any = None) -> Event:
        """An event that has happened."""
        return event or Event()


class Event(_Nothing):
    """A CPU's event: it has happened when it is recorded."""

    def record(self, stream: Any = None) -> None:
        """Returns at once."""

    def wait(self, stream: Any = None) -> None:
        """Returns at once."""


_STREAMS = [Stream()]  # those that are current, the innermost last


@contextmanager
def _current(stream: Any) -> Iterator[Any]:
    _STREAMS.append(stream)
    try:
        yield stream
    finally:
        _STREAMS.pop()
