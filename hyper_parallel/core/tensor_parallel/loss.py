# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that torch gives them
"""loss_parallel(): cross entropy of scores whose classes are cut, with targets as a data loader gives them.

with loss_parallel():
    loss = F.cross_entropy(logits, targets)       logits [Shard(0) on dp, Shard(1) on tp], targets plain
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.modes import Override, override
from hyper_parallel.core.dtensor.placement_types import Replicate
from hyper_parallel.core.shard.ops.sharded_cross_entropy import (
    class_dim,
    layout_of_losses,
    layout_of_weights,
)
from hyper_parallel.platform.error_codes import coded


@contextmanager
def loss_parallel() -> Iterator[None]:
    """A context in which cross_entropy of distributed scores takes plain targets and class weights.

    A plain target is this rank's part of the batch, or the whole batch on every rank: its shape tells. Plain weights
    are the same on every rank. Scores never leave their rank: what would need it is an OperatorError.
    """
    how = Override(place_plain=_placed, keeps_layouts=True)
    with override("cross_entropy", how):
        yield


def _placed(input: Any, target: Any, weight: Any, **_: Any) -> Mapping[int, DTensor]:
    """The plain targets and weights as distributed tensors that lie as they are needed, by their ids."""
    if not isinstance(input, DTensor):
        return {}  # scores that lie nowhere tell nothing about their targets
    found: dict[int, DTensor] = {}
    if not isinstance(target, DTensor):
        found[id(target)] = _placed_target(input, target)
    if weight is not None and not isinstance(weight, DTensor):
        copy = DTensor.from_local(
            weight, input.device_mesh, [Replicate()] * input.device_mesh.ndim
        )
        found[id(weight)] = copy.redistribute(None, layout_of_weights(input.layout))
    return found


def _placed_target(input: DTensor, target: Any) -> DTensor:
    given, shape = tuple(target.shape), tuple(input.shape)
    whole, needed, *others = _ways_to_lie(
        input.layout.reset_partial(), shape, len(given)
    )
    for layout in (needed, *others):
        if given == layout.local_shape(whole):
            return DTensor.from_local(target, None, layout, shape=whole).redistribute(
                None, needed
            )
    expected = " or ".join(
        dict.fromkeys(str(layout.local_shape(whole)) for layout in (needed, *others))
    )
    raise coded(
        ValueError,
        "HP410",
        f"cross_entropy: rank {input.device_mesh.rank} got a plain target of shape {given} for input of shape "
        f"{shape} in {input.layout}; within loss_parallel() it is this rank's part or the whole, of shape "
        f"{expected}",
    )


def _ways_to_lie(layout: Layout, shape: tuple[int, ...], ndim: int) -> tuple[Any, ...]:
    """The shape of a target of so many dims; how it is needed, as the losses lie; and how else it may be given.

    One that gives every class its share has the shape of the scores, and may have all classes of this rank's positions.
    """
    dim = class_dim(len(shape))
    copied = layout.with_placements([Replicate()] * layout.mesh.ndim)
    if ndim != len(shape):
        whole = shape[:dim] + shape[dim + 1 :]
        return whole, layout_of_losses(layout), layout_of_losses(copied)
    all_classes = layout.with_placements(
        [Replicate() if p.is_shard(dim) else p for p in layout.placements]
    )
    return shape, layout, all_classes, copied
