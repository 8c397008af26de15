# SPDX-License-Identifier: Apache-2.0
"""Takes tokens into experts and out again: what is distributed becomes this rank's part of it.

outputs = cross(where, [tokens, index, weights], parameters, function)

``function(locals, parameters)`` sees plain tensors. Plain tokens are this rank's own along ``ep`` and the same along
``tp``. Distributed ones are divided along ``ep``, whatever they were, and keep their other placements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
)
from hyper_parallel.core.dtensor.routes import local_for
from hyper_parallel.core.expert_parallel.experts import Where
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()
Function = Callable[[list[Any], dict[str, Any]], Any]


def cross(
    where: Where,
    tensors: Sequence[Any],
    parameters: Mapping[str, Any],
    function: Function,
) -> Any:
    """What a function makes of this rank's tokens and parameters, distributed as the tokens were.

    ``tensors``: the tokens, and others that have a row for each of them.
    """
    tokens = tensors[0]
    was_plain = not isinstance(tokens, DTensor)
    if was_plain:
        if where.tp is None or where.tp.size() == 1:
            return function(list(tensors), _take_parameters(parameters, None))
        tensors = [_wrap_copies(tensor, where.tp) for tensor in tensors]
        tokens = tensors[0]
    layout, used = _decide(tokens._layout, where)
    locals_ = [_take(tensor, layout, used) for tensor in tensors]
    outputs = function(locals_, _take_parameters(parameters, (layout, used)))
    leaving = _layout_outside(layout, where, len(outputs.shape))
    shape = (tokens.shape[0], *outputs.shape[1:])
    result = DTensor(outputs, leaving, shape)
    target = _as_it_came(tokens._layout, layout)
    if target is not leaving:
        result = result.redistribute(None, target)
    return result.to_local() if was_plain else result


def _wrap_copies(tensor: Any, mesh: DeviceMesh) -> Any:
    """A plain tensor that all ranks of an axis have."""
    layout = Layout.from_device_mesh(mesh)([Replicate()]).bind(len(tensor.shape))
    return DTensor.from_local(tensor, None, layout)


@functools.lru_cache(maxsize=4096)
def _decide(tokens: Layout, where: Where) -> tuple[Layout, tuple[int, ...]]:
    """The layout of the tokens inside, and the axes along which ranks compute different things then."""
    layout = _layout_inside(tokens, where)
    return layout, _used_axes(layout, where)


def _layout_inside(layout: Layout, where: Where) -> Layout:
    """Tokens divided along ``ep``, and along ``tp`` beside it; elsewhere by rows or not at all."""
    placements: list[Placement] = [
        one if one.is_shard(0) else Replicate() for one in layout.placements
    ]
    if where.ep is not None:
        axis = _find_axis(layout.mesh, where.ep)
        if axis is not None:
            is_divided = placements[axis].is_shard(0)
            placements[axis] = placements[axis] if is_divided else Shard(0)
        elif not _are_divided(layout, where.ep):
            raise coded(
                ValueError,
                "HP454",
                f"experts on {where.ep} got tokens in {layout}, which are the same on ranks that share the experts; "
                "replicate(model, mesh) or fully_shard(model, mesh=..., batch_dim=0) along these ranks divides them",
            )
    if where.tp is not None:
        axis = _find_axis(layout.mesh, where.tp)
        if axis is None:
            raise coded(
                ValueError,
                "HP454",
                f"experts are sharded along {where.tp}, which is not an axis of {layout.mesh}, on which tokens are",
            )
        placements[axis] = Shard(0) if where.divides_tokens else Replicate()
    return layout.with_placements(placements)


@functools.lru_cache(maxsize=4096)
def _find_axis(mesh: DeviceMesh, axis_mesh: DeviceMesh) -> int | None:
    """Which axis of a mesh another one is; None if it is none."""
    names = mesh.mesh_dim_names or ()
    ranks = tuple(axis_mesh.rank_list)
    axes = range(mesh.ndim)
    matching = [a for a in axes if tuple(mesh.get_rank_list_along_axis(a)) == ranks]
    # Axes of one rank differ in nothing but the name.
    named = [a for a in matching if names[a : a + 1] == axis_mesh.mesh_dim_names]
    return next(iter([*named, *matching]), None)


def _are_divided(layout: Layout, axis_mesh: DeviceMesh) -> bool:
    """Whether the ranks of an axis have different tokens, or those of one batch that each has by itself."""
    ranks = list(axis_mesh.rank_list)
    places = [layout.mesh.coordinate_of(rank) for rank in ranks]
    if None in places:
        return True
    return len({_part_of(layout, rank) for rank in ranks}) == len(ranks)


def _part_of(layout: Layout, rank: int) -> tuple[int, ...]:
    """Which part of a tensor a rank has."""
    coordinate = layout.mesh.coordinate_of(rank) or ()
    pairs = zip(coordinate, layout.placements, strict=False)
    return tuple(at for at, placement in pairs if not placement.is_replicate())


def _used_axes(layout: Layout, where: Where) -> tuple[int, ...]:
    """The axes along which ranks compute different things."""
    used = [
        axis for axis, one in enumerate(layout.placements) if not one.is_replicate()
    ]
    if where.tp is not None:
        axis = _find_axis(layout.mesh, where.tp)
        assert axis is not None
        used.append(axis)
    return tuple(sorted(set(used)))


def _take(tensor: Any, layout: Layout, used: Sequence[int]) -> Any:
    """This rank's part of a tensor that has a row for each token."""
    if not isinstance(tensor, DTensor):
        everywhere = layout.with_placements([Replicate()] * layout.mesh.ndim)
        tensor = DTensor.from_local(tensor, None, everywhere.bind(len(tensor.shape)))
    return _shard_for(tensor, layout.bind(len(tensor.shape)), used)


