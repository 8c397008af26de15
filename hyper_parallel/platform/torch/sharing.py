# SPDX-License-Identifier: Apache-2.0
"""Agrees whether the ranks of a group share memory.

    channel = connect(group, device, timeout, "rows", Channel)      None on all ranks if they do not share

Sharing is agreed on in the job's store: all ranks are on one host and can open each other's memory, or none of them
shares. HYPER_PARALLEL_SHARE_MEMORY=0 on any rank turns it off.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.platform.shared_channel import Address, Peers
from hyper_parallel.platform.shared_files import find_host
from hyper_parallel.platform.torch import gloo, order

HYPER_PARALLEL_SHARE_MEMORY = "HYPER_PARALLEL_SHARE_MEMORY"

LOOK_SECONDS = 0.25  # between looks whether another process has ended or failed

_Peers = TypeVar("_Peers", bound=Peers)


def connect(
    group: dist.ProcessGroup,
    device: torch.device,
    timeout: timedelta,
    purpose: str,
    make: Callable[[int, int], _Peers],
) -> _Peers | None:
    """What ``make(index, ranks)`` makes, connected to all ranks of the group; or None on all of them."""
    if not gloo.is_used(group, torch.empty(0, device=device)) or group.size() == 1:
        return None
    exchange = functools.partial(_exchange, _store_of(group, purpose), group, timeout)
    peers = _try(group, make)
    offer = None if peers is None else list(peers.address(_find_namespaces()))
    offers = exchange("offers", offer)
    answers = exchange("answers", _open_all(peers, offers))
    return peers if all(answers) else None


def _try(group: dist.ProcessGroup, make: Callable[[int, int], _Peers]) -> _Peers | None:
    asked = os.environ.get(HYPER_PARALLEL_SHARE_MEMORY, "1")
    can_share = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
    if asked in ("", "0") or not can_share:
        return None
    try:
        return make(group.rank(), group.size())
    except OSError:
        return None


def _open_all(peers: Peers | None, offers: list[Any]) -> bool:
    """Whether all ranks offer their memory on one host, and this one can open it."""
    if peers is None or None in offers:
        return False
    if len({host for host, *_ in offers}) > 1:
        return False
    try:
        peers.connect([Address(*one) for one in offers])
    except OSError:
        return False
    return True


def _find_namespaces() -> str:
    """The same on all processes that see one host: containers and network namespaces are hosts of their own."""
    namespaces = [
        str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("net", "pid")
    ]
    return " ".join((find_host(), *namespaces))


def _store_of(group: dist.ProcessGroup, purpose: str) -> Any:
    store = distributed_c10d._get_default_store()
    key = f"hyper_parallel/{purpose}/{group.group_name}"
    # A job that is joined again in the same store agrees anew.
    times = store.add(f"{key}/{dist.get_rank()}", 1)
    return dist.PrefixStore(f"{key}/{times}", store)  # type: ignore[attr-defined]


def _exchange(
    store: Any, group: dist.ProcessGroup, timeout: timedelta, what: str, own: Any
) -> list[Any]:
    """What every rank says, in rank order."""
    keys = [f"{what}/{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], json.dumps(own))
    deadline = time.monotonic() + timeout.total_seconds()
    while not store.check(keys):
        if time.monotonic() > deadline:
            raise RuntimeError(f"shared memory: timed out after {timeout}")
        if failed := order.failure(group):
            raise failed
        with suppress(RuntimeError):  # which tells that the time is over
            store.wait(keys, timedelta(seconds=LOOK_SECONDS))
    return [json.loads(store.get(key)) for key in keys]
