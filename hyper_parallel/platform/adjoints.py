# SPDX-License-Identifier: Apache-2.0
"""Collectives in the graph, written once for every framework: each backward is the adjoint of its forward.

    all-gather <-> reduce-scatter     all-to-all <-> the reverse all-to-all     all-reduce sum <-> all-reduce sum

A collective is a pair of functions: ``run`` communicates outside the graph, and ``adjoint`` turns the gradient of the
result into the gradient of the operand. Adjoints communicate in the graph, so gradients of gradients are exact too.
Arguments are not checked here; ``Differentiable`` does that.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.platform.checks import HOOK_ROLES, meet
from hyper_parallel.platform.pending import (
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)

if TYPE_CHECKING:
    from hyper_parallel.platform.platform import Platform


class _Linear:
    """A linear function of one tensor, whose backward needs the gradient only."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        platform: Platform,
        run: Callable[[Any], Any],
        adjoint: Callable[[Any], Any],
    ) -> Any:
        ctx.platform, ctx.adjoint = platform, adjoint
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        with ctx.platform.in_backward():
            return ctx.adjoint(grad), None, None, None


class _Nonlinear:
    """A function of one tensor, whose backward needs its operand and its result."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        platform: Platform,
        run: Callable[[Any], Any],
        adjoint: Callable[[Any, Any, Any], Any],
    ) -> Any:
        ctx.platform, ctx.adjoint = platform, adjoint
        result = run(x)
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, result = ctx.saved_tensors
        with ctx.platform.in_backward():
            return ctx.adjoint(grad, x, result), None, None, None


@functools.cache
def _derive(kind: Any, base: Any) -> Any:
    """Returns the autograd function of this kind for the framework whose base class is ``base``."""
    return types.new_class(kind.__name__, (kind, base))


def _apply(
    kind: Any,
    platform: Platform,
    x: Any,
    run: Callable[[Any], Any],
    adjoint: Callable[..., Any],
) -> Any:
    if not platform.is_recorded(x):
        return run(x)
    base: Any = platform.HigherOrderFunction
    return _derive(kind, base).apply(x, platform, run, adjoint)


def all_reduce(platform: Platform, x: Any, op: str, group: Any) -> Any:
    """Reduces over the group."""

    def run(x: Any) -> Any:
        return start_all_reduce(platform, x, op, group).finish()

    def adjoint(grad: Any, x: Any = None, result: Any = None) -> Any:
        # Every rank's result depends on this rank's data, so their gradients add up.
        total = all_reduce(platform, grad, "sum", group)
        return platform.reduction_gradient(op, total, x, result, group)

    return _apply(_kind_of(op), platform, x, run, adjoint)


def all_gather(
    platform: Platform, x: Any, dim: int, sizes: Sequence[int], group: Any
) -> Any:
    """Concatenates every rank's ``x``, whose sizes along ``dim`` are ``sizes``."""

    def run(x: Any) -> Any:
        return start_all_gather(platform, x, dim, sizes, group).finish()

    def adjoint(grad: Any) -> Any:
        return reduce_scatter(platform, grad, dim, sizes, "sum", group)

    return _apply(_Linear, platform, x, run, adjoint)


def reduce_scatter(
    platform: Platform, x: Any, dim: int, sizes: Sequence[int], op: str, group: Any
) -> Any:
    """Reduces over the group and keeps this rank's piece, of ``sizes`` along ``dim``."""

    def run(x: Any) -> Any:
        return start_reduce_scatter(platform, x, dim, sizes, op, group).finish()

    def gather(piece: Any) -> Any:
        return all_gather(platform, piece, dim, sizes, group)

    def adjoint(grad: Any, x: Any = None, piece: Any = None) -> Any:
        result = None if piece is None else gather(piece)
        return platform.reduction_gradient(op, gather(grad), x, result, group)

    return _apply(_kind_of(op), platform, x, run, adjoint)


def _kind_of(op: str) -> Any:
    return _Linear if op in ("sum", "avg") else _Nonlinear


