# SPDX-License-Identifier: Apache-2.0
"""Clipping gradients by their total norm, wherever their shards lie.

A norm of norms is the norm of the whole: each rank takes that of its shards, the ranks over which the shards are spread
exchange one number each, and what is the same on all ranks is counted once.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import Platform
from hyper_parallel.platform.torch.dtensor_base import DTensorBase


class Gradients(Platform):
    """The part of the contract that is about gradients as a whole."""

    def tape(self) -> AbstractContextManager[Any]:
        return torch.enable_grad()

    def _run_backward(
        self, tensors: Sequence[Any], gradients: Sequence[Any], keep_graph: bool
    ) -> None:
        torch.autograd.backward(list(tensors), list(gradients), keep_graph)

    def saved_tensors(
        self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]
    ) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def accumulates_gradient(self, leaf: Any) -> bool:
        if (
            not leaf.is_leaf
            or torch.is_grad_enabled()
            or leaf._backward_hooks
            or leaf._post_accumulate_grad_hooks
        ):
            return False
        try:
            return torch._C._will_engine_execute_node(
                torch.autograd.graph.get_gradient_edge(leaf).node
            )
        except (
            RuntimeError
        ):  # torch does not tell within autograd.grad, where nothing is accumulated
            return False

    def accumulate_gradient(self, leaf: Any, gradient: Any) -> None:
        if leaf.grad is None:
            leaf.grad = gradient
        else:
            leaf.grad.add_(gradient)

    def backward_number(self) -> int:
        return torch._C._current_graph_task_id()

    def after_backward(self, call: Callable[[], None]) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(call)

    def clip_grad_norm_(
        self,
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        """Scales gradients down to ``max_norm`` in place and returns the total norm before that, a plain tensor.

        It is the norm of one device, added up in float32 or wider: sharded parameters count whole, on whatever meshes
        they lie, and replicated or plain ones once. Every rank passes its parameters in the same order. What a rank
        does not hold it does not count: pipeline stages on meshes of their own get a norm each.
        """
        max_norm, norm_type = float(max_norm), float(norm_type)
        if math.isnan(max_norm) or max_norm < 0:
            raise coded(
                ValueError,
                "HP135",
                f"clip_grad_norm_: max_norm must be a number of at least 0, got {max_norm}",
            )
        if math.isnan(norm_type) or norm_type <= 0:
            raise coded(
                ValueError,
                "HP135",
                f"clip_grad_norm_: norm_type must be positive or inf, got {norm_type}",
            )
        # A parameter without a gradient takes part as well: another rank may have one for its shard.
        spread: dict[tuple[int, ...], list[_Held]] = defaultdict(list)
        for held in map(_held, _parameters(parameters)):
            if held.grad is not None or held.param.requires_grad:
                spread[held.ranks].append(held)
        with torch.no_grad():
            norms = {
                ranks: _norm(pieces, norm_type, foreach)
                for ranks, pieces in spread.items()
            }
            # Sorted by ranks, so that groups with common members never wait for each other.
            for ranks in sorted(ranks for ranks in norms if ranks):
                norms[ranks] = self._norm_over(ranks, norms[ranks], norm_type)
            # In the order of the parameters, so that every rank rounds alike.
            total = _norm_of_norms(list(norms.values()), norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise coded(
                RuntimeError,
                "HP135",
                f"clip_grad_norm_: the norm of order {norm_type} is non-finite ({total.item()}), so the gradients "
                "cannot be clipped by it; with error_if_nonfinite=False they are scaled nevertheless",
            )
        every: Any = [held for pieces in spread.values() for held in pieces]
        nn.utils.clip_grads_with_norm_(
            every, max_norm, total, foreach
        )  # it asks for nothing but ``grad``
        return total

    def _norm_over(
        self, ranks: Sequence[int], norm: torch.Tensor, norm_type: float
    ) -> torch.Tensor:
        # One number a rank is gathered, not reduced: a maximum between ranks may lose a nan.
        gathered = self.all_gather_into_tensor(
            norm.reshape(1), self.create_group(ranks)
        )
        return torch.linalg.vector_norm(gathered, norm_type)


def _parameters(parameters: Any) -> list[torch.Tensor]:
    """The tensors meant by a module, a tensor or an iterable, each once."""
    if isinstance(parameters, nn.Module):
        found: Iterable[Any] = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        found = [parameters]
    else:
        found = parameters
    unique = {id(p): p for p in found}
    wrong = [
        type(p).__name__ for p in unique.values() if not isinstance(p, torch.Tensor)
    ]
    if wrong:
        raise coded(
            TypeError,
            "HP135",
            f"clip_grad_norm_: expected a module, a tensor or an iterable of tensors, found {wrong[0]} in it",
        )
    return list(unique.values())


class _Held(NamedTuple):
    """What this rank has of a parameter and its gradient, and the ranks that together have all of the gradient."""

    param: torch.Tensor
    grad: torch.Tensor | None
    ranks: tuple[int, ...]  # none if each has all of it


def _held(param: Any) -> _Held:
    grad = param.grad
    if not isinstance(param, DTensorBase):
        return _Held(param, grad, ())
    layout = param._layout if grad is None else grad._layout
    if grad is not None and layout.is_partial():
        raise coded(
            ValueError,
            "HP135",
            f"clip_grad_norm_: the gradient of a parameter of shape {tuple(param.shape)} waits for a reduction, "
            f"{layout}; a norm needs the values: call reduce_partial() on it first",
        )
    ranks = layout.mesh.ranks_along(axis for axes in layout.dim_axes for axis in axes)
    return _Held(
        param,
        None if grad is None else grad._local,
        tuple(ranks) if len(ranks) > 1 else (),
    )


def _norm(
    pieces: Sequence[_Held], norm_type: float, foreach: bool | None
) -> torch.Tensor:
    """The norm of what this rank has; the parameters tell the dtype, so that the ranks agree on it."""
    dtype = functools.reduce(
        torch.promote_types, (held.param.dtype for held in pieces), torch.float32
    )
    # A maximum of nothing is an error, so empty shards are left out.
    grads = [
        held.grad for held in pieces if held.grad is not None and held.grad.numel()
    ]
    if not grads:
        return torch.zeros((), dtype=dtype.to_real(), device=pieces[0].param.device)
    if foreach is False:
        return _norm_of_norms(
            [torch.linalg.vector_norm(grad, norm_type, dtype=dtype) for grad in grads],
            norm_type,
        )
    return _norm_of_norms(torch._foreach_norm(grads, norm_type, dtype=dtype), norm_type)


def _norm_of_norms(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    if not norms:
        return torch.tensor(0.0)
    return torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type
    )
