# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A001, A002 - operands have the names that torch gives them
"""Cross entropy of scores whose classes are cut: one exchange of a few numbers a position, and a local backward.

The loss of a position is the sum over its classes of ``a * (log(sum(exp(x))) - x)``, where a class has the share ``a``
of the target: the weight of the target's class for that one, or what a target in shares gives it, smoothed. A rank
tells of its classes the largest score, the sum of the exponentials below it, the sum of ``a * x`` below it, and the
sum of ``a``; every rank puts those of all together. Scores never leave their rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.modes import MODES
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.dtensor.routes import local_for
from hyper_parallel.core.shard.arguments import OperatorError, check_explicit
from hyper_parallel.core.shard.ops.staged_reductions import wide
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()
LONG = platform.str_to_dtype("int64")


def class_dim(ndim: int) -> int:
    """The dim of the classes of scores of so many dims."""
    return min(ndim - 1, 1)


@functools.lru_cache(maxsize=4096)
def layout_of_losses(layout: Layout) -> Layout:
    """How the losses of scores of this layout lie, and targets that are classes: as the scores, without the classes."""
    dims = list(range(len(layout.dim_axes)))
    dims.remove(class_dim(len(dims)))
    return _layout_of_dims(layout, dims)


@functools.lru_cache(maxsize=4096)
def layout_of_weights(layout: Layout) -> Layout:
    """How one number a class lies where the scores lie so."""
    return _layout_of_dims(layout, [class_dim(len(layout.dim_axes))])


def _layout_of_dims(layout: Layout, dims: list[int]) -> Layout:
    """The layout of a tensor that has only these dims of another one."""
    placements: list[Placement] = [
        replace(one, dim=dims.index(one.dim))
        if isinstance(one, Shard) and one.dim in dims
        else Replicate()
        for one in layout.placements
    ]
    return Layout.from_device_mesh(layout.mesh)(placements).bind(len(dims))


def losses_of_cut_classes(
    input: DTensor,
    target: DTensor,
    weight: DTensor | None,
    ignore_index: int,
    label_smoothing: float,
) -> tuple[DTensor, DTensor]:
    """The loss of every position and the weight of its target, in the dtype of sums; the classes are cut.

    A target that is no class is an IndexError, as on one device; on an accelerator, where asking for its value would
    wait for all that runs, its loss is a nan.
    """
    in_shares = tuple(input.shape) == tuple(target.shape)
    _check(input, target, weight, ignore_index, label_smoothing, in_shares)
    input = _in_one_piece(input.reduce_partial())
    layout, dim = input.layout, class_dim(len(input.shape))
    losses, weights, axes = (
        layout_of_losses(layout),
        layout_of_weights(layout),
        layout.dim_axes[dim],
    )
    call = _Call(
        dim,
        _first_class(input, dim),
        input.shape[dim],
        platform.create_group(layout.mesh.ranks_along(axes)),
        in_shares,
        ignore_index,
        label_smoothing,
    )
    target_here = _local(1, target, layout if in_shares else losses)
    target_here = (
        target_here if in_shares else target_here.to(LONG)
    )  # a byte may equal ignore_index modulo 256
    weight_here = (
        None if weight is None else _local(2, weight, weights, _cutting(losses))
    )
    found = _functions()["losses"].apply(
        input.to_local(), target_here, weight_here, call
    )
    shape = _without(input.shape, dim)
    return DTensor(found[0], losses, shape), DTensor(found[1], losses, shape)


def _first_class(input: DTensor, dim: int) -> int:
    """The first of this rank's classes, which follow each other."""
    [(start, _)] = input.layout.spans_of(tuple(input.shape))[dim]
    return int(start)


def _local(
    number: int, tensor: DTensor, layout: Layout, summed: tuple[int, ...] = ()
) -> Any:
    """The shard in this layout, when the gradient comes in parts on these axes."""
    if MODES.explicit:
        check_explicit("cross_entropy", tensor, number, layout)
    return local_for(tensor, layout, summed)