def differentiate_reduction(
    platform: Platform, op: str, grad: Any, x: Any, result: Any, group: Any
) -> Any:
    """Returns the gradient of this rank's ``x`` from that of the reduction's ``result``."""
    if op == "sum":
        return grad
    if op == "avg":
        return grad / group.size()
    if op == "prod":
        return grad * _multiply_others(platform, x, group)
    is_extreme = (x == result).to(grad.dtype)
    ties = platform.all_reduce(platform.clone(is_extreme), group)
    return grad * is_extreme / ties  # ties share the gradient, as in torch.amax


def _multiply_others(platform: Platform, x: Any, group: Any) -> Any:
    """Returns the product of the other ranks' data, in the graph.

    Dividing the product of all by this rank's data would fail where that is zero.
    """
    size, own_rank = group.size(), group.rank()
    rows = all_gather(platform, x.reshape((1, *x.shape)), 0, [1] * size, group)
    product = platform.full_like(x, 1)
    for rank in range(size):
        if rank != own_rank:
            product = product * rows[rank]
    return platform.keep_in_graph(product, [rows])


def all_to_all(
    platform: Platform, x: Any, output_shape: Sequence[int], group: Any
) -> Any:
    """Exchanges equal chunks of dim 0."""
    input_shape = tuple(x.shape)

    def run(x: Any) -> Any:
        return platform.all_to_all_single(x, output_shape, group)[0]

    def adjoint(grad: Any) -> Any:
        return all_to_all(platform, grad, input_shape, group)

    return _apply(_Linear, platform, x, run, adjoint)


def exchange(
    platform: Platform,
    call: str,
    x: Any,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    group: Any,
) -> Any:
    """Exchanges chunks of dim 0 of these sizes."""

    def run(x: Any) -> Any:
        output, handle = platform.exchange(call, x, input_splits, output_splits, group)
        handle.wait()
        return output

    def adjoint(grad: Any) -> Any:
        return exchange(platform, call, grad, output_splits, input_splits, group)

    return _apply(_Linear, platform, x, run, adjoint)


class _Journey:
    """One exchange whose two halves are two functions of the graph, each the adjoint of the reverse's other half."""

    def __init__(self, platform: Platform, call: str, *how: Any) -> None:
        self.platform, self.call = platform, call
        self.input_splits, self.output_splits, self.group = how
        self.under_way: tuple[Any, Any] | None = None
        self.back: _Journey | None = None

    def start(self, x: Any) -> Any:
        """Begins it; returns what stands for its result in the graph."""
        platform, sizes = self.platform, (self.input_splits, self.output_splits)

        def run(x: Any) -> Any:
            self.under_way = platform.exchange(self.call, x, *sizes, self.group)
            # Of a shape that it has both ways, for the gradient of it is what stands for the way back.
            return platform.zeros((1,), dtype=x.dtype, device=x.device)

        def adjoint(grad: Any) -> Any:
            assert self.back is not None
            return self.back.finish(grad)

        return _apply(_Linear, platform, x, run, adjoint)

    def finish(self, started: Any) -> Any:
        """Waits for it; ``started`` is what ``start`` returned."""

        def run(_: Any) -> Any:
            assert self.under_way is not None
            (output, handle), self.under_way = self.under_way, None
            handle.wait()
            return output

        def adjoint(grad: Any) -> Any:
            splits = self.output_splits, self.input_splits
            self.back = _Journey(self.platform, self.call, *splits, self.group)
            return self.back.start(grad)

        return _apply(_Linear, self.platform, started, run, adjoint)


def start_exchange(
    platform: Platform,
    call: str,
    x: Any,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    group: Any,
) -> Callable[[], Any]:
    """Begins ``exchange``; what it returns waits for the result, once.

    Backward is in two halves too: what lies between the two here lies between them there.
    """
    journey = _Journey(platform, call, input_splits, output_splits, group)
    started = journey.start(x)
    return lambda: journey.finish(started)


