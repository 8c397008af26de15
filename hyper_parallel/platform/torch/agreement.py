# SPDX-License-Identifier: Apache-2.0
"""Compares what the ranks are about to do, before a collective with data that does not fit together ends a process.

One more exchange of small objects for every collective, so it is off unless asked for (``checked_collectives``).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hyper_parallel.platform.agreement import Call, check_agreement


def require_agreement(call: Call, group: dist.ProcessGroup) -> None:
    """A ValueError on every rank of the group if their calls do not fit together."""
    ranks = dist.get_process_group_ranks(group)
    calls: list[Any] = [None] * len(ranks)
    dist.all_gather_object(calls, call, group)
    check_agreement(calls, ranks, call.name)
