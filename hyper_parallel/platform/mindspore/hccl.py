# SPDX-License-Identifier: Apache-2.0
"""The collectives of MindSpore on Ascend, started without waiting. Untested on hardware.

Buffers are contiguous tensors of their own; groups go by name. Each function returns what to wait for, or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore.mint.distributed as dist

from hyper_parallel.platform.error_codes import coded


def barrier(group: str) -> Any:
    """Every rank comes."""
    return dist.barrier(group=group, async_op=True)


def all_reduce(buffer: Any, op: str, group: str) -> Any:
    """The reduction, in place."""
    return dist.all_reduce(buffer, op=op, group=group, async_op=True)


def all_gather(output: Any, source: Any, group: str) -> Any:
    """Every rank's tensor, joined along dim 0."""
    return dist.all_gather_into_tensor(output, source, group=group, async_op=True)


def reduce_scatter(output: Any, source: Any, op: str, group: str) -> Any:
    """This rank's piece of the reduction."""
    return dist.reduce_scatter_tensor(output, source, op=op, group=group, async_op=True)


def exchange(
    output: Any,
    source: Any,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    group: str,
) -> Any:
    """Piece i of dim 0 to rank i."""
    sizes = (output_splits and list(output_splits), input_splits and list(input_splits))
    return dist.all_to_all_single(output, source, *sizes, group=group, async_op=True)


def broadcast(buffer: Any, src: int, group: str) -> Any:
    """One rank's tensor, in place."""
    return dist.broadcast(buffer, src, group=group, async_op=True)


def send(tensor: Any, dst: int, group: str) -> Any:
    """To a global rank."""
    return dist.isend(tensor, dst, group=group)


def receive(buffer: Any, src: int | None, group: str) -> Any:
    """From a global rank."""
    return dist.irecv(buffer, _named("irecv", src), group=group)


def exchange_with(output: Any, source: Any, peer: int, group: str) -> None:
    """A tensor for another between two ranks."""
    operations = [
        dist.P2POp("isend", source, peer, group),
        dist.P2POp("irecv", output, peer, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def send_objects(objects: list[Any], dst: int, group: str) -> None:
    """Picklable objects to a global rank."""
    dist.send_object_list(objects, dst, group=group)


def receive_objects(objects: list[Any], src: int | None, group: str) -> int:
    """Picklable objects from a global rank, which is returned."""
    return int(
        dist.recv_object_list(objects, _named("recv_object_list", src), group=group)
    )


def gather_objects(objects: list[Any], own: Any, group: str) -> None:
    """Every rank's object."""
    dist.all_gather_object(objects, own, group=group)


def _named(call: str, src: int | None) -> int:
    if src is None:
        raise coded(
            ValueError,
            "HP122",
            f"{call}: hccl cannot receive from whoever sends; pass src=",
        )
    return src
