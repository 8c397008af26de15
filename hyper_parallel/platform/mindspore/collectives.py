# SPDX-License-Identifier: Apache-2.0
"""Plain collectives on MindSpore: native on Ascend, and on a CPU by way of the job's store (`store_collectives`)."""

from __future__ import annotations

import itertools
import math
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mindspore
import numpy as np
from mindspore import mint

from hyper_parallel.platform.agreement import Call, agree, check_agreement, dtype_name
from hyper_parallel.platform.caller import users_line
from hyper_parallel.platform.checks import check_reduction, check_tensor
from hyper_parallel.platform.differentiable import Differentiable
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.messages import BackendMessages, Messages
from hyper_parallel.platform.mindspore import hccl
from hyper_parallel.platform.mindspore.groups import Groups
from hyper_parallel.platform.mindspore.store_collectives import (
    Group,
    Job,
    Meeting,
    Post,
    issued,
)
from hyper_parallel.platform.order import parted
from hyper_parallel.platform.platform import Traffic
from hyper_parallel.platform.rows import BufferRows, Rows, join_gather, join_reduction

# Letters of objects must not be taken for the user's tensors.
_OBJECTS = "objects"
_EXCHANGE = "exchange"


class Handle:
    """An operation under way: ``wait()`` returns when its tensor may be read, or raises a CommunicationError."""

    def __init__(
        self, is_ready: Callable[[], bool], finish: Callable[[], None]
    ) -> None:
        self._is_ready = is_ready
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> bool:
        """Waits and, the first time, finishes the result."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended; its result may still need ``wait()``."""
        return self._finish is None or self._is_ready()


class _Backward(threading.local):
    """How many backwards of our autograd functions are under way on this thread.

    Another thread's forward may communicate meanwhile.
    """

    depth = 0


class _Then:
    """A handle that does something more once its collective has finished."""

    def __init__(self, handle: Any, then: Callable[[], None]) -> None:
        self._handle, self._then = handle, then

    def wait(self) -> None:
        """Waits for the collective."""
        self._handle.wait()
        self._then()


