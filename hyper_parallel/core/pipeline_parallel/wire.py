# SPDX-License-Identifier: Apache-2.0
"""What a stage hands to another, in a form without pickle: a description of its structure, and its tensors.

    parcel = describe((x, {"mask": None, "step": 3}))
    parcel.known.text    '["tuple", [["tensor", 0], ["dict", [["mask", ["none"]], ["step", ["value", 3]]]]]]'
    parcel.known.specs   (Spec("float32", (2, 4), requires_grad=True, layout=None),)
    rebuild(parcel.known.text, [x])

A distributed tensor travels as its shard. The other side places it on the mesh of the same axes on which its own
stage is.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate, Shard
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()

_PLAIN = (bool, int, float, str)


_ONE_TENSOR = json.dumps(["tensor", 0])


class Spec(NamedTuple):
    """A tensor on the wire; of a distributed one, ``shape`` is that of the shard."""

    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool
    layout: str | None  # the global shape, the axes and the placements, as JSON


class Known(NamedTuple):
    """The description of a structure: what both sides of a boundary know of its messages."""

    text: str
    specs: tuple[Spec, ...]


class Parcel(NamedTuple):
    """The description of a structure, and the tensors in it."""

    known: Known
    tensors: list[Any]


def describe(tree: Any) -> Parcel:
    """Takes a structure of tensors, numbers, strings and None apart."""
    if platform.is_tensor(tree):
        return Parcel(Known(_ONE_TENSOR, (_spec_of(tree),)), [tree])
    tensors: list[Any] = []
    node = _describe(tree, tensors)
    known = Known(json.dumps(node), tuple(map(_spec_of, tensors)))
    return Parcel(known, tensors)


@functools.lru_cache(maxsize=4096)
def find_trained(specs: tuple[Spec, ...]) -> tuple[int, ...]:
    """The positions of the tensors for which gradients come back."""
    return tuple(index for index, spec in enumerate(specs) if spec.requires_grad)


@functools.lru_cache(maxsize=4096)
def describe_gradients(specs: tuple[Spec, ...]) -> Known:
    """The description of the gradients of what was described."""
    trained = [specs[index] for index in find_trained(specs)]
    return Known(
        "gradients", tuple(spec._replace(requires_grad=False) for spec in trained)
    )


def _describe(tree: Any, tensors: list[Any]) -> list[Any]:
    if platform.is_tensor(tree):
        tensors.append(tree)
        return ["tensor", len(tensors) - 1]
    if tree is None:
        return ["none"]
    if isinstance(tree, _PLAIN):
        return ["value", tree]
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        return ["dict", [[key, _describe(tree[key], tensors)] for key in tree]]
    if type(tree) in (tuple, list):
        kind = type(tree).__name__
        return [kind, [_describe(item, tensors) for item in tree]]
    raise coded(
        TypeError,
        "HP481",
        f"pipeline: a stage returned {type(tree).__name__}, which cannot be sent to the next stage; stages hand over "
        "tensors, numbers, strings and None, in tuples, lists and dicts",
    )


def rebuild(text: str, tensors: Sequence[Any]) -> Any:
    """The structure that was described, with these tensors."""
    if text == _ONE_TENSOR:
        return tensors[0]
    return _rebuild(json.loads(text), tensors)


def _rebuild(node: list[Any], tensors: Sequence[Any]) -> Any:
    kind = node[0]
    if kind == "tensor":
        return tensors[node[1]]
    if kind == "none":
        return None
    if kind == "value":
        return node[1]
    if kind == "dict":
        return {key: _rebuild(item, tensors) for key, item in node[1]}
    items = [_rebuild(item, tensors) for item in node[1]]
    return tuple(items) if kind == "tuple" else items


# --- tensors


def shard_of(tensor: Any) -> Any:
    """The plain tensor that travels."""
    return tensor._local if isinstance(tensor, DTensor) else tensor


def _spec_of(tensor: Any) -> Spec:
    shard = shard_of(tensor)
    dtype = _name_dtype(shard.dtype)
    layout = None
    if isinstance(tensor, DTensor):
        names = list(tensor.device_mesh.mesh_dim_names or ())
        placements = [_describe_placement(one) for one in tensor.placements]
        layout = json.dumps([list(map(int, tensor.shape)), names, placements])
    requires_grad = bool(platform.is_recorded(shard))
    return Spec(dtype, tuple(shard.shape), requires_grad, layout)


@functools.cache
def _name_dtype(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2].lower()


def _describe_placement(placement: Placement) -> list[Any]:
    if isinstance(placement, (Shard, Replicate)):
        own = [getattr(placement, one.name) for one in dataclasses.fields(placement)]
        return [type(placement).__name__, *own]
    raise coded(
        TypeError,
        "HP481",
        f"pipeline: a stage returned a tensor with the placement {placement!r}; stages hand over tensors that are "
        "sharded and replicated: redistribute it first",
    )


def _build_placement(name: str, *own: Any) -> Placement:
    kinds = {kind.__name__: kind for kind in _kinds_of(Placement)}
    values = [tuple(one) if isinstance(one, list) else one for one in own]
    return kinds[name](*values)


def _kinds_of(kind: type[Placement]) -> list[type[Placement]]:
    """A class and all that are derived from it."""
    kinds = [kind]
    for derived in kind.__subclasses__():
        kinds += _kinds_of(derived)
    return kinds


def place(shard: Any, spec: Spec, mesh: DeviceMesh | None) -> Any:
    """The tensor that was described, on this side's mesh of the same axes."""
    if spec.layout is None:
        return shard
    shape, names, placements = json.loads(spec.layout)
    own = _find_axes(mesh, names)
    layout = Layout.from_device_mesh(own)(
        [_build_placement(*one) for one in placements]
    )
    return DTensor(shard, layout.bind(len(shape)), tuple(shape))


def _find_axes(mesh: DeviceMesh | None, names: Sequence[str]) -> DeviceMesh:
    own = () if mesh is None else tuple(mesh.root_mesh.mesh_dim_names or ())
    if mesh is None or not set(names) <= set(own):
        raise coded(
            ValueError,
            "HP481",
            f"pipeline: a tensor on the axes {list(names)} came to a stage on {mesh}; pass mesh= to the stage, with "
            "these axes, or distribute its parameters over them",
        )
    if tuple(mesh.mesh_dim_names or ()) == tuple(names):
        return mesh
    axes: DeviceMesh = mesh.root_mesh[tuple(names)]
    return axes
