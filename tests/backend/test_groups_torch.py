# SPDX-License-Identifier: Apache-2.0
"""Groups that torch itself destroys, which MindSpore cannot on a CPU, and batches in one launch."""

import pytest
import torch
from backend.test_groups import total

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import P2POp
from hyper_parallel.platform.torch import p2p
from hyper_parallel.testing import on_ranks


@on_ranks(2)
def test_a_group_that_was_destroyed_behind_our_back_is_made_again():
    platform = get_platform()
    group = platform.create_group([0, 1])
    torch.distributed.destroy_process_group(group)
    assert platform.get_created_group([0, 1]) is None
    assert total(platform, platform.create_group([0, 1])) == 3


@on_ranks(2)
def test_a_batch_in_one_launch():
    """As on NCCL; gloo accepts it too."""
    platform = get_platform()
    rank = platform.get_rank()
    buffer = torch.zeros(2)
    told = []
    with platform.listen_to_collectives(told.append):
        works = p2p.start_coalesced(
            platform,
            [
                P2POp("recv", buffer, 1 - rank),
                P2POp("send", torch.full((2,), float(rank)), 1 - rank),
            ],
        )
    for work in works:
        work.wait()
    assert buffer.tolist() == [1.0 - rank] * 2
    assert [(t.collective, t.nbytes) for t in told] == [("irecv", 8), ("isend", 0)]
    with pytest.raises(ValueError, match="is not contiguous"):
        p2p.start_coalesced(platform, [P2POp("send", torch.ones(2, 2).T, 1 - rank)])
