# SPDX-License-Identifier: Apache-2.0
"""The arguments of a call: the distributed tensors among them, their description, their shards in their places."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.modes import MODES
from hyper_parallel.core.dtensor.placement_types import Replicate
from hyper_parallel.core.dtensor.redistribution import plan as plan_redistribution
from hyper_parallel.core.dtensor.spec import spec_of
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()
Tensor = platform.Tensor

_LOST = (
    "a distributed tensor came out of an autograd function that knows only plain tensors, so that no gradient would "
    "reach its inputs; derive the function from DFunction and give it a rule; checkpoint() needs use_reentrant=False"
)
_INFINITE = (float("inf"), float("-inf"))


class OperatorError(RuntimeError):
    """An operator that cannot be run on these distributed tensors."""  # a TypeError would be swallowed by x + y


class PlainTensorError(Exception):
    """A plain tensor is among the arguments."""


def describe(values: Any, key: list[Any], tensors: list[DTensor]) -> None:
    """Adds to the key what a plan may depend on, and finds the distributed tensors."""
    for value in values:
        kind = type(value)
        if kind is DTensor:
            tensors.append(_checked(value))
            key.append(value._spec or spec_of(value))
        elif kind is int or value is None:
            key.append(value)  # what else is equal to it comes with its type
        elif kind is float:
            # A number that changes at every step must not make a plan at every step.
            key += (kind, value if value == 0.0 or value in _INFINITE else None)
        elif kind is tuple or kind is list:
            key += (kind, len(value))
            describe(value, key, tensors)
        else:
            _describe_rare(value, key, tensors)


def _describe_rare(value: Any, key: list[Any], tensors: list[DTensor]) -> None:
    """The same for what is seldom an argument."""
    if isinstance(value, slice):
        key += (slice, value.start, value.stop, value.step)
    elif isinstance(value, Tensor):
        if not isinstance(value, DTensor):
            raise PlainTensorError
        tensors.append(value.current())
        key.append(value._spec or spec_of(value))
    else:
        key += (type(value), value)


def _checked(tensor: DTensor) -> DTensor:
    """The tensor as it is now; an error if no gradient would flow through it."""
    tensor.current()
    if tensor._unrecorded and tensor.lost_its_graph:
        raise coded(OperatorError, "HP309", _LOST)
    return tensor


def tensors_in(tree: Any) -> Iterator[Any]:
    """The tensors of nested arguments, in their order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))


def flat(items: Sequence[Any]) -> list[Any]:
    """The tensors of operands, of which some are lists and some None."""
    return [
        x
        for item in items
        if item is not None
        for x in (item if isinstance(item, (list, tuple)) else (item,))
    ]


def replaced(tree: Any, shards: Iterator[Any]) -> Any:
    """The arguments with the next shard for every distributed tensor."""
    if isinstance(tree, DTensor):
        return next(shards)
    if isinstance(tree, (list, tuple)):
        items = [replaced(item, shards) for item in tree]
        return items if isinstance(tree, list) else tuple(items)
    return tree


def distributed(
    name: str, args: Any, kwargs: Any, zeros: bool, placed: Mapping[int, DTensor]
) -> tuple[Any, Any]:
    """The arguments with plain tensors made distributed, where that is allowed: always of those of one element.

    ``zeros``: whether tensors of zeros are allowed too; they are the same on every rank. ``placed``: those of which it
    is known how they lie, by their ids.
    """
    found = list(tensors_in((args, kwargs)))
    mesh = next(t for t in found if isinstance(t, DTensor)).device_mesh
    numbers = iter(range(len(found)))

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        number = next(numbers)
        if isinstance(value, DTensor):
            return value
        if id(value) in placed:
            return placed[id(value)]
        is_copy = MODES.replicate_plain or (zeros and bool((value == 0).all()))
        if not is_copy and not _is_number(value):
            raise coded(
                OperatorError,
                "HP304",
                f"{name}: tensor {number} among its arguments, of shape {tuple(value.shape)}, is a plain tensor "
                f"among distributed ones on {mesh}. Say how it lies: distribute_tensor(tensor, mesh, placements) "
                "or DTensor.from_local(...); or call it within implicit_replication() if it is the same on every "
                "rank. A module of a model that is called by itself needs the style Replicated() in the plan; "
                "resize_token_embeddings and the like come before parallelize_module. A method of a fully_shard unit "
                "other than forward needs register_fsdp_forward_method(module, name)",
            )
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim)

    return platform.tree_map(one, tuple(args)), platform.tree_map(one, dict(kwargs))


