# SPDX-License-Identifier: Apache-2.0
"""Runs a function on shards between layouts that were given, not derived: what it needs beyond a rule.

Without a rule the placements alone say how gradients come back: where any tensor of the call is cut or in parts along
an axis, the ranks of that axis compute different things, so what is a copy there gets its gradient in parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.routes import local_for
from hyper_parallel.core.shard.arguments import replaced, tensors_in
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


def call_on_shards(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    layouts: Sequence[Layout | None],
    results: Any,
) -> Any:
    """``function`` on the shards, its results distributed.

    ``layouts``: for every distributed tensor among the arguments, in their order, the layout in which it is taken.
    ``results``: a layout for every result (None leaves one plain), or one for a single result.
    """
    tensors = [t for t in tensors_in((args, kwargs)) if isinstance(t, DTensor)]
    outputs = list(results) if isinstance(results, (list, tuple)) else [results]
    used = _used_axes([*layouts, *outputs])
    locals_ = [
        local_for(t, *_route(t, layout, used))
        for t, layout in zip(tensors, layouts, strict=True)
    ]
    for shard in locals_:
        platform.mark_escaped(shard)
    shards = iter(locals_)
    made = function(
        *replaced(args, shards),
        **{name: replaced(value, shards) for name, value in kwargs.items()},
    )
    even = all(
        is_even(t._shape, layout or t._layout)
        for t, layout in zip(tensors, layouts, strict=True)
    )
    return _wrap_results(name, made, outputs, even)


def _wrap_results(
    name: str, made: Any, layouts: Sequence[Layout | None], even: bool
) -> Any:
    """One result or several, distributed in these layouts."""
    several = isinstance(made, (list, tuple))
    found = list(made) if several else [made]
    if len(layouts) != len(found):
        raise coded(
            ValueError,
            "HP308",
            f"{name}: expected a layout for each of its {len(found)} results, got {len(layouts)}",
        )
    wrapped = [
        wrap_result(name, value, layout, even)
        for value, layout in zip(found, layouts, strict=True)
    ]
    if not several:
        return wrapped[0]
    return wrapped if type(made) is list else tuple(wrapped)


def _used_axes(layouts: Sequence[Any]) -> set[int]:
    return {
        axis
        for layout in layouts
        if layout is not None
        for axis, placement in enumerate(layout.placements)
        if not placement.is_replicate()
    }


def _route(
    tensor: DTensor, layout: Layout | None, used: set[int]
) -> tuple[Layout, tuple[int, ...]]:
    layout = tensor._layout if layout is None else layout.bind(len(tensor._shape))
    return layout, tuple(
        axis for axis in sorted(used) if layout.placements[axis].is_replicate()
    )


def is_even(shape: Sequence[int], layout: Layout) -> bool:
    """Whether all ranks have shards of one shape."""
    bound = layout.bind(len(shape))
    for dim, size in enumerate(shape):
        if size % bound.get_dim_split_num(dim):
            return False
    return all(
        len(set(bound.sizes_along(axis, shape))) == 1 for axis in bound.irregular
    )


def wrap_result(name: str, value: Any, layout: Layout | None, even: bool) -> Any:
    """A shard that a function has made as a distributed tensor; where shards may be uneven the ranks agree first."""
    if layout is None or not platform.is_tensor(value):
        return value
    layout = layout.bind(len(value.shape))
    # A shard of an irregular dim must be as large as its placement says.
    shape = (
        layout.get_global_shape(value.shape)
        if even and layout.is_regular
        else _agreed_shape(name, value.shape, layout)
    )
    return DTensor(value, layout, shape)


def _agreed_shape(name: str, local: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """The shape of the whole when shards differ: every rank tells its own."""
    everyone: list[Any] = [None] * math.prod(layout.mesh_shape)
    platform.all_gather_object(
        everyone, tuple(local), platform.create_group(layout.rank_list)
    )
    shapes = dict(zip(sorted(layout.rank_list), everyone, strict=True))
    own = layout.mesh.own_coordinate(name)
    whole = []
    for dim, axes in enumerate(layout.dim_axes):
        line = [
            rank
            for rank in layout.rank_list
            if all(
                at == own[a]
                for a, at in enumerate(layout.mesh.coordinate_of(rank) or ())
                if a not in axes
            )
        ]
        whole.append(sum(shapes[rank][dim] for rank in line))
    expected = layout.local_shape(whole)
    if any(
        layout.local_shape(whole, layout.mesh.coordinate_of(rank)) != shapes[rank]
        for rank in shapes
    ):
        raise coded(
            ValueError,
            "HP308",
            f"{name}: the shards' shapes {shapes} do not make a tensor of shape {tuple(whole)} in {layout}; rank "
            f"{layout.mesh.rank} should have {expected}",
        )
    return tuple(whole)
