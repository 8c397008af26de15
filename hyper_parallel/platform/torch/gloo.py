# SPDX-License-Identifier: Apache-2.0
"""The faster exact ways on gloo, whose own all-gather, all-reduce and reduce-scatter go round a ring.

A ring costs as many turns as there are ranks; an exchange in which everyone talks to everyone costs one. Measured on 4
ranks with ``benchmarks/collectives.py``: reduce-scatter by an exchange and a local reduction is 2 to 4 times as fast,
a small all-gather and all-reduce 2 to 3 times, a large all-gather about 1.7 times. Pieces are reduced in the order
of the ranks, so all ranks get the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# Below this many bytes a rank, sending copies in one exchange beats the ring, also for an all-reduce.
SMALL = 1 << 16

# Messages of a collective must not be taken for those of the user's isend and irecv in the same group.
TAG = 0x6870

# What gloo can carry; data of any other dtype travels as bytes, and cannot be reduced.
DTYPES = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool, torch.complex64, torch.complex128,
}  # fmt: skip

_carries: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()


def is_used(group: dist.ProcessGroup, data: torch.Tensor) -> bool:
    """Whether gloo carries this tensor in this group."""
    carries = _carries.get(group)
    if carries is None:
        carries = _carries[group] = "gloo" in dist.get_backend_config(group)
    return carries and data.device.type == "cpu"


def carried(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensor itself, or, for a dtype that gloo does not know, its bytes, in as many rows."""
    if tensor.dtype in DTYPES or not is_used(group, tensor):
        return tensor
    return (tensor if tensor.dim() > 1 else tensor.view(tensor.numel(), 1)).view(
        torch.uint8
    )


def all_gather(
    output: torch.Tensor,
    source: torch.Tensor,
    group: dist.ProcessGroup,
    number: int = 0,
) -> Any:
    """Starts an all-gather of ``source`` into ``output``, joined along dim 0; returns what to wait for.

    ``number``: large messages are not taken for those of a call with another number.
    """
    count, rank = group.size(), group.rank()
    if is_small(source):
        copies = source.expand(count, *source.shape).contiguous().view(output.shape)
        return dist.all_to_all_single(output, copies, group=group, async_op=True)
    pieces = output.view(count, *source.shape)
    if pieces[rank].data_ptr() != source.data_ptr():
        pieces[rank].copy_(source)
    works = []
    for distance in range(1, count):
        to, origin = (rank + distance) % count, (rank - distance) % count
        tag = TAG + number
        works.append(dist.isend(source, group=group, tag=tag, group_dst=to))
        works.append(dist.irecv(pieces[origin], group=group, tag=tag, group_src=origin))
    return SeveralWorks(works)


def reduce_scatter(
    output: torch.Tensor,
    source: torch.Tensor,
    group: dist.ProcessGroup,
    number: int = 0,
    in_one_exchange: bool = False,
) -> tuple[Any, Callable[[], None]]:
    """Starts the sum of every rank's ``source``, of which ``output`` gets this rank's piece.

    Returns what to wait for, and what completes the sum then: pieces are added in the order of the ranks.
    ``number``: as in ``all_gather``. ``in_one_exchange``: without point-to-point messages, whatever the size.
    """
    count, rank = group.size(), group.rank()
    pieces = source.view(count, *output.shape)
    if in_one_exchange or is_small(source):
        arrived = torch.empty_like(pieces)
        work = dist.all_to_all_single(arrived, pieces, group=group, async_op=True)

        def add_arrived() -> None:
            reduce_pieces(arrived, "sum", output)

        return work, add_arrived
    received = [
        pieces[rank] if origin == rank else torch.empty_like(output)
        for origin in range(count)
    ]
    works = []
    for distance in range(1, count):
        to, origin = (rank + distance) % count, (rank - distance) % count
        tag = TAG + number
        works.append(dist.isend(pieces[to], group=group, tag=tag, group_dst=to))
        works.append(
            dist.irecv(received[origin], group=group, tag=tag, group_src=origin)
        )

    def add() -> None:
        torch.add(received[0], received[1], out=output)
        for piece in received[2:]:
            output.add_(piece)

    return SeveralWorks(works), add


def reduce_pieces(
    pieces: torch.Tensor, op: str, output: torch.Tensor | None = None
) -> torch.Tensor:
    """Reduces over dim 0 of stacked pieces, in rank order, in the dtype of the pieces; outside the graph."""
    with torch.no_grad():
        if op in ("sum", "prod"):
            dtype = pieces.dtype  # else small integers are widened
            return (torch.sum if op == "sum" else torch.prod)(
                pieces, 0, dtype=dtype, out=output
            )
        reduce: Any = {"avg": torch.mean, "max": torch.amax, "min": torch.amin}[op]
        return reduce(pieces, 0, out=output)


def loses_nan(data: torch.Tensor, op: str) -> bool:
    """Whether gloo's own reduction may drop a nan: it compares, and a comparison with a nan is false."""
    return op in ("max", "min") and data.is_floating_point()


def as_ordered(data: torch.Tensor, op: str) -> torch.Tensor:
    """Floating-point numbers as integers of the same order, with nans beyond all others: gloo compares those right."""
    wide = data if data.dtype in (torch.float32, torch.float64) else data.float()
    integers = _INTEGERS[wide.dtype]
    limits = torch.iinfo(integers)
    bits = wide.view(integers)
    ordered = torch.where(bits < 0, bits ^ limits.max, bits)
    return ordered.masked_fill_(wide.isnan(), limits.max if op == "max" else limits.min)


def from_ordered(ordered: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of which ``as_ordered`` made these integers."""
    limits = torch.iinfo(ordered.dtype)
    bits = torch.where(ordered < 0, ordered ^ limits.max, ordered)
    return bits.view(_FLOATS[ordered.dtype]).to(dtype)


_FLOATS = {torch.int32: torch.float32, torch.int64: torch.float64}
_INTEGERS = {number: integer for integer, number in _FLOATS.items()}


def is_small(data: torch.Tensor) -> bool:
    """Whether turns cost more than bytes."""
    return data.nbytes <= SMALL


class SeveralWorks:
    """Several operations under way, as one; ``has_messages``: some are point-to-point."""

    def __init__(self, works: Sequence[Any], has_messages: bool = True) -> None:
        self.works, self.has_messages = works, has_messages

    def wait(self, timeout: timedelta) -> None:
        """Waits for all of them, which have so long together: a peer that is late in one does not get more in the next.

        An operation whose wait has timed out cannot go on.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        for work in self.works:
            left = max(
                deadline - time.monotonic(), 0.001
            )  # no time at all would mean as long as the group has
            work.wait(timedelta(seconds=left))

    def is_completed(self) -> bool:
        """Whether all of them have ended."""
        return all(work.is_completed() for work in self.works)