def _is_number(value: Any) -> bool:
    """Whether a plain tensor has one element, which then counts as the same on every rank."""
    if math.prod(value.shape) != 1:
        return False
    if len(value.shape):
        warnings.warn(
            f"a plain tensor of shape {tuple(value.shape)} among distributed ones is taken for a number that every "
            "rank has; reshape(()) it, or say how it lies with DTensor.from_local(...)",
            stacklevel=2,
        )
    return True


def changes_plain(args: Any, kwargs: Any) -> bool:
    """Whether a plain tensor is changed in place by distributed numbers, as in clipping: its result can only be plain.

    Where the number needs a gradient it is unknown whether the ranks' shares add up, so that is not one of them.
    """
    if not args or not isinstance(args[0], Tensor) or isinstance(args[0], DTensor):
        return False
    numbers = [
        tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, DTensor)
    ]
    return not any(
        number._shape or platform.is_recorded(number._local) for number in numbers
    )


def with_values(tree: Any) -> Any:
    """The arguments with plain tensors for distributed ones."""
    return platform.tree_map(
        lambda value: value.full_tensor() if isinstance(value, DTensor) else value, tree
    )


def on_all_ranks(local: Any, mesh: Any) -> DTensor:
    """A plain tensor that every rank of a mesh has."""
    layout = Layout.from_device_mesh(mesh)([Replicate()] * mesh.ndim).bind(
        len(local.shape)
    )
    return DTensor(local, layout, local.shape)


def replicated(local: Any, like: DTensor) -> DTensor:
    """A plain tensor that every rank has, on the mesh of another."""
    return on_all_ranks(local, like.device_mesh)


def on_shards(func: Any, args: Any, kwargs: Any) -> Any:
    """The call on the shards as they are; a target that was changed in place is returned as it came."""

    def shard(value: Any) -> Any:
        return value._local if isinstance(value, DTensor) else value

    result = func(
        *platform.tree_map(shard, tuple(args)), **platform.tree_map(shard, dict(kwargs))
    )
    first = args[0] if args else None
    return first if isinstance(first, DTensor) and result is first._local else result


def refuse_copy(name: str, target: DTensor) -> None:
    """An error where a change of the target would be lost."""
    if target._lost_view_of is not None:
        raise coded(
            OperatorError,
            "HP307",
            f"{name}: the target is the result of {target._lost_view_of} along a sharded dim, for which data was "
            "moved: it is a copy, and the tensor that it was taken from would not change. Assign by index (x[...] = "
            "value), or redistribute() first",
        )


def one_mesh(name: str, tensors: Sequence[DTensor]) -> Any:
    """The mesh on which all of them lie."""
    meshes = list(dict.fromkeys(t.device_mesh for t in tensors))
    if len(meshes) != 1:
        raise coded(
            OperatorError,
            "HP305",
            f"{name}: its tensors lie on different meshes, {' and '.join(map(str, meshes))}; "
            "DTensor.from_local(tensor.to_local(), mesh, placements) puts one on another mesh",
        )
    return meshes[0]


def check_explicit(name: str, tensor: DTensor, number: int, target: Layout) -> None:
    """An error that shows the redistribution, where one is needed."""
    if target is not tensor._layout:
        itemsize = platform.get_element_size(tensor._local)
        steps = plan_redistribution(
            tensor._layout, target, tuple(tensor._shape), itemsize
        )
        raise coded(
            OperatorError,
            "HP306",
            f"{name}: explicit mode: tensor {number} of its arguments must go from {tensor._layout} to {target}; "
            f"call redistribute() on it. That would be:\n{steps.explain()}",
        )
