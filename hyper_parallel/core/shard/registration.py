# SPDX-License-Identifier: Apache-2.0
"""torch's ``register_sharding``: the placements that an operator accepts, listed for one axis of a mesh.

    @register_sharding(torch.ops.mylib.scale.default)
    def scale(x, factor):
        return [([Shard(dim)], [Shard(dim), None]) for dim in range(x.ndim)]

At each call the cheapest of them is taken, on every axis; that all tensors are Replicate is always acceptable. Ranks
are taken to compute different things along an axis where any tensor is not Replicate, and gradients follow from that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.dtensor import DTensor, layout_of
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate
from hyper_parallel.core.dtensor.redistribution import plan
from hyper_parallel.core.shard.arguments import one_mesh, tensors_in
from hyper_parallel.core.shard.local_call import call_on_shards
from hyper_parallel.core.shard.ops.operator import operator
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()
Shardings = Callable[..., Sequence[tuple[Sequence[Any], Sequence[Any]]]]


class _Option(NamedTuple):
    """Placements on one axis: of each result, None for what is no tensor, and of each tensor among the arguments."""

    results: tuple[Any, ...]
    operands: tuple[Placement, ...]


def register_sharding(op: Any) -> Callable[[Shardings], Shardings]:
    """Registers the decorated function for an operator, or for each of a list.

    ``op``: the function or torch.ops overload that is called. The decorated function takes the arguments of the call
    and returns a list of ([placements of the results], [placements of the arguments, None for what is no tensor]).
    """

    def register(shardings: Shardings) -> Shardings:
        for one in op if isinstance(op, (list, tuple)) else [op]:
            called = platform.op_name_of(one)
            if called.inplace:
                raise coded(
                    ValueError,
                    "HP321",
                    f"register_sharding: {called.name} changes its argument in place, which must stay as it lies; "
                    "give it a rule by operator() instead",
                )
            operator(
                called.name, "*args", direct=_Registered(called.name, shardings).run
            )
        return shardings

    return register


class _Registered:
    """An operator with the shardings that it accepts."""

    def __init__(self, name: str, shardings: Shardings) -> None:
        self._name, self._shardings = name, shardings

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The operator on the shards, in the cheapest acceptable placements."""
        tensors: list[DTensor] = list(tensors_in((args, kwargs)))
        mesh = one_mesh(self._name, tensors)
        options = self._options(tensors, args, kwargs)
        best: tuple[int, Any] | None = None
        for chosen in itertools.product(options, repeat=mesh.ndim):
            layouts = [
                _operand(mesh, tensor, index, chosen)
                for index, tensor in enumerate(tensors)
            ]
            cost = _cost(tensors, layouts)
            if cost is not None and (best is None or cost < best[0]):
                best = cost, (layouts, chosen)
        assert best is not None  # that all are Replicate is among the options
        layouts, chosen = best[1]
        base = Layout.from_device_mesh(mesh)
        count = len(chosen[0].results)
        results = [
            _result(base, [option.results[number] for option in chosen])
            for number in range(count)
        ]
        return call_on_shards(
            self._name,
            func,
            args,
            kwargs,
            layouts,
            results if count > 1 else results[0],
        )

    def _options(
        self, tensors: Sequence[DTensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[_Option]:
        found = []
        for results, operands in self._shardings(*args, **kwargs):
            placements = tuple(one for one in operands if one is not None)
            if len(placements) != len(tensors) or not all(
                isinstance(one, Placement) for one in placements
            ):
                raise coded(
                    ValueError,
                    "HP321",
                    f"{self._name}: its sharding function must give a placement for each of {len(tensors)} "
                    f"tensors among the arguments, got {list(operands)!r}",
                )
            found.append(_Option(tuple(results), placements))
        counts = {len(option.results) for option in found}
        if len(counts) != 1:
            raise coded(
                ValueError,
                "HP321",
                f"{self._name}: its sharding function must give at least one entry, all with as many results; got "
                f"{found!r}",
            )
        whole = tuple(None if one is None else Replicate() for one in found[0].results)
        return [*found, _Option(whole, (Replicate(),) * len(tensors))]


def _operand(
    mesh: Any, tensor: DTensor, index: int, chosen: Sequence[_Option]
) -> Layout:
    return layout_of(
        mesh, [option.operands[index] for option in chosen], len(tensor.shape)
    )


def _result(base: Layout, placements: list[Any]) -> Layout | None:
    return None if None in placements else base(placements)


def _cost(tensors: Sequence[DTensor], layouts: Sequence[Layout]) -> int | None:
    """The bytes that redistribution moves, and what each collective costs besides; None where a rank would be empty."""
    cost = 0
    for tensor, layout in zip(tensors, layouts, strict=True):
        if any(
            size < layout.get_dim_split_num(dim)
            for dim, size in enumerate(tensor.shape)
        ):
            return None
        itemsize = platform.get_element_size(tensor._local)
        cost += plan(tensor.layout, layout, tuple(tensor.shape), itemsize).cost
    return cost
