# SPDX-License-Identifier: Apache-2.0
"""Ranks and process groups.

Example::

    group = platform.create_group([0, 2])  # called by ranks 0 and 2, which share one group
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hyper_parallel.platform.axes import forget_axes
from hyper_parallel.platform.error_codes import coded

# str(tuple(sorted(ranks))) -> group. The same ranks never make two groups.
EXISTING_COMM_GROUPS: dict[str, Any] = {}


class Ranks(ABC):
    """Joining a job and creating groups. ``group=None`` means the default group everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self._forgetters: list[Callable[[], None]] = []

    @abstractmethod
    def get_rank(self) -> int:
        """Returns this process's rank in the default group, or 0 before the process has joined a job."""

    @abstractmethod
    def get_world_size(self) -> int:
        """Returns the number of processes in the default group, or 1 before the process has joined a job."""

    @abstractmethod
    def get_group_local_rank(self, group: Any = None) -> int:
        """Returns this process's rank within ``group``."""

    @abstractmethod
    def get_process_group_ranks(self, group: Any = None) -> list[int]:
        """Returns the global ranks of ``group``, in group order."""

    @abstractmethod
    def get_backend(self, group: Any = None) -> str:
        """Returns the name of the group's communication backend: gloo, nccl, hccl or mccl."""

    @abstractmethod
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
        """Joins this process to the job; does nothing if it has already joined.

        The backend follows the device unless it is named. ``timeout`` (seconds or a timedelta) bounds every
        collective of the default group and of the groups created from it.
        """

    @abstractmethod
    def destroy_process_group(self, group: Any = None) -> None:
        """Leaves ``group``, or every group if none is given, and clears everything cached about them."""

    @abstractmethod
    def split_group(
        self,
        parent_pg: Any = None,
        split_ranks: Sequence[Sequence[int]] | None = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
    ) -> Any:
        """Creates a group per list in ``split_ranks`` (ranks within the parent); returns the caller's own, or None."""

    def create_group(self, rank_list: Iterable[int]) -> Any:
        """Returns the group of these global ranks, creating it if needed; None if this process is not a member.

        Only members need to call it; they must create the groups they share in the same order.
        """
        ranks = self._checked_ranks("create_group", rank_list)
        group = self.get_created_group(ranks)
        if group is None and self.get_rank() in ranks:
            group = EXISTING_COMM_GROUPS[_group_key(ranks)] = self._new_group(ranks)
        return group

    def get_created_group(self, rank_list: Iterable[int]) -> Any:
        """Returns the group of these global ranks, in any order, or None if it does not exist."""
        group = EXISTING_COMM_GROUPS.get(_group_key(rank_list))
        return group if group is not None and self._group_lives(group) else None

    def mark_created_groups(self, process_group: Any) -> None:
        """Registers one group or a list of groups created by the user, so that no second one is created."""
        several = isinstance(process_group, (list, tuple))
        for group in process_group if several else [process_group]:
            ranks = self.get_process_group_ranks(group)
            EXISTING_COMM_GROUPS[_group_key(ranks)] = group

    @abstractmethod
    def _group(self, call: str, group: Any) -> Any:
        """Returns the process group meant by ``group``, with ``size()`` and ``rank()``, or raises an error."""

    @abstractmethod
    def _new_group(self, ranks: Sequence[int], **options: Any) -> Any:
        """Creates a group of these ranks; called by its members only."""

    @abstractmethod
    def _group_lives(self, group: Any) -> bool:
        """Returns whether the group still exists, that is, was not destroyed through the framework."""

    def _checked_ranks(self, call: str, ranks: Iterable[int]) -> list[int]:
        """Returns the ranks sorted, or raises a ValueError that says what is wrong with them."""
        found = list(ranks)
        size = self.get_world_size()
        wrong = [r for r in found if not isinstance(r, int) or not 0 <= r < size]
        if not found or wrong or len(set(found)) != len(found):
            why = (
                f"{wrong} out of range"
                if wrong
                else "a rank appears twice"
                if found
                else "no ranks"
            )
            raise coded(
                ValueError,
                "HP105",
                f"{call}: expected different ranks from 0 to {size - 1}, got {found}: {why}",
            )
        return sorted(found)

    @abstractmethod
    def new_store(
        self,
        port: int = 0,
        *,
        is_master: bool,
        host: str = "127.0.0.1",
        timeout: float = 60.0,
    ) -> Any:
        """Creates a TCP key-value store for init_process_group(store=...); port 0 on the master picks a free one."""

    @abstractmethod
    def prefix_store(self, prefix: str, store: Any) -> Any:
        """Returns a view of ``store`` whose keys start with ``prefix``, so that one store can serve several jobs."""

    def forget_groups_with(self, forget: Callable[[], None]) -> None:
        """Registers a callback that runs before all groups are destroyed, for whatever caches or uses groups."""
        self._forgetters.append(forget)

    def _forget_groups(self) -> None:
        """Clears what is cached about groups; called when all of them are destroyed."""
        EXISTING_COMM_GROUPS.clear()
        forget_axes()
        for forget in self._forgetters:
            forget()


def _group_key(ranks: Iterable[int]) -> str:
    return str(tuple(sorted(ranks)))
