# SPDX-License-Identifier: Apache-2.0
"""Tensors: creating, converting and combining them, and the names of operators.

Example::

    x = platform.zeros((2, 3), dtype=platform.str_to_dtype("bfloat16"))
    y = platform.operator("relu")(x)
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from hyper_parallel.platform import containers
from hyper_parallel.platform.contract import PlatformType
from hyper_parallel.platform.error_codes import coded

# In the order in which a dtype's name is searched for them: "uint8" contains "int".
_DTYPE_KINDS = ("bool", "complex", "float", "uint", "int")


class OpName(NamedTuple):
    """The name of a called operator, whether it is in place, and the names of its positional parameters."""

    name: str
    inplace: bool
    parameters: tuple[str, ...] | None


class Tensors(ABC):
    """Plain tensors, and the framework's operators under the names that the rules use."""

    Tensor: type[Any]
    tensor: Callable[..., Any]
    DTensorBase: type[Any]
    platform_type: PlatformType
    tensor_dtype: Any

    @abstractmethod
    def op_name_of(self, func: Any) -> OpName:
        """Returns an operator's name in the rules and the names of its positional parameters."""

    @abstractmethod
    def get_op_name(self, func: Any) -> str:
        """Returns an operator's name without namespace and overload: "add" for torch.add and aten.add.Tensor."""

    @abstractmethod
    def canonical_kwargs(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Renames keyword arguments to the names that the rules use."""

    @abstractmethod
    def operator(self, name: str) -> Callable[..., Any]:
        """Returns the framework's function for an operator name."""

    @abstractmethod
    def call_where_empty(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls a function on plain tensors that may be empty on some ranks, with the correct result."""

    def attention_by_operators(self) -> AbstractContextManager[Any]:
        """Computes attention by separate operators, whose gradients are differentiable, within a context."""
        return nullcontext()

    @abstractmethod
    def is_tensor(self, obj: Any) -> bool:
        """Returns whether ``obj`` is a tensor of this framework."""

    def _local(self, tensor: Any) -> Any:
        """Returns the plain tensor on this rank."""
        return tensor.to_local() if isinstance(tensor, self.DTensorBase) else tensor

    @abstractmethod
    def is_dense(self, tensor: Any) -> bool:
        """Returns whether the tensor stores each of its elements, unlike a sparse one."""

    @abstractmethod
    def is_floating_point(self, tensor: Any) -> bool:
        """Returns whether the tensor has a floating-point dtype."""

    def dtype_kind(self, dtype: Any) -> str:
        """Returns the kind of a dtype: "bool", "int", "uint", "float" or "complex"."""
        return _dtype_kind(str(dtype))

    @abstractmethod
    def get_element_size(self, tensor: Any) -> int:
        """Returns the number of bytes per element."""

    @abstractmethod
    def str_to_dtype(self, dtype_str: str) -> Any:
        """Returns the framework's dtype for a name as stored in checkpoints: "float32", "torch.float32", "bfloat16"."""

    @abstractmethod
    def tensor_type_cast(self, input_data: Any, cast_type: str) -> Any:
        """Casts ``input_data`` to the dtype of that name."""

    @abstractmethod
    def list_to_size(self, size_list: Sequence[int]) -> Any:
        """Converts a list of ints to the framework's shape type."""

    @abstractmethod
    def zeros(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        """Returns a tensor of zeros."""

    @abstractmethod
    def ones(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        """Returns a tensor of ones."""

    @abstractmethod
    def empty(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        """Returns an uninitialized tensor."""

    @abstractmethod
    def full(
        self, size: Any, fill_value: Any, dtype: Any = None, device: Any = None
    ) -> Any:
        """Returns a tensor filled with one value."""

    @abstractmethod
    def arange(
        self,
        start: Any,
        end: Any = None,
        step: Any = 1,
        dtype: Any = None,
        device: Any = None,
    ) -> Any:
        """Returns values from ``start`` (0 if ``end`` is None) to ``end`` in steps of ``step``."""

    @abstractmethod
    def rand(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        """Returns uniform random numbers from [0, 1)."""

    @abstractmethod
    def randn(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        """Returns standard normal random numbers."""

    @abstractmethod
    def full_like(self, tensor: Any, fill_value: Any, dtype: Any = None) -> Any:
        """Returns a tensor filled with one value, with the shape and device of ``tensor``."""

    @abstractmethod
    def empty_like(
        self,
        tensor: Any,
        *,
        dtype: Any = None,
        device: Any = None,
        pin_memory: bool = False,
    ) -> Any:
        """Returns an uninitialized tensor of the shape of ``tensor``; ``pin_memory`` needs an accelerator to apply."""

    @abstractmethod
    def chunk(self, data: Any, split_dim: int, split_size: int, index: int) -> Any:
        """Returns chunk ``index`` of ``split_size`` chunks, sized as by torch.chunk; empty if there are fewer."""

    def chunks(self, data: Any, split_dim: int, split_size: int) -> list[Any]:
        """Returns all ``split_size`` chunks along ``split_dim``, as ``chunk`` does."""
        places = range(split_size)
        return [self.chunk(data, split_dim, split_size, place) for place in places]

    @abstractmethod
    def cat(self, tensors: Sequence[Any], dim: int = 0) -> Any:
        """Concatenates the tensors along ``dim``."""

    @abstractmethod
    def clone(self, tensor: Any) -> Any:
        """Copies the tensor's data into new memory, outside the graph."""

    @abstractmethod
    def construct_strided_slice(
        self, x: Any, begin: Sequence[int], end: Sequence[int], stride: Sequence[int]
    ) -> Any:
        """Returns ``x[begin:end:stride]`` over all dims at once; strides may be negative."""

    def in_memory_format_of(self, like: Any, tensor: Any) -> Any:  # noqa: ARG002 - for frameworks that have formats
        """Returns the tensor in the memory format (dim order) of ``like``, if the framework has such formats."""
        return tensor

    def can_view(
        self,
        shape: Sequence[int],  # noqa: ARG002
        strides: Sequence[int],  # noqa: ARG002
        new_shape: Sequence[int],  # noqa: ARG002
    ) -> bool:
        """Returns whether this shape and these strides can be viewed as ``new_shape``; needs ``counts_changes``."""
        raise AssertionError(
            f"{self.platform_type.value} does not tell views from copies"
        )

    @abstractmethod
    def copy_into(self, target: Any, source: Any, non_blocking: bool = False) -> None:
        """Copies a plain tensor's elements into another in place; the target may be any view."""

    def copy_all(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        """Copies plain tensors into others in place, pair by pair."""
        for target, source in zip(targets, sources, strict=True):
            self.copy_into(target, source)

    def copy_part(
        self,
        tensor: Any,
        slices: tuple[slice, ...],
        shape: tuple[int, ...],  # noqa: ARG002 - for tensors that cannot be sliced
    ) -> Any:
        """Returns a contiguous copy of a part of a plain tensor, which has this shape; the tensor may have no data."""
        return self.clone(tensor[slices].contiguous())

    def add_into(self, target: Any, source: Any) -> None:
        """Adds a plain tensor to another in place; the target may be any view."""
        self.copy_into(target, target + source)

    def divide_by(self, tensor: Any, number: float) -> None:
        """Divides a plain tensor in place."""
        self.copy_into(tensor, tensor / number)

    @abstractmethod
    def changed(self, target: Any, source: Any, non_blocking: bool = False) -> Any:
        """Returns ``target`` with the elements of ``source``, differentiably; the result may be a new tensor."""

    @abstractmethod
    def assign(self, target: Any, index: Any, value: Any) -> Any:
        """Returns ``target`` with ``value`` at ``index``; its old elements stay in the graph even if all are replaced.

        Other ranks may keep some of theirs, and then communicate for them in backward.
        """

    @abstractmethod
    def tensor_to_numpy(self, tensor: Any) -> Any:
        """Converts a tensor on any device to a numpy array; bfloat16, which numpy lacks, becomes float32."""

    def tree_map(self, fn: Callable[[Any], Any], tree: Any) -> Any:
        """Applies ``fn`` to every leaf of a nested container."""
        return containers.tree_map(fn, tree)

    def apply_to_tensors(self, fn: Callable[[Any], Any], container: Any) -> Any:
        """Applies ``fn`` to every tensor of a nested container and keeps everything else."""
        if self.is_tensor(container):
            return fn(container)
        return containers.tree_map(
            lambda leaf: fn(leaf) if self.is_tensor(leaf) else leaf, container
        )


@functools.cache
def _dtype_kind(name: str) -> str:
    name = name.rpartition(".")[2].lower()
    for kind in _DTYPE_KINDS:
        if kind in name:
            return kind
    raise coded(ValueError, "HP138", f"dtype_kind: {name!r} is not a dtype of numbers")
