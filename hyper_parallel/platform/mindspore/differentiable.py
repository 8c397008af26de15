# SPDX-License-Identifier: Apache-2.0
"""Collectives in the graph: each backward is the adjoint of its forward.

    all-gather <-> reduce-scatter     all-to-all <-> the reverse all-to-all     all-reduce sum <-> all-reduce sum

The linear ones call each other's ``apply`` in backward, so gradients of gradients work too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import mindspore
from mindspore import mint, ops

from hyper_parallel.platform.agreement import dtype_name
from hyper_parallel.platform.checks import (
    HOOK_ROLES,
    check_all_to_all,
    check_count,
    check_dim,
    check_hook,
    check_pieces,
    check_sizes,
    check_split,
    check_transposed,
    meet,
)
from hyper_parallel.platform.mindspore import private
from hyper_parallel.platform.mindspore.collectives import (
    Collectives,
    check_reducible,
    check_tensor,
)
from hyper_parallel.platform.mindspore.cpu.empty_shards.kernels import has_gradient
from hyper_parallel.platform.mindspore.store_collectives import Group
from hyper_parallel.platform.transform import chunk_sizes

Function: Any = private.function()


class Differentiable(Collectives):
    """The part of the contract that is about communication in the graph."""

    def differentiable_all_reduce(self, data: Any, op: str, group: Any) -> Any:
        resolved = self._group("differentiable_all_reduce", group)
        check_tensor("differentiable_all_reduce", data)
        check_reducible("differentiable_all_reduce", data, op)
        if not self.is_recorded(data):
            return self.all_reduce(self.clone(data), resolved, op=op)
        return _AllReduce.apply(data, op, resolved, self)

    def reduction_gradient(
        self, op: str, grad: Any, data: Any, result: Any, group: Any
    ) -> Any:
        resolved = self._group("reduction_gradient", group)
        if op == "sum":
            return grad
        if op == "avg":
            return grad / resolved.size()
        if (
            dtype_name(grad) == "bfloat16"
        ):  # few operators have a kernel for it on a CPU; float32 holds its numbers
            wide = [x.to(mindspore.float32) for x in (grad, data, result)]
            return self.reduction_gradient(op, wide[0], wide[1], wide[2], resolved).to(
                grad.dtype
            )
        if op in ("max", "min"):
            won = (data == result).to(grad.dtype)
            return (
                grad * won / self.all_reduce(self.clone(won), resolved)
            )  # ties share, as in torch.amax
        # The product of the others: the result divided by this rank's data would fail where that is zero.
        zero, one = self.full_like(data, 0), self.full_like(data, 1)
        is_zero = data == zero
        here = is_zero.to(mindspore.int32)
        zeros = self.all_reduce(self.clone(here), resolved)
        nonzero = mint.where(is_zero, one, data)
        product = self.all_reduce(self.clone(nonzero), resolved, op="prod")
        return grad * mint.where(zeros == here, product / nonzero, zero)

    def differentiable_all_gather_concat(
        self,
        data: Any,
        group: Any,
        concat_size: int,
        concat_dim: int,
        sizes: Sequence[int] | None = None,
    ) -> Any:
        call = "differentiable_all_gather_concat"
        resolved = self._group(call, group)
        check_tensor(call, data)
        dim = check_dim(call, "concat_dim", data, concat_dim)
        check_count(call, "concat_size", concat_size, resolved)
        data = _without_gradient_of_integers(data)
        return _AllGather.apply(
            data,
            dim,
            tuple(check_sizes(call, data, dim, sizes, resolved)),
            resolved,
            self,
        )

    def differentiable_reduce_scatter(
        self, data: Any, dev_num: int, axis: int, op: str, group: Any
    ) -> Any:
        call = "differentiable_reduce_scatter"
        resolved = self._group(call, group)
        check_tensor(call, data)
        dim = check_dim(call, "axis", data, axis)
        check_count(call, "dev_num", dev_num, resolved)
        check_reducible(call, data, op)
        data = _without_gradient_of_integers(data)
        return _ReduceScatter.apply(
            data, dim, tuple(chunk_sizes(data.shape[dim], dev_num)), op, resolved, self
        )

    def differentiable_all_to_all(
        self, input_data: Any, output_shape: Sequence[int], group: Any
    ) -> Any:
        resolved = self._group("differentiable_all_to_all", group)
        check_tensor("differentiable_all_to_all", input_data)
        return _AllToAll.apply(
            _without_gradient_of_integers(input_data),
            tuple(output_shape),
            resolved,
            self,
        )

    def differentiable_all_to_all_single(
        self,
        input_tensor: Any,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        group: Any,
    ) -> Any:
        call = "differentiable_all_to_all_single"
        return self._uneven_all_to_all(
            call, input_tensor, input_splits, output_splits, group
        )

    def differentiable_all_to_all_single_async(
        self,
        input_tensor: Any,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        group: Any,
    ) -> Any:
        """Untested on hardware: on an accelerator ``wait()`` makes the current stream wait and the host goes on."""
        # The two are one on every device: on a CPU a tensor may not be handed out before it is there.
        call = "differentiable_all_to_all_single_async"
        return self._uneven_all_to_all(
            call, input_tensor, input_splits, output_splits, group
        )

    def _uneven_all_to_all(
        self,
        call: str,
        x: Any,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        group: Any,
    ) -> Any:
        resolved = self._group(call, group)
        check_tensor(call, x)
        inputs, outputs = check_all_to_all(
            call, x, input_splits, output_splits, resolved.size()
        )
        return _UnevenAllToAll.apply(
            _without_gradient_of_integers(x),
            tuple(inputs),
            tuple(outputs),
            resolved,
            self,
            call,
        )

    def differentiable_async_a2a_launch(
        self,
        x: Any,
        group: Any,
        world_size: int,
        concat_dim: int,
        split_dim: int,
        handle_box: list[Any] | None = None,
    ) -> tuple[Any, Any, Any]:
        call = "differentiable_async_a2a_launch"
        resolved = self._group(call, group)
        check_tensor(call, x)
        _, split = check_transposed(
            call, x, world_size, concat_dim, split_dim, resolved
        )  # the wait uses the other
        check_split(call, x, split, world_size)
        with self.no_grad():
            pieces = _to_pieces(x, split, world_size)
            buffer, work = self._exchange(
                call, pieces, pieces.shape, None, None, resolved
            )
        return _Launched.apply(x, split, _Box(handle_box)), work, buffer

    def differentiable_async_a2a_wait(
        self,
        x: Any,
        work: Any,
        out_perm: Any,
        group: Any,
        world_size: int,
        concat_dim: int,
        split_dim: int,
        handle_box: list[Any] | None = None,
    ) -> Any:
        call = "differentiable_async_a2a_wait"
        resolved = self._group(call, group)
        check_tensor(call, x)
        concat, split = check_transposed(
            call, x, world_size, concat_dim, split_dim, resolved
        )
        check_pieces(call, x, out_perm, split, world_size)
        return _AsyncWait.apply(
            x, work, out_perm, resolved, concat, split, _Box(handle_box), self
        )

    def differentiable_sync_hook(self, x: Any, hook_name: str, coordinator: Any) -> Any:
        check_hook(hook_name)
        check_tensor("differentiable_sync_hook", x)
        return _SyncHook.apply(x, hook_name, coordinator)

    def p2p_exchange(self, tensor: Any, peer_rank: int, group: Any = None) -> Any:
        resolved = self._group("p2p_exchange", group)
        check_tensor("p2p_exchange", tensor)
        self._check_member("p2p_exchange", "peer_rank", peer_rank, resolved)
        if peer_rank == self.get_rank():
            return tensor.copy()
        return _Exchange.apply(tensor, peer_rank, resolved, self)

    # --- along any dim, outside the graph

    def _gather_dim(self, x: Any, dim: int, sizes: Sequence[int], group: Group) -> Any:
        """Every rank's ``x``, whose sizes along ``dim`` are ``sizes``, joined along ``dim``."""
        widest = max(sizes)
        if x.shape[dim] < widest:
            padding = list(x.shape)
            padding[dim] = widest - (x.shape[dim] if x.size else 0)
            x = (
                mint.cat((x, self.zeros(padding, x.dtype)), dim)
                if x.size
                else self.zeros(padding, x.dtype)
            )
        joined = self.all_gather_into_tensor(x, group)
        if dim == 0 and all(size == widest for size in sizes):
            return joined
        rows = x.shape[0]
        pieces = [mint.narrow(joined, 0, i * rows, rows) for i in range(len(sizes))]
        kept = [
            mint.narrow(piece, dim, 0, size)
            for piece, size in zip(pieces, sizes, strict=True)
            if size
        ]
        return mint.cat(tuple(kept), dim) if kept else pieces[0]  # of all ranks nothing

    def _reduce_scatter_dim(
        self, x: Any, dim: int, sizes: Sequence[int], op: str, group: Group
    ) -> Any:
        """This rank's piece, of ``sizes`` along ``dim``, of the reduction of ``x``."""
        starts = itertools.accumulate(sizes, initial=0)
        pieces = [
            mint.narrow(x, dim, start, size)
            for start, size in zip(starts, sizes, strict=False)
        ]
        mine = tuple(pieces[group.rank()].shape)
        if all(size == sizes[0] for size in sizes):
            if not x.size:
                return self.empty(mine, x.dtype)
            stacked = x if dim == 0 else mint.cat(tuple(pieces), 0)
            return self.reduce_scatter_tensor(stacked, group, op=op)
        counts = [math.prod(piece.shape) for piece in pieces]
        count = math.prod(mine)
        flat = [
            piece.contiguous().reshape(-1) for piece in pieces if math.prod(piece.shape)
        ]
        source = mint.cat(tuple(flat), 0) if flat else self.empty((0,), x.dtype)
        received, work = self._exchange(
            "reduce_scatter",
            source,
            (len(sizes) * count,),
            [count] * len(sizes),
            counts,
            group,
        )
        work.wait()
        return self.reduce_pieces(received, (len(sizes), *mine), op)


