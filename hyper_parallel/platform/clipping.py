# SPDX-License-Identifier: Apache-2.0
"""Clipping gradients by their total norm, wherever their shards are.

A norm of norms is the norm of the whole: each rank computes that of its shards, the ranks that share a gradient
exchange one number each, and what is the same on all ranks is counted once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from hyper_parallel.platform.error_codes import coded

if TYPE_CHECKING:
    from hyper_parallel.platform.platform import Platform

CALL = "clip_grad_norm_"


class Held(NamedTuple):
    """What this rank holds of a parameter and its gradient, and the ranks that together hold all of the gradient."""

    param: Any
    grad: Any
    ranks: tuple[int, ...]  # empty if each rank holds all of it


def clip_grad_norm(
    platform: Platform,
    parameters: Any,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    *,
    is_counted: Callable[[Any], bool] = lambda _: True,
    combine: Callable[[Any], Any] = lambda norm: norm,
) -> Any:
    """Scales gradients down to ``max_norm`` in place and returns the total norm before scaling.

    ``is_counted``: whether a parameter adds to the norm; its gradient is scaled in any case. ``combine``: the norm of
    everything from that of these parameters, which a model divided between ranks has only a part of.
    """
    max_norm, norm_type = _check_norms(float(max_norm), float(norm_type))
    shared: dict[tuple[int, ...], list[Held]] = {}
    for held in _all_held(platform, parameters):
        # A parameter without a gradient takes part as well: another rank may have one for its shard.
        if held.grad is not None or platform.requires_grad(held.param):
            shared.setdefault(held.ranks, []).append(held)
    counted = {
        ranks: [held for held in pieces if is_counted(held.param)]
        for ranks, pieces in shared.items()
    }
    with platform.no_grad():
        total = combine(_total_norm(platform, counted, norm_type, foreach))
        if error_if_nonfinite and not math.isfinite(total.item()):
            raise coded(
                RuntimeError,
                "HP135",
                f"{CALL}: the norm of order {norm_type} is non-finite ({total.item()}), so the gradients cannot be "
                "clipped by it; with error_if_nonfinite=False they are scaled nevertheless",
            )
        gradients = [gradient for held in shared.values() for gradient in _grads(held)]
        platform._scale_gradients(gradients, max_norm, total, foreach)
    return total


def _check_norms(max_norm: float, norm_type: float) -> tuple[float, float]:
    if math.isnan(max_norm) or max_norm < 0:
        raise coded(
            ValueError,
            "HP135",
            f"{CALL}: max_norm must be a number of at least 0, got {max_norm}",
        )
    if math.isnan(norm_type) or norm_type <= 0:
        raise coded(
            ValueError,
            "HP135",
            f"{CALL}: norm_type must be positive or inf, got {norm_type}",
        )
    return max_norm, norm_type


def _total_norm(
    platform: Platform,
    shared: dict[tuple[int, ...], list[Held]],
    norm_type: float,
    foreach: bool | None,
) -> Any:
    norms = {
        ranks: platform._gradient_norm(
            _grads(pieces), [held.param for held in pieces], norm_type, foreach
        )
        for ranks, pieces in shared.items()
        if pieces
    }
    # Sorted by ranks, so that groups with common members never wait for each other.
    for ranks in sorted(ranks for ranks in norms if ranks):
        # One number per rank is gathered, not reduced: a maximum between ranks may lose a nan.
        group = platform.create_group(ranks)
        gathered = platform.all_gather_into_tensor(norms[ranks].reshape(1), group)
        norms[ranks] = platform._norm_of_norms([gathered], norm_type)
    # In the order of the parameters, so that every rank rounds alike.
    return platform._norm_of_norms(
        [norm.reshape(1) for norm in norms.values()], norm_type
    )


def _grads(pieces: Iterable[Held]) -> list[Any]:
    return [held.grad for held in pieces if held.grad is not None]


def _all_held(platform: Platform, parameters: Any) -> list[Held]:
    """Expands a module, a tensor, or an iterable of tensors or (tensor, gradient); each tensor counts once."""
    held: dict[int, Held] = {}
    for param, gradient in _pairs(platform, parameters):
        if id(param) not in held:
            held[id(param)] = _held(platform, param, gradient)
    return list(held.values())


def _pairs(platform: Platform, parameters: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(parameters, platform.Module):
        parameters = platform.parameters_dict(parameters).values()
    elif platform.is_tensor(parameters):
        parameters = [parameters]
    for item in parameters:
        is_pair = isinstance(item, tuple) and len(item) == 2
        yield item if is_pair else (item, None)


def _held(platform: Platform, param: Any, gradient: Any) -> Held:
    for value in (param, gradient):
        if value is not None and not platform.is_tensor(value):
            raise coded(
                TypeError,
                "HP135",
                f"{CALL}: expected a module, a tensor, or an iterable of tensors or of pairs (parameter, gradient), "
                f"found {type(value).__name__} in it",
            )
    gradient = platform.gradient_of(param) if gradient is None else gradient
    if gradient is None:
        platform._check_clippable(param)
        return Held(param, None, _sharing_ranks(platform, param))
    if isinstance(gradient, platform.DTensorBase):
        return Held(param, _values(param, gradient), _sharing_ranks(platform, gradient))
    own = platform.get_param_local_data(param)
    if tuple(gradient.shape) != tuple(own.shape):
        raise coded(
            ValueError,
            "HP135",
            f"{CALL}: a gradient of shape {tuple(gradient.shape)} is not that of a parameter of which this rank has "
            f"{tuple(own.shape)}",
        )
    return Held(param, gradient, _sharing_ranks(platform, param))


def _values(param: Any, gradient: Any) -> Any:
    """Returns the shard of a distributed gradient."""
    if gradient.layout.is_partial():
        raise coded(
            ValueError,
            "HP135",
            f"{CALL}: the gradient of a parameter of shape {tuple(param.shape)} waits for a reduction, "
            f"{gradient.layout}; a norm needs the values: call reduce_partial() on it first",
        )
    return gradient._local


def _sharing_ranks(platform: Platform, tensor: Any) -> tuple[int, ...]:
    """Returns the ranks over which a tensor is sharded; empty if each holds all of it."""
    if not isinstance(tensor, platform.DTensorBase):
        return ()
    axes = (axis for axes in tensor.layout.dim_axes for axis in axes)
    ranks = tuple(tensor.layout.mesh.ranks_along(axes))
    return ranks if len(ranks) > 1 else ()
