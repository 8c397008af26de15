# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that the rules give them
"""Losses, each the loss of every element and what is made of them all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.mindspore.cpu.functions.norms import FUNCTIONS as NORMS
from hyper_parallel.platform.mindspore.cpu.functions.reductions import (
    FUNCTIONS as REDUCTIONS,
)
from hyper_parallel.platform.mindspore.cpu.functions.shared import (
    mint,
    numbers,
    ops,
    shaped,
)


def _old(reduction: str, size_average: Any, reduce: Any) -> str:
    """The reduction that the two booleans of former times ask for."""
    if size_average is None and reduce is None:
        return reduction
    return "none" if reduce is False else "sum" if size_average is False else "mean"


def _reduced(loss: Any, reduction: str) -> Any:
    if reduction == "none":
        return loss
    if reduction not in ("sum", "mean"):
        raise ValueError(
            f"expected 'none', 'sum' or 'mean' as reduction, got {reduction!r}"
        )
    return mint.sum(loss) if reduction == "sum" else mint.mean(loss)


def _squared(
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    weight: Any = None,
) -> Any:
    off = input - target
    return _weighted(off * off, weight, _old(reduction, size_average, reduce))


def _weighted(loss: Any, weight: Any, reduction: str) -> Any:
    """With weights, a mean is one of the weighted losses over all weights."""
    if weight is None:
        return _reduced(loss, reduction)
    total = _reduced(loss * weight, "none" if reduction == "none" else "sum")
    return total / mint.sum(weight) if reduction == "mean" else total


def _l1(
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    weight: Any = None,
) -> Any:
    return _weighted(
        mint.abs(input - target), weight, _old(reduction, size_average, reduce)
    )


def _huber(
    input: Any,
    target: Any,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Any = None,
) -> Any:
    off, at = mint.abs(input - target), numbers(input, delta)
    half = numbers(input, 0.5)
    loss = mint.where(off <= at, half * off * off, at * (off - half * at))
    return _reduced(loss if weight is None else loss * weight, reduction)


def _smooth_l1(
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Any:
    off, at, half = mint.abs(input - target), numbers(input, beta), numbers(input, 0.5)
    reduction = _old(reduction, size_average, reduce)
    if beta == 0:
        return _reduced(off, reduction)
    return _reduced(
        mint.where(off < at, half * off * off / at, off - half * at), reduction
    )


def _bce(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    def log(x: Any) -> Any:
        return mint.clamp(mint.log(x), min=-100.0)

    loss = -(target * log(input) + (1 - target) * log(1 - input))
    return _reduced(
        loss if weight is None else loss * weight, _old(reduction, size_average, reduce)
    )


def _bce_with_logits(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    pos_weight: Any = None,
) -> Any:
    zero = ops.zeros((), input.dtype)
    softplus = mint.log1p(mint.exp(-mint.abs(input))) + mint.maximum(-input, zero)
    scale = 1 if pos_weight is None else (pos_weight - 1) * target + 1
    loss = (1 - target) * input + scale * softplus
    return _reduced(
        loss if weight is None else loss * weight, _old(reduction, size_average, reduce)
    )


def _kl_div(
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    if log_target:
        loss = mint.exp(target) * (target - input)
    else:
        none = target == 0
        logs = mint.log(mint.where(none, ops.ones((), target.dtype), target))
        loss = target * (logs - input)
    reduction = _old(reduction, size_average, reduce)
    if reduction == "batchmean":
        return mint.sum(loss) / numbers(input, input.shape[0])
    return _reduced(loss, reduction)


def _poisson(
    input: Any,
    target: Any,
    log_input: bool = True,
    full: bool = False,
    size_average: Any = None,
    eps: float = 1e-8,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    loss = (
        mint.exp(input) - target * input
        if log_input
        else input - target * mint.log(input + numbers(input, eps))
    )
    if full:
        safe = mint.where(target > 1, target, ops.ones((), target.dtype))
        extra = (
            safe * mint.log(safe)
            - safe
            + numbers(input, 0.5) * mint.log(safe * numbers(input, 2 * math.pi))
        )
        loss = loss + mint.where(target > 1, extra, ops.zeros((), target.dtype))
    return _reduced(loss, _old(reduction, size_average, reduce))


def _gaussian(
    input: Any,
    target: Any,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:
    if not hasattr(var, "shape"):
        var = ops.full(tuple(input.shape), var, dtype=input.dtype)
    elif tuple(var.shape) != tuple(input.shape) and tuple(var.shape) == tuple(
        input.shape[:-1]
    ):
        var = mint.unsqueeze(var, -1)
    least = numbers(var, eps)  # which does not change the gradient
    var = var + ops.stop_gradient(mint.maximum(var, least) - var)
    off = input - target
    loss = numbers(input, 0.5) * (mint.log(var) + off * off / var)
    return _reduced(
        loss + numbers(input, 0.5 * math.log(2 * math.pi)) if full else loss, reduction
    )


def _hinge(
    input: Any,
    target: Any,
    margin: float = 1.0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    zero = ops.zeros((), input.dtype)
    away = mint.maximum(numbers(input, margin) - input, zero)
    loss = mint.where(target != 1, away, zero) + mint.where(target != -1, input, zero)
    return _reduced(loss, _old(reduction, size_average, reduce))


def _ranking(
    input1: Any,
    input2: Any,
    target: Any,
    margin: float = 0.0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    loss = mint.maximum(
        -target * (input1 - input2) + numbers(input1, margin),
        ops.zeros((), input1.dtype),
    )
    return _reduced(loss, _old(reduction, size_average, reduce))


def _cosine(
    input1: Any,
    input2: Any,
    target: Any,
    margin: float = 0.0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    tiny = numbers(input1, 1e-12)
    first, second = (mint.sum(x * x, -1) + tiny for x in (input1, input2))
    cosine = mint.sum(input1 * input2, -1) / mint.sqrt(first * second)
    zero = ops.zeros((), cosine.dtype)
    away = mint.maximum(cosine - numbers(cosine, margin), zero)
    loss = mint.where(target == 1, 1 - cosine, zero) + mint.where(
        target == -1, away, zero
    )
    return _reduced(loss, _old(reduction, size_average, reduce))


def _triplet(
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    distance = NORMS["pairwise_distance"]
    near, far = distance(anchor, positive, p, eps), distance(anchor, negative, p, eps)
    if swap:
        far = mint.minimum(far, distance(positive, negative, p, eps))
    loss = mint.maximum(numbers(near, margin) + near - far, ops.zeros((), near.dtype))
    return _reduced(loss, _old(reduction, size_average, reduce))


def _soft_margin(
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    loss = mint.log1p(mint.exp(-target * input))
    return _reduced(loss, _old(reduction, size_average, reduce))


def _multilabel_soft_margin(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    loss = _bce_with_logits(input, target, reduction="none")
    loss = mint.mean(loss if weight is None else loss * weight, -1)
    return _reduced(loss, _old(reduction, size_average, reduce))


def _multi_margin(
    input: Any,
    target: Any,
    p: int = 1,
    margin: float = 1.0,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    index = mint.unsqueeze(target, -1)
    away = mint.maximum(
        numbers(input, margin) - mint.gather(input, -1, index) + input,
        ops.zeros((), input.dtype),
    )
    away = away if p == 1 else away * away
    if weight is not None:
        away = away * mint.unsqueeze(ops.gather(weight, target, 0), -1)
    others = ops.one_hot(target, input.shape[-1]) == 0
    loss = mint.mean(mint.where(others, away, ops.zeros((), input.dtype)), -1)
    return _reduced(loss, _old(reduction, size_average, reduce))


# --- classes


def _nll(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    dim = 0 if len(input.shape) == 1 else 1
    weights, safe = _of_targets(input, target, weight, ignore_index)
    picked = mint.squeeze(mint.gather(input, dim, mint.unsqueeze(safe, dim)), dim)
    loss = _counted(-picked * weights, target, ignore_index)
    return _mean_by_weight(loss, weights, _old(reduction, size_average, reduce))


def _counted(loss: Any, target: Any, ignore_index: int) -> Any:
    """The losses of targets that count; the others' are zero, and so are their gradients, whatever arrives there."""
    return mint.where(target != ignore_index, loss, ops.zeros((), loss.dtype))


