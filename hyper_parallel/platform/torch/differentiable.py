# SPDX-License-Identifier: Apache-2.0
"""Collectives in the graph: each backward is the adjoint of its forward.

    all-gather <-> reduce-scatter     all-to-all <-> the reverse all-to-all     all-reduce sum <-> all-reduce sum

The linear ones call each other's ``apply`` in backward, so gradients of gradients work too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

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
from hyper_parallel.platform.torch import ties
from hyper_parallel.platform.torch.collectives import (
    Collectives,
    as_stored,
    check_reducible,
    check_tensor,
)
from hyper_parallel.platform.torch.faults import Handle
from hyper_parallel.platform.transform import chunk_sizes


class Differentiable(Collectives):
    """The part of the contract that is about communication in the graph."""

    def differentiable_all_reduce(self, data: Any, op: str, group: Any) -> Any:
        resolved = self._group("differentiable_all_reduce", group)
        check_tensor("differentiable_all_reduce", data)
        if not self.is_recorded(data):
            return self.all_reduce(
                data.detach().clone(memory_format=torch.contiguous_format),
                resolved,
                op=op,
            )
        check_reducible("differentiable_all_reduce", data, op, resolved)
        return _AllReduce.apply(data, op, resolved, self)

    def reduction_gradient(
        self, op: str, grad: Any, data: Any, result: Any, group: Any
    ) -> Any:
        resolved = self._group("reduction_gradient", group)
        if op == "sum":
            return grad
        if op == "avg":
            return grad / resolved.size()
        if op in ("max", "min"):
            won = (data == result).to(grad.dtype)
            return (
                grad * won / self.all_reduce(won.clone(), resolved)
            )  # ties share, as in torch.amax
        return grad * self._product_of_others(data, resolved)

    def _product_of_others(
        self, data: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        """The product of all other ranks' data, in the graph; dividing by this rank's would fail where that is zero."""
        rows = _AllGather.apply(
            data.unsqueeze(0), 0, [1] * group.size(), group, self
        ).unbind(0)
        others = [row for rank, row in enumerate(rows) if rank != group.rank()]
        product = functools.reduce(torch.mul, others, torch.ones_like(data))
        return (
            ties.keep_in_graph(product, [rows[group.rank()]])
            if rows[0].requires_grad
            else product
        )

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
        sizes = check_sizes(call, data, dim, sizes, resolved)
        return _AllGather.apply(data, dim, sizes, resolved, self)

    def differentiable_reduce_scatter(
        self, data: Any, dev_num: int, axis: int, op: str, group: Any
    ) -> Any:
        call = "differentiable_reduce_scatter"
        resolved = self._group(call, group)
        check_tensor(call, data)
        dim = check_dim(call, "axis", data, axis)
        check_count(call, "dev_num", dev_num, resolved)
        check_reducible(call, data, op, resolved)
        return _ReduceScatter.apply(
            data, dim, chunk_sizes(data.shape[dim], dev_num), op, resolved, self
        )

    def differentiable_all_to_all(
        self, input_data: Any, output_shape: Sequence[int], group: Any
    ) -> Any:
        resolved = self._group("differentiable_all_to_all", group)
        check_tensor("differentiable_all_to_all", input_data)
        return _AllToAll.apply(input_data, tuple(output_shape), resolved, self)

    def differentiable_all_to_all_single(
        self,
        input_tensor: Any,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        group: Any,
    ) -> Any:
        return self._uneven_all_to_all(
            "differentiable_all_to_all_single",
            input_tensor,
            input_splits,
            output_splits,
            group,
        )

    def differentiable_all_to_all_single_async(
        self,
        input_tensor: Any,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        group: Any,
    ) -> Any:
        """Untested on hardware: on an accelerator ``wait()`` makes the current stream wait and the host goes on."""
        # The two are one on every device: torch's wait is a wait of the stream where there are streams, and on a CPU
        # a tensor may not be handed out before it is there.
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
        return _UnevenAllToAll.apply(x, inputs, outputs, resolved, self, call)

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
        pieces = _to_pieces(x.detach(), split, world_size)
        buffer, work = self._exchange(call, pieces, pieces.shape, None, None, resolved)
        return _Launched.apply(x, split, handle_box), work, buffer

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
            x, work, out_perm, resolved, concat, split, handle_box, self
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
            return tensor.clone()
        return _Exchange.apply(tensor, peer_rank, resolved, self)

    # --- along any dim, outside the graph

    def _gather_dim(
        self, x: torch.Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        """Every rank's ``x``, whose sizes along ``dim`` are ``sizes``, joined along ``dim``."""
        widest = max(sizes)
        if any(size != widest for size in sizes) and x.shape[dim] < widest:
            padding = list(x.shape)
            padding[dim] = widest - x.shape[dim]
            x = torch.cat([x, x.new_zeros(padding)], dim)
        joined = self.all_gather_into_tensor(x, group)
        if dim == 0 and all(size == widest for size in sizes):
            return joined
        pieces = joined.unflatten(0, (len(sizes), x.shape[0])).unbind(0)
        return torch.cat(
            [
                piece.narrow(dim, 0, size)
                for piece, size in zip(pieces, sizes, strict=True)
            ],
            dim,
        )

    def _reduce_scatter_dim(
        self,
        x: torch.Tensor,
        dim: int,
        sizes: Sequence[int],
        op: str,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """This rank's piece, of ``sizes`` along ``dim``, of the reduction of ``x``."""
        pieces = x.split(list(sizes), dim)
        mine = pieces[group.rank()].shape
        if all(size == sizes[0] for size in sizes):
            stacked = x if dim == 0 else torch.cat(pieces, 0)
            return (
                self.reduce_scatter_tensor(stacked, group, op=op)
                if sizes[0]
                else x.new_empty(mine)
            )
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        received, work = self._exchange(
            "reduce_scatter",
            flat,
            (len(sizes) * mine.numel(),),
            [mine.numel()] * len(sizes),
            [piece.numel() for piece in pieces],
            group,
        )
        work.wait()
        return self.reduce_pieces(received, (len(sizes), *mine), op)


class _AllReduce(Function):
    @staticmethod
    def forward(
        ctx: Any,
        data: torch.Tensor,
        op: str,
        group: dist.ProcessGroup,
        platform: Differentiable,
    ) -> Any:
        ctx.op, ctx.group, ctx.platform = op, group, platform
        output = platform.all_reduce(
            data.detach().clone(memory_format=torch.contiguous_format), group, op=op
        )
        if op in ("max", "min", "prod"):
            ctx.save_for_backward(data, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
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
        sizes: list[int],
        group: dist.ProcessGroup,
        platform: Differentiable,
    ) -> Any:
        ctx.dim, ctx.sizes, ctx.group, ctx.platform = dim, sizes, group, platform
        return platform._gather_dim(data, dim, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (
            _ReduceScatter.apply(
                grad, ctx.dim, ctx.sizes, "sum", ctx.group, ctx.platform
            ),
            None,
            None,
            None,
            None,
        )


class _ReduceScatter(Function):
    @staticmethod
    def forward(
        ctx: Any,
        data: Any,
        dim: int,
        sizes: list[int],
        op: str,
        group: dist.ProcessGroup,
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
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        def gather(piece: torch.Tensor) -> Any:
            return _AllGather.apply(piece, ctx.dim, ctx.sizes, ctx.group, ctx.platform)

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
        group: dist.ProcessGroup,
        platform: Differentiable,
    ) -> Any:
        ctx.input_shape, ctx.group, ctx.platform = tuple(data.shape), group, platform
        return platform.all_to_all_single(data, output_shape, group)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
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
        inputs: list[int],
        outputs: list[int],
        group: dist.ProcessGroup,
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
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        reverse = _UnevenAllToAll.apply(
            grad, ctx.outputs, ctx.inputs, ctx.group, ctx.platform, ctx.call
        )
        return reverse, None, None, None, None, None


class _Launched(Function):
    """The identity; with a box, backward adds the gradient of the reverse exchange that waits there."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, split_dim: int, handle_box: list[Any] | None
    ) -> Any:
        ctx.split_dim, ctx.handle_box = split_dim, handle_box
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.handle_box:
            work, buffer = ctx.handle_box.pop(0)
            work.wait()
            grad = grad + _from_pieces(buffer, ctx.split_dim)
        return grad, None, None


class _AsyncWait(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        work: Any,
        out_perm: torch.Tensor,
        group: dist.ProcessGroup,
        concat_dim: int,
        split_dim: int,
        handle_box: list[Any] | None,
        platform: Differentiable,
    ) -> Any:
        ctx.group, ctx.concat_dim, ctx.split_dim, ctx.handle_box = (
            group,
            concat_dim,
            split_dim,
            handle_box,
        )
        ctx.platform, ctx.shape = platform, x.shape
        if work is not None:
            work.wait()
        return _from_pieces(out_perm.detach(), concat_dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        pieces = _to_pieces(grad, ctx.concat_dim, ctx.group.size())
        call = "the backward of differentiable_async_a2a_wait"
        buffer, work = ctx.platform._exchange(
            call, pieces, pieces.shape, None, None, ctx.group
        )
        if ctx.handle_box is None:
            work.wait()
            grad_x = _from_pieces(buffer, ctx.split_dim)
        else:
            ctx.handle_box.append((work, buffer))
            grad_x = grad.new_zeros(()).expand(
                ctx.shape
            )  # the gradient comes through the box
        return grad_x, *(None,) * 7


def _to_pieces(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """(count, *piece): the equal pieces of ``dim``, stacked in front."""
    return x.unflatten(dim, (count, x.shape[dim] // count)).movedim(dim, 0).contiguous()


def _from_pieces(pieces: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat(pieces.unbind(0), dim)


class _SyncHook(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, hook_name: str, coordinator: Any) -> Any:
        ctx.hook_name, ctx.coordinator = hook_name, coordinator
        meet(coordinator, HOOK_ROLES[hook_name][0])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        meet(ctx.coordinator, HOOK_ROLES[ctx.hook_name][1])
        return grad, None, None


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        peer: int,
        group: dist.ProcessGroup,
        platform: Differentiable,
    ) -> Any:
        ctx.peer, ctx.group, ctx.platform = peer, group, platform
        source = as_stored(tensor)
        output = torch.empty_like(source)
        call = f"p2p_exchange with rank {peer}"
        platform._tell("p2p_exchange", (platform.get_rank(), peer), source.nbytes)
        ops = [
            dist.P2POp(dist.isend, source, peer, group),
            dist.P2POp(dist.irecv, output, peer, group),
        ]
        for work in platform._call(
            call, group, lambda: dist.batch_isend_irecv(ops), peer
        ):
            Handle(work, call, group, peer=peer).wait()
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (
            _Exchange.apply(grad, ctx.peer, ctx.group, ctx.platform),
            None,
            None,
            None,
        )
