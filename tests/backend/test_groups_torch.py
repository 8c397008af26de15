# SPDX-License-Identifier: Apache-2.0
"""Groups that torch itself destroys; MindSpore cannot on a CPU."""

import torch
from backend.test_groups import total

from hyper_parallel.platform import get_platform
from hyper_parallel.testing import on_ranks


@on_ranks(2)
def test_a_group_that_was_destroyed_behind_our_back_is_made_again():
    platform = get_platform()
    group = platform.create_group([0, 1])
    torch.distributed.destroy_process_group(group)
    assert platform.get_created_group([0, 1]) is None
    assert total(platform, platform.create_group([0, 1])) == 3
