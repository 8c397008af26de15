# SPDX-License-Identifier: Apache-2.0
"""Gradients on torch: running backward, what it does with leaves, and the norms that clipping needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hyper_parallel.platform.platform import Platform


def _accumulates(node: Any) -> bool:
    """Whether the running backward accumulates the gradient that this node stands for."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False  # torch does not tell within autograd.grad, where nothing is accumulated


# What is recorded anyway needs no switch, which takes longer than a small operator.
_RECORDING: AbstractContextManager[None] = nullcontext()


class _Alias(torch.autograd.Function):
    """The same memory and version as a leaf, but no leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradient


class Gradients(Platform):
    """The part of the contract that is about gradients as a whole."""

    def tape(self) -> AbstractContextManager[Any]:
        return _RECORDING if torch.is_grad_enabled() else torch.enable_grad()

    def _run_backward(
        self, tensors: Sequence[Any], gradients: Sequence[Any], keep_graph: bool
    ) -> None:
        torch.autograd.backward(list(tensors), list(gradients), keep_graph)

    def _run_backward_inputs(
        self, tensors: Sequence[Any], gradients: Sequence[Any], inputs: Sequence[Any]
    ) -> Callable[[], None]:
        # Only pipelines need it, and importing the platform is to stay light.
        from hyper_parallel.platform.torch.split_backward import backward_inputs

        return backward_inputs(tensors, gradients, inputs)

    def use_leaf(self, leaf: Any) -> Any:
        is_plain = type(leaf) is torch.Tensor and leaf.requires_grad
        return _Alias.apply(leaf) if is_plain else leaf

    def saved_tensors(
        self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]
    ) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def can_defer_gradient(self, leaf: Any) -> bool:
        if (
            not leaf.is_leaf
            or torch.is_grad_enabled()
            or leaf._backward_hooks
            or leaf._post_accumulate_grad_hooks
        ):
            return False
        return _accumulates(torch.autograd.graph.get_gradient_edge(leaf).node)

    def can_defer_gradients(self, leaves: Sequence[Any], context: Any) -> bool:
        if torch.is_grad_enabled():
            return False
        nodes = {
            id(node.variable): node
            for node, _ in context.next_functions
            if hasattr(node, "variable")
        }
        return all(
            id(leaf) in nodes
            and not leaf._backward_hooks
            and not leaf._post_accumulate_grad_hooks
            and _accumulates(nodes[id(leaf)])
            for leaf in leaves
        )

    def defer_gradient(
        self,
        leaf: Any,
        part: Any,  # noqa: ARG002 - the leaf gets nothing before
        sum_now: Callable[[], Any],  # noqa: ARG002 - nobody asks before
    ) -> tuple[Any, Callable[[Any], None]]:
        return None, functools.partial(self.accumulate_gradient, leaf)

    def forget_gradient(self, leaf: Any) -> None:
        leaf.grad = None

    def accumulate_gradient(self, leaf: Any, gradient: Any) -> None:
        if leaf.grad is None:
            leaf.grad = gradient
        else:
            leaf.grad.add_(gradient)

    def backward_number(self) -> int:
        return torch._C._current_graph_task_id()

    def after_backward(self, call: Callable[[], None]) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(call)

    def before_backward_of(
        self, outputs: Sequence[Any], call: Callable[[], None]
    ) -> None:
        def run(_: Any) -> None:
            call()

        nodes = []
        for output in outputs:
            # An operation in place on a view gives the view another node; that of its base stays.
            base = output._base
            nodes += [output.grad_fn, None if base is None else base.grad_fn]
        for node in dict.fromkeys(nodes):
            if node is not None:
                node.register_prehook(run)

    def after_backward_to(self, tensor: Any, call: Callable[[], None]) -> Any:
        def run(_: Any) -> None:
            call()

        with torch.enable_grad():
            # Unlike that of a view, its gradient is the same tensor, which a leaf then knows to be used elsewhere.
            alias = torch.ops.aten.alias(tensor)
        alias.grad_fn.register_prehook(run)
        return alias

    def gradient_of(self, leaf: Any) -> Any:
        return leaf.grad

    def _gradient_norm(
        self,
        gradients: Sequence[Any],
        parameters: Sequence[Any],
        norm_type: float,
        foreach: bool | None,
    ) -> Any:
        dtypes = (param.dtype for param in parameters)
        dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        # A maximum of nothing is an error, so empty shards are left out.
        grads = [grad for grad in gradients if grad.numel()]
        if not grads:
            return torch.zeros((), dtype=dtype.to_real(), device=parameters[0].device)
        if foreach is False:
            vector_norm = torch.linalg.vector_norm
            norms = [vector_norm(grad, norm_type, dtype=dtype) for grad in grads]
        else:
            norms = list(torch._foreach_norm(grads, norm_type, dtype=dtype))
        return self._norm_of_norms([norm.reshape(1) for norm in norms], norm_type)

    def _norm_of_norms(self, norms: Sequence[Any], norm_type: float) -> Any:
        if not norms:
            return torch.tensor(0.0)
        joined = torch.cat([norm.to(norms[0].device) for norm in norms])
        return torch.linalg.vector_norm(joined, norm_type)

    def _scale_gradients(
        self,
        gradients: Sequence[Any],
        max_norm: float,
        total: Any,
        foreach: bool | None,
    ) -> None:
        # It reads nothing but ``grad`` of what it is given.
        holders: Any = [SimpleNamespace(grad=gradient) for gradient in gradients]
        nn.utils.clip_grads_with_norm_(holders, max_norm, total, foreach)
