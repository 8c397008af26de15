# SPDX-License-Identifier: Apache-2.0
"""Plain collectives on torch.distributed: checked input, the faster exact way, errors that name the missing rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from hyper_parallel.platform.agreement import Call
from hyper_parallel.platform.checks import check_reduction, check_tensor
from hyper_parallel.platform.differentiable import Differentiable
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.errors import CommunicationError
from hyper_parallel.platform.order import FIRST
from hyper_parallel.platform.platform import Traffic
from hyper_parallel.platform.torch import gloo, order
from hyper_parallel.platform.torch.faults import (
    BACKEND_ERRORS,
    Handle,
    explain,
    timeout_of,
    waiting_in,
)
from hyper_parallel.platform.torch.groups import Groups

if TYPE_CHECKING:
    from hyper_parallel.platform.messages import Messages
    from hyper_parallel.platform.rows import Rows
    from hyper_parallel.platform.torch.rows import SharedRows

_REDUCE_OP = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}


class Collectives(Groups, Differentiable):
    """Communication outside the graph; ``Differentiable`` adds the one in the graph."""

    _compared_by_default = FIRST  # gloo ends processes whose data does not fit together

    def barrier(
        self, group: Any = None, async_op: bool = False, device_ids: Any = None
    ) -> Any:
        resolved = self._group("barrier", group)
        self._announce(lambda: Call("barrier"), resolved)
        work = self._call(
            "barrier",
            resolved,
            lambda: dist.barrier(resolved, async_op=True, device_ids=device_ids),
        )
        handle = Handle(work, "barrier", resolved)
        if async_op:
            return handle
        handle.wait()
        return None

    def all_reduce(
        self, data: Any, group_info: Any, async_op: bool = False, op: str = "sum"
    ) -> Any:
        group = self._group("all_reduce", group_info)
        check_tensor(self, "all_reduce", data)
        self._check_reducible("all_reduce", data, op, group)
        self._announce(
            lambda: Call.on("all_reduce", data, op), group, 2 * _share(data, group)
        )
        # gloo reduces only the first elements of a tensor with gaps in memory, without an error.
        buffer = as_stored(data)
        by_gloo = gloo.is_used(group, data)
        keeps_nan = not (by_gloo and gloo.loses_nan(data, op))
        if (
            by_gloo and gloo.is_small(data) and not (group.size() <= 2 and keeps_nan)
        ):  # a ring of two is an exchange
            pieces = buffer.new_empty((group.size(), *buffer.shape))
            work = self._call(
                "all_reduce", group, lambda: gloo.all_gather(pieces, buffer, group)
            )
            return self._result(
                data,
                Handle(
                    work,
                    "all_reduce",
                    group,
                    lambda: gloo.reduce_pieces(pieces, op, data.detach()),
                ),
                async_op,
            )
        native = _native_op(op, data)
        if not keeps_nan:
            ordered = gloo.as_ordered(buffer, op)
            work = self._call(
                "all_reduce",
                group,
                lambda: dist.all_reduce(ordered, native, group, async_op=True),
            )
            handle = Handle(
                work,
                "all_reduce",
                group,
                lambda: _copy_into(data, gloo.from_ordered(ordered, data.dtype)),
            )
            return self._result(data, handle, async_op)
        work = self._call(
            "all_reduce",
            group,
            lambda: dist.all_reduce(buffer, native, group, async_op=True),
        )
        finish = (
            None
            if buffer.data_ptr() == data.data_ptr()
            else lambda: _copy_into(data, buffer)
        )
        return self._result(data, Handle(work, "all_reduce", group, finish), async_op)

    def all_gather_into_tensor(
        self, data: Any, group_info: Any, async_op: bool = False
    ) -> Any:
        group = self._group("all_gather_into_tensor", group_info)
        check_tensor(self, "all_gather_into_tensor", data)
        received = data.nbytes * (group.size() - 1)
        self._announce(lambda: Call.on("all_gather_into_tensor", data), group, received)
        source = as_stored(data)
        source = source if source.dim() else source.view(1)
        output = source.new_empty((group.size() * source.shape[0], *source.shape[1:]))
        # What is compared must be waited for in steps, which gloo's point-to-point communication does not stand.
        gather = (
            gloo.all_gather
            if gloo.is_used(group, data) and not order.last(group)[1]
            else _native_all_gather
        )
        work = self._call(
            "all_gather_into_tensor",
            group,
            lambda: gather(
                gloo.carried(output, group), gloo.carried(source, group), group
            ),
        )
        return self._result(
            output, Handle(work, "all_gather_into_tensor", group), async_op
        )

    def reduce_scatter_tensor(
        self, data: Any, group_info: Any, async_op: bool = False, op: str = "sum"
    ) -> Any:
        call = "reduce_scatter_tensor"
        group = self._group(call, group_info)
        check_tensor(self, call, data)
        self._check_reducible(call, data, op, group)
        size = group.size()
        if data.dim() == 0 or data.shape[0] % size:
            raise coded(
                ValueError,
                "HP123",
                f"{call}: dim 0 of shape {tuple(data.shape)} is not divisible by the group's {size} ranks",
            )
        self._announce(lambda: Call.on(call, data, op), group, _share(data, group))
        source = as_stored(data)
        output = source.new_empty((data.shape[0] // size, *data.shape[1:]))
        if not gloo.is_used(group, data):
            work = self._call(
                call,
                group,
                lambda: dist.reduce_scatter_single(
                    output, source, _native_op(op, data), group, async_op=True
                ),
            )
            return self._result(output, Handle(work, call, group), async_op)
        pieces = source.new_empty((size, *output.shape))
        work = self._call(
            call,
            group,
            lambda: dist.all_to_all_single(pieces, source, group=group, async_op=True),
        )
        return self._result(
            output,
            Handle(work, call, group, lambda: gloo.reduce_pieces(pieces, op, output)),
            async_op,
        )

    def take_rows(
        self, length: int, dtype: Any, group: Any, *, is_outgoing: bool = False
    ) -> Rows:
        # Few programs need it, and importing the platform is to stay light.
        from hyper_parallel.platform.torch import rows as rows_of

        call = "take_rows"
        resolved = self._group(call, group)
        device = self.device()
        if not rows_of.is_agreed(resolved):
            agree = functools.partial(
                rows_of.agree, resolved, device, timeout_of(resolved)
            )
            with waiting_in(call, resolved):
                self._call(call, resolved, agree)
        return rows_of.take_rows(
            length, dtype, device, resolved, is_outgoing=is_outgoing
        )

    def gather_tensors(
        self,
        outputs: Sequence[Any],
        sources: Sequence[Any],
        group: Any,
        number: int = 0,
        rows: Rows | None = None,
    ) -> Any:
        from hyper_parallel.platform.rows import join_gather

        call = "all_gather_into_tensor"
        resolved = self._group(call, group)
        outputs, sources = join_gather(rows, outputs, sources)
        shared = _as_shared(rows)
        own = sum(source.nbytes for source in sources) + (
            shared.nbytes if shared else 0
        )
        received = own * (resolved.size() - 1)
        describe = functools.partial(_describe_call, call, sources, shared, number)
        self._announce(describe, resolved, received)
        is_compared = order.last(resolved)[1]  # as in all_gather_into_tensor
        is_direct = (
            not is_compared and bool(sources) and gloo.is_used(resolved, sources[0])
        )

        def start() -> list[Any]:
            works = [
                gloo.all_gather(output, source, resolved, number)
                if is_direct
                else _native_all_gather(output, source, resolved)
                for output, source in zip(outputs, sources, strict=True)
            ]
            return works if shared is None else [*works, shared.start()]

        works = gloo.SeveralWorks(self._call(call, resolved, start), is_direct)
        return Handle(works, call, resolved)

    def reduce_scatter_tensors(
        self,
        outputs: Sequence[Any],
        sources: Sequence[Any],
        group: Any,
        number: int = 0,
        rows: Rows | None = None,
    ) -> Any:
        from hyper_parallel.platform.rows import join_reduction

        call = "reduce_scatter_tensor"
        resolved = self._group(call, group)
        sources = join_reduction(rows, sources)
        shared = _as_shared(rows)
        received = sum(_share(source, resolved) for source in sources)
        if shared is not None:
            received += shared.nbytes * (resolved.size() - 1)
        describe = functools.partial(_describe_call, call, sources, shared, number)
        self._announce(describe, resolved, received)
        is_compared = order.last(resolved)[1]
        is_gloo = bool(sources) and gloo.is_used(resolved, sources[0])

        def start() -> list[tuple[Any, Callable[[], None]]]:
            started = [
                gloo.reduce_scatter(output, source, resolved, number, is_compared)
                if is_gloo
                else _native_reduce_scatter(output, source, resolved)
                for output, source in zip(outputs, sources, strict=False)
            ]
            if shared is not None:
                add = functools.partial(shared.sum_into, outputs[-1])
                started.append((shared.start(), add))
            return started

        started = self._call(call, resolved, start)
        works = gloo.SeveralWorks([work for work, _ in started], not is_compared)

        def finish() -> None:
            for _, add in started:
                add()

        return Handle(works, call, resolved, finish)

    def all_to_all_single(
        self,
        input_tensor: Any,
        output_shape: Sequence[int],
        group: Any,
        async_op: bool = False,
    ) -> Any:
        call = "all_to_all_single"
        resolved = self._group(call, group)
        check_tensor(self, call, input_tensor)
        size = resolved.size()
        shape = tuple(output_shape)
        if (
            input_tensor.dim() == 0
            or not shape
            or input_tensor.shape[0] % size
            or shape[0] % size
        ):
            raise coded(
                ValueError,
                "HP123",
                f"{call}: dim 0 of the input {tuple(input_tensor.shape)} and of the output {shape} must be "
                f"divisible by the group's {size} ranks",
            )
        if math.prod(shape) != input_tensor.numel():
            raise coded(
                ValueError,
                "HP123",
                f"{call}: output_shape {shape} does not hold the input's {input_tensor.numel()} elements",
            )
        output, handle = self._exchange(call, input_tensor, shape, None, None, resolved)
        if async_op:
            return output, handle
        handle.wait()
        return output, None

    def broadcast(self, data: Any, src: int, group: Any, async_op: bool = False) -> Any:
        resolved = self._group("broadcast", group)
        check_tensor(self, "broadcast", data)
        self._check_member("broadcast", "src", src, resolved)
        received = 0 if src == self.get_rank() else data.nbytes
        self._announce(
            lambda: Call.on("broadcast", data, f"src {src}"), resolved, received
        )
        buffer = as_stored(data)
        work = self._call(
            "broadcast",
            resolved,
            lambda: dist.broadcast(
                gloo.carried(buffer, resolved), src, resolved, async_op=True
            ),
        )
        finish = (
            None
            if buffer.data_ptr() == data.data_ptr()
            else lambda: _copy_into(data, buffer)
        )
        return self._result(data, Handle(work, "broadcast", resolved, finish), async_op)

    def isend(
        self, tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0
    ) -> Any:
        resolved = self._group("isend", group)
        check_tensor(self, "isend", tensor)
        self._check_peer("isend", "dst", dst, resolved)
        source = as_stored(tensor)
        call = f"isend to rank {dst}"
        self._tell("isend", (self.get_rank(), dst), 0)
        work = self._call(
            call,
            resolved,
            lambda: dist.isend(gloo.carried(source, resolved), dst, resolved, tag),
        )
        return Handle(work, call, resolved, peer=dst)

    def irecv(
        self, tensor: Any, src: int | None = None, group: Any = None, tag: int = 0
    ) -> Any:
        resolved = self._group("irecv", group)
        check_tensor(self, "irecv", tensor)
        if src is not None:
            self._check_peer("irecv", "src", src, resolved)
        buffer = as_stored(tensor)
        call = f"irecv from rank {src}" if src is not None else "irecv from any rank"
        self._tell("irecv", (self.get_rank(), src), tensor.nbytes)
        work = self._call(
            call,
            resolved,
            lambda: dist.irecv(gloo.carried(buffer, resolved), src, resolved, tag),
        )
        finish = (
            None
            if buffer.data_ptr() == tensor.data_ptr()
            else lambda: _copy_into(tensor, buffer)
        )
        return Handle(work, call, resolved, finish, peer=src)

    def connect_messages(self, group: Any) -> Messages:
        from hyper_parallel.platform.messages import BackendMessages
        from hyper_parallel.platform.torch import messages

        call = "connect_messages"
        resolved = self._group(call, group)
        timeout = timeout_of(resolved)
        if not messages.is_agreed(resolved):
            agree = functools.partial(messages.agree, resolved, self.device(), timeout)
            with waiting_in(call, resolved):
                self._call(call, resolved, agree)
        shared = messages.shared_messages(resolved, timeout, self._tell)
        return BackendMessages(self, resolved) if shared is None else shared

    def send_object_list(
        self, obj_list: list[Any], dst: int | None = None, group: Any = None
    ) -> None:
        resolved = self._group("send_object_list", group)
        self._check_peer("send_object_list", "dst", dst, resolved)
        with waiting_in("send_object_list", resolved):
            self._call(
                "send_object_list",
                resolved,
                lambda: dist.send_object_list(obj_list, dst, resolved),
                dst,
            )

    def recv_object_list(
        self, obj_list: list[Any], src: int | None = None, group: Any = None
    ) -> int:
        resolved = self._group("recv_object_list", group)
        if src is not None:
            self._check_peer("recv_object_list", "src", src, resolved)
        with waiting_in("recv_object_list", resolved):
            return self._call(
                "recv_object_list",
                resolved,
                lambda: dist.recv_object_list(obj_list, src, resolved),
                src,
            )

    def all_gather_object(
        self, object_list: list[Any], obj: Any, group: Any = None
    ) -> None:
        resolved = self._group("all_gather_object", group)
        if len(object_list) != resolved.size():
            raise coded(
                ValueError,
                "HP124",
                f"all_gather_object: object_list needs one slot for each of the {resolved.size()} ranks, got "
                f"{len(object_list)}",
            )
        self._announce(lambda: Call("all_gather_object"), resolved)
        if order.last(resolved)[
            1
        ]:  # the meeting itself is not waited for in steps, so all come together before
            work = self._call(
                "all_gather_object",
                resolved,
                lambda: dist.barrier(resolved, async_op=True),
            )
            Handle(work, "all_gather_object", resolved).wait()
        with waiting_in("all_gather_object", resolved):
            self._call(
                "all_gather_object",
                resolved,
                lambda: dist.all_gather_object(object_list, obj, resolved),
            )

    def exchange(
        self,
        call: str,
        data: Any,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        group: Any,
    ) -> tuple[Any, Any]:
        resolved = self._group(call, group)
        shape = tuple(data.shape)
        if output_splits is not None:
            shape = (sum(output_splits), *shape[1:])
        return self._exchange(call, data, shape, output_splits, input_splits, resolved)

    def reduce_pieces(self, received: Any, shape: Sequence[int], op: str) -> Any:
        return gloo.reduce_pieces(received.view(tuple(shape)), op)

    def _exchange(
        self,
        call: str,
        source: torch.Tensor,
        shape: Sequence[int],
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, Handle]:
        """Starts an all-to-all along dim 0; returns the output and its handle."""
        if output_splits is None or input_splits is None:
            self._announce(
                lambda: Call.on(call, source, f"to {tuple(shape)}"),
                group,
                _share(source, group),
            )
        else:  # the sizes along dim 0 may differ, but must fit crosswise
            row = math.prod(source.shape[1:]) * source.element_size()
            others = sum(output_splits) - output_splits[group.rank()]
            facts = (source.dtype, *source.shape[1:])
            sends, receives = tuple(input_splits), tuple(output_splits)
            self._announce(
                lambda: Call(call, facts, sends, receives), group, others * row
            )
        source = as_stored(source)
        output = source.new_empty(tuple(shape))
        work = self._call(
            call,
            group,
            lambda: dist.all_to_all_single(
                gloo.carried(output, group),
                gloo.carried(source, group),
                output_splits and list(output_splits),
                input_splits and list(input_splits),
                group=group,
                async_op=True,
            ),
        )
        return output, Handle(work, call, group)

    def _swap_with(
        self, tensor: torch.Tensor, peer: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        source = as_stored(tensor)
        output = torch.empty_like(source)
        call = f"p2p_exchange with rank {peer}"
        self._tell("p2p_exchange", (self.get_rank(), peer), source.nbytes)
        ops = [
            dist.P2POp(dist.isend, source, peer, group),
            dist.P2POp(dist.irecv, output, peer, group),
        ]
        works = self._call(call, group, lambda: dist.batch_isend_irecv(ops), peer)
        for work in works:
            Handle(work, call, group, peer=peer).wait()
        return output

    def _announce(
        self, describe: Callable[[], Call], group: dist.ProcessGroup, nbytes: int = 0
    ) -> None:
        """Counts, compares the ranks' calls if that was asked for, and tells the listeners; else costs next to "
        "nothing."""
        number = order.begin(group)
        # The more thorough check tells all ranks together, and would wait for one that the other check had told.
        is_compared = (
            number <= self._compared_first
            and not self._checks_collectives
            and order.is_comparable(group)
        )
        if not is_compared and not self._checks_collectives and not self._listeners:
            return
        call = describe()
        if is_compared:
            self._compare(call, group)
        if self._checks_collectives:
            # Rarely asked for, and importing the platform is to stay light.
            from hyper_parallel.platform.torch.agreement import require_agreement

            self._call(call.name, group, lambda: require_agreement(call, group))
        self._tell(call.name, dist.get_process_group_ranks(group), nbytes)

    def _compare(self, call: Call, group: dist.ProcessGroup) -> None:
        seconds = timeout_of(group).total_seconds()
        seeks = self._seeks_circles
        with waiting_in(call.name, group):
            self._call(
                call.name,
                group,
                lambda: order.compare(group, call, seconds, seeks_circles=seeks),
            )

    def _tell(self, name: str, ranks: Sequence[int | None], nbytes: int) -> None:
        if not self._listeners:
            return
        members = tuple(rank for rank in ranks if rank is not None)
        traffic = Traffic(
            name, members, nbytes, backward=torch._C._current_graph_task_id() != -1
        )
        for listener in list(self._listeners):
            listener(traffic)

    def _call(
        self,
        call: str,
        group: dist.ProcessGroup,
        start: Callable[[], Any],
        peer: int | None = None,
    ) -> Any:
        try:
            return start()
        except CommunicationError:
            raise
        except BACKEND_ERRORS as error:
            raise explain(
                error,
                call,
                group,
                peer,
                0 if peer is not None else order.last(group)[0],
            ) from error

    def _result(self, tensor: torch.Tensor, handle: Handle, async_op: bool) -> Any:
        if async_op:
            return tensor, handle
        handle.wait()
        return tensor

    def _check_reducible(
        self, call: str, data: torch.Tensor, op: str, group: dist.ProcessGroup
    ) -> None:
        check_reduction(self, call, data, op)
        if gloo.is_used(group, data) and data.dtype not in gloo.DTYPES:
            raise coded(
                ValueError,
                "HP121",
                f"{call}: gloo cannot reduce {data.dtype}; cast to one of {sorted(map(str, gloo.DTYPES))}",
            )


