# SPDX-License-Identifier: Apache-2.0
"""Styles for attention modules that get queries, keys and values, of which each rank has a part of the sequence.

ContextParallel().apply(model.layers[0].core_attention, mesh["cp"])
AsyncContextParallel().apply(core_attention, mesh["cp"], q_proj=q_proj, k_proj=k_proj, v_proj=v_proj)

The module sees distributed tensors of the whole sequence, and its attention is computed by all ranks together. Plain
tensors come out where plain tensors went in. Parameters are left alone: their gradients are this rank's part, which
data parallelism over the same ranks sums, or ``shard_sequence`` for whole models.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.context_parallel import early
from hyper_parallel.core.context_parallel.attention import Method, overrides_with
from hyper_parallel.core.context_parallel.model import check_degree
from hyper_parallel.core.context_parallel.rotate import rotates
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.modes import MODES
from hyper_parallel.core.dtensor.placement_types import Shard, ZigzagShard
from hyper_parallel.core.modules.axis import MeshAxis, axis_of
from hyper_parallel.core.modules.boundary import attach
from hyper_parallel.core.modules.plain import keeps_distributed
from hyper_parallel.core.modules.style import ParallelStyle
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


class ContextParallel(ParallelStyle):
    """Computes the attention of a module on sequences that the ranks of an axis share.

    ``seq_dim``, ``head_dim``: of queries, keys and values, as the module gets them. ``ulysses_degree``: how many
    neighbours exchange heads for positions: all by default, with 1 keys and values are gathered, and in between both.
    ``qkv_indices``, ``qkv_kwarg_names``: which arguments they are. ``load_balance``: a rank's part is that of
    ``ZigzagShard``, an early and a late one. ``rotate_method``: "allgather" or "alltoall", how keys and values travel;
    by default what ``set_rotate_method`` says. ``use_local_output``: whether plain tensors come out; by default if such
    went in.
    """

    def __init__(
        self,
        seq_dim: int = 1,
        head_dim: int = 2,
        ulysses_degree: int | None = None,
        qkv_indices: Sequence[int] = (0, 1, 2),
        qkv_kwarg_names: Sequence[str] = (),
        *,
        load_balance: bool = False,
        rotate_method: str | None = None,
        use_local_output: bool | None = None,
    ) -> None:
        dims = (seq_dim, head_dim)
        is_valid = all(type(dim) is int and dim >= 0 for dim in dims)
        if not is_valid or seq_dim == head_dim:
            raise coded(
                ValueError,
                "HP802",
                f"{type(self).__name__}: seq_dim and head_dim must be two different dims, got {seq_dim!r} and "
                f"{head_dim!r}",
            )
        if ulysses_degree is not None and (
            type(ulysses_degree) is not int or ulysses_degree < 1
        ):
            raise coded(
                ValueError,
                "HP802",
                f"{type(self).__name__}: ulysses_degree must be a positive int, got {ulysses_degree!r}",
            )
        self.seq_dim, self.head_dim = seq_dim, head_dim
        self.ulysses_degree = ulysses_degree
        self.qkv_indices = tuple(qkv_indices)
        self.qkv_kwarg_names = tuple(qkv_kwarg_names)
        self.load_balance = load_balance
        self.rotates = rotates(rotate_method)
        self.use_local_output = use_local_output

    def _options(self) -> dict[str, Any]:
        defaults = {
            "seq_dim": 1,
            "head_dim": 2,
            "ulysses_degree": None,
            "qkv_indices": (0, 1, 2),
            "qkv_kwarg_names": (),
            "load_balance": False,
            "use_local_output": None,
        }
        given = {name: getattr(self, name) for name in defaults}
        return {name: value for name, value in given.items() if value != defaults[name]}

    @property
    def placement(self) -> Shard:
        """The placement of the sequence."""
        kind = ZigzagShard if self.load_balance else Shard
        return kind(self.seq_dim)

    def method(self, ranks: int) -> Method:
        """How attention is computed on so many ranks."""
        degree = ranks if self.ulysses_degree is None else self.ulysses_degree
        method = Method("ring" if self.rotates else "allgather", degree)
        check_degree(method, ranks)
        return method

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Computes the module's attention together with the other ranks of the mesh; returns the module."""
        self._attach(module, _flat(device_mesh))
        return module

    def _attach(self, module: Any, mesh: DeviceMesh) -> _Crossing:
        crossing = _Crossing(self, mesh)
        attach(
            module,
            "style",
            enter=crossing.enter,
            leave=crossing.leave,
            on_error=crossing.undo,
            source=self,
            wraps={*self.qkv_indices, *self.qkv_kwarg_names},
        )
        return crossing


