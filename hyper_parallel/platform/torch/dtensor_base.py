# SPDX-License-Identifier: Apache-2.0
"""The tensor subclass that distributed tensors derive from: a local tensor, its layout and the global shape.

Autograd sees the shard, so what is asked about the graph is asked of the shard. Operators go to ``dispatch`` of the
class that derives from it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch.optim import optimizer
from torch.utils import _foreach_utils

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.strides import whole_stride
from hyper_parallel.platform.torch.saving import (
    SavedInChunks,
    allow_loading,
    guard_safetensors,
)

_make_wrapper = torch.Tensor._make_wrapper_subclass
_is_grad_enabled = torch.is_grad_enabled


class DTensorBase(SavedInChunks, torch.Tensor):
    """A shard with the metadata of the whole: ``shape`` is global, ``local_shape`` is this rank's."""

    _local: torch.Tensor
    _layout: Any
    _shape: torch.Size
    _routes: Any = None  # the shard by other routes, as they are asked for
    _wraps_user_tensor = False  # the shard is a tensor of the user's, from which others may be made as well
    _gathered_from: Any = (
        None  # what it was gathered from, or of what gathered it is a view
    )
    _origin_versions: tuple[int | None, ...] = ()  # of the origin and of itself, then
    _lost_view_of: str | None = (
        None  # the view that it would be, had its base not been redistributed
    )
    _reduced: Any = None  # the same with its reduction taken, where a maximum, minimum or product is pending
    _parts: Any = (
        None  # what takes its gradient in parts, and the axes along which it does
    )
    _taken: Any = None  # from what, and how to take it again when that has changed
    _forms = 0  # how often an operator in place has changed its shape
    _unrecorded = False  # made where nothing is recorded for backward
    _spec: Any = None  # stands for its layout, shape and dtype
    _last_gradient: DTensorBase | None = None  # optimizers ask for it again and again

    @staticmethod
    def __new__(
        cls: type[DTensorBase], local: torch.Tensor, layout: Any, shape: Sequence[int]
    ) -> DTensorBase:
        size = shape if type(shape) is torch.Size else torch.Size(shape)
        return cls.wrapped(local, local.dtype, layout, size, None)

    @classmethod
    def wrapped(
        cls,
        local: torch.Tensor,
        dtype: torch.dtype,
        layout: Any,
        size: torch.Size,
        spec: Any,
    ) -> DTensorBase:
        """The distributed tensor of a shard, for those who know its dtype and what stands for it."""
        # That the wrapper requires a gradient serves one end: a plain autograd function leaves its mark on it.
        if local.requires_grad:
            wrapper = _make_wrapper(
                cls, size, dtype=dtype, device=local.device, requires_grad=True
            )
        else:
            wrapper = _make_wrapper(cls, size, dtype=dtype, device=local.device)
        own = wrapper.__dict__
        own["_local"] = local
        own["_layout"] = layout
        own["_shape"] = size
        own["_spec"] = spec
        if not _is_grad_enabled():
            own["_unrecorded"] = True
        return wrapper

    @classmethod
    def install_fast_dispatch(cls, make: Callable[..., Any]) -> None:
        """Has operators go the way that ``make`` gives, which leaves to the usual one what it does not know."""
        way = make(
            cls=cls,
            own=_OWN,
            slow=MethodType(_torch_function, cls),
            tensor=torch.Tensor,
            make_wrapper=_make_wrapper,
            is_grad_enabled=_is_grad_enabled,
        )
        cls.__torch_function__ = staticmethod(way)  # type: ignore[method-assign]

    @property
    def layout(self) -> Any:  # type: ignore[override]
        """How the whole tensor lies on the mesh."""
        return self._layout

    @property
    def local_shape(self) -> torch.Size:
        """The shape of the data on this rank."""
        return self._local.shape

    @property
    def __tensor_flatten__(self) -> Any:
        """There is none: torch.compile, which looks for it in each tensor that it meets, is told why."""
        from hyper_parallel.platform.torch.compilation import refuse_tracing

        refuse_tracing(
            lambda: (
                f"a {type(self).__name__} of shape {tuple(self._shape)} in {self._layout} came in"
            )
        )
        raise AttributeError(f"{type(self).__name__} has no __tensor_flatten__")

    @property
    def is_parameter(self) -> bool:
        """Whether a module has it as a parameter."""
        return "_is_param" in self.__dict__

    @property
    def lost_its_graph(self) -> bool:
        """Whether an autograd function of torch made it: that one records the wrapper, and no gradient would flow."""
        if not torch.is_grad_enabled() or self._local.requires_grad:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined]

    def to_local(self) -> torch.Tensor:
        """The data on this rank, as a plain tensor that shares its memory."""
        return self.current()._local

    def current(self) -> DTensorBase:
        """The tensor itself; one that had to be a copy of another, and not a view, has taken over its changes."""
        if self._taken is not None:
            self.follow_base()
        return self

    def follow_base(self) -> None:
        """Takes over what has changed in the tensor that this one is a copy of; a deriving class says how."""
        raise NotImplementedError

    def __copy__(self) -> DTensorBase:
        twin = self._twin(self._local)
        twin.__dict__.update(vars(self))
        return twin

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self._shape)}, local={self._local!r}, layout={self._layout!r})"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        allow_loading(cls)
        guard_safetensors()
        # torch.optim and clipping take lists of these classes at once where kernels for lists are fast.
        for types in (
            optimizer._foreach_supported_types,
            _foreach_utils._foreach_supported_types,
        ):
            types.append(cls)
        # Torch asks for it several times at each call; as a class method it would be bound anew each time.
        cls.__torch_function__ = staticmethod(MethodType(_torch_function, cls))  # type: ignore[method-assign]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # The wrapper has no storage, so an operator that came past __torch_function__ has nothing to compute on.
        raise coded(
            TypeError,
            "HP320",
            f"{func}: code that works below torch's functions was given a {cls.__name__}, whose data it cannot "
            "see. DistributedDataParallel, torch.compile, torch.func and C++ extensions do so; for data parallel "
            "call replicate(model, mesh['dp']), for an operator of your own custom_shard()",
        )

    @staticmethod
    def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator on distributed tensors; a deriving class says how."""
        raise NotImplementedError

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None
    ) -> DTensorBase:
        """The same tensor in another layout; a deriving class says how."""
        raise NotImplementedError

    @classmethod
    def _on_every_rank(
        cls, local: torch.Tensor, device_type: str, ranks: Any, names: Any
    ) -> DTensorBase:
        """A tensor of which every rank of a mesh has all; a deriving class says how."""
        raise NotImplementedError

    def reduce_partial(self) -> DTensorBase:
        """The same tensor without pending reductions; a deriving class says how."""
        raise NotImplementedError

    def full_tensor(self) -> Any:
        """The whole as a plain tensor; a deriving class says how."""
        raise NotImplementedError

    # --- what the class of torch has as methods and properties, on the shard or on the whole

    def _twin(self, local: torch.Tensor) -> DTensorBase:
        return type(self)(local, self._layout, self._shape)

    def _detached(self) -> DTensorBase:
        if self._taken is not None:
            return self.detached_copy()
        return self._twin(self._local.detach())

    def detached_copy(self) -> DTensorBase:
        """The tensor outside the graph, where it had to be a copy of another; a deriving class says how."""
        raise NotImplementedError

    def _set_data(self, data: Any) -> None:
        """Other data of the same layout, in place; the wrapper takes its dtype and device."""
        if (
            not isinstance(data, DTensorBase)
            or data._layout is not self._layout
            or data._shape != self._shape
        ):
            raise coded(
                ValueError,
                "HP227",
                f"data: expected a {type(self).__name__} of shape {tuple(self._shape)} in {self._layout}, got "
                f"{data._layout if isinstance(data, DTensorBase) else type(data).__name__} of shape "
                f"{tuple(data.shape)}",
            )
        self._local.data = data._local
        self._spec = None
        with torch._C.DisableTorchFunctionSubclass():
            _set_data_of_wrapper(self, data)

    def take_form(self, layout: Any, shape: Sequence[int]) -> None:
        """Another layout and shape, after the shard was changed in place."""
        self._layout, self._shape = layout, torch.Size(shape)
        self._routes = self._gathered_from = self._reduced = self._spec = (
            self._last_gradient
        ) = None
        self._wraps_user_tensor = False
        self._forms += 1
        with torch._C.DisableTorchFunctionSubclass():
            _set_data_of_wrapper(self, self._twin(self._local))

    def _set_requires_grad(self, value: bool) -> None:
        self._require_grad(value)

    def _require_grad(self, requires_grad: bool = True) -> DTensorBase:
        self._local.requires_grad_(requires_grad)
        self._spec = None
        with torch._C.DisableTorchFunctionSubclass():
            _require_grad_of_wrapper(self, requires_grad)
        return self

    def _gradient(self) -> DTensorBase | None:
        """The gradient lies as the tensor does, whole where a reduction is pending."""
        source = self.gradient_source()
        if source is not self:
            return source._gradient()
        grad = self._local.grad
        if grad is None:
            self._last_gradient = None
        elif self._last_gradient is None or self._last_gradient._local is not grad:
            self._last_gradient = made = self._gradient_of(grad)
            if made._layout is self._layout and grad.dtype is self._local.dtype:
                made._spec = self._spec
        return self._last_gradient

    def gradient_source(self) -> DTensorBase:
        """The tensor whose shard gets the gradient of this one; a deriving class says which."""
        return self

    def _gradient_of(self, grad: torch.Tensor) -> DTensorBase:
        if self._layout.is_partial():
            return self.gradient_of_whole(grad)
        return type(self)(grad, self._layout, self._shape)

    def keep_gradient_of(self, leaf: DTensorBase) -> None:
        """Keeps the gradient of this tensor as that of a leaf from which it was computed."""
        if leaf._local.is_leaf and self._local.requires_grad:
            self._local.retain_grad()

    def gradient_of_whole(self, grad: torch.Tensor) -> DTensorBase:
        """The gradient by the value of this tensor, from that of its shard; a deriving class says how."""
        raise NotImplementedError

    def gradient_of_shard(self, grad: DTensorBase) -> torch.Tensor:
        """The gradient of the shard, as backward takes it, from that by the value; a deriving class says how."""
        raise NotImplementedError

    def _set_gradient(self, grad: Any) -> None:
        source = self.gradient_source()
        if source is not self:
            source._set_gradient(grad)
            grad = None
        if isinstance(grad, DTensorBase):
            grad = self.gradient_of_shard(grad)
        elif grad is not None:
            raise coded(
                TypeError,
                "HP227",
                f"grad: expected a {type(self).__name__} in {self._layout}, got a plain tensor",
            )
        self._local.grad = grad
        self._last_gradient = None

    def _deepcopied(self, memo: dict[int, Any]) -> DTensorBase:
        if id(self) not in memo:
            twin = self._twin(copy.deepcopy(self._local, memo))
            own = (
                "_local",
                "_layout",
                "_shape",
                "_routes",
                "_gathered_from",
                "_spec",
                "_last_gradient",
                "_lost_view_of",
                "_taken",
                "_reduced",
            )
            twin.__dict__.update(
                {key: value for key, value in vars(self).items() if key not in own}
            )
            memo[id(self)] = twin
        return memo[id(self)]

    def _backward(
        self,
        gradient: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """From every rank's shard."""
        shard, gradient = self.current()._backward_root(gradient)
        if inputs is not None:
            inputs = [
                one._local if isinstance(one, DTensorBase) else one
                for one in _several(inputs)
            ]
        torch.autograd.backward(
            shard, gradient, retain_graph, create_graph, inputs=inputs
        )

    def _backward_root(self, gradient: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Where backward begins and with what: the gradient of a pending sum is the same for every part."""
        target = (
            self
            if all(op in (None, "sum") for op in self._layout.partial)
            else self.reduce_partial()
        )
        if isinstance(gradient, DTensorBase):
            return target._local, target.gradient_of_shard(gradient)
        if gradient is None:
            if self._shape.numel() != 1:
                raise RuntimeError(
                    "grad can be implicitly created only for scalar outputs"
                )
            return target._local, torch.ones_like(target._local)
        if gradient.dim():
            raise coded(
                TypeError,
                "HP227",
                f"backward: expected a gradient that lies as {self._layout}, got a plain tensor",
            )
        return target._local, gradient

    def _watched(self, what: str) -> None:
        """From now on the whole gradient passes the shard itself; a route around it would not be seen."""
        if self._gathered_from is not None and self._routes:
            raise coded(
                RuntimeError,
                "HP225",
                f"{what}: the tensor was gathered and used already; call it right after redistribute()",
            )
        self._gathered_from = self._routes = (
            None  # routes are shared with others that were gathered from the same tensor
        )

    def _hooked(self, hook: Callable[..., Any]) -> Any:
        source = self.current().gradient_source()
        if source is not self:
            return source._hooked(hook)
        self._watched("register_hook")

        def on_shard(grad: torch.Tensor) -> Any:
            changed = hook(self._gradient_of(grad))
            return (
                self.gradient_of_shard(changed)
                if isinstance(changed, DTensorBase)
                else changed
            )

        return self._local.register_hook(on_shard)

    def _hooked_after(self, hook: Callable[..., Any]) -> Any:
        return self._local.register_post_accumulate_grad_hook(lambda _: hook(self))

    def _retain_grad(self) -> None:
        source = self.current().gradient_source()
        if source is not self:
            source._retain_grad()
            return
        self._watched("retain_grad")
        self._local.retain_grad()


def _torch_function(
    cls: type[DTensorBase],
    func: Any,
    types: Any,  # noqa: ARG001 - torch's signature
    args: Any = (),
    kwargs: Any = None,
) -> Any:
    own = _OWN.get(func)
    if own is not None:
        return own(*args, **(kwargs or {}))
    return cls.dispatch(func, args, kwargs or {})


DTensorBase.__torch_function__ = staticmethod(MethodType(_torch_function, DTensorBase))  # type: ignore[method-assign]


def _several(items: Any) -> Sequence[Any]:
    return items if isinstance(items, (list, tuple)) else (items,)


def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    only_inputs: bool = True,  # noqa: ARG001 - torch's signature
    allow_unused: Any = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Any, ...]:
    """torch.autograd.grad: of the shards, by every route that was handed out."""
    if is_grads_batched:
        raise coded(
            NotImplementedError,
            "HP312",
            "autograd.grad: is_grads_batched is not supported for distributed tensors",
        )
    outputs, inputs = _several(outputs), _several(inputs)
    given = (
        _several(grad_outputs) if grad_outputs is not None else [None] * len(outputs)
    )
    seeds = [_root_of(*pair) for pair in zip(outputs, given, strict=True)]
    inputs = [_gradient_source_of(tensor) for tensor in inputs]
    leaves = [_watch_local(tensor) for tensor in inputs]
    found = torch.autograd.grad(
        [out for out, _ in seeds],
        leaves,
        [grad for _, grad in seeds],
        retain_graph=retain_graph,
        create_graph=create_graph,
        allow_unused=allow_unused,
        materialize_grads=materialize_grads,
    )
    pairs = zip(inputs, found, strict=True)
    return tuple(_wrap_gradient(tensor, grad) for tensor, grad in pairs)


def _root_of(output: Any, grad: Any) -> tuple[Any, Any]:
    """The plain tensor that backward starts from, and its gradient."""
    if isinstance(output, DTensorBase):
        root: tuple[Any, Any] = output.current()._backward_root(grad)
        return root
    return output, grad


def _gradient_source_of(tensor: Any) -> Any:
    is_distributed = isinstance(tensor, DTensorBase)
    return tensor.current().gradient_source() if is_distributed else tensor


def _watch_local(tensor: Any) -> Any:
    """The plain tensor whose gradient is taken."""
    if not isinstance(tensor, DTensorBase):
        return tensor
    tensor._watched("autograd.grad")
    return tensor._local


def _wrap_gradient(tensor: Any, grad: Any) -> Any:
    if isinstance(tensor, DTensorBase) and grad is not None:
        return tensor._gradient_of(grad)
    return grad


def _property(name: str) -> Any:
    return getattr(torch.Tensor, name)


_set_data_of_wrapper = _property("data").__set__
_require_grad_of_wrapper = _property("requires_grad").__set__


def _of_wrapper(func: Any) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    return ask


def _of_shard(name: str) -> Callable[..., Any]:
    return lambda tensor, *args, **kwargs: getattr(tensor._local, name)(*args, **kwargs)


def _attribute_of_shard(name: str) -> Callable[..., Any]:
    return lambda tensor: getattr(tensor._local, name)


def _attribute_of_graph(name: str) -> Callable[..., Any]:
    return lambda tensor: getattr(
        (tensor if tensor._taken is None else tensor.current())._local, name
    )


def _of_whole(name: str) -> Callable[..., Any]:
    return lambda tensor, *args, **kwargs: getattr(
        tensor.redistribute()._local.detach(), name
    )(*args, **kwargs)


def _of_own_whole(name: str) -> Callable[..., Any]:
    """For what shares memory with its result."""
    return lambda tensor, *args, **kwargs: getattr(tensor.full_tensor().detach(), name)(
        *args, **kwargs
    )


def _stride(tensor: DTensorBase, dim: int | None = None) -> Any:
    """The wrapper has those of a contiguous tensor; a shard whose dims lie in another order tells otherwise."""
    strides = whole_stride(tensor._shape, tensor._local)
    return strides if dim is None else strides[dim]


def _dim_order(tensor: DTensorBase, **kwargs: Any) -> Any:
    return torch.empty_strided(tensor._shape, _stride(tensor), device="meta").dim_order(
        **kwargs
    )


_OWN: dict[Any, Callable[..., Any]] = {
    torch.autograd.grad: _grad,
    torch.Tensor.__deepcopy__: DTensorBase._deepcopied,
    torch.Tensor.__repr__: lambda tensor, **_: DTensorBase.__repr__(tensor),
    torch.Tensor.__reduce_ex__: DTensorBase.__reduce_ex__,
    torch.Tensor.backward: DTensorBase._backward,
    torch.Tensor.detach: DTensorBase._detached,
    torch.Tensor.register_hook: DTensorBase._hooked,
    torch.Tensor.register_post_accumulate_grad_hook: DTensorBase._hooked_after,
    torch.Tensor.requires_grad_: DTensorBase._require_grad,
    torch.Tensor.retain_grad: DTensorBase._retain_grad,
    _property("data").__get__: DTensorBase._detached,
    _property("data").__set__: DTensorBase._set_data,
    _property("grad").__delete__: lambda tensor: tensor._set_gradient(None),
    _property("grad").__get__: DTensorBase._gradient,
    _property("grad").__set__: DTensorBase._set_gradient,
    _property("requires_grad").__set__: DTensorBase._set_requires_grad,
    _property("shape").__get__: lambda tensor: tensor._shape,
    torch.Tensor.__len__: lambda tensor: tensor._shape[0],
    torch.Tensor.__format__: lambda tensor, spec: (
        tensor.redistribute()._local.detach().__format__(spec)
        if not tensor._shape
        else object.__format__(tensor, spec)
    ),
}
for _name in (
    "device", "dtype", "retains_grad",
    "is_cpu", "is_cuda", "is_ipu", "is_maia", "is_meta", "is_mkldnn", "is_mps", "is_mtia", "is_nested", "is_quantized",
    "is_sparse", "is_sparse_csr", "is_vulkan", "is_xla", "is_xpu", "itemsize",
):  # fmt: skip
    _OWN[_property(_name).__get__] = _attribute_of_shard(_name)
# Optimizers ask every parameter for these, several times per step; a property of the class is not dispatched.
for _name in ("device", "dtype", "is_sparse", "is_cpu", "is_cuda"):
    setattr(DTensorBase, _name, property(_attribute_of_shard(_name)))
DTensorBase.grad = property(  # type: ignore[assignment]
    DTensorBase._gradient,
    DTensorBase._set_gradient,
    lambda tensor: tensor._set_gradient(None),
)
for _name in ("_version", "grad_fn", "is_leaf", "requires_grad"):
    _OWN[_property(_name).__get__] = _attribute_of_graph(_name)
for _name in (
    "_is_zerotensor", "get_device", "is_coalesced", "is_complex", "is_conj", "is_contiguous", "is_floating_point",
    "is_inference", "is_neg", "is_pinned", "is_shared", "is_signed", "data_ptr", "untyped_storage", "element_size",
    "storage_offset",
):  # fmt: skip
    _OWN[getattr(torch.Tensor, _name)] = _of_shard(_name)
_OWN |= {
    getattr(torch, name): _OWN[getattr(torch.Tensor, name)]
    for name in ("is_complex", "is_floating_point")
}
_OWN |= {
    getattr(torch, name): _of_shard(name)
    for name in ("is_inference", "is_conj", "is_neg", "is_signed")
}
for _name in ("dim", "ndimension", "nelement", "numel", "size", "is_same_size"):
    _OWN[getattr(torch.Tensor, _name)] = _of_wrapper(getattr(torch.Tensor, _name))
_OWN[torch.Tensor.stride] = _stride
_OWN[torch.Tensor.dim_order] = _dim_order
_OWN[torch.numel] = _of_wrapper(torch.numel)
_OWN[torch._has_compatible_shallow_copy_type] = _of_wrapper(
    torch._has_compatible_shallow_copy_type
)
for _name in (
    "layout",
    "name",
    "nbytes",
    "ndim",
    "output_nr",
    "_base",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
):
    _OWN[_property(_name).__get__] = _of_wrapper(_property(_name).__get__)
for _name in (
    "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__", "item", "tolist",
):  # fmt: skip
    _OWN[getattr(torch.Tensor, _name)] = _of_whole(_name)
for _name in ("__array__", "numpy"):
    _OWN[getattr(torch.Tensor, _name)] = _of_own_whole(_name)
