# SPDX-License-Identifier: Apache-2.0
"""Nested state dicts as flat names and back.

    {"model": {"w": w}, "steps": [{"n": 1}]}   ->   model.w, steps.0.n

Dicts are entered, lists that hold tensors or containers, and whatever has state_dict() and load_state_dict(); all else
is a leaf. A path keeps what a dotted name loses:
a str is a key, an int a position in a list, and (5,) the key 5.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.metadata import Path
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

_SCALARS = (type(None), bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class PerRank:
    """A value that each rank has its own of. Tensors and arrays must be of one shape on all ranks."""

    value: Any


def unwrapped(value: Any) -> tuple[Any, bool]:
    """A value, and whether each rank has its own; an array of which each has its own is a tensor of the same memory."""
    if not isinstance(value, PerRank):
        return as_ours(value), False
    if not isinstance(value.value, np.ndarray):
        return value.value, True
    array = value.value
    return get_platform().tensor_from_bytes(
        array.reshape(-1).view(np.uint8), str(array.dtype), array.shape
    ), True


def as_ours(value: Any) -> Any:
    """The framework's own distributed tensors as ours, of the same memory; anything else as it is."""
    if hasattr(value, "device_mesh") and not isinstance(value.device_mesh, DeviceMesh):
        from hyper_parallel.core.dtensor.interop import from_native

        return from_native(value)
    return value


@dataclass(frozen=True)
class Leaf:
    """A value of a nested state dict, and where it is."""

    path: Path
    value: Any
    holder: Any  # the dict or list that has it


def state_of(_path: Path, value: Any) -> Any:
    """The state of a value that gives it."""
    return value.state_dict()


def flattened(
    state_dict: Mapping[Any, Any], state: Callable[[Path, Any], Any] = state_of
) -> dict[str, Leaf]:
    """All leaves by their dotted names, in order; what is stateful is entered by its ``state``."""
    found: dict[str, Leaf] = {}
    for leaf in _leaves(state_dict, (), frozenset(), state):
        name = dotted(leaf.path)
        if name in found:
            raise coded(
                CheckpointError,
                "HP510",
                f"two values have this name: {found[name].path} and {leaf.path}; give one of them another",
                field=name,
            )
        if name.startswith("@"):
            raise coded(
                CheckpointError,
                "HP510",
                "names that begin with @ are the format's own; choose another",
                field=name,
            )
        found[name] = leaf
    return found


def nested(values: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Any]:
    """The nested state dict of these values; a name without a path is a key at the top."""
    root: dict[Any, Any] = {}
    for name, value in values.items():
        *way, last = paths.get(name, (name,))
        holder = root
        for step in way:
            holder = holder.setdefault(step, _Inner())
        holder[last] = value
    return {_key(step): _closed(value) for step, value in root.items()}


class _Inner(dict[Any, Any]):
    """A container while it is being filled: steps to values, in any order."""


def _closed(value: Any) -> Any:
    if not isinstance(value, _Inner):
        return value
    if all(type(step) is int for step in value):
        return [_closed(value[position]) for position in sorted(value)]
    return {_key(step): _closed(inner) for step, inner in value.items()}


def _key(step: Any) -> Any:
    return step[0] if isinstance(step, tuple) else step


def place(leaf: Leaf, value: Any) -> None:
    """Puts a value where the leaf is."""
    leaf.holder[_key(leaf.path[-1])] = value


def dotted(path: Path) -> str:
    """The name that stands for a path."""
    return ".".join(str(_key(step)) for step in path)


def is_stateful(value: Any) -> bool:
    """Whether a value gives its state and takes it back."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def _leaves(
    holder: Any, path: Path, above: frozenset[int], state: Callable[[Path, Any], Any]
) -> Iterator[Leaf]:
    if id(holder) in above:
        raise coded(
            CheckpointError,
            "HP510",
            "the state dict contains itself",
            field=dotted(path),
        )
    above |= {id(holder)}
    steps = holder.items() if isinstance(holder, Mapping) else enumerate(holder)
    for key, value in steps:
        inner = (*path, _step(holder, key, path))
        if is_stateful(value):
            yield from _leaves(state(inner, value), inner, above, state)
        elif _is_entered(value, inner):
            yield from _leaves(value, inner, above, state)
        else:
            yield Leaf(inner, value, holder)


def _step(holder: Any, key: Any, path: Path) -> Any:
    if not isinstance(holder, Mapping) or type(key) is str:
        return key
    if type(key) is int:
        return (key,)
    raise coded(
        CheckpointError,
        "HP510",
        f"keys must be strings or ints, got {type(key).__name__} {key!r}; wrap a dict without tensors in a tuple",
        field=dotted(path) or None,
    )


def _is_entered(value: Any, path: Path) -> bool:
    if type(value) in (dict, OrderedDict):
        return bool(value)
    if type(value) is list:
        return any(not isinstance(item, _SCALARS) for item in value)
    if isinstance(value, tuple) and any(
        get_platform().is_tensor(item) for item in value
    ):
        told = f"a tuple cannot be filled in place, got one with tensors: use a list, not {value!r:.80}"
        raise coded(CheckpointError, "HP510", told, field=dotted(path))
    return False
