# SPDX-License-Identifier: Apache-2.0
"""State dicts for units, whose entries may be full tensors, this rank's shards, or distributed on any mesh."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.fully_shard.unit import Unit
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


def fit_state(own: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The given entries in the layouts of the own ones; raises for wrong shapes before anything is loaded.

    A shape that is both that of the full tensor and that of the shard is the full tensor's. Other names stay.
    """
    pairs = {
        name: value
        for name, value in given.items()
        if isinstance(own.get(name), DTensor) and platform.is_tensor(value)
    }
    for name, value in pairs.items():
        _check_shape(name, own[name], value)
    fitted = {name: _fit(own[name], value) for name, value in pairs.items()}
    complete = copy.copy(given)  # with what frameworks attach to it
    complete.update(fitted)  # type: ignore[attr-defined]
    return complete


def _check_shape(name: str, own: DTensor, given: Any) -> None:
    full, local = tuple(own.shape), tuple(own._local.shape)
    shape = tuple(given.shape)
    if shape == full or (shape == local and not isinstance(given, DTensor)):
        return
    raise coded(
        ValueError,
        "HP433",
        f"load_state_dict: {name} has the shape {shape}; expected {full}, that of the full tensor, or {local}, that of "
        "this rank's shard",
    )


def _fit(own: DTensor, given: Any) -> Any:
    with platform.no_grad():
        if isinstance(given, DTensor):
            if given.layout.mesh == own.layout.mesh:
                return given.redistribute(None, own.layout)
            given = given.full_tensor()
        is_full = tuple(given.shape) == tuple(own.shape)
        shard = own.layout.part_of(given) if is_full else given
        copied = platform.clone(platform.detach(shard))
    return own.layout.tensor(copied, tuple(own.shape))


def keep_replaced(unit: Unit, old: list[Any]) -> None:
    """After a load with ``assign``: ties stay, and optimizers that have the old parameters are told."""
    for one, before in zip(unit.managed, old, strict=True):
        new = one.parameter
        if new is before:
            continue
        for owner, name in one.places:
            platform.put_tensor(owner, name, before)
            platform.set_own_tensor(owner, name, new)
    unit.renew()