def all_to_all_along(
    platform: Platform,
    x: Any,
    gather_dim: int,
    split_dim: int,
    gather_sizes: Sequence[int],
    split_sizes: Sequence[int],
    group: Any,
) -> Any:
    """Gathers ``gather_dim`` and keeps this rank's piece of ``split_dim``."""

    def run(x: Any) -> Any:
        pending = start_all_to_all(
            platform, x, gather_dim, split_dim, gather_sizes, split_sizes, group
        )
        return pending.finish()

    def adjoint(grad: Any) -> Any:
        return all_to_all_along(
            platform, grad, split_dim, gather_dim, split_sizes, gather_sizes, group
        )

    return _apply(_Linear, platform, x, run, adjoint)


def launch_all_to_all(
    platform: Platform,
    call: str,
    x: Any,
    split_dim: int,
    group: Any,
    handle_box: list[Any] | None,
) -> tuple[Any, Any, Any]:
    """Starts the exchange that ``finish_all_to_all`` finishes; returns (x, handle, buffer)."""
    pieces = _stack_pieces(platform.detach(x), split_dim, group.size())
    buffer, handle = platform.exchange(call, pieces, None, None, group)

    def add_boxed_gradient(grad: Any) -> Any:
        if not handle_box:
            return grad
        reverse, pieces = handle_box.pop(0)
        reverse.wait()
        return grad + _join_pieces(pieces, split_dim)

    launched = _apply(_Linear, platform, x, lambda x: x, add_boxed_gradient)
    return launched, handle, buffer


def finish_all_to_all(
    platform: Platform,
    x: Any,
    handle: Any,
    buffer: Any,
    concat_dim: int,
    split_dim: int,
    group: Any,
    handle_box: list[Any] | None,
) -> Any:
    """Waits for a launched exchange; with a box, the reverse exchange is left there under way."""
    shape, count = tuple(x.shape), group.size()
    gathered = [shape[concat_dim]] * count
    split = [shape[split_dim] // count] * count

    def run(_: Any) -> Any:
        if handle is not None:
            handle.wait()
        return _join_pieces(platform.detach(buffer), concat_dim)

    def adjoint(grad: Any) -> Any:
        if handle_box is None:
            return all_to_all_along(
                platform, grad, split_dim, concat_dim, split, gathered, group
            )
        pieces = _stack_pieces(grad, concat_dim, count)
        call = "the backward of differentiable_async_a2a_wait"
        received, reverse = platform.exchange(call, pieces, None, None, group)
        handle_box.append((reverse, received))
        # The gradient comes through the box; a single zero stands for all of these.
        zero = platform.zeros((1,) * len(shape), dtype=grad.dtype, device=grad.device)
        return platform.operator("expand")(zero, shape)

    return _apply(_Linear, platform, x, run, adjoint)


def _stack_pieces(x: Any, dim: int, count: int) -> Any:
    """Returns the equal pieces of ``dim``, stacked in front: (count, *piece)."""
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    split = x.reshape((*before, count, x.shape[dim] // count, *after))
    others = [d for d in range(split.ndim) if d != dim]
    return split.permute((dim, *others)).contiguous()


def _join_pieces(pieces: Any, dim: int) -> Any:
    """Returns stacked pieces concatenated along ``dim``."""
    count, *piece = pieces.shape
    beside = pieces.permute((*range(1, dim + 1), 0, *range(dim + 1, pieces.ndim)))
    piece[dim] *= count
    return beside.reshape(tuple(piece))


def swap(platform: Platform, x: Any, peer: int, group: Any) -> Any:
    """Sends ``x`` to a peer and returns the peer's."""

    def run(x: Any) -> Any:
        return platform._swap_with(x, peer, group)

    def adjoint(grad: Any) -> Any:
        return swap(platform, grad, peer, group)

    return _apply(_Linear, platform, x, run, adjoint)


def synchronize(platform: Platform, x: Any, hook_name: str, coordinator: Any) -> Any:
    """Returns ``x``; forward and backward wait at the coordinator in the roles of this hook."""
    forward_role, backward_role = HOOK_ROLES[hook_name]

    def pass_forward(x: Any) -> Any:
        meet(coordinator, forward_role)
        return x

    def pass_backward(grad: Any) -> Any:
        meet(coordinator, backward_role)
        return grad

    return _apply(_Linear, platform, x, pass_forward, pass_backward)