class Collectives(Groups, Differentiable):
    """Communication outside the graph; ``Differentiable`` adds the one in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self._backward = _Backward()

    def barrier(
        self,
        group: Any = None,
        async_op: bool = False,
        device_ids: Any = None,  # noqa: ARG002
    ) -> Any:
        """Untested on hardware: by hccl."""
        resolved = self._group("barrier", group)
        self._announce(lambda: Call("barrier"), resolved)
        if self._is_native():
            handle = _native(hccl.barrier(resolved))
        else:
            handle = self._meet(
                Call("barrier"), resolved, [b""] * resolved.size(), lambda _: None
            )
        if async_op:
            return handle
        handle.wait()
        return None

    def all_reduce(
        self, data: Any, group_info: Any, async_op: bool = False, op: str = "sum"
    ) -> Any:
        """Untested on hardware: by hccl."""
        group = self._group("all_reduce", group_info)
        check_tensor(self, "all_reduce", data)
        self._check_reducible("all_reduce", data, op, group)
        call = Call.on("all_reduce", data, op)
        self._announce(lambda: call, group, 2 * _share(data, group))
        if self._is_native():
            buffer = data.contiguous()
            work = hccl.all_reduce(buffer, _reduction(op, data), group)
            return self._result(data, _native(work, self._into(data, buffer)), async_op)
        mine = self._read(data)
        handle = self._meet(
            call,
            group,
            [mine] * group.size(),
            lambda pieces: self._write(data, reduced(pieces, op, data)),
        )
        return self._result(data, handle, async_op)

    def all_gather_into_tensor(
        self, data: Any, group_info: Any, async_op: bool = False
    ) -> Any:
        """Untested on hardware: by hccl."""
        name = "all_gather_into_tensor"
        group = self._group(name, group_info)
        check_tensor(self, name, data)
        call = Call.on(name, data)
        self._announce(lambda: call, group, data.nbytes * (group.size() - 1))
        shape = tuple(data.shape) or (1,)
        output = self._unset((group.size() * shape[0], *shape[1:]), data)
        if self._is_native():
            work = hccl.all_gather(output, data.contiguous().reshape(shape), group)
            return self._result(output, _native(work), async_op)
        mine = self._read(data)
        handle = self._meet(
            call,
            group,
            [mine] * group.size(),
            lambda pieces: self._write(output, b"".join(pieces)),
        )
        return self._result(output, handle, async_op)

    def reduce_scatter_tensor(
        self, data: Any, group_info: Any, async_op: bool = False, op: str = "sum"
    ) -> Any:
        """Untested on hardware: by hccl."""
        name = "reduce_scatter_tensor"
        group = self._group(name, group_info)
        check_tensor(self, name, data)
        self._check_reducible(name, data, op, group)
        size = group.size()
        if data.ndim == 0 or data.shape[0] % size:
            raise coded(
                ValueError,
                "HP123",
                f"{name}: dim 0 of shape {tuple(data.shape)} is not divisible by the group's {size} ranks",
            )
        call = Call.on(name, data, op)
        self._announce(lambda: call, group, _share(data, group))
        output = self._unset((data.shape[0] // size, *data.shape[1:]), data)
        if self._is_native():
            work = hccl.reduce_scatter(
                output, data.contiguous(), _reduction(op, data), group
            )
            return self._result(output, _native(work), async_op)
        sent = _cut(self._read(data), [1] * size)
        handle = self._meet(
            call,
            group,
            sent,
            lambda pieces: self._write(output, reduced(pieces, op, output)),
        )
        return self._result(output, handle, async_op)

    def take_rows(
        self, length: int, dtype: Any, group: Any, *, is_outgoing: bool = False
    ) -> Rows:
        resolved = self._group("take_rows", group)
        buffer = self.empty((resolved.size(), length), dtype, self.device())
        return BufferRows(buffer, buffer if is_outgoing else buffer[resolved.rank()])

    def gather_tensors(
        self,
        outputs: Sequence[Any],
        sources: Sequence[Any],
        group: Any,
        number: int = 0,  # noqa: ARG002 - ranks meet by name
        rows: Rows | None = None,
    ) -> Any:
        outputs, sources = join_gather(rows, outputs, sources)
        packed = self.cat(sources)
        joined, handle = self.all_gather_into_tensor(packed, group, async_op=True)

        def unpack() -> None:
            rows = joined.reshape(-1, packed.shape[0])
            start = 0
            for output in outputs:
                stop = start + output.shape[0] // rows.shape[0]
                self.copy_into(output, rows[:, start:stop].reshape(-1))
                start = stop

        return _Then(handle, unpack)

    def reduce_scatter_tensors(
        self,
        outputs: Sequence[Any],
        sources: Sequence[Any],
        group: Any,
        number: int = 0,  # noqa: ARG002 - ranks meet by name
        rows: Rows | None = None,
    ) -> Any:
        sources = join_reduction(rows, sources)
        ranks = self._group("reduce_scatter_tensor", group).size()
        packed = self.cat([source.reshape(ranks, -1) for source in sources], 1)
        reduced, handle = self.reduce_scatter_tensor(
            packed.reshape(-1), group, async_op=True
        )

        def unpack() -> None:
            start = 0
            for output in outputs:
                stop = start + output.shape[0]
                self.copy_into(output, reduced[start:stop])
                start = stop

        return _Then(handle, unpack)

    def all_to_all_single(
        self,
        input_tensor: Any,
        output_shape: Sequence[int],
        group: Any,
        async_op: bool = False,
    ) -> Any:
        """Untested on hardware: by hccl."""
        call = "all_to_all_single"
        resolved = self._group(call, group)
        check_tensor(self, call, input_tensor)
        size = resolved.size()
        shape = tuple(output_shape)
        if (
            input_tensor.ndim == 0
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
        if math.prod(shape) != input_tensor.size:
            raise coded(
                ValueError,
                "HP123",
                f"{call}: output_shape {shape} does not hold the input's {input_tensor.size} elements",
            )
        output, handle = self._exchange(call, input_tensor, shape, None, None, resolved)
        if async_op:
            return output, handle
        handle.wait()
        return output, None

    def broadcast(self, data: Any, src: int, group: Any, async_op: bool = False) -> Any:
        """Untested on hardware: by hccl."""
        resolved = self._group("broadcast", group)
        check_tensor(self, "broadcast", data)
        self._check_member("broadcast", "src", src, resolved)
        is_source = src == self.get_rank()
        call = Call.on("broadcast", data, f"src {src}")
        self._announce(lambda: call, resolved, 0 if is_source else data.nbytes)
        if self._is_native():
            buffer = data.contiguous()
            return self._result(
                data,
                _native(
                    hccl.broadcast(buffer, src, resolved), self._into(data, buffer)
                ),
                async_op,
            )
        mine = self._read(data) if is_source else b""
        origin = resolved.ranks.index(src)

        def finish(pieces: Sequence[bytes]) -> None:
            if not is_source:
                self._write(data, pieces[origin])

        return self._result(
            data, self._meet(call, resolved, [mine] * resolved.size(), finish), async_op
        )

    def connect_messages(self, group: Any) -> Messages:
        return BackendMessages(self, self._group("connect_messages", group))

    def isend(
        self, tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0
    ) -> Any:
        """Untested on hardware: by hccl, which knows no tags."""
        resolved = self._group("isend", group)
        check_tensor(self, "isend", tensor)
        peer = self._check_peer("isend", "dst", dst, resolved)
        self._tell("isend", (self.get_rank(), peer), 0)
        if self._is_native():
            return _native(hccl.send(tensor.contiguous(), peer, resolved))
        self._post(resolved).send(peer, tag, _facts(tensor), self._read(tensor))
        return Handle(lambda: True, lambda: None)

    def irecv(
        self, tensor: Any, src: int | None = None, group: Any = None, tag: int = 0
    ) -> Any:
        """Untested on hardware: by hccl, which knows no tags and needs ``src``."""
        resolved = self._group("irecv", group)
        check_tensor(self, "irecv", tensor)
        peer = None if src is None else self._check_peer("irecv", "src", src, resolved)
        self._tell("irecv", (self.get_rank(), src), tensor.nbytes)
        if self._is_native():
            buffer = tensor.contiguous()
            return _native(
                hccl.receive(buffer, src, resolved), self._into(tensor, buffer)
            )
        post = self._post(resolved)
        call = f"irecv from rank {src}" if src is not None else "irecv from any rank"
        number = None if peer is None else post.claim(peer, tag)

        def finish() -> None:
            sender, facts, data = post.await_letter(call, peer, tag, number)
            if facts != _facts(tensor):
                raise coded(
                    ValueError,
                    "HP124",
                    f"{call}: rank {sender} sent {facts[1]} elements of {facts[0]}, but the tensor has "
                    f"{tensor.size} of {dtype_name(tensor)}",
                )
            self._write(tensor, data)

        return Handle(
            lambda: (
                peer is not None
                and number is not None
                and post.has_letter(peer, tag, number)
            ),
            finish,
        )

    def send_object_list(
        self, obj_list: list[Any], dst: int | None = None, group: Any = None
    ) -> None:
        """Untested on hardware: by hccl."""
        resolved = self._group("send_object_list", group)
        peer = self._check_peer("send_object_list", "dst", dst, resolved)
        if self._is_native():
            hccl.send_objects(obj_list, peer, resolved)
        else:
            self._post(resolved).send(peer, _OBJECTS, (), pickle.dumps(obj_list))

    def recv_object_list(
        self, obj_list: list[Any], src: int | None = None, group: Any = None
    ) -> int:
        """Untested on hardware: by hccl."""
        call = "recv_object_list"
        resolved = self._group(call, group)
        peer = None if src is None else self._check_peer(call, "src", src, resolved)
        if self._is_native():
            return hccl.receive_objects(obj_list, peer, resolved)
        post = self._post(resolved)
        number = None if peer is None else post.claim(peer, _OBJECTS)
        sender, _, data = post.await_letter(call, peer, _OBJECTS, number)
        found = pickle.loads(data)  # noqa: S301 - from a rank of our own job
        if len(found) != len(obj_list):
            raise coded(
                ValueError,
                "HP124",
                f"{call}: rank {sender} sent {len(found)} objects, but the list has {len(obj_list)} slots",
            )
        obj_list[:] = found
        return sender

    def all_gather_object(
        self, object_list: list[Any], obj: Any, group: Any = None
    ) -> None:
        """Untested on hardware: by hccl."""
        name = "all_gather_object"
        resolved = self._group(name, group)
        if len(object_list) != resolved.size():
            raise coded(
                ValueError,
                "HP124",
                f"{name}: object_list needs one slot for each of the {resolved.size()} ranks, got "
                f"{len(object_list)}",
            )
        self._announce(lambda: Call(name), resolved)
        if self._is_native():
            hccl.gather_objects(object_list, obj, resolved)
            return

        def finish(pieces: Sequence[bytes]) -> None:
            object_list[:] = [pickle.loads(piece) for piece in pieces]  # noqa: S301 - from ranks of our own job

        self._meet(
            Call(name), resolved, [pickle.dumps(obj)] * resolved.size(), finish
        ).wait()

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
        _, *piece = shape
        if self._is_native():
            reduce: Any = {
                "sum": mint.sum,
                "avg": mint.mean,
                "max": mint.amax,
                "min": mint.amin,
                "prod": mint.prod,
            }
            return reduce[op](received.reshape(tuple(shape)), 0)
        output = self._unset(tuple(piece), received)
        data, length = self._read(received), math.prod(piece) * received.itemsize
        if length:
            starts = range(0, len(data), length)
            pieces = [data[start : start + length] for start in starts]
            self._write(output, reduced(pieces, op, output))
        return output

    def reduction_gradient(
        self, op: str, grad: Any, data: Any, result: Any, group: Any
    ) -> Any:
        if op in ("sum", "avg") or dtype_name(grad) != "bfloat16":
            return super().reduction_gradient(op, grad, data, result, group)
        # Few operators have a kernel for bfloat16 on a CPU, and float32 holds its numbers.
        wide_grad, wide_data, wide_result = (
            x.to(mindspore.float32) for x in (grad, data, result)
        )
        wide = super().reduction_gradient(op, wide_grad, wide_data, wide_result, group)
        return wide.to(grad.dtype)

    def _exchange(
        self,
        name: str,
        source: Any,
        shape: Sequence[int],
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        group: Group,
    ) -> tuple[Any, Handle]:
        """Starts an all-to-all along dim 0; returns the output and its handle."""
        if output_splits is None or input_splits is None:
            call, received = (
                Call.on(name, source, f"to {tuple(shape)}"),
                _share(source, group),
            )
            input_splits = output_splits = None
        else:  # the sizes along dim 0 may differ, but must fit crosswise
            row = math.prod(source.shape[1:]) * source.itemsize
            received = (sum(output_splits) - output_splits[group.rank()]) * row
            facts = (dtype_name(source), *source.shape[1:])
            call = Call(name, facts, tuple(input_splits), tuple(output_splits))
        self._announce(lambda: call, group, received)
        output = self._unset(tuple(shape), source)
        if self._is_native():
            return output, _native(
                hccl.exchange(
                    output, source.contiguous(), output_splits, input_splits, group
                )
            )
        sent = _cut(self._read(source), input_splits or [1] * group.size())
        return output, self._meet(
            call, group, sent, lambda pieces: self._write(output, b"".join(pieces))
        )

    def _swap_with(self, tensor: Any, peer: int, group: Group) -> Any:
        name = f"p2p_exchange with rank {peer}"
        self._tell("p2p_exchange", (self.get_rank(), peer), tensor.nbytes)
        output = self._unset(tuple(tensor.shape), tensor)
        if self._is_native():
            hccl.exchange_with(output, tensor.contiguous(), peer, group)
            return output
        post = self._post(group)
        number = post.claim(peer, _EXCHANGE)
        ours = (*_facts(tensor), tuple(tensor.shape))
        post.send(peer, _EXCHANGE, ours, self._read(tensor))
        _, theirs, data = post.await_letter(name, peer, _EXCHANGE, number)
        if theirs != ours:
            raise coded(
                ValueError,
                "HP124",
                f"{name}: it has {theirs[0]} {theirs[2]}, this rank {ours[0]} {ours[2]}",
            )
        self._write(output, data)
        return output

    def _meet(
        self,
        call: Call,
        group: Group,
        pieces: Sequence[bytes],
        finish: Callable[[Sequence[bytes]], None],
    ) -> Handle:
        """Leaves this rank's pieces for the others; the handle finishes with what they have for this rank."""
        in_order = group.issued <= self._compared_first
        if in_order:
            call = replace(call, line=users_line())
        meeting = Meeting(self._joined(), group, call, pieces, in_order=in_order)
        return Handle(meeting.is_full, lambda: finish(meeting.pieces()))

    def _post(self, group: Group) -> Post:
        return Post(self._joined(), group)

    def _joined(self) -> Job:
        assert self._job is not None
        return self._job

    def _announce(
        self, describe: Callable[[], Call], group: Group, nbytes: int = 0
    ) -> None:
        """Counts, compares the ranks' calls if that was asked for, and tells the listeners; else costs next to "
        "nothing."""
        group.issued += 1
        in_order = group.issued <= self._compared_first
        if (
            self._checks_collectives or in_order
        ) and self._is_native():  # on a CPU every note is compared
            call = replace(describe(), line=users_line())
            calls: list[Any] = [None] * group.size()
            hccl.gather_objects(calls, call, group)
            if in_order and not agree(calls):
                told = dict(zip(group.ranks, map(issued, calls), strict=True))
                raise parted(self.get_rank(), group.issued, group.ranks, told)
            check_agreement(calls, group.ranks, call.name)
        if self._listeners:
            self._tell(describe().name, group.ranks, nbytes)

    def _tell(self, name: str, ranks: Sequence[int | None], nbytes: int) -> None:
        if not self._listeners:
            return
        members = tuple(rank for rank in ranks if rank is not None)
        traffic = Traffic(name, members, nbytes, backward=self._backward.depth > 0)
        for listener in list(self._listeners):
            listener(traffic)

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """The collectives inside belong to a backward, of which the framework itself does not tell."""
        self._backward.depth += 1
        try:
            yield
        finally:
            self._backward.depth -= 1

    def _result(self, tensor: Any, handle: Handle, async_op: bool) -> Any:
        if async_op:
            return tensor, handle
        handle.wait()
        return tensor

    def _into(self, data: Any, buffer: Any) -> Callable[[], None]:
        """Copies what came where it belongs, if it came elsewhere."""
        return (
            (lambda: None)
            if buffer.data_ptr() == data.data_ptr()
            else lambda: self.copy_into(data, buffer)
        )

    def _unset(self, shape: Sequence[int], like: Any) -> Any:
        if self._is_native():
            return self.empty(shape, like.dtype)
        return self.tensor_from_bytes(
            np.empty(math.prod(shape) * like.itemsize, np.uint8), like.dtype, shape
        )

    def _read(self, tensor: Any) -> bytes:
        """The elements, one after the other."""
        return bytes(self.tensor_memory(tensor).tobytes()) if tensor.size else b""

    def _write(self, tensor: Any, data: bytes) -> None:
        """Puts elements into the tensor's own memory, whatever view of it that is."""
        if tensor.size:
            memory = self.tensor_memory(tensor)
            memory[...] = np.frombuffer(data, memory.dtype).reshape(memory.shape)
            self.note_change(tensor)

    def _check_reducible(
        self,
        call: str,
        data: Any,
        op: str,
        group: Group,  # noqa: ARG002
    ) -> None:
        check_reduction(self, call, data, op)
        if dtype_name(data).startswith("float8"):
            raise coded(
                ValueError,
                "HP121",
                f"{call}: {dtype_name(data)} cannot be reduced; cast to float16, bfloat16 or float32",
            )


