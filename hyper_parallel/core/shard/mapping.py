# SPDX-License-Identifier: Apache-2.0
"""torch's ``local_map``: a function on plain tensors, called with the shards of distributed ones.

    matmul = local_map(torch.mm, out_placements=[Shard(0)], in_placements=([Shard(0)], [Replicate()]),
                       in_grad_placements=([Shard(0)], [Partial()]))

Unlike ``custom_shard`` it does not infer how gradients come back: each lies as its argument does, unless
``in_grad_placements`` say otherwise. A Replicate argument with which ranks compute different things needs Partial().
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor, layout_of
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.core.shard.local_call import is_even, wrap_result
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: Sequence[Any] | None = None,
    in_grad_placements: Sequence[Any] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """``func`` on the shards of its arguments, its results distributed; without ``func`` a decorator.

    ``out_placements``: placements of a single result, or a tuple with an entry for every result, None for what is no
    tensor. ``in_placements``: an entry for every argument, those in lists one by one; None for what is no distributed
    tensor. A plain tensor is passed as it is. ``in_grad_placements``: how the gradients of the shards lie.
    ``device_mesh``: the mesh of the results, by default that of the first distributed argument. Without distributed
    arguments ``func`` is called as it is.
    """
    if func is None:
        return lambda function: local_map(
            function,
            out_placements,
            in_placements,
            in_grad_placements,
            device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    call = _Call(func, in_placements, in_grad_placements, redistribute_inputs)

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        leaves = _leaves(args)
        call.check_count(len(leaves))
        taken = [call.take(number, value) for number, value in enumerate(leaves)]
        tensors = [value for value in leaves if isinstance(value, DTensor)]
        shards = iter([local for local, _ in taken])
        made = func(*platform.tree_map(lambda _: next(shards), tuple(args)), **kwargs)
        if not tensors:
            return made
        mesh = device_mesh if device_mesh is not None else tensors[0].device_mesh
        return call.wrap(
            made, mesh, out_placements, even=all(even for _, even in taken)
        )

    return wrapped


class _Call:
    """What a function was mapped with."""

    def __init__(
        self, func: Any, in_placements: Any, in_grad_placements: Any, redistribute: bool
    ) -> None:
        self.name = f"local_map({getattr(func, '__name__', func)})"
        self._placements, self._grads, self._redistribute = (
            in_placements,
            in_grad_placements,
            redistribute,
        )

    def check_count(self, count: int) -> None:
        """An error where the placements are not those of so many arguments."""
        for what, given in (
            ("in_placements", self._placements),
            ("in_grad_placements", self._grads),
        ):
            if given is not None and len(given) != count:
                raise coded(
                    ValueError,
                    "HP317",
                    f"{self.name}: expected {what} for {count} arguments, got {len(given)}: {given}",
                )

    def take(self, number: int, value: Any) -> tuple[Any, bool]:
        """What the function gets for an argument, and whether all ranks get a shard of the same shape."""
        wanted = None if self._placements is None else self._placements[number]
        if not isinstance(value, DTensor):
            if wanted is not None and not platform.is_tensor(value):
                raise coded(
                    TypeError,
                    "HP317",
                    f"{self.name}: argument {number} must be a tensor as in_placements say, got "
                    f"{type(value).__name__}; give None for what is none",
                )
            return value, True
        if self._placements is not None:
            value = self._placed(number, value, wanted)
        grads = None if self._grads is None else self._grads[number]
        if self._grads is not None and grads is None:
            raise coded(
                ValueError,
                "HP317",
                f"{self.name}: argument {number} is a DTensor; in_grad_placements must say how its "
                "gradient lies, or be left out for all",
            )
        return value.to_local(grad_placements=grads), is_even(value.shape, value.layout)

    def _placed(self, number: int, value: DTensor, wanted: Any) -> DTensor:
        if wanted is None:
            raise coded(
                ValueError,
                "HP317",
                f"{self.name}: argument {number} is a DTensor in {value.layout}, but in_placements say None for it",
            )
        layout = layout_of(value.device_mesh, wanted, len(value.shape))
        if layout is value.layout:
            return value
        if not self._redistribute:
            raise coded(
                ValueError,
                "HP317",
                f"{self.name}: argument {number} lies in {value.layout}, expected {layout}; redistribute() it, or "
                "pass redistribute_inputs=True",
            )
        return value.redistribute(None, layout)

    def wrap(self, made: Any, mesh: DeviceMesh, placements: Any, *, even: bool) -> Any:
        """The results of the function as distributed tensors."""
        several = isinstance(placements, tuple) and not any(
            isinstance(one, Placement) for one in placements
        )
        expected = placements if several else (placements,)
        found = _leaves(made)
        if len(found) != len(expected):
            raise coded(
                ValueError,
                "HP308",
                f"{self.name}: expected placements for each of its {len(found)} results, got {len(expected)}",
            )
        for number, (value, wanted) in enumerate(zip(found, expected, strict=True)):
            if isinstance(value, DTensor) or (
                wanted is not None and not platform.is_tensor(value)
            ):
                raise coded(
                    TypeError,
                    "HP308",
                    f"{self.name}: result {number} must be a plain tensor as out_placements say, got "
                    f"{type(value).__name__}",
                )
        layouts = (
            _layout(mesh, wanted, value)
            for wanted, value in zip(expected, found, strict=True)
        )
        results = iter(
            [
                wrap_result(self.name, *pair, even)
                for pair in zip(found, layouts, strict=True)
            ]
        )
        return platform.tree_map(lambda _: next(results), made)


def _layout(mesh: DeviceMesh, placements: Any, value: Any) -> Layout | None:
    return (
        layout_of(mesh, placements, len(value.shape))
        if platform.is_tensor(value)
        else None
    )


def _leaves(tree: Any) -> list[Any]:
    """The values in nested containers, in their order."""
    found: list[Any] = []
    platform.tree_map(found.append, tree)
    return found