def _cutting(layout: Layout) -> tuple[int, ...]:
    """The axes that cut anything: what has none of these dims gets its gradient in parts there."""
    return tuple(sorted(axis for axes in layout.dim_axes for axis in axes))


def _without(shape: Any, dim: int) -> tuple[int, ...]:
    return tuple(shape[:dim]) + tuple(shape[dim + 1 :])


def _check(
    input: DTensor,
    target: DTensor,
    weight: DTensor | None,
    ignore_index: int,
    label_smoothing: float,
    in_shares: bool,
) -> None:
    """What the framework refuses on one device."""
    dim = class_dim(len(input.shape))
    shape, classes = tuple(input.shape), input.shape[dim]
    positions = _without(shape, dim)
    if not in_shares and tuple(target.shape) != positions:
        raise coded(
            ValueError,
            "HP315",
            f"cross_entropy: expected a target of shape {positions}, or {shape} if it gives every class its share, "
            f"for input of shape {shape}, got {tuple(target.shape)}",
        )
    if weight is not None and tuple(weight.shape) != (classes,):
        raise coded(
            ValueError,
            "HP315",
            f"cross_entropy: expected a weight for each of {classes} classes, got {tuple(weight.shape)}",
        )
    if platform.is_floating_point(target) != in_shares:
        raise coded(
            OperatorError,
            "HP315",
            f"cross_entropy: a target of shape {tuple(target.shape)} for input of shape {shape} gives "
            f"{'every class its share, as floating point' if in_shares else 'classes, as integers'}; got "
            f"{target.dtype}",
        )
    if in_shares and ignore_index >= 0:
        raise coded(
            OperatorError,
            "HP315",
            "cross_entropy: ignore_index is for targets that are classes, not shares of all classes",
        )
    if not in_shares and weight is not None and platform.is_recorded(weight.to_local()):
        raise coded(
            OperatorError,
            "HP315",
            "cross_entropy: it gives no gradient for weight, which requires one; weight.detach()",
        )
    if not 0 <= label_smoothing <= 1:
        raise coded(
            OperatorError,
            "HP315",
            f"cross_entropy: label_smoothing must be between 0 and 1, got {label_smoothing}",
        )


def _in_one_piece(input: DTensor) -> DTensor:
    """The scores with classes that follow each other on every rank."""
    layout, dim = input.layout, class_dim(len(input.shape))
    cut = [axis for axis, one in layout.irregular.items() if one.dim == dim]
    if not cut:
        return input
    how = MODES.overrides.get("cross_entropy")
    if how is not None and how.keeps_layouts:
        raise coded(
            OperatorError,
            "HP315",
            f"cross_entropy: loss_parallel() does not move scores, but {layout} cuts them section by "
            "section; redistribute() them so that the classes of a rank follow each other",
        )
    placements = [
        Shard(dim) if axis in cut else placement
        for axis, placement in enumerate(layout.placements)
    ]
    return input.redistribute(None, layout.with_placements(placements))


# --- on one rank


@dataclass(frozen=True)
class _Call:
    """What a rank must know: where its classes begin, of how many, who has the others, and what was asked for."""

    dim: int
    start: int
    classes: int
    group: Any
    in_shares: bool
    ignore_index: int
    smoothing: float

    @property
    def smooth_part(self) -> float:
        """What smoothing gives to each class."""
        return self.smoothing / max(self.classes, 1)

    def along(self, numbers: Any) -> Any:
        """Numbers of positions, to go with the scores."""
        return numbers.unsqueeze(self.dim)

    def across(self, scores: Any, weight: Any) -> Any:
        """Numbers of classes, to go with the scores."""
        if weight is None:
            return 1
        return weight.to(wide(scores.dtype)).reshape(
            (-1,) + (1,) * (len(scores.shape) - 1 - self.dim)
        )

    def kept(self, target: Any) -> Any:
        """Which positions count."""
        return target != self.ignore_index