def _flat(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of one axis; of several axes the last ones are neighbours."""
    return mesh if mesh.ndim == 1 else mesh.flatten()


class _Calls(threading.local):
    """Per call under way: what held before, whether plain tensors went in, and the length of the sequence."""

    def __init__(self) -> None:
        self.stack: list[tuple[Any, bool, int]] = []


class _Crossing:
    """What happens to tensors that go into a module and come out of it."""

    def __init__(self, style: ContextParallel, mesh: DeviceMesh) -> None:
        self._style, self._mesh = style, mesh
        self._ranks = mesh.size()
        self._method = style.method(self._ranks)
        axis = MeshAxis(mesh)
        self._wrap = axis.wrap_fn(style.placement)
        self._redistribute = axis.redistribute_fn(style.placement)
        self._calls = _Calls()

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Distributes queries, keys and values."""
        style = self._style
        args_list, kwargs = list(args), dict(kwargs)
        places: list[tuple[Any, Any]] = [
            (args_list, index) for index in style.qkv_indices if index < len(args)
        ]
        places += [(kwargs, name) for name in style.qkv_kwarg_names if name in kwargs]
        places = [(among, at) for among, at in places if platform.is_tensor(among[at])]
        if not places:
            raise coded(
                ValueError,
                "HP803",
                f"{type(style).__name__}: {type(module).__name__} got no tensor at the positions {style.qkv_indices} "
                f"or by the names {style.qkv_kwarg_names}; qkv_indices and qkv_kwarg_names say which arguments are "
                "queries, keys and values",
            )
        was_plain = not any(isinstance(among[at], DTensor) for among, at in places)
        for among, at in places:
            among[at] = self._enter_one(module, among[at])
        length = next(among[at].shape[style.seq_dim] for among, at in places)
        self._calls.stack.append((MODES.overrides, was_plain, length))
        MODES.overrides = overrides_with(self._method)
        return tuple(args_list), kwargs

    def _enter_one(self, module: Any, value: Any) -> DTensor:
        style = self._style
        name = type(style).__name__
        if len(value.shape) <= max(style.seq_dim, style.head_dim):
            raise coded(
                ValueError,
                "HP803",
                f"{name}: {type(module).__name__} got a tensor of shape {tuple(value.shape)}, which has no dim "
                f"{max(style.seq_dim, style.head_dim)}; seq_dim={style.seq_dim} and head_dim={style.head_dim} must be "
                "dims of queries, keys and values",
            )
        if isinstance(value, DTensor):
            own = value.placements[axis_of(value.device_mesh, self._mesh)]
            return value if own.is_shard(style.seq_dim) else self._redistribute(value)
        size = value.shape[style.seq_dim]
        if style.load_balance and size % 2 and self._ranks > 1:
            raise coded(
                ValueError,
                "HP803",
                f"{name}: this rank has {size} positions of a plain tensor, but with load_balance=True it holds two "
                f"parts of one size; the length of the sequence must be a multiple of {2 * self._ranks}",
            )
        return self._wrap(module, value)

    def leave(self, module: Any, output: Any) -> Any:
        """Hands the outputs out as the inputs came in."""
        MODES.overrides, was_plain, length = self._calls.stack.pop()
        to_local = self._style.use_local_output
        if to_local is None:
            to_local = was_plain and not keeps_distributed(module)

        def hand_out(value: Any) -> Any:
            if not isinstance(value, DTensor):
                return value
            own = value.placements[axis_of(value.device_mesh, self._mesh)]
            is_part = type(own) is type(self._style.placement)
            if not (is_part and value.shape[own.dim] == length):  # type: ignore[attr-defined]
                value = self._redistribute(value)
            return value.to_local() if to_local else value

        return platform.apply_to_tensors(hand_out, output)

    def undo(self, module: Any) -> None:
        """Ends a call that has failed."""
        del module
        early.forget()
        MODES.overrides, _, _ = self._calls.stack.pop()


class AsyncContextParallel(ContextParallel):
    """The same with exchanges of heads that begin while the projections still compute.

    What a projection returns must reach the module as a view, (batch, sequence, heads, head_dim) or its transpose; if
    something lies between them, or heads do not divide, or no heads are exchanged, it is ``ContextParallel``.
    """

    def apply(
        self,
        module: Any,
        device_mesh: DeviceMesh,
        q_proj: Any = None,
        k_proj: Any = None,
        v_proj: Any = None,
    ) -> Any:
        """Computes the module's attention together with the other ranks of the mesh; returns the module."""
        mesh = _flat(device_mesh)
        projections = (q_proj, k_proj, v_proj)
        self._attach(module, mesh)
        degree = self.method(mesh.size()).degree or 1
        if degree > 1 and all(one is not None for one in projections):
            self._start_early(module, mesh, projections, degree)
        return module

    def _start_early(
        self, module: Any, mesh: DeviceMesh, projections: Sequence[Any], degree: int
    ) -> None:
        ranks = list(mesh.rank_list)
        first = ranks.index(mesh.rank) // degree * degree
        group = platform.create_group(ranks[first : first + degree])
        is_on = True

        def projected(owner: Any, output: Any) -> None:
            is_plain = platform.is_tensor(output) and not isinstance(output, DTensor)
            fits = is_plain and len(output.shape) == 3 and not output.shape[2] % degree
            if is_on and fits:
                early.start(owner, output, degree, group)

        def leave(owner: Any, output: Any) -> None:
            nonlocal is_on
            del output
            if early.end():
                is_on = False
                warnings.warn(
                    f"AsyncContextParallel: what the projections return does not reach {type(owner).__name__} as it "
                    "is, or has heads that do not divide; from now on exchanges begin when attention does",
                    stacklevel=2,
                )

        for one in projections:
            attach(one, "user", leave=projected, source=self)
        attach(module, "user", leave=leave, source=self)
