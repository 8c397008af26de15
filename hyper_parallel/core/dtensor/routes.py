# SPDX-License-Identifier: Apache-2.0
"""Returns a tensor's shard through a route: one per requested layout and per way in which its gradient is reduced.

A tensor that is Replicate on an axis gets the full gradient on every rank there, or a part of it, depending on its
consumers. Consumers of one kind share a route, so their gradients are added first and communicated once; and a value
that was communicated for one consumer is reused by the next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.collectives import (
    gradient_layout,
    is_nonlinear,
    redistribute,
)
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.reducer import reduce_later
from hyper_parallel.core.dtensor.spec import waits_for_value
from hyper_parallel.platform import get_platform

platform = get_platform()


class ViewOf(NamedTuple):
    """The origin of a view of a gathered tensor, so that the parts of its gradient can go where the base's go."""

    base: Any
    again: Callable[[Any], Any]  # the same view of another shard
    version: int | None  # of the base, when it was taken


def local_for(
    tensor: Any, target: Layout, summed: tuple[int, ...] = (), *, implicit: bool = True
) -> Any:
    """The shard of a distributed tensor in the target layout, if its gradient is Partial on these axes."""
    local = tensor._local
    graph = platform.is_recorded(local)
    if target is tensor._layout and not (graph and summed):
        return local
    if graph and waits_for_value(tensor) and _takes_reduction(tensor._layout, target):
        return local_for(reduced_twin(tensor), target, summed, implicit=implicit)
    if not graph:
        summed = ()
    routes, version = _remembered(tensor, local)
    if routes is None:
        route = _made(tensor, target, summed, None, implicit)
        platform.mark_alias(route, local)
        return route
    key = (tensor._layout, target, summed, graph, version)
    route = routes.get(key)
    if route is None or not _is_as_made(route):
        _forget_others(routes, version)
        route = _made(tensor, target, summed, _known(routes, key), implicit)
        # What was communicated for a parameter is not kept: it would be a second copy between the steps.
        if target is tensor._layout or not tensor.is_parameter:
            route._made_as = platform.version_of(route)
            routes[key] = route
    return route


def reduced_twin(tensor: Any) -> Any:
    """The reduced value of a tensor that is Partial by something other than a sum: all users share it.

    The gradient of the value is that of the twin; the shard gets the gradient of its own part.
    """
    recorded, version = (
        platform.is_recorded(tensor._local),
        platform.version_of(tensor._local),
    )
    if tensor._reduced is not None:
        twin, twin_recorded, twin_version = tensor._reduced
        if twin_version == version and (twin_recorded or not recorded):
            return twin
    target = gradient_layout(tensor._layout)
    twin = type(tensor)(
        _made(tensor, target, (), None, implicit=True), target, tensor._shape
    )
    twin.keep_gradient_of(tensor)
    tensor._reduced = twin, recorded, version
    return twin


def own_local_for(tensor: Any, target: Layout, summed: tuple[int, ...] = ()) -> Any:
    """The same for a caller that may modify it: it is not shared, unless the tensor already has this layout."""
    if not platform.is_recorded(tensor._local):
        summed = ()
    elif waits_for_value(tensor) and _takes_reduction(tensor._layout, target):
        return platform.operator("clone")(
            local_for(reduced_twin(tensor), target, summed, implicit=False)
        )
    if target is tensor._layout:
        return (
            _made(tensor, target, summed, None, implicit=False)
            if summed
            else tensor.to_local()
        )
    routes, version = _remembered(tensor, tensor._local)
    key = (tensor._layout, target, summed, platform.is_recorded(tensor._local), version)
    if routes and _known(routes, key) is not None:
        return platform.operator("clone")(
            local_for(tensor, target, summed, implicit=False)
        )
    return _made(tensor, target, summed, None, implicit=False)


def routes_of_moved(tensor: Any, target: Layout) -> Any:
    """The routes of what a tensor becomes in another layout: all who ask for that share them, as they share its value.

    None where it is made anew for each, or was just changed.
    """
    if tensor.is_parameter:
        return None
    local = tensor._local
    routes, version = _remembered(tensor, local)
    if routes is None:
        return None
    key = (None, target, (), platform.is_recorded(local), version)
    moved = routes.get(key)
    if moved is None:
        moved = routes[key] = type(routes)()
    return moved