def _shard_for(tensor: Any, layout: Layout, used: Sequence[int]) -> Any:
    summed = tuple(axis for axis in used if layout.placements[axis].is_replicate())
    shard = local_for(tensor, layout, summed)
    platform.mark_escaped(shard)
    return shard


def _take_parameters(
    parameters: Mapping[str, Any], tokens: tuple[Layout, tuple[int, ...]] | None
) -> dict[str, Any]:
    """This rank's part of the parameters; ``tokens``: their layout, and the axes along which they differ."""
    return {name: _take_one(name, one, tokens) for name, one in parameters.items()}


def _take_one(
    name: str, parameter: Any, tokens: tuple[Layout, tuple[int, ...]] | None
) -> Any:
    is_distributed = isinstance(parameter, DTensor)
    if tokens is None or not tokens[1]:
        return (
            _shard_for(parameter, parameter._layout, ())
            if is_distributed
            else parameter
        )
    if not is_distributed:
        raise coded(
            ValueError,
            "HP454",
            f"{name} is plain on every rank, but tokens are distributed in {tokens[0]}: its gradient would be that of "
            "this rank's tokens; give the experts a style such as ExpertParallel(), and replicate or shard what is "
            "around them",
        )
    used = _axes_with_different_tokens(parameter._layout, *tokens)
    return _shard_for(parameter, parameter._layout, used)


@functools.lru_cache(maxsize=4096)
def _axes_with_different_tokens(
    layout: Layout, tokens: Layout, used: tuple[int, ...]
) -> tuple[int, ...]:
    """The axes of a parameter's mesh along which ranks have different tokens, or compute different parts."""

    def part_of(rank: int) -> tuple[int, ...] | None:
        place = tokens.mesh.coordinate_of(rank)
        return None if place is None else tuple(place[axis] for axis in used)

    lines = [layout.mesh.get_rank_list_along_axis(a) for a in range(layout.mesh.ndim)]
    return tuple(
        axis for axis, line in enumerate(lines) if len(set(map(part_of, line))) > 1
    )


def _layout_outside(layout: Layout, where: Where, ndim: int) -> Layout:
    """That of the outputs: where only features are sharded they are parts of a sum."""
    placements = list(layout.placements)
    if where.tp is not None and not where.divides_tokens:
        axis = _find_axis(layout.mesh, where.tp)
        assert axis is not None
        placements[axis] = Partial()
    return layout.with_placements(placements).bind(ndim)


def _as_it_came(before: Layout, inside: Layout) -> Layout:
    """The layout in which outputs leave: that of the tokens, with what was pending or sharded otherwise replicated."""
    placements = [one if one.is_shard(0) else Replicate() for one in before.placements]
    return inside.with_placements(placements)
