# SPDX-License-Identifier: Apache-2.0
"""A distributed tensor: this rank's shard, the layout, and the global shape.

    w = distribute_tensor(weight, mesh, [Shard(0)])     every rank keeps its rows
    y = w.redistribute(mesh, [Replicate()])             and gathers all others

``shape``, ``size`` and ``numel`` are global, ``local_shape`` and ``to_local()`` are this rank's. Autograd records the
shards, so gradients flow through every operator.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from hyper_parallel.core.dtensor.casts import redistribute_as
from hyper_parallel.core.dtensor.collectives import (
    gradient_layout,
    gradient_of_shard,
    gradient_of_whole,
    redistribute,
)
from hyper_parallel.core.dtensor.copied_views import follow_base, remember_base
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, get_current_mesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.modes import SkipDTensorDispatch  # noqa: F401 - users import it from here
from hyper_parallel.core.dtensor.operators import dispatcher
from hyper_parallel.core.dtensor.pending_tensor import PendingTensor
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate
from hyper_parallel.core.dtensor.random import as_one_device
from hyper_parallel.core.dtensor.routes import (
    local_for,
    own_local_for,
    reduced_twin,
    routes_of_moved,
    versions,
)
from hyper_parallel.core.dtensor.spec import spec_of, waits_for_value
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.strides import whole_stride

platform = get_platform()


class DTensor(platform.DTensorBase):  # type: ignore[misc, name-defined]
    """A tensor of the framework, distributed on a mesh."""

    @staticmethod
    def from_local(
        local_tensor: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Any = None,
        *,
        shape: Sequence[int] | None = None,
        run_check: bool = False,
        stride: Sequence[int] | None = None,
        grad_placements: Any = None,
    ) -> DTensor:
        """The distributed tensor whose shard on this rank is ``local_tensor``; Replicate by default.

        Without ``shape`` every rank is assumed to have a shard of this shape; uneven shards need it. Nothing is
        communicated, so shards that differ raise at a later collective, if it is compared (the first 100 of each group
        are). ``run_check`` compares shapes and dtypes between the ranks immediately, and the values of replicas, and
        names the ranks that differ.
        ``stride`` must be the global stride with the dims in the memory order of the shard. ``grad_placements``: the
        placements of the gradient of ``local_tensor``; by default those of the tensor, Replicate where it is Partial.
        """
        _check_dense("from_local", local_tensor)
        layout = layout_of(device_mesh, placements, len(local_tensor.shape))
        layout.mesh.own_coordinate("from_local")
        whole = (
            layout.get_global_shape(local_tensor.shape)
            if shape is None
            else tuple(shape)
        )
        # An irregular placement may say the size of its dim.
        is_known = shape is not None or not layout.is_regular
        if is_known and tuple(local_tensor.shape) != (
            expected := layout.local_shape(whole)
        ):
            raise coded(
                ValueError,
                "HP220",
                f"from_local: rank {layout.mesh.rank} has a shard of shape {tuple(local_tensor.shape)}, but "
                f"{layout} gives it {expected} of a tensor of shape {whole}",
            )
        if stride is not None:
            _check_stride(local_tensor, whole, stride)
        if run_check:
            _check_ranks(local_tensor, layout, whole)
        if grad_placements is not None:
            parts = axes_of_partial_gradient(
                "from_local", layout, grad_placements, len(whole)
            )
            moved = redistribute(local_tensor, layout, layout, whole, varied=parts)
            made = DTensor.of_plain(moved, layout, whole)
            if parts:
                made._parts = local_tensor, parts
            return made
        return DTensor.of_plain(local_tensor, layout, whole)

    @staticmethod
    def of_plain(local: Any, layout: Layout, shape: Any) -> DTensor:
        """``from_local`` without checks of the shard."""
        made = DTensor(local, layout, shape)
        spec_of(made)
        # All that is made from one plain tensor in one layout shares its routes, and so the sum of its gradient.
        made._wraps_user_tensor = True
        platform.mark_escaped(local)
        return made

    @classmethod
    def _on_every_rank(
        cls, local: Any, device_type: str, ranks: Any, names: Any
    ) -> DTensor:
        """A replicated tensor from plain values, as stored in a file."""
        mesh = DeviceMesh(device_type, ranks, mesh_dim_names=names)
        return cls(
            local,
            layout_of(mesh, [Replicate()] * mesh.ndim, len(local.shape)),
            local.shape,
        )

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of the tensor."""
        mesh: DeviceMesh = self._layout.mesh
        return mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        placements: tuple[Placement, ...] = self._layout.placements
        return placements

    def size(self, dim: int | None = None) -> Any:
        """The global shape, or the size along a dim."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """The global number of elements."""
        return math.prod(self.shape)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Any = None,
        *,
        async_op: bool = False,
        forward_dtype: Any = None,
        backward_dtype: Any = None,
    ) -> DTensor:
        """The same tensor in another layout on the same mesh; Replicate by default.

        ``forward_dtype``: the tensor is cast to it before communication, and keeps it. ``backward_dtype``: the gradient
        is communicated in it, by default in the dtype of the tensor, and cast back. ``async_op``: returns once the
        communication has started, with an object whose ``wait()`` returns the tensor.
        """
        self.current()
        mesh = device_mesh or self.device_mesh
        if mesh != self.device_mesh:
            raise coded(
                ValueError,
                "HP224",
                f"redistribute: the tensor lies on {self.device_mesh}, not on {mesh}",
            )
        wanted = [Replicate()] * mesh.ndim if placements is None else placements
        target = layout_of(mesh, wanted, len(self._shape))
        if any(
            dtype not in (None, self._local.dtype)
            for dtype in (forward_dtype, backward_dtype)
        ):
            moved = redistribute_as(
                self._local,
                self._layout,
                target,
                self._shape,
                forward_dtype,
                backward_dtype,
            )
            made = DTensor(moved, target, self._shape)
            return PendingTensor.done(made) if async_op else made  # type: ignore[return-value]
        if async_op:
            finish = functools.partial(self._redistribute_to, target)
            return PendingTensor(self, target, finish)  # type: ignore[return-value]
        return self._redistribute_to(target)

    def _redistribute_to(self, target: Layout, value: Any = None) -> DTensor:
        """``value``: this rank's shard in the target layout, if it is already known."""
        if target is self._layout:
            return self
        local = (
            local_for(self, target, implicit=False)
            if value is None
            else redistribute(
                self._local, self._layout, target, self._shape, value=value
            )
        )
        made = DTensor(local, target, self._shape)
        spec_of(made)
        pairs = zip(self._layout.placements, target.placements, strict=True)
        if any(before.is_shard() and after.is_replicate() for before, after in pairs):
            # Parts of its gradient go straight back to the shards, as long as neither is changed in place.
            made._gathered_from = self
            made._origin_versions = versions(self, made)
            made._routes = routes_of_moved(self, target)
        return made

    def reduce_partial(self) -> DTensor:
        """The same tensor with every Partial axis reduced."""
        return self.redistribute(None, self._layout.reset_partial())

    def follow_base(self) -> None:
        """Updates a copied view after its base has changed."""
        follow_base(self)

    def detached_copy(self) -> DTensor:
        """The detached tensor; a copied view still follows its base."""
        made = DTensor(self.to_local().detach(), self._layout, self._shape)
        remember_base(
            made, self, self._lost_view_of or "detach", self.detach, is_view=True
        )
        return made

    def gradient_source(self) -> DTensor:
        """The tensor whose shard gets the gradient of this one: reduced, where the gradient of a part is another."""
        return reduced_twin(self) if waits_for_value(self) else self

    def gradient_of_whole(self, grad: Any) -> DTensor:
        """The gradient by the value of this tensor, from that of its shard."""
        lying = gradient_layout(self._layout)
        return DTensor(
            gradient_of_whole(grad, self._layout, self._shape), lying, self._shape
        )

    def gradient_of_shard(self, grad: Any) -> Any:
        """The gradient of the shard, as backward takes it, from that by the value."""
        lying = gradient_layout(self._layout)
        return gradient_of_shard(
            local_for(grad, lying, implicit=False), self._layout, self._shape
        )

    def to_local(self, *, grad_placements: Any = None) -> Any:
        """The shard on this rank as a plain tensor, which shares its memory if the framework allows.

        ``grad_placements``: the placements of the gradient of that plain tensor; by default those of the tensor, and
        Replicate where it is Partial. Use Partial() if ranks use their replicas in different computations.
        """
        if grad_placements is None:
            return super().to_local()
        parts = axes_of_partial_gradient(
            "to_local", self._layout, grad_placements, len(self._shape)
        )
        return own_local_for(self.current(), self._layout, parts)

    def full_tensor(self, *, grad_placements: Any = None) -> Any:
        """The full tensor as a plain tensor on every rank: the shard itself if it is replicated, else a new tensor.

        ``grad_placements``: the placements of the gradient of that plain tensor, Replicate or Partial on each axis.
        """
        target = layout_of(self.device_mesh, None, len(self._shape))
        parts: tuple[int, ...] = ()
        if grad_placements is not None:
            parts = axes_of_partial_gradient(
                "full_tensor", target, grad_placements, len(self._shape)
            )
        return own_local_for(self.current(), target, parts)

    def to(self, *args: Any, **kwargs: Any) -> DTensor:
        """The tensor with another dtype or device, like the framework's ``to``."""
        moved: DTensor = DTensor.dispatch(
            platform.operator("to"), (self, *args), kwargs
        )
        return moved

    def float(self, **how: Any) -> DTensor:
        """The tensor in float32."""
        return self.to(platform.str_to_dtype("float32"), **how)

    @staticmethod
    def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator of the framework by its rule."""
        DTensor.dispatch = dispatcher().dispatch  # type: ignore[method-assign] # the short way from now on
        return DTensor.dispatch(func, args, kwargs)


def _check_dense(name: str, tensor: Any) -> None:
    if not platform.is_dense(tensor):
        raise coded(
            ValueError,
            "HP222",
            f"{name}: expected a dense tensor, got a sparse one, which cannot be cut; to_dense() first",
        )


def layout_of(device_mesh: DeviceMesh | None, placements: Any, ndim: int) -> Layout:
    """The layout of a mesh and placements, in either form, for tensors of ``ndim`` dims; None means Replicate."""
    if isinstance(placements, Layout):
        return placements.bind(ndim)
    mesh = device_mesh if device_mesh is not None else get_current_mesh()
    if placements is None and isinstance(mesh, DeviceMesh):
        placements = [Replicate()] * mesh.ndim
    if not isinstance(placements, (list, tuple)):
        return _layout_of(mesh, placements, ndim)
    key = (mesh, *placements, ndim)
    found = _LAYOUTS.get(key)
    if found is None:
        found = _LAYOUTS[key] = _layout_of(mesh, placements, ndim)
    return found


_LAYOUTS: MutableMapping[Any, Layout] = WeakValueDictionary()


def _layout_of(mesh: Any, placements: Any, ndim: int) -> Layout:
    if not isinstance(mesh, DeviceMesh):
        raise coded(
            TypeError,
            "HP211",
            f"device_mesh must be a DeviceMesh, got {type(mesh).__name__}",
        )
    if isinstance(placements, (Placement, str)):
        placements = [placements]
    base = Layout.from_device_mesh(mesh)
    if any(isinstance(entry, Placement) for entry in placements):
        return base(list(placements)).bind(ndim)
    if len(placements) != ndim:
        raise coded(
            ValueError,
            "HP211",
            f"expected one alias for each of {ndim} dims, got {len(placements)}: {placements!r}",
        )
    return base(*placements)


def axes_of_partial_gradient(
    call: str, layout: Layout, grad_placements: Any, ndim: int
) -> tuple[int, ...]:
    """The axes along which ``grad_placements`` make the gradient of a plain tensor of this layout Partial.

    On all other axes the gradient must have its default placement: any other does not match the shape of the shard, or
    is ambiguous.
    """
    usual = gradient_layout(layout.bind(ndim))
    wanted = layout_of(layout.mesh, grad_placements, ndim)
    others = [
        p for p in layout.placements if p.is_partial() and not p.is_partial("sum")
    ]
    if others:
        raise coded(
            ValueError,
            "HP232",
            f"{call}: grad_placements: the gradient of a part of {layout} is not that of the tensor; "
            "reduce_partial() first",
        )
    parts = []
    for axis, (own, asked) in enumerate(
        zip(usual.placements, wanted.placements, strict=True)
    ):
        if own.is_replicate() and asked.is_partial("sum"):
            parts.append(axis)
        elif own != asked:
            allowed = f"{own!r} or Partial()" if own.is_replicate() else repr(own)
            raise coded(
                ValueError,
                "HP232",
                f"{call}: grad_placements: the tensor is {layout.placements[axis]!r} on axis {axis} of "
                f"{layout.mesh}, so its gradient must be {allowed} there, got {asked!r}; redistribute() the "
                "tensor first",
            )
    return tuple(parts)


def _check_stride(local: Any, shape: Sequence[int], stride: Sequence[int]) -> None:
    expected = whole_stride(shape, local)
    if tuple(stride) != expected:
        raise coded(
            ValueError,
            "HP233",
            f"from_local: stride {tuple(stride)} is not that of a tensor of shape {tuple(shape)} whose dims lie in "
            f"memory as those of the shard, which is {expected}; leave it out, or copy the shard into that order",
        )


def distribute_tensor(
    tensor: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Any = None,
    *,
    src_data_rank: int | None = None,
) -> DTensor:
    """Shards a tensor that every rank has; ``src_data_rank``, a rank in the mesh, broadcasts its data first.

    Without placements the tensor is replicated. The shard is a leaf with its own memory, which requires a gradient if
    the tensor does; it is channels_last if the tensor is.
    """
    if isinstance(tensor, DTensor):
        raise coded(
            ValueError,
            "HP222",
            f"distribute_tensor: the tensor already has the layout {tensor.layout}; use redistribute()",
        )
    _check_dense("distribute_tensor", tensor)
    layout = layout_of(device_mesh, placements, len(tensor.shape))
    requires_grad = platform.requires_grad(tensor)
    if requires_grad and getattr(tensor, "grad_fn", None) is not None:
        raise coded(
            RuntimeError,
            "HP222",
            f"distribute_tensor: the tensor of shape {tuple(tensor.shape)} was computed from others, which would "
            "get no gradient, since the shards are leaves. To stay in the graph, call "
            "DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim).redistribute(mesh, placements); or "
            "detach() it first",
        )
    if src_data_rank is not None:
        if src_data_rank not in layout.rank_list:
            raise coded(
                ValueError,
                "HP222",
                f"distribute_tensor: src_data_rank {src_data_rank} is not in {layout.mesh}",
            )
        group = platform.create_group(layout.rank_list)
        sent = platform.broadcast(platform.clone(tensor), src_data_rank, group)
        tensor = platform.in_memory_format_of(tensor, sent)
    whole = layout.with_placements([Replicate()] * layout.mesh.ndim)
    shard = redistribute(platform.detach(tensor), whole, layout, tuple(tensor.shape))
    shard = platform.clone(shard) if layout is whole else shard
    shard = platform.in_memory_format_of(tensor, shard)
    platform.mark_escaped(shard)  # it may be a part of the user's tensor
    return DTensor(
        platform.set_requires_grad(shard, requires_grad), layout, tensor.shape
    )


# --- modules


def distribute_module(
    module: Any,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Any = None,
    input_fn: Any = None,
    output_fn: Any = None,
) -> Any:
    """Distributes a module's parameters and buffers on a mesh and returns the module.

    ``partition_fn(name, submodule, mesh)`` is called for every submodule and may distribute its tensors; the rest
    becomes Replicate. ``input_fn(module, inputs, mesh)`` and ``output_fn(module, outputs, mesh)`` receive the inputs
    and outputs, and may return replacements.
    """
    if getattr(module, "_is_distributed", False):
        raise coded(
            RuntimeError,
            "HP223",
            "distribute_module: the module is distributed already; it can be done once",
        )
    mesh = device_mesh if device_mesh is not None else get_current_mesh()
    enter = _with_module("input_fn", input_fn)
    leave = _with_module("output_fn", output_fn)
    for name, submodule in platform.get_cells_and_names(module):
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
    replicate_rest(module, mesh)
    if enter is not None:
        platform.register_forward_pre_hook(
            module, lambda owner, inputs: enter(owner, inputs, mesh)
        )
    if leave is not None:
        platform.register_forward_hook(
            module, lambda owner, _, outputs: leave(owner, outputs, mesh)
        )
    module._is_distributed = True
    return module


def replicate_rest(
    module: Any, mesh: DeviceMesh, src_data_rank: int | None = None
) -> None:
    """Replicates on a mesh all tensors of a module and its submodules that are not distributed yet.

    ``src_data_rank``: the index in the mesh of the rank that broadcasts its data; None if each rank keeps its own.
    """
    done: dict[int, tuple[Any, Any]] = {}  # a tensor that two modules share stays one
    for _, submodule in platform.get_cells_and_names(module):
        for name, tensor in platform.own_tensors(submodule):
            if isinstance(tensor, DTensor):
                continue
            if id(tensor) not in done:
                source = (
                    None
                    if src_data_rank is None or platform.is_meta(tensor)
                    else mesh.rank_list[src_data_rank]
                )
                made = distribute_tensor(
                    tensor, mesh, [Replicate()] * mesh.ndim, src_data_rank=source
                )
                platform.set_own_tensor(submodule, name, made)
                done[id(tensor)] = tensor, dict(platform.own_tensors(submodule))[name]
            else:
                platform.set_own_tensor(submodule, name, done[id(tensor)][1])


def _with_module(argument: str, function: Any) -> Any:
    """The function as one of (module, values, mesh)."""
    if function is None:
        return None
    count = len(inspect.signature(function).parameters)
    if count == 2:
        warnings.warn(
            f"{argument}(values, mesh) is deprecated; take (module, values, mesh)",
            FutureWarning,
            stacklevel=3,
        )
        return lambda _, values, mesh: function(values, mesh)
    if count != 3:
        raise coded(
            ValueError,
            "HP223",
            f"distribute_module: {argument} must take (module, values, mesh), it takes {count} arguments",
        )
    return function


# --- tensors from nothing


def _sizes_in_a_row(make: Callable[..., DTensor]) -> Callable[..., DTensor]:
    """Accepts sizes as separate arguments: ``zeros(2, 3, device_mesh=mesh)`` is ``zeros((2, 3), mesh)``."""

    @functools.wraps(make)
    def call(*args: Any, **options: Any) -> DTensor:
        count = sum(1 for _ in itertools.takewhile(_is_size, args))
        if count > 1 or (count == 0 and not args and "size" not in options):
            args = (args[:count], *args[count:])
        return make(*args, **options)

    return call


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@_sizes_in_a_row
def zeros(
    size: Any,
    device_mesh: Any = None,
    placements: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
    layout: Any = None,
) -> DTensor:
    """A distributed tensor of zeros; ``layout`` may only be ``torch.strided``."""
    asked = _asked("zeros", size, device_mesh, placements, layout)
    return _filled(asked, 0.0, dtype, device, requires_grad)


@_sizes_in_a_row
def ones(
    size: Any,
    device_mesh: Any = None,
    placements: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
    layout: Any = None,
) -> DTensor:
    """A distributed tensor of ones."""
    asked = _asked("ones", size, device_mesh, placements, layout)
    return _filled(asked, 1.0, dtype, device, requires_grad)


@_sizes_in_a_row
def empty(
    size: Any,
    device_mesh: Any = None,
    placements: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
    layout: Any = None,
) -> DTensor:
    """An uninitialized distributed tensor."""
    asked = _asked("empty", size, device_mesh, placements, layout)
    local = platform.empty(asked.local_shape, dtype=dtype, device=device)
    return asked.tensor(local, requires_grad)


def full(
    size: Any,
    fill_value: Any,
    *,
    device_mesh: Any = None,
    placements: Any = None,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
    layout: Any = None,
) -> DTensor:
    """A distributed tensor filled with one value."""
    asked = _asked("full", size, device_mesh, placements, layout)
    return _filled(asked, fill_value, dtype, device, requires_grad)


@_sizes_in_a_row
def rand(
    size: Any,
    device_mesh: Any = None,
    placements: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
    layout: Any = None,
) -> DTensor:
    """Uniform random numbers, equal to those of one device on any mesh."""
    asked = _asked("rand", size, device_mesh, placements, layout)
    return _drawn(asked, platform.rand, dtype, device, requires_grad)


@_sizes_in_a_row
def randn(
    size: Any,
    device_mesh: Any = None,
    placements: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
    layout: Any = None,
) -> DTensor:
    """Normal random numbers, equal to those of one device on any mesh."""
    asked = _asked("randn", size, device_mesh, placements, layout)
    return _drawn(asked, platform.randn, dtype, device, requires_grad)


class _Asked(NamedTuple):
    """Creates the tensor of a factory."""

    shape: tuple[int, ...]
    layout: Layout

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.layout.local_shape(self.shape)

    def tensor(self, local: Any, requires_grad: bool) -> DTensor:
        if requires_grad:
            local = platform.set_requires_grad(local, True)
        return DTensor(local, self.layout, self.shape)


def _asked(
    call: str, size: Any, device_mesh: Any, placements: Any, strided: Any
) -> _Asked:
    if strided is not None and repr(strided) != "torch.strided":
        raise coded(
            ValueError,
            "HP222",
            f"{call}: layout must be torch.strided, got {strided!r}; how the tensor lies on the mesh is said by "
            "placements=",
        )
    shape = (size,) if isinstance(size, int) else tuple(size)
    layout = layout_of(device_mesh, placements, len(shape))
    if layout.is_partial():
        raise coded(
            ValueError,
            "HP213",
            f"{call}: {layout} leaves a reduction pending, of which the parts are not known",
        )
    return _Asked(shape, layout)


def _filled(
    asked: _Asked, value: Any, dtype: Any, device: Any, requires_grad: bool
) -> DTensor:
    local = platform.full(asked.local_shape, value, dtype=dtype, device=device)
    return asked.tensor(local, requires_grad)


def _drawn(
    asked: _Asked, draw: Any, dtype: Any, device: Any, requires_grad: bool
) -> DTensor:
    # The whole is drawn on every rank and cut: the numbers do not depend on the mesh.
    whole = as_one_device(
        asked.layout.mesh, lambda: draw(asked.shape, dtype=dtype, device=device)
    )
    shard = asked.layout.part_of(whole)
    return asked.tensor(platform.clone(shard), requires_grad)


# --- the check of from_local


def _check_ranks(local: Any, layout: Layout, shape: Sequence[int]) -> None:
    """Raises a ValueError on every rank that names the ranks whose shards do not match."""
    facts = {"shape": tuple(shape), "dtype": str(local.dtype), "values": _digest(local)}
    group = platform.create_group(layout.rank_list)
    everyone: list[Any] = [None] * math.prod(layout.mesh_shape)
    platform.all_gather_object(everyone, facts, group)
    by_rank = dict(zip(sorted(layout.rank_list), everyone, strict=True))
    for name in ("shape", "dtype"):
        _require_one(
            name, {rank: found[name] for rank, found in by_rank.items()}, layout
        )
    for ranks in _copies(layout):
        _require_one(
            "values", {rank: by_rank[rank]["values"] for rank in ranks}, layout
        )


def _copies(layout: Layout) -> list[list[int]]:
    """The ranks that should have the same data, group by group."""
    copied = {
        axis
        for axis, placement in enumerate(layout.placements)
        if placement.is_replicate()
    }
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in layout.rank_list:
        place = layout.mesh.coordinate_of(rank) or ()
        groups.setdefault(
            tuple(0 if axis in copied else at for axis, at in enumerate(place)), []
        ).append(rank)
    return list(groups.values())


def _require_one(name: str, found: dict[int, Any], layout: Layout) -> None:
    if len(set(found.values())) > 1:
        first = next(iter(found))
        others = [rank for rank, value in found.items() if value != found[first]]
        told = f": {found}" if name != "values" else ""
        if name == "shape":
            told += "; if that is meant, say the shape of the whole, from_local(..., shape=)"
        raise coded(
            ValueError,
            "HP221",
            f"from_local: {layout}: ranks {others} have another {name} than rank {first}{told}",
        )


def _digest(local: Any) -> str:
    return hashlib.sha256(platform.tensor_to_numpy(local).tobytes()).hexdigest()