def _told(call: _Call, input: Any, target: Any, weight: Any) -> list[Any]:
    """What this rank tells of its classes: the largest score, then the sums."""
    dim, dtype = call.dim, wide(input.dtype)
    if input.shape[dim]:
        top = input.amax(dim).to(dtype)
    else:
        top = platform.full(
            _without(input.shape, dim), -float("inf"), dtype=dtype, device=input.device
        )
    below = input - call.along(_base(top))
    sums = (_told_of_shares if call.in_shares else _told_of_target)(
        call, below, target, weight
    )
    return [
        top,
        below.exp_().sum(dim),
        *sums,
    ]  # in place, for it is as large as the scores


def _base(top: Any) -> Any:
    """What scores are taken below: the largest one, unless that is no number to subtract."""
    return top.masked_fill(top == -float("inf"), 0)


def _told_of_shares(call: _Call, below: Any, target: Any, weight: Any) -> list[Any]:
    shares = _smoothed(call, below, target) * call.across(below, weight)
    return [(shares * below).sum(call.dim), shares.sum(call.dim)]


def _smoothed(call: _Call, scores: Any, target: Any) -> Any:
    """The shares that a target gives to the classes."""
    return target.to(wide(scores.dtype)) * (1 - call.smoothing) + call.smooth_part


def _told_of_target(call: _Call, below: Any, target: Any, weight: Any) -> list[Any]:
    """The target's score and weight where it is among this rank's classes, and what smoothing adds."""
    dim, here = call.dim, below.shape[call.dim]
    mine, index, weights = _own(call, below, target, weight)
    score = weights
    if here:
        score = (
            below.gather(dim, call.along(index)).squeeze(dim) * weights
        ).masked_fill(~mine, 0)
    if not call.smoothing:
        return [score, weights]
    ignored, across = ~call.kept(target), call.across(below, weight)
    scores = (
        (below if weight is None else below * across).sum(dim).masked_fill(ignored, 0)
    )
    total = here if weight is None else across.sum()
    smooth = (call.smooth_part * total + weights * 0).masked_fill(ignored, 0)
    return [score * (1 - call.smoothing) + scores * call.smooth_part, weights, smooth]


def _own(call: _Call, scores: Any, target: Any, weight: Any) -> tuple[Any, Any, Any]:
    """Which targets are among this rank's classes, where, and their weights, zero for the others."""
    here = scores.shape[call.dim]
    index = target.to(LONG) - call.start
    mine = call.kept(target) & (index >= 0) & (index < here)
    index = index * mine
    weights = mine.to(wide(scores.dtype))
    if weight is not None and here:
        weights = weight.to(weights.dtype)[index].masked_fill(~mine, 0)
    return mine, index, weights


def _merged(call: _Call, told: list[Any]) -> tuple[Any, ...]:
    """From what all ranks tell: the losses, the weights of the targets, the sum of shares, the top and the sum below.

    One exchange; its order is the same on all ranks, and so are the results to the last bit.
    """
    mine = platform.cat([numbers.unsqueeze(0) for numbers in told]).unsqueeze(0)
    everyones = platform.get_tensor_transform().all_gather(mine, 0, call.group)
    tops, sums, scores, weights, *smooth = (everyones[:, i] for i in range(len(told)))
    shares = weights * (1 - call.smoothing) + smooth[0] if smooth else weights
    top = tops.amax(0)
    total = (sums * (tops - top).exp()).sum(0)
    losses = (shares * (top - _base(tops) + total.log()) - scores).sum(0)
    return losses, weights.sum(0), shares.sum(0), top, total


def _refuse_outside(call: _Call, target: Any) -> None:
    """Before anything is exchanged: all ranks that have parts of a position's classes have its target."""
    if platform.device_type() != "cpu":
        return
    targets = target.reshape(-1)  # MindSpore takes no mask of a tensor without dims
    outside = targets[call.kept(targets) & ((targets < 0) | (targets >= call.classes))]
    if len(outside):
        raise coded(
            IndexError,
            "HP315",
            f"cross_entropy: target {int(outside[0])} is out of bounds: there are {call.classes} classes, from 0 "
            f"to {call.classes - 1}, and ignore_index is {call.ignore_index}",
        )