def _made(
    tensor: Any, target: Layout, summed: tuple[int, ...], value: Any, implicit: bool
) -> Any:
    if tensor._parts is not None:
        parted, axes = tensor._parts
        if set(axes) <= set(summed):
            # The gradient arrives in parts and is wanted in parts: nothing is summed along these axes.
            return redistribute(
                parted,
                tensor._layout,
                target,
                tensor._shape,
                summed,
                varied=axes,
                implicit=implicit,
            )
    if summed and tensor.is_parameter and _stays_whole(tensor._layout, target, summed):
        route = reduce_later(
            tensor._local, tensor._layout, tuple(tensor._shape), summed
        )
        return redistribute(
            route,
            tensor._layout,
            target,
            tensor._shape,
            summed,
            varied=summed,
            implicit=implicit,
        )
    view = tensor._gathered_from
    if isinstance(view, ViewOf):
        base, again, version = view
        if (
            summed
            and target is tensor._layout
            and platform.version_of(base._local) == version
        ):
            return again(local_for(base, base._layout, summed, implicit=implicit))
        view = None
    origin = _origin_for(tensor, target, summed) if view is not None else None
    if origin is not None:
        # It was gathered from shards: the parts of the gradient go back to them by a reduce-scatter.
        return redistribute(
            origin._local,
            origin._layout,
            target,
            tensor._shape,
            summed,
            value=tensor._local,
            implicit=implicit,
        )
    return redistribute(
        tensor._local,
        tensor._layout,
        target,
        tensor._shape,
        summed,
        value=value,
        implicit=implicit,
    )


@functools.lru_cache(maxsize=4096)
def _takes_reduction(source: Layout, target: Layout) -> bool:
    """Whether something else than a sum that is pending has been taken in the target."""
    pairs = zip(source.placements, target.placements, strict=True)
    return any(
        before.is_partial() and not before.is_partial("sum") and before != after
        for before, after in pairs
    )


@functools.lru_cache(maxsize=4096)
def _stays_whole(source: Layout, target: Layout, axes: tuple[int, ...]) -> bool:
    """Whether every rank along these axes has all of the tensor, before and after: then what is done along others can
    be done to each part of its gradient."""
    return all(
        layout.placements[axis].is_replicate()
        for layout in (source, target)
        for axis in axes
    )


def versions(*tensors: Any) -> tuple[int | None, ...]:
    """What tells whether any of these shards is changed in place."""
    return tuple(platform.version_of(tensor._local) for tensor in tensors)


def _origin_for(tensor: Any, target: Layout, summed: tuple[int, ...]) -> Any:
    """What the tensor was gathered from, where the parts of its gradient can go straight back there."""
    origin = tensor._gathered_from
    if (
        origin is None
        or target is not tensor._layout
        or None in tensor._origin_versions
    ):
        return None
    sharded = any(origin._layout.placements[axis].is_shard() for axis in summed)
    return (
        origin
        if sharded and versions(origin, tensor) == tensor._origin_versions
        else None
    )


def _known(routes: Any, key: tuple[Any, ...]) -> Any:
    """The value, if another route to the same layout already has it."""
    source, target, _, graph, version = key
    if any(map(is_nonlinear, source.placements)):
        return None
    found = (
        route
        for other, route in routes.items()
        if other[:2] == (source, target) and other[3:] == (graph, version)
    )
    return next(filter(_is_as_made, found), None)


def _is_as_made(route: Any) -> bool:
    """Whether a value that was computed for another consumer is unmodified."""
    version = platform.version_of(route)
    return version is not None and version == route._made_as


def _remembered(tensor: Any, local: Any) -> tuple[Any, int]:
    version = platform.version_of(local)
    if version is None:  # nobody could tell whether what is remembered is still true
        return None, 0
    if tensor._routes is None:
        tensor._routes = platform.memory_of(local) if tensor._wraps_user_tensor else {}
    return tensor._routes, version


def _forget_others(routes: Any, version: int) -> None:
    for key in [key for key in routes if key[4] != version]:
        routes.pop(key, None)


def adopt_after_inplace(tensor: Any, local: Any) -> None:
    """After a change in place: the tensor's data is another tensor where the framework records no such change."""
    if not platform.counts_changes:
        platform.note_change(tensor._local)
    if local is not None and local is not tensor._local:
        tensor.adopt_after_inplace(local)
