# SPDX-License-Identifier: Apache-2.0
"""Process groups on torch.distributed: joining the job, making groups by their members alone, finding ranks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.platform import platform as contract
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.errors import CommunicationError
from hyper_parallel.platform.platform import Platform
from hyper_parallel.platform.torch import order, patches
from hyper_parallel.platform.torch.faults import (
    BACKEND_ERRORS,
    end_lookout,
    explain_group,
    longest_wait,
    timeout_of,
)

BACKEND_OF_DEVICE = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl", "xpu": "xccl"}


class Groups(Platform):
    """The part of the contract that is about ranks and groups."""

    def __init__(self) -> None:
        super().__init__()
        patches.install_functional(loads=False)
        self._timeout: timedelta | None = None
        self._generations: Counter[tuple[int, ...]] = Counter()
        self._epoch = 0  # how often this process has joined the job of the present store; 0: not asked yet

    def get_rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def get_world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

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
        return dist.get_rank(self._group("get_group_local_rank", group))

    def get_process_group_ranks(self, group: Any = None) -> list[int]:
        return dist.get_process_group_ranks(
            self._group("get_process_group_ranks", group)
        )

    def get_backend(self, group: Any = None) -> str:
        return str(dist.get_backend(self._group("get_backend", group)))

    def init_process_group(
        self,
        backend: str | None = None,
        *,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        pg_options: Any = None,
        device_id: Any = None,
    ) -> None:
        patches.install_functional(loads=True)
        if dist.is_initialized():
            return
        self._timeout = _as_timedelta(timeout)
        if (
            init_method is None
            and store is None
            and rank < 0
            and world_size < 0
            and not _is_launched()
        ):
            # A notebook or a plain script: a job of this process alone, which needs no address.
            rank, world_size, store = 0, 1, dist.HashStore()  # type: ignore[attr-defined]
        try:
            dist.init_process_group(
                backend or self._default_backend(),
                init_method=init_method,
                timeout=self._timeout,
                world_size=world_size,
                rank=rank,
                store=store,
                pg_options=pg_options,
                device_id=device_id,
            )
        except ValueError as error:
            if "environment variable" not in str(error):
                raise
            raise coded(
                ValueError,
                "HP106",
                f"init_process_group: {error}. Start the program with torchrun, or pass rank=, world_size= and "
                "init_method= or store=",
            ) from error
        except BACKEND_ERRORS as error:
            raise coded(
                CommunicationError,
                "HP110",
                f"init_process_group: rank {rank if rank >= 0 else '(from the environment)'} could not join the "
                f"job of {world_size if world_size > 0 else 'WORLD_SIZE'} ranks: {error}. Check that every rank "
                "was started and reaches the same address; timeout= says how long to wait.",
            ) from error

    def destroy_process_group(self, group: Any = None) -> None:
        if not dist.is_initialized():
            return
        resolved = self._group("destroy_process_group", group)
        if resolved is dist.group.WORLD:
            self._forget_groups()  # while they still work: a save in the background ends first
            end_lookout()
            order.end_order()
            dist.destroy_process_group()
            self._generations.clear()
            self._epoch = 0
            self._timeout = None
            return
        for key in [
            k for k, g in contract.EXISTING_COMM_GROUPS.items() if g is resolved
        ]:
            del contract.EXISTING_COMM_GROUPS[key]
        order.forget(resolved)
        dist.destroy_process_group(resolved)

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
        return self._new_group(
            own, timeout=timeout, pg_options=pg_options, group_desc=group_desc
        )

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
        # dist.new_group wants every rank of the job to call it, or, with use_local_synchronization, puts the number of
        # groups that a process has made into the group's name: members that have made different numbers of groups
        # then wait for each other for ever. Naming the group by its ranks and by how often they made one needs
        # neither, so the private helper under new_group is called with that name.
        patches.install_functional(loads=True)
        world = self._group("create_group", None)
        name = self._group_name(tuple(ranks))
        try:
            group, _ = distributed_c10d._new_process_group_helper(
                len(ranks),
                list(ranks).index(dist.get_rank()),
                list(ranks),
                dist.Backend(dist.get_backend(world)),
                distributed_c10d._get_default_store(),
                name,
                backend_options=options.get("pg_options"),
                timeout=_as_timedelta(options.get("timeout"))
                or self._timeout
                or timeout_of(world),
                device_id=world.bound_device_id,
                group_desc=options.get("group_desc"),
            )
        except BACKEND_ERRORS as error:
            raise explain_group(
                error, list(ranks), f"hyper_parallel/new_group/{name}"
            ) from error
        distributed_c10d._world.pg_group_ranks[group] = {
            rank: i for i, rank in enumerate(ranks)
        }
        return group

    def _group_name(self, ranks: tuple[int, ...]) -> distributed_c10d.GroupName:
        """A name that the group's members find by themselves and that no earlier group in the same store has."""
        if not self._epoch and dist.get_backend() == "fake":
            self._epoch = 1  # nobody is met there, and its store counts nothing
        if not self._epoch:
            self._epoch = distributed_c10d._get_default_store().add(
                f"hyper_parallel/epoch/{dist.get_rank()}", 1
            )
        name = f"ranks_{'_'.join(map(str, ranks))}_{self._epoch}.{self._generations[ranks]}"
        self._generations[ranks] += 1
        return distributed_c10d.GroupName(name)

    def longest_wait(self) -> tuple[str, float] | None:
        return longest_wait()

    def _group_lives(self, group: Any) -> bool:
        return group in distributed_c10d._world.pg_map

    def _default_backend(self) -> str:
        device = self.device_type()
        if device not in BACKEND_OF_DEVICE:
            raise coded(
                ValueError,
                "HP106",
                f"init_process_group: no default backend for device {device!r}; pass backend=",
            )
        return BACKEND_OF_DEVICE[device]

    def _group(self, call: str, group: Any) -> dist.ProcessGroup:
        """The process group meant by ``group``: None, a group or an object that has one; else an error."""
        if group is None:
            if not dist.is_initialized():
                raise coded(
                    RuntimeError,
                    "HP103",
                    f"{call}: there is no process group; call init_process_group() first",
                )
            return distributed_c10d._get_default_group()
        if isinstance(group, dist.ProcessGroup):
            return group
        for attribute in ("group", "process_group"):
            held = getattr(group, attribute, None)
            if isinstance(held, dist.ProcessGroup):
                return held
        if callable(getattr(group, "get_group", None)):
            return self._group(call, group.get_group())
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise coded(
                ValueError,
                "HP104",
                f"{call}: rank {self.get_rank()} is not a member of that group",
            )
        raise coded(
            TypeError,
            "HP104",
            f"{call}: expected a process group, an object with a group, or None for the default group, got "
            f"{type(group).__name__} {group!r}",
        )

    def new_store(
        self,
        port: int = 0,
        *,
        is_master: bool,
        host: str = "127.0.0.1",
        timeout: float = 60.0,
    ) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=is_master,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
        )

    def prefix_store(self, prefix: str, store: Any) -> Any:
        return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def _is_launched() -> bool:
    """Whether anything in the environment speaks of a job that this process is a rank of."""
    return any(
        name in os.environ
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )


def _as_timedelta(timeout: Any) -> timedelta | None:
    if timeout is None or isinstance(timeout, timedelta):
        return timeout
    if isinstance(timeout, (int, float)) and timeout > 0:
        return timedelta(seconds=timeout)
    raise coded(
        ValueError,
        "HP106",
        f"timeout must be a positive number of seconds or a timedelta, got {timeout!r}",
    )