def _of_targets(
    input: Any, target: Any, weight: Any, ignore_index: int
) -> tuple[Any, Any]:
    """The weight of every target, none for those that do not count; and the targets, zero in their stead."""
    counts = target != ignore_index
    safe = mint.where(counts, target, ops.zeros_like(target))
    each = counts.astype(input.dtype)
    return each if weight is None else each * ops.gather(weight, safe, 0), safe


def _mean_by_weight(loss: Any, weights: Any, reduction: str) -> Any:
    return (
        mint.sum(loss) / mint.sum(weights)
        if reduction == "mean"
        else _reduced(loss, reduction)
    )


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    dim = 0 if len(input.shape) == 1 else 1
    classes, reduction = input.shape[dim], _old(reduction, size_average, reduce)
    logs = REDUCTIONS["log_softmax"](input, dim)
    shape = [1] * len(input.shape)
    shape[dim] = -1
    across = logs if weight is None else logs * shaped(weight, shape)
    if tuple(target.shape) == tuple(input.shape) and target.is_floating_point():
        if label_smoothing:
            target = target * numbers(target, 1 - label_smoothing) + numbers(
                target, label_smoothing / classes
            )
        loss = -mint.sum(across * target, dim)
        positions = numbers(loss, max(math.prod(input.shape) // classes, 1))
        return (
            mint.sum(loss) / positions
            if reduction == "mean"
            else _reduced(loss, reduction)
        )
    found = _nll(logs, target, weight, None, ignore_index, None, reduction)
    if not label_smoothing:
        return found
    weights, _ = _of_targets(input, target, weight, ignore_index)
    spread = _mean_by_weight(
        _counted(-mint.sum(across, dim), target, ignore_index), weights, reduction
    )
    return found * numbers(found, 1 - label_smoothing) + spread * numbers(
        found, label_smoothing / classes
    )


def _ctc(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:
    input_lengths, target_lengths = (
        one if isinstance(one, Tensor) else Tensor(np.asarray(one, np.int64))
        for one in (input_lengths, target_lengths)
    )
    if len(targets.shape) == 1:  # those of all, one after the other
        targets = _row_by_row(targets, target_lengths)
    # The kernel refuses targets that are longer than their input, and leaves the loss of no input unset.
    fits, some = input_lengths >= target_lengths, input_lengths > 0
    lengths = mint.where(some, input_lengths, ops.ones_like(input_lengths))
    counted = mint.where(fits, target_lengths, ops.zeros_like(target_lengths))
    loss = ops.ctc_loss(
        log_probs, targets, lengths, counted, blank, "none", zero_infinity
    )[0]
    loss = mint.where(some, loss, numbers(loss, 0.0))
    loss = mint.where(fits, loss, numbers(loss, math.inf))
    if zero_infinity:  # which the kernel takes in some places of a batch only
        loss = mint.where(loss == numbers(loss, math.inf), numbers(loss, 0.0), loss)
    if reduction == "mean":
        loss = loss / mint.clamp(target_lengths.astype(loss.dtype), min=1)
    return _reduced(loss, reduction)


def _row_by_row(targets: Any, lengths: Any) -> Any:
    """A row for each of the batch, filled up with zeros, which do not count."""
    counts, values = lengths.asnumpy(), targets.asnumpy()
    found = np.zeros((len(counts), max(1, *counts)), values.dtype)
    found[np.arange(found.shape[1]) < counts[:, None]] = values[: counts.sum()]
    return Tensor(found)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mse_loss": _squared,
    "l1_loss": _l1,
    "huber_loss": _huber,
    "smooth_l1_loss": _smooth_l1,
    "binary_cross_entropy": _bce,
    "binary_cross_entropy_with_logits": _bce_with_logits,
    "kl_div": _kl_div,
    "poisson_nll_loss": _poisson,
    "gaussian_nll_loss": _gaussian,
    "hinge_embedding_loss": _hinge,
    "margin_ranking_loss": _ranking,
    "cosine_embedding_loss": _cosine,
    "triplet_margin_loss": _triplet,
    "soft_margin_loss": _soft_margin,
    "multilabel_soft_margin_loss": _multilabel_soft_margin,
    "multi_margin_loss": _multi_margin,
    "nll_loss": _nll,
    "cross_entropy": _cross_entropy,
    "ctc_loss": _ctc,
}