def as_stored(data: torch.Tensor) -> torch.Tensor:
    """The tensor without gaps in memory and without a sign or a conjugation that is only noted: backends see memory."""
    return data.detach().resolve_conj().resolve_neg().contiguous()


def _native_op(op: str, data: torch.Tensor) -> Any:
    """The backend's reduction; for bools a sum is "any" and a product "all", as in torch."""
    return _REDUCE_OP[
        {"sum": "max", "prod": "min"}.get(op, op) if data.dtype is torch.bool else op
    ]


def _copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def _native_all_gather(
    output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup
) -> Any:
    return dist.all_gather_single(output, source, group, async_op=True)


def _native_reduce_scatter(
    output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup
) -> tuple[Any, Callable[[], None]]:
    """Untested on hardware."""
    work = dist.reduce_scatter_single(output, source, group=group, async_op=True)
    return work, lambda: None


def _as_shared(rows: Rows | None) -> SharedRows | None:
    """Rows that are in memory of several ranks."""
    return cast("SharedRows", rows) if rows is not None and rows.is_shared else None


def _describe_call(
    name: str, tensors: Sequence[torch.Tensor], rows: SharedRows | None, number: int
) -> Call:
    sizes = tuple(tensor.numel() for tensor in tensors)
    dtypes = [tensor.dtype for tensor in tensors]
    if rows is not None:
        sizes += (rows.own.numel(),)
        dtypes.append(rows.own.dtype)
    dtype = str(dtypes[0]).removeprefix("torch.")
    return Call(name, (dtype, sizes, f"number {number}"))


def _share(data: torch.Tensor, group: dist.ProcessGroup) -> int:
    """What a rank receives when everyone sends each other one of as many pieces."""
    return -(-data.nbytes // group.size()) * (group.size() - 1)