def _without_gradient_of_integers(x: Any) -> Any:
    """MindSpore would send one through them, on the ranks that have elements: backward would not be everybody's."""
    return x if has_gradient(x) else ops.stop_gradient(x)


class _Box:
    """A list on its way through ``apply``, which would copy it."""

    def __init__(self, handles: list[Any] | None) -> None:
        self.handles = handles


class _AllReduce(Function):
    @staticmethod
    def forward(
        ctx: Any, data: Any, op: str, group: Group, platform: Differentiable
    ) -> Any:
        ctx.op, ctx.group, ctx.platform = op, group, platform
        output = platform.all_reduce(platform.clone(data), group, op=op)
        if op in ("max", "min", "prod"):
            ctx.save_for_backward(data, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        with ctx.platform.in_backward():
            # Every rank's result depends on this rank's data, so their gradients add up.
            total = _AllReduce.apply(grad, "sum", ctx.group, ctx.platform)
            data, result = ctx.saved_tensors or (None, None)
            return (
                ctx.platform.reduction_gradient(ctx.op, total, data, result, ctx.group),
                None,
                None,
                None,
            )


class _AllGather(Function):
    @staticmethod
    def forward(
        ctx: Any,
        data: Any,
        dim: int,
        sizes: tuple[int, ...],
        group: Group,
        platform: Differentiable,
    ) -> Any:
        ctx.dim, ctx.sizes, ctx.group, ctx.platform = dim, sizes, group, platform
        return platform._gather_dim(data, dim, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        with ctx.platform.in_backward():
            own = _ReduceScatter.apply(
                grad, ctx.dim, ctx.sizes, "sum", ctx.group, ctx.platform
            )
        return own, None, None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(
        ctx: Any,
        data: Any,
        dim: int,
        sizes: tuple[int, ...],
        op: str,
        group: Group,
        platform: Differentiable,
    ) -> Any:
        ctx.dim, ctx.sizes, ctx.op, ctx.group, ctx.platform = (
            dim,
            sizes,
            op,
            group,
            platform,
        )
        output = platform._reduce_scatter_dim(data, dim, sizes, op, group)
        if op in ("max", "min", "prod"):
            ctx.save_for_backward(data, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        def gather(piece: Any) -> Any:
            return _AllGather.apply(piece, ctx.dim, ctx.sizes, ctx.group, ctx.platform)

        with ctx.platform.in_backward():
            data, piece = ctx.saved_tensors or (None, None)
            result = gather(piece) if piece is not None else None
            own = ctx.platform.reduction_gradient(
                ctx.op, gather(grad), data, result, ctx.group
            )
        return own, None, None, None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any,
        data: Any,
        output_shape: tuple[int, ...],
        group: Group,
        platform: Differentiable,
    ) -> Any:
        ctx.input_shape, ctx.group, ctx.platform = tuple(data.shape), group, platform
        return platform.all_to_all_single(data, output_shape, group)[0]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        with ctx.platform.in_backward():
            return (
                _AllToAll.apply(grad, ctx.input_shape, ctx.group, ctx.platform),
                None,
                None,
                None,
            )


class _UnevenAllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any,
        data: Any,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        group: Group,
        platform: Differentiable,
        call: str,
    ) -> Any:
        ctx.inputs, ctx.outputs, ctx.group, ctx.platform, ctx.call = (
            inputs,
            outputs,
            group,
            platform,
            call,
        )
        output, work = platform._exchange(
            call, data, (sum(outputs), *data.shape[1:]), outputs, inputs, group
        )
        work.wait()
        return output

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        with ctx.platform.in_backward():
            reverse = _UnevenAllToAll.apply(
                grad, ctx.outputs, ctx.inputs, ctx.group, ctx.platform, ctx.call
            )
        return reverse, None, None, None, None, None


class _Launched(Function):
    """The identity; with a box, backward adds the gradient of the reverse exchange that waits there."""

    @staticmethod
    def forward(ctx: Any, x: Any, split_dim: int, box: _Box) -> Any:
        ctx.split_dim, ctx.box = split_dim, box
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if ctx.box.handles:
            work, buffer = ctx.box.handles.pop(0)
            work.wait()
            grad = grad + _from_pieces(buffer, ctx.split_dim)
        return grad, None, None


class _AsyncWait(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        work: Any,
        out_perm: Any,
        group: Group,
        concat_dim: int,
        split_dim: int,
        box: _Box,
        platform: Differentiable,
    ) -> Any:
        ctx.group, ctx.concat_dim, ctx.split_dim, ctx.box = (
            group,
            concat_dim,
            split_dim,
            box,
        )
        ctx.platform, ctx.shape = platform, tuple(x.shape)
        if work is not None:
            work.wait()
        return _from_pieces(out_perm, concat_dim)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        pieces = _to_pieces(grad, ctx.concat_dim, ctx.group.size())
        call = "the backward of differentiable_async_a2a_wait"
        with ctx.platform.in_backward():
            buffer, work = ctx.platform._exchange(
                call, pieces, pieces.shape, None, None, ctx.group
            )
        if ctx.box.handles is None:
            work.wait()
            grad_x = _from_pieces(buffer, ctx.split_dim)
        else:
            ctx.box.handles.append((work, buffer))
            grad_x = ctx.platform.zeros(
                ctx.shape, grad.dtype
            )  # the gradient comes through the box
        return grad_x, *(None,) * 7


def _to_pieces(x: Any, dim: int, count: int) -> Any:
    """(count, *piece): the equal pieces of ``dim``, stacked in front."""
    cut = x.reshape((*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :]))
    others = [d for d in range(cut.ndim) if d != dim]
    return cut.permute((dim, *others)).contiguous()


def _from_pieces(pieces: Any, dim: int) -> Any:
    count, *piece = pieces.shape
    beside = pieces.permute((*range(1, dim + 1), 0, *range(dim + 1, pieces.ndim)))
    return beside.reshape((*piece[:dim], count * piece[dim], *piece[dim + 1 :]))


class _SyncHook(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, hook_name: str, coordinator: Any) -> Any:
        ctx.hook_name, ctx.coordinator = hook_name, coordinator
        meet(coordinator, HOOK_ROLES[hook_name][0])
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        meet(ctx.coordinator, HOOK_ROLES[ctx.hook_name][1])
        return grad, None, None


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Any, peer: int, group: Group, platform: Differentiable
    ) -> Any:
        ctx.peer, ctx.group, ctx.platform = peer, group, platform
        return platform._exchange_with(tensor, peer, group)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        with ctx.platform.in_backward():
            return (
                _Exchange.apply(grad, ctx.peer, ctx.group, ctx.platform),
                None,
                None,
                None,
            )
