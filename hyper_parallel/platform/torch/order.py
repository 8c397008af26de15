# SPDX-License-Identifier: Apache-2.0
"""Counts the collectives of every group and, where that is asked for, compares them in the job's store.

The first rank that comes to a collective leaves there what it issues; each of the others compares, with one message and
without waiting for anyone. A rank that differs raises before it has sent anything, so that data that does not fit never
meets, and leaves a mark for those that wait already: they look for one, for ranks that have left the job, and for a
circle of ranks that wait for each other in collectives of different groups.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.platform.agreement import Call
from hyper_parallel.platform.axes import axis_of
from hyper_parallel.platform.errors import CommunicationError
from hyper_parallel.platform.order import in_a_circle, parted
from hyper_parallel.platform.torch.asking import ask_store, forget_silence

# How long a failed rank waits for what the others have to say. They fail at about the same time.
NOTE_SECONDS = 1.0

# As many collectives of a group are remembered: one rank may be that far ahead of another.
RECENT = 512

# Of as many other ranks a rank asks at most what they wait in, when it looks for a circle.
MOST_READ = 256

_PARTED, _LEFT, _CIRCLE = "parted", "left", "circle"


class RanksLeftError(RuntimeError):
    """Ranks that a collective needs have left the job."""


class Standing:
    """What this rank has issued in a group."""

    __slots__ = ("compared", "issued", "needs_all", "number", "store")

    def __init__(self) -> None:
        self.number = 0  # of the last collective, from 1
        self.compared = False  # whether that one was
        self.issued: dict[
            int, str
        ] = {}  # number -> what and where, of the recent ones that were compared
        self.needs_all = False  # whether a circle is looked for: the last one cannot complete without every rank
        self.store: Any = None


_standings: dict[dist.ProcessGroup, Standing] = {}
_job = ""  # where in the store this job compares; empty before it does
_threads: set[int] = set()  # in which this process issues collectives


def begin(group: dist.ProcessGroup) -> int:
    """The number of the collective that a group begins."""
    standing = _standings.get(group)
    if standing is None:
        standing = _standings[group] = Standing()
    standing.number += 1
    standing.compared = False
    return standing.number


def last(group: dist.ProcessGroup) -> tuple[int, bool]:
    """(number, whether it was compared) of a group's last collective."""
    standing = _standings.get(group)
    return (0, False) if standing is None else (standing.number, standing.compared)


def is_comparable(group: dist.ProcessGroup) -> bool:
    """Whether there is someone to compare with, and a store to do it in, which torch's backend for dry runs lacks."""
    return group.size() > 1 and dist.get_backend(group) != "fake"


def compare(
    group: dist.ProcessGroup, call: Call, seconds: float, *, seeks_circles: bool
) -> None:
    """A CommunicationError if another rank has issued another collective in this one's place.

    ``seconds``: that the store may take to answer. ``seeks_circles``: whether its wait looks for ranks that wait for
    each other; else a rank may wait until its time is over while another waits for it elsewhere.
    """
    from hyper_parallel.platform.caller import users_line

    standing = _standings[group]
    number = standing.number
    standing.compared = True
    standing.needs_all = (
        seeks_circles and call.name != "broadcast" and call.sends is None
    )
    _threads.add(threading.get_ident())
    standing.issued[number] = f"{call} at {users_line() or 'a line of the framework'}"
    standing.issued.pop(number - RECENT, None)
    described = f"{call.name}({', '.join(map(str, call.facts))})"
    own = [group.rank(), described, call.sends, call.receives]
    ask_store(
        lambda: _compare_in_store(group, standing, number, own), seconds + NOTE_SECONDS
    )


def _compare_in_store(
    group: dist.ProcessGroup, standing: Standing, number: int, own: list[Any]
) -> None:
    store = _store_of(group, standing)
    first = json.loads(store.compare_set(str(number), "", json.dumps(own)))
    if not _fit(own, first):
        store.compare_set(_PARTED, "", str(number))
        raise _parted(group, standing)
    if first[0] == group.rank() and number > RECENT:
        store.delete_key(str(number - RECENT))


def _fit(own: list[Any], other: list[Any]) -> bool:
    """Whether two ranks issue the same, and send each other as much as the other expects."""
    place, described, sends, receives = own
    their_place, theirs, their_sends, their_receives = other
    if described != theirs or (sends is None) != (their_sends is None):
        return False
    if sends is None or place == their_place:
        return True
    does_fit: bool = (
        sends[their_place] == their_receives[place]
        and receives[their_place] == their_sends[place]
    )
    return does_fit