def _reduction(op: str, data: Any) -> str:
    """For bools a sum is "any" and a product "all", as in torch."""
    return (
        {"sum": "max", "prod": "min"}.get(op, op) if dtype_name(data) == "bool" else op
    )


def reduced(pieces: Sequence[bytes], op: str, like: Any) -> bytes:
    """The reduction of every rank's elements, in rank order, so that all ranks get the same bits."""
    if not like.size:
        return b""
    dtype = like.asnumpy().dtype
    wide = (
        np.float32 if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype
    )  # float16, bfloat16
    total = np.frombuffer(pieces[0], dtype).astype(wide)
    combine = _COMBINE[_reduction(op, like)]
    for piece in pieces[1:]:
        total = combine(total, np.frombuffer(piece, dtype).astype(wide))
    return bytes(
        (total / len(pieces) if op == "avg" else total).astype(dtype).tobytes()
    )


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "avg": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}


def _cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """The data in pieces whose sizes are as these."""
    unit = len(data) // (sum(sizes) or 1)
    ends = itertools.accumulate((size * unit for size in sizes), initial=0)
    return [data[start:stop] for start, stop in itertools.pairwise(ends)]


def _facts(tensor: Any) -> tuple[Any, ...]:
    return dtype_name(tensor), int(tensor.size)


def _native(work: Any, then: Callable[[], None] = lambda: None) -> Handle:
    def finish() -> None:
        if work is not None:
            work.wait()
        then()

    return Handle(lambda: work is None, finish)


def _share(data: Any, group: Group) -> int:
    """What a rank receives when everyone sends each other one of as many pieces."""
    return -(-int(data.nbytes) // group.size()) * (group.size() - 1)
