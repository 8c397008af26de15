# SPDX-License-Identifier: Apache-2.0
"""Batches of sends and receives on backends that need them in one launch: without it NCCL may deadlock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import P2POp
from hyper_parallel.platform.torch import gloo
from hyper_parallel.platform.torch.collectives import Collectives
from hyper_parallel.platform.torch.faults import Handle


def is_carried_by_gloo(platform: Collectives, ops: Sequence[P2POp]) -> bool:
    """Returns whether gloo carries all of these tensors, one by one."""
    return all(
        gloo.is_used(platform._group("batch_p2p", op.group), op.tensor) for op in ops
    )


def start_coalesced(platform: Collectives, ops: Sequence[P2POp]) -> list[Any]:
    """Starts all operations in one launch; returns as many handles as the backend has.

    Untested on hardware: NCCL and HCCL.
    """
    batch = []
    for op in ops:
        if not op.tensor.is_contiguous():
            raise coded(
                ValueError,
                "HP139",
                f"batch_p2p: the tensor of shape {tuple(op.tensor.shape)} for rank {op.peer} is not contiguous",
            )
        is_send = op.kind == "send"
        start = dist.isend if is_send else dist.irecv
        received = 0 if is_send else op.tensor.nbytes
        platform._tell(start.__name__, (platform.get_rank(), op.peer), received)
        group = platform._group("batch_p2p", op.group)
        batch.append(dist.P2POp(start, op.tensor, op.peer, group, op.tag))
    works = dist.batch_isend_irecv(batch)
    first = batch[0]
    return [Handle(w, "batch_p2p", first.group, peer=first.peer) for w in works]
