# SPDX-License-Identifier: Apache-2.0
"""Process groups on MindSpore: joining the job, making groups by their members alone, finding ranks.

On a CPU the ranks meet in a store and need nothing of MindSpore's own communication, mccl, which a process joins once
and cannot leave. It is joined where it is asked for, by ``backend="mccl"`` or by starting the program with msrun: then
MindSpore's own functions take our groups. What it has made stays for the life of the process.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import mindspore
import mindspore.mint.distributed as dist
import numpy as np
from mindspore.communication import GlobalComm

from hyper_parallel.platform import platform as contract
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.errors import CommunicationError
from hyper_parallel.platform.mindspore import private
from hyper_parallel.platform.mindspore.store import Membership, Store, connect
from hyper_parallel.platform.mindspore.store_collectives import Group, Job, world_name
from hyper_parallel.platform.platform import Platform

LONGEST_WAIT = 1800.0  # seconds, unless init_process_group is told
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# What lives as long as the process: the names of MindSpore's groups, and the store that it joined by.
_MADE: set[str] = set()
_JOINED_BY: list[Any] = []
_HOSTED: dict[tuple[str, int], Any] = {}  # stores of this process, by their addresses


class Groups(Platform):
    """The part of the contract that is about ranks and groups."""

    def __init__(self) -> None:
        super().__init__()
        self._job: Job | None = None
        self._world: Group | None = None
        self._named: dict[str, Group] = {}  # groups that the user made
        self._generations: Counter[tuple[int, ...]] = Counter()

    def get_rank(self) -> int:
        return self._world.rank() if self._world is not None else 0

    def get_world_size(self) -> int:
        return self._world.size() if self._world is not None else 1

    def get_global_rank(self, group: Any, group_rank: int) -> int:
        ranks = self.get_process_group_ranks(group)
        if not isinstance(group_rank, int) or not 0 <= group_rank < len(ranks):
            raise coded(
                ValueError,
                "HP105",
                f"get_global_rank: group_rank must be 0 to {len(ranks) - 1} in ranks {ranks}, got {group_rank!r}",
            )
        return ranks[group_rank]

    def get_group_local_rank(self, group: Any = None) -> int:
        return self._group("get_group_local_rank", group).rank()

    def get_process_group_ranks(self, group: Any = None) -> list[int]:
        return list(self._group("get_process_group_ranks", group).ranks)

    def get_backend(self, group: Any = None) -> str:
        self._group("get_backend", group)
        return "hccl" if self._is_native() else "mccl"

    def init_process_group(
        self,
        backend: str | None = None,
        *,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        pg_options: Any = None,  # noqa: ARG002 - MindSpore has none
        device_id: Any = None,  # noqa: ARG002 - mindspore.set_device chooses it
    ) -> None:
        """On a CPU ``backend="mccl"`` joins MindSpore's own communication too. Untested on hardware: by hccl."""
        if self._world is not None:
            return
        seconds = _seconds(timeout) or LONGEST_WAIT
        if self._is_native():
            self._join_hccl(init_method, seconds, world_size, rank, store)
            return
        if backend not in (None, "mccl"):
            raise coded(
                ValueError,
                "HP106",
                f"init_process_group: MindSpore's backend on a CPU is mccl, got {backend!r}",
            )
        rank, size, found = self._place(init_method, seconds, world_size, rank, store)
        part = found.under(
            f"joined{found.add(f'joined/{rank}', 1)}"
        )  # a rank that joins again meets the others anew
        job = Job(rank, size, part, seconds)
        came = Membership(part, "came", job.world)
        came.sign(rank)
        if missing := job.wait_for(
            job.world, came.signed, seconds, "init_process_group"
        ):
            raise coded(
                CommunicationError,
                "HP110",
                f"init_process_group: rank {rank} could not join the job of {size} ranks: after {seconds:g} s "
                f"ranks {sorted(missing)} had not come. Check that every rank was started and reaches the same "
                "address; timeout= says how long to wait.",
                collective="init_process_group",
                ranks=tuple(job.world),
                missing=tuple(sorted(missing)),
            )
        job.meet_hosts()
        if backend == "mccl":
            _join_mccl(job)
        if found.port in _hosted_ports():
            atexit.register(job.host_until_all_are_gone)
        atexit.register(
            job.leave
        )  # before that; for programs that do not say that they leave
        self._job, self._world = (
            job,
            Group(world_name(), job.world, rank, "world", seconds),
        )

    def _place(
        self, init_method: str | None, seconds: float, size: int, rank: int, store: Any
    ) -> tuple[int, int, Store]:
        """(rank, number of ranks, store), from the arguments, from MindSpore's launcher or from the environment."""
        if store is not None:
            if rank < 0 or size < 1:
                raise coded(
                    ValueError,
                    "HP106",
                    "init_process_group: store= needs rank= and world_size=",
                )
            return rank, size, store if isinstance(store, Store) else Store(store)
        if init_method is None and (GlobalComm.INITED or "MS_WORKER_NUM" in os.environ):
            return _launched(seconds)
        host, port = _master_address(init_method)
        rank = rank if rank >= 0 else int(os.environ["RANK"])
        size = size if size > 0 else int(os.environ["WORLD_SIZE"])
        connect = _host if rank == 0 else _reach
        return rank, size, Store(connect(host, port, seconds))

    def _join_hccl(
        self, init_method: str | None, seconds: float, size: int, rank: int, store: Any
    ) -> None:
        if not GlobalComm.INITED:
            dist.init_process_group(
                "hccl",
                init_method=init_method,
                timeout=timedelta(seconds=seconds),
                world_size=size,
                rank=rank,
                store=store,
            )
        self._world = Group(
            world_name(),
            range(dist.get_world_size()),
            dist.get_rank(),
            "world",
            seconds,
        )

    def destroy_process_group(self, group: Any = None) -> None:
        """Untested on hardware: by hccl."""
        if self._world is None:
            return
        resolved = self._group("destroy_process_group", group)
        if resolved is not self._world:
            for key in [
                k for k, g in contract.EXISTING_COMM_GROUPS.items() if g is resolved
            ]:
                del contract.EXISTING_COMM_GROUPS[key]
            resolved.lives = False
            if self._is_native():
                dist.destroy_process_group(str(resolved))
                _MADE.discard(str(resolved))
            return
        self._forget_groups()  # while they still work: a save in the background ends first
        if self._job is not None:
            atexit.unregister(self._job.leave)
            self._job.leave()
        if self._is_native():
            dist.destroy_process_group()
            _MADE.clear()
        self._job = self._world = None
        self._named.clear()
        self._generations.clear()

    def split_group(
        self,
        parent_pg: Any = None,
        split_ranks: Sequence[Sequence[int]] | None = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
    ) -> Any:
        if not split_ranks:
            raise coded(
                ValueError,
                "HP105",
                f"split_group: split_ranks must be a list of rank lists, got {split_ranks!r}",
            )
        lists = self._global_rank_lists(parent_pg, split_ranks)
        own = next((ranks for ranks in lists if self.get_rank() in ranks), None)
        if own is None:
            return None
        if timeout is None and pg_options is None and group_desc is None:
            # The registry serves here too: the same ranks with the same options are the same group.
            return self.create_group(own)
        return self._new_group(own, timeout=timeout)

    def _global_rank_lists(
        self, parent_pg: Any, split_ranks: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        parent = self.get_process_group_ranks(parent_pg)
        seen: set[int] = set()
        lists = []
        for ranks in split_ranks:
            wrong = [
                r for r in ranks if not isinstance(r, int) or not 0 <= r < len(parent)
            ]
            if not ranks or wrong or seen.intersection(ranks):
                raise coded(
                    ValueError,
                    "HP105",
                    f"split_group: each list in split_ranks must hold ranks 0 to {len(parent) - 1} of the parent, "
                    f"none in two lists; got {[list(r) for r in split_ranks]}",
                )
            seen.update(ranks)
            lists.append(self._checked_ranks("split_group", [parent[r] for r in ranks]))
        return lists

    def _new_group(self, ranks: Sequence[int], **options: Any) -> Any:
        world = self._group("create_group", None)
        name = f"ranks_{'_'.join(map(str, ranks))}"
        timeout = _seconds(options.get("timeout")) or world.timeout
        key = f"{name}.{self._generations[tuple(ranks)]}"
        self._generations[tuple(ranks)] += 1
        if self._job is not None:
            members = Membership(self._job.store, f"{key}/made", ranks)
            members.sign(self._job.rank)
            if missing := self._job.wait_for(
                ranks, members.signed, timeout, "the creation of the group"
            ):
                raise self._job.explain(
                    "the creation of the group", ranks, missing, key, None
                )
        if GlobalComm.INITED and name not in _MADE:
            _MADE.add(name)
            mindspore.communication.create_group(name, list(ranks))
        return Group(name, ranks, world.rank(), key, timeout)

    def longest_wait(self) -> tuple[str, float] | None:
        waits = list(self._job.waiting.values()) if self._job is not None else []
        if not waits:
            return None
        call, since = min(waits, key=lambda wait: wait[1])
        return call, time.monotonic() - since

    def _group_lives(self, group: Any) -> bool:
        return not isinstance(group, Group) or group.lives

    def _group(self, call: str, group: Any) -> Group:
        """The group meant by ``group``: None, a group or an object that has one; else an error."""
        if group is None:
            if self._world is None:
                raise coded(
                    RuntimeError,
                    "HP103",
                    f"{call}: there is no process group; call init_process_group() first",
                )
            return self._world
        if isinstance(group, Group):
            return group
        if (
            group == ""
        ):  # what MindSpore's new_group returns to a rank that is not in it
            raise coded(
                ValueError,
                "HP104",
                f"{call}: rank {self.get_rank()} is not a member of that group",
            )
        held = self._made_by_user(group) if isinstance(group, str) else None
        for attribute in ("group", "process_group"):
            if held is None and isinstance(getattr(group, attribute, None), str):
                return self._group(call, getattr(group, attribute))
        if held is None and callable(getattr(group, "get_group", None)):
            return self._group(call, group.get_group())
        if held is None:
            raise coded(
                TypeError,
                "HP104",
                f"{call}: expected a process group, an object with a group, or None for the default group, got "
                f"{type(group).__name__} {group!r}",
            )
        return held

    def _made_by_user(self, name: str) -> Group | None:
        """What MindSpore knows under that name."""
        if name not in self._named and self._world is not None and GlobalComm.INITED:
            try:
                ranks = dist.get_process_group_ranks(name)
            except (RuntimeError, TypeError, ValueError):
                return None
            self._named[name] = Group(
                name, ranks, self.get_rank(), f"named/{name}", self._world.timeout
            )
        return self._named.get(name)

    def _is_native(self) -> bool:
        """Whether the device has collectives of its own for everything."""
        return bool(mindspore.get_context("device_target") == "Ascend")

    def new_store(
        self,
        port: int = 0,
        *,
        is_master: bool,
        host: str = "127.0.0.1",
        timeout: float = 60.0,
    ) -> Any:
        return Store(connect(host, port, is_master=is_master, timeout=timeout))

    def prefix_store(self, prefix: str, store: Any) -> Any:
        return (store if isinstance(store, Store) else Store(store)).under(prefix)


def _join_mccl(job: Job) -> None:
    """Joins MindSpore's own communication on a CPU, unless this process has."""
    if GlobalComm.INITED:
        before = (
            mindspore.communication.get_rank(),
            mindspore.communication.get_group_size(),
        )
        if before != (job.rank, job.size):
            raise coded(
                RuntimeError,
                "HP106",
                f"init_process_group: this process was rank {before[0]} of {before[1]} and would be rank "
                f"{job.rank} of {job.size}; MindSpore joins one job in the life of a process. Start new processes.",
            )
        return
    timeout, opened = job.timeout, Membership(job.store, "mccl/opened", job.world)
    options: dict[str, Any] = {
        "timeout": timeout,
        "world_size": job.size,
        "answer_timeout": timeout,
    }  # MindSpore waits in it itself
    if job.rank == 0:
        store = connect(job.store.host, 0, is_master=True, **options)
        job.store.set("mccl", str(store.port))
        opened.sign(0)
    else:
        job.wait_for(
            [0], opened.signed, timeout, "the creation of MindSpore's own communication"
        )
        store = connect(
            job.store.host, int(job.store.get("mccl")), is_master=False, **options
        )
    _JOINED_BY.append(store)
    private.init_with_store()(
        backend="mccl",
        timeout=timedelta(seconds=timeout),
        world_size=job.size,
        rank=job.rank,
        store=store,
    )
    ranks, sizes = private.group_caches()
    ranks["hccl_world_group"], sizes["hccl_world_group"] = job.rank, job.size


def _launched(seconds: float) -> tuple[int, int, Store]:
    """The same under msrun, where rank 0 opens the store and tells the others by MindSpore's own broadcast."""
    if not GlobalComm.INITED:
        mindspore.communication.init()
    rank, size = (
        mindspore.communication.get_rank(),
        mindspore.communication.get_group_size(),
    )
    if not _JOINED_BY:
        address = np.zeros(5, np.int64)  # the four numbers of the host, and the port
        if rank == 0:
            host = _own_address(os.environ.get("MS_SCHED_HOST", "127.0.0.1"))
            opened = _host(host, 0, seconds)
            address[:] = [*socket.inet_aton(host), opened.port]
        told = mindspore.Tensor(address)
        dist.broadcast(told, 0, group=world_name())
        *numbers, port = told.asnumpy().tolist()
        if rank != 0:
            host = socket.inet_ntoa(bytes(numbers))
            opened = _reach(host, port, seconds)
        _JOINED_BY.append(opened)
    return rank, size, Store(_JOINED_BY[0], "msrun/")


def _master_address(init_method: str | None) -> tuple[str, int]:
    """(host, port) of the job's store, from the argument or from the environment."""
    if init_method is not None and init_method.startswith("tcp://"):
        host, _, port = init_method.removeprefix("tcp://").rpartition(":")
        return host, int(port)
    for name in _VARIABLES:
        if name not in os.environ:
            raise coded(
                ValueError,
                "HP106",
                f"init_process_group: environment variable {name} expected, but not set. Start the program "
                "with msrun, or pass rank=, world_size= and init_method='tcp://host:port' or store=",
            )
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _host(host: str, port: int, seconds: float) -> Any:
    """A store of this process, which stays as long as it does: others may read when this rank has left the job."""
    if (host, port) not in _HOSTED:
        opened = connect(host, port, is_master=True, timeout=seconds)
        _HOSTED[host, opened.port] = opened
        return opened
    return _HOSTED[host, port]


def _reach(host: str, port: int, seconds: float) -> Any:
    return connect(host, port, is_master=False, timeout=seconds)


def _hosted_ports() -> set[int]:
    return {port for _, port in _HOSTED}


def _own_address(other: str) -> str:
    """The address by which this host is known where it talks to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing
        return str(probe.getsockname()[0])


def _seconds(timeout: Any) -> float | None:
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, (int, float)) and seconds > 0:
        return float(seconds)
    raise coded(
        ValueError,
        "HP106",
        f"timeout must be a positive number of seconds or a timedelta, got {timeout!r}",
    )