class Wait:
    """A wait for a group's last collective, which was compared: looks, while it lasts, whether it can end."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        standing = _standings[group]
        self._group, self._number = group, standing.number
        # Whoever may go on without some of the others, or in another thread, does not wait for certain.
        self._is_certain = standing.needs_all and len(_threads) == 1
        self.is_told = False
        self._circle: list[tuple[int, str]] = []  # as it was when we last looked

    def look(self) -> None:
        """A CommunicationError if the ranks have parted or wait in a circle, a RuntimeError if one has left the job."""
        if failed := failure(self._group):
            raise failed
        if not self._is_certain:
            return
        store, rank = distributed_c10d._get_default_store(), dist.get_rank()
        if not self.is_told:
            store.set(
                _waits_key(rank), json.dumps(_standing_of(self._group, self._number))
            )
            self.is_told = True
        circle = _circle(store, rank)
        if (
            circle and circle == self._circle
        ):  # it was there all the time between two looks
            store.set(
                f"{_job}/{_CIRCLE}", json.dumps(circle)
            )  # the first that is told may leave before the others look
            raise _told_circle(circle)
        self._circle = circle

    def end(self) -> None:
        """The collective is complete."""
        if self.is_told:
            distributed_c10d._get_default_store().delete_key(
                _waits_key(dist.get_rank())
            )


def _told_circle(circle: list[tuple[int, str]]) -> CommunicationError:
    return in_a_circle(
        dist.get_rank(), [(rank, json.loads(told)) for rank, told in circle]
    )


def _waits_key(rank: int) -> str:
    return f"{_job}/waits/{rank}"


def _standing_of(group: dist.ProcessGroup, number: int) -> dict[str, Any]:
    """What this rank waits in, and how many collectives of each group it has issued."""
    ranks = dist.get_process_group_ranks(group)
    return {
        "group": group.group_name,
        "ranks": ranks,
        "axis": axis_of(ranks),
        "number": number,
        "issued": _standings[group].issued[number],
        "counts": {
            each.group_name: standing.number for each, standing in _standings.items()
        },
    }


def _is_behind(told: str | None, standing: dict[str, Any]) -> bool:
    """Whether a rank that told this has not come to the collective that another one stands in."""
    if not told:
        return False
    issued = json.loads(told)["counts"].get(standing["group"], 0)
    return bool(issued < standing["number"])


def _circle(store: Any, rank: int) -> list[tuple[int, str]]:
    """Ranks, each of which waits for the next and the last for the first, with what they told; empty without one."""
    told: dict[int, str | None] = {}

    def waits(other: int) -> str | None:
        if other not in told:
            if len(told) == MOST_READ:
                return None
            key = _waits_key(other)
            told[other] = store.get(key).decode() if store.check([key]) else None
        return told[other]

    path: list[int] = []
    seen: set[int] = set()

    def follow(one: int) -> list[int]:
        own = waits(one)
        if own is None or one in path or one in seen:
            return path[path.index(one) :] if one in path else []
        path.append(one)
        seen.add(one)
        standing = json.loads(own)
        for other in standing["ranks"]:
            if _is_behind(waits(other), standing) and (found := follow(other)):
                return found
        path.pop()
        return []

    return [(r, told[r] or "") for r in follow(rank)]


def failure(group: dist.ProcessGroup) -> RuntimeError | None:
    """Why a collective of a group that is compared cannot complete, if that is known."""
    standing = _standings.get(group)
    if standing is None or standing.store is None:
        return None
    if standing.store.check([_PARTED]):
        return _parted(group, standing)
    store = distributed_c10d._get_default_store()
    if store.check([f"{_job}/{_CIRCLE}"]):
        circle = json.loads(store.get(f"{_job}/{_CIRCLE}"))
        if dist.get_rank() in dict(circle):
            return _told_circle(circle)
    if store.check([f"{_job}/{_LEFT}"]):
        gone = [
            r
            for r in dist.get_process_group_ranks(group)
            if store.check([f"{_job}/{_LEFT}/{r}"])
        ]
        if gone:
            return RanksLeftError(f"ranks {gone} have left the job")
    return None


def end_order() -> None:
    """Tells those that still wait that this rank leaves the job, if its collectives were compared."""
    global _job  # noqa: PLW0603 - one job a process
    if _job:
        with suppress(
            RuntimeError
        ):  # the rank that hosts the store has ended before, or does not answer
            ask_store(_tell_that_this_rank_leaves, NOTE_SECONDS)
    forget_silence()
    _job = ""
    _standings.clear()
    _threads.clear()


def _tell_that_this_rank_leaves() -> None:
    store = distributed_c10d._get_default_store()
    store.set(f"{_job}/{_LEFT}/{dist.get_rank()}", "")
    store.set(f"{_job}/{_LEFT}", "")


def forget(group: dist.ProcessGroup) -> None:
    """A group is no more."""
    _standings.pop(group, None)


def _store_of(group: dist.ProcessGroup, standing: Standing) -> Any:
    global _job  # noqa: PLW0603 - one job a process
    if standing.store is None:
        store = distributed_c10d._get_default_store()
        if not _job:  # a job that is joined again in the same store compares elsewhere
            times = store.add(f"hyper_parallel/order/joined/{dist.get_rank()}", 1)
            _job = f"hyper_parallel/order/{times}"
        standing.store = dist.PrefixStore(f"{_job}/{group.group_name}", store)  # type: ignore[attr-defined]
    return standing.store


def _parted(group: dist.ProcessGroup, standing: Standing) -> CommunicationError:
    """The error, when the ranks have told each other what they issued."""
    store, rank, ranks = (
        standing.store,
        dist.get_rank(),
        dist.get_process_group_ranks(group),
    )
    number = int(store.get(_PARTED))
    if number in standing.issued:
        store.set(f"issued/{rank}", standing.issued[number])
    deadline = time.monotonic() + NOTE_SECONDS
    while len(present := [r for r in ranks if store.check([f"issued/{r}"])]) < len(
        ranks
    ):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return parted(
        rank, number, ranks, {r: store.get(f"issued/{r}").decode() for r in present}
    )
