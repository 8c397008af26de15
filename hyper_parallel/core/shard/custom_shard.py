# SPDX-License-Identifier: Apache-2.0
"""A function on local tensors made one on distributed tensors by saying how its arguments and results lie."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor, layout_of
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.core.shard.local_call import call_on_shards
from hyper_parallel.platform.error_codes import coded


def custom_shard(
    func: Callable[..., Any],
    device_mesh: DeviceMesh | None,
    out_placements: Any,
    in_placements: Sequence[Any] | None = None,
    redistribute_inputs: bool = True,
) -> Callable[..., Any]:
    """``func`` on the shards.

    ``in_placements``: one entry for every positional argument, None for what is no distributed tensor or may lie as it
    does. ``out_placements``: placements for a single result, or a tuple with one entry for every result; None leaves a
    result plain. Without ``redistribute_inputs`` an argument that lies otherwise is a ValueError.
    """
    name = f"custom_shard({getattr(func, '__name__', func)})"

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        layouts = _layouts(
            name, args, kwargs, device_mesh, in_placements, redistribute_inputs
        )
        mesh = device_mesh or next(
            (t.device_mesh for t in args if isinstance(t, DTensor)), None
        )
        return call_on_shards(
            name, func, args, kwargs, layouts, _results(mesh, out_placements)
        )

    return wrapped


def _layouts(
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    mesh: Any,
    placements: Any,
    redistribute: bool,
) -> list[Layout | None]:
    if placements is not None and len(placements) != len(args):
        raise coded(
            ValueError,
            "HP317",
            f"{name}: expected in_placements for {len(args)} positional arguments, got {len(placements)}",
        )
    found: list[Layout | None] = []
    for number, arg in enumerate(args):
        wanted = placements[number] if placements is not None else None
        if not isinstance(arg, DTensor):
            if wanted is not None:
                raise coded(
                    TypeError,
                    "HP317",
                    f"{name}: argument {number} must be a DTensor as in_placements say, got {type(arg).__name__}; "
                    "distribute_tensor() makes it one",
                )
            continue
        layout = (
            arg.layout
            if wanted is None
            else layout_of(mesh or arg.device_mesh, wanted, len(arg.shape))
        )
        if layout is not arg.layout and not redistribute:
            raise coded(
                ValueError,
                "HP317",
                f"{name}: argument {number} lies in {arg.layout}, expected {layout}; redistribute() it",
            )
        found.append(layout)
    return found + [
        value.layout for value in kwargs.values() if isinstance(value, DTensor)
    ]


def _results(mesh: Any, placements: Any) -> Any:
    """A layout for every result; placements for one result are not yet bound to a number of dims."""
    if placements is None or isinstance(placements, Layout):
        return placements
    if _is_one(placements):
        return _base(mesh, placements)
    return [None if one is None else _base(mesh, one) for one in placements]


def _is_one(placements: Any) -> bool:
    return isinstance(placements, (Placement, str)) or any(
        isinstance(p, (Placement, str)) for p in placements
    )


def _base(mesh: Any, placements: Any) -> Layout:
    if isinstance(placements, Layout):
        return placements
    items = (
        [placements] if isinstance(placements, (Placement, str)) else list(placements)
    )
    base = Layout.from_device_mesh(mesh)
    return (
        base(items)
        if any(isinstance(item, Placement) for item in items)
        else base(*items)
    )