@functools.cache
def _functions() -> dict[str, Any]:
    """The autograd functions, made when the framework is known."""

    class Losses(platform.Function):  # type: ignore[name-defined, misc]
        @staticmethod
        def forward(ctx: Any, input: Any, target: Any, weight: Any, call: _Call) -> Any:
            if not call.in_shares:
                _refuse_outside(call, target)
            losses, weights, shares, top, total = _merged(
                call, _told(call, input, target, weight)
            )
            if not call.in_shares:
                kept = call.kept(target)
                # An out-of-range target belongs to no rank; make the loss nan.
                outside = kept & ((target < 0) | (target >= call.classes))
                losses = losses.masked_fill(~kept, 0).masked_fill(outside, float("nan"))
                shares = shares.masked_fill(outside, float("nan"))
            ctx.call = call
            ctx.save_for_backward(input, target, weight, shares, top, total)
            ctx.mark_non_differentiable(weights)
            return losses, weights

        @staticmethod
        def backward(ctx: Any, grad: Any, _: Any) -> Any:
            return (
                *Gradients.apply(
                    grad, *ctx.saved_tensors, ctx.call, tuple(ctx.needs_input_grad)
                ),
                None,
            )

    class Gradients(platform.Function):  # type: ignore[name-defined, misc]
        @staticmethod
        def forward(_: Any, *saved: Any) -> Any:
            return _gradients(*saved)

        @staticmethod
        def backward(*_: Any) -> Any:
            raise coded(
                OperatorError,
                "HP315",
                "cross_entropy: scores with cut classes have no second derivative; redistribute() them to whole "
                "classes",
            )

    return {"losses": Losses}


def _gradients(
    grad: Any,
    input: Any,
    target: Any,
    weight: Any,
    shares: Any,
    top: Any,
    total: Any,
    call: _Call,
    wanted: tuple[bool, ...],
) -> tuple[Any, Any, Any]:
    """Of this rank's scores: the softmax of all classes, less the target. Of shares and their weights: the scores."""
    if not call.in_shares:
        grad = grad.masked_fill(
            ~call.kept(target), 0
        )  # it is infinite in a mean over nothing
        return (
            _gradient_of_scores(
                call, grad, input, target, weight, (shares, top, total)
            ).to(input.dtype),
            None,
            None,
        )
    smoothed, across = _smoothed(call, input, target), call.across(input, weight)
    for_input = for_target = for_weight = None
    if wanted[0]:
        made = _softmax(call, input, top, total, grad * shares)
        for_input = made.sub_(smoothed * across * call.along(grad)).to(input.dtype)
    if wanted[1] or wanted[2]:
        missing = (call.along(top + total.log()) - input) * call.along(
            grad
        )  # what the scores lack
        if wanted[1]:
            for_target = (missing * across * (1 - call.smoothing)).to(target.dtype)
        if wanted[2]:
            others = [at for at in range(len(input.shape)) if at != call.dim]
            for_weight = (
                (missing * smoothed).sum(others) if others else missing * smoothed
            )
            for_weight = for_weight.to(weight.dtype)
    return for_input, for_target, for_weight


def _softmax(call: _Call, input: Any, top: Any, total: Any, factor: Any) -> Any:
    """The softmax over the classes of all ranks times a factor for each position; one tensor as large as the scores."""
    return (input - call.along(top)).exp_().mul_(call.along(factor / total))


def _gradient_of_scores(
    call: _Call,
    grad: Any,
    input: Any,
    target: Any,
    weight: Any,
    merged: tuple[Any, ...],
) -> Any:
    shares, top, total = merged
    made = _softmax(call, input, top, total, grad * shares)
    _, index, weights = _own(call, input, target, weight)
    if input.shape[call.dim]:
        taken = grad * weights * (call.smoothing - 1)
        made = platform.operator("scatter_add_")(
            made, call.dim, call.along(index), call.along(taken)
        )
    if call.smoothing:
        spread = call.along(grad * -call.smooth_part)
        made = (
            made.add_(spread)
            if weight is None
            else made.addcmul_(spread, call.across(input, weight))
        )
    return made
