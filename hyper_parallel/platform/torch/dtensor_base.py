# SPDX-License-Identifier: Apache-2.0
"""The tensor subclass that distributed tensors derive from: a local tensor, its layout and the global shape.

It holds data and answers for its metadata; operators belong to the class that derives from it, so here every other
operator is refused rather than run on a wrapper without storage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

_METADATA = {
    torch.Tensor.dim,
    torch.Tensor.element_size,
    torch.Tensor.is_complex,
    torch.Tensor.is_floating_point,
    torch.Tensor.ndimension,
    torch.Tensor.nelement,
    torch.Tensor.numel,
    torch.Tensor.size,
}


class DTensorBase(torch.Tensor):
    """A shard with the metadata of the whole: ``shape`` is global, ``local_shape`` is this rank's."""

    _local: torch.Tensor
    _layout: Any

    @staticmethod
    def __new__(cls: type[DTensorBase], local: torch.Tensor, layout: Any, shape: Sequence[int]) -> DTensorBase:
        wrapper: DTensorBase = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        wrapper._local = local
        wrapper._layout = layout
        return wrapper

    @property
    def layout(self) -> Any:  # type: ignore[override]
        """How the whole tensor lies on the mesh."""
        return self._layout

    @property
    def local_shape(self) -> torch.Size:
        """The shape of the data on this rank."""
        return self._local.shape

    def to_local(self) -> torch.Tensor:
        """The data on this rank, as a plain tensor that shares its memory."""
        return self._local

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_rebuild, (type(self), self._local, self._layout, tuple(self.shape)))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, local={self._local!r}, layout={self._layout!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OWN:
            return _OWN[func](*args, **kwargs)
        if func in _METADATA or getattr(func, "__name__", "") in ("__get__", "__set__"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return cls.dispatch(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # The wrapper has no storage, so an operator that came past __torch_function__ has nothing to compute on.
        raise TypeError(f"{func}: reached the wrapper of a {cls.__name__} below the level where operators are caught")

    @classmethod
    def dispatch(cls, func: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG003 - for the deriving class
        """Runs an operator on distributed tensors; a deriving class says how."""
        name = getattr(func, "__name__", func)
        raise TypeError(f"{name}: {cls.__name__} has no rules for operators; call to_local() and compute on the shard")


def _rebuild(cls: type[DTensorBase], local: torch.Tensor, layout: Any, shape: Sequence[int]) -> DTensorBase:
    return cls(local, layout, shape)


def _detach(tensor: DTensorBase) -> DTensorBase:
    return type(tensor)(tensor._local.detach(), tensor._layout, tensor.shape)


def _requires_grad_(tensor: DTensorBase, requires_grad: bool = True) -> DTensorBase:
    tensor._local.requires_grad_(requires_grad)
    return tensor


def _grad(tensor: DTensorBase) -> DTensorBase | None:
    """The gradient lies as the tensor does, whole where a reduction is pending."""
    grad = tensor._local.grad
    return None if grad is None else type(tensor)(grad, tensor._layout.reset_partial(), tensor.shape)


def _set_grad(tensor: DTensorBase, grad: Any) -> None:
    tensor._local.grad = grad._local if isinstance(grad, DTensorBase) else grad


def _deepcopy(tensor: DTensorBase, memo: dict[int, Any]) -> DTensorBase:
    if id(tensor) not in memo:
        twin = type(tensor)(copy.deepcopy(tensor._local, memo), tensor._layout, tensor.shape)
        twin.__dict__.update({key: value for key, value in vars(tensor).items() if key not in ("_local", "_layout")})
        memo[id(tensor)] = twin
    return memo[id(tensor)]


def _property(name: str) -> Any:
    return getattr(torch.Tensor, name)


# Autograd sees the shard, so what is asked about the graph is asked of the shard.
_OWN: dict[Any, Callable[..., Any]] = {
    torch.Tensor.detach: _detach,
    _property("data").__get__: _detach,
    torch.Tensor.requires_grad_: _requires_grad_,
    _property("requires_grad").__get__: lambda tensor: tensor._local.requires_grad,
    _property("requires_grad").__set__: lambda tensor, value: _requires_grad_(tensor, value) and None,
    _property("grad").__get__: _grad,
    _property("grad").__set__: _set_grad,
    _property("grad_fn").__get__: lambda tensor: tensor._local.grad_fn,
    _property("is_leaf").__get__: lambda tensor: tensor._local.is_leaf,
    torch.Tensor.__repr__: DTensorBase.__repr__,
    torch.Tensor.__deepcopy__: _deepcopy,
}
