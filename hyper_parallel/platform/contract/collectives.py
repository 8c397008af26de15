# SPDX-License-Identifier: Apache-2.0
"""Communication outside the graph.

Example::

    total = platform.all_reduce(x, group)
    platform.isend(x, dst=1).wait()
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from hyper_parallel.platform.contract.ranks import Ranks
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.order import (
    ALL,
    HYPER_PARALLEL_CHECK_ORDER,
    first_compared,
)

if TYPE_CHECKING:
    from hyper_parallel.platform.messages import Messages
    from hyper_parallel.platform.rows import Rows

HYPER_PARALLEL_CHECK = "HYPER_PARALLEL_CHECK"


class Traffic(NamedTuple):
    """One collective as seen by this rank; ``nbytes`` is what it receives if the least possible is moved."""

    collective: str
    ranks: tuple[int, ...]
    nbytes: int
    backward: bool


class P2POp(NamedTuple):
    """A point-to-point operation: ``kind`` is "send" or "recv", ``peer`` a global rank."""

    kind: str
    tensor: Any
    peer: int
    group: Any = None
    tag: int = 0


class Collectives(Ranks):
    """Communication outside the graph, and the checks of it."""

    # How many collectives of each group are compared by default, if the backend does not compare them itself.
    _compared_by_default = 0

    def __init__(self) -> None:
        super().__init__()
        checked = os.environ.get(HYPER_PARALLEL_CHECK, "0")
        self._checks_collectives = checked not in ("", "0")
        asked = os.environ.get(HYPER_PARALLEL_CHECK_ORDER)
        self._compared_first = first_compared(asked, self._compared_by_default)
        self._seeks_circles = asked is not None
        self._listeners: list[Callable[[Traffic], None]] = []

    @abstractmethod
    def barrier(
        self, group: Any = None, async_op: bool = False, device_ids: Any = None
    ) -> Any:
        """Blocks until every rank of the group has called it; with ``async_op`` returns a handle."""

    @abstractmethod
    def all_reduce(
        self, data: Any, group_info: Any, async_op: bool = False, op: str = "sum"
    ) -> Any:
        """Reduces ``data`` over the group in place on every rank and returns it."""

    @abstractmethod
    def all_gather_into_tensor(
        self, data: Any, group_info: Any, async_op: bool = False
    ) -> Any:
        """Concatenates every rank's ``data``, which must have equal shapes, along dim 0 in rank order."""

    @abstractmethod
    def reduce_scatter_tensor(
        self, data: Any, group_info: Any, async_op: bool = False, op: str = "sum"
    ) -> Any:
        """Reduces ``data`` over the group and returns this rank's chunk of equal chunks along dim 0."""

    @abstractmethod
    def take_rows(
        self, length: int, dtype: Any, group: Any, *, is_outgoing: bool = False
    ) -> Rows:
        """Memory for one row that all ranks read, or, with ``is_outgoing``, for one row to each rank.

        Every rank of the group calls it in the same order, and passes the rows to one collective.
        """

    @abstractmethod
    def gather_tensors(
        self,
        outputs: Sequence[Any],
        sources: Sequence[Any],
        group: Any,
        number: int = 0,
        rows: Rows | None = None,
    ) -> Any:
        """Starts one all-gather of flat tensors of one dtype into flat ``outputs``, in rank order; returns a handle.

        ``rows``: are gathered along. ``number``: where the backend can, messages are not taken for those of a call
        with another number.
        """

    @abstractmethod
    def reduce_scatter_tensors(
        self,
        outputs: Sequence[Any],
        sources: Sequence[Any],
        group: Any,
        number: int = 0,
        rows: Rows | None = None,
    ) -> Any:
        """Starts one reduce-scatter by sum of flat tensors of one dtype into ``outputs``; returns a handle.

        Each source holds the pieces of all ranks in rank order, each output this rank's sum. ``rows``: outgoing ones,
        whose sum is the last of the outputs. Sources and rows must not change before the handle's ``wait()`` has
        returned. ``number``: as in ``gather_tensors``.
        """

    @abstractmethod
    def all_to_all_single(
        self,
        input_tensor: Any,
        output_shape: Sequence[int],
        group: Any,
        async_op: bool = False,
    ) -> Any:
        """Sends chunk i of dim 0 to rank i and concatenates what arrives; returns (output, work or None)."""

    @abstractmethod
    def exchange(
        self,
        call: str,
        data: Any,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        group: Any,
    ) -> tuple[Any, Any]:
        """Starts an all-to-all of rows; returns (output, handle).

        ``call`` is what it is announced as. Without splits every rank gets as many rows.
        """

    @abstractmethod
    def reduce_pieces(self, received: Any, shape: Sequence[int], op: str) -> Any:
        """Reduces pieces that arrived one after the other, in rank order; ``shape``: (number of pieces, *piece)."""

    @abstractmethod
    def broadcast(self, data: Any, src: int, group: Any, async_op: bool = False) -> Any:
        """Overwrites ``data`` on every rank with that of global rank ``src`` and returns it."""

    @abstractmethod
    def isend(
        self, tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0
    ) -> Any:
        """Starts sending ``tensor`` to global rank ``dst``; returns a handle."""

    @abstractmethod
    def irecv(
        self, tensor: Any, src: int | None = None, group: Any = None, tag: int = 0
    ) -> Any:
        """Starts receiving into ``tensor`` from global rank ``src`` (any rank if None); returns a handle."""

    @abstractmethod
    def connect_messages(self, group: Any) -> Messages:
        """Messages between the ranks of the group, all of which call it, in the same order."""

    def batch_p2p(self, ops: Sequence[P2POp]) -> list[Any]:
        """Starts sends and receives together and returns handles, all of which must be waited for.

        Ranks may list their operations in any order: no send waits for a receive of the same batch.
        """
        for op in ops:
            if op.kind not in ("send", "recv"):
                raise coded(
                    ValueError,
                    "HP139",
                    f"batch_p2p: kind must be 'send' or 'recv', got {op.kind!r}",
                )
        return self._start_p2p(ops)

    def _start_p2p(self, ops: Sequence[P2POp]) -> list[Any]:
        """Starts the sends first: a receive may block a backend that works in order."""
        sends = [self.isend(*op[1:]) for op in ops if op.kind == "send"]
        receives = [self.irecv(*op[1:]) for op in ops if op.kind == "recv"]
        return [*sends, *receives]

    @abstractmethod
    def p2p_exchange(self, tensor: Any, peer_rank: int, group: Any = None) -> Any:
        """Sends ``tensor`` to a peer and returns the peer's, of the same shape; backward exchanges the gradients."""

    @abstractmethod
    def _swap_with(self, tensor: Any, peer: int, group: Any) -> Any:
        """Sends ``tensor`` to another rank and returns that rank's, outside the graph."""

    @abstractmethod
    def _check_reducible(self, call: str, data: Any, op: str, group: Any) -> None:
        """Raises a ValueError if the group cannot reduce a tensor of this dtype with ``op``."""

    def _check_member(self, call: str, name: str, rank: Any, group: Any) -> int:
        """Returns the global rank, or raises a ValueError if it is not in the group."""
        ranks = self.get_process_group_ranks(group)
        if rank not in ranks or isinstance(rank, bool):
            raise coded(
                ValueError,
                "HP122",
                f"{call}: {name} must be one of the group's ranks {ranks}, got {rank!r}",
            )
        return int(rank)

    def _check_peer(self, call: str, name: str, rank: Any, group: Any) -> int:
        """Returns the global rank, or raises a ValueError if it is not another one of the group."""
        if self._check_member(call, name, rank, group) == self.get_rank():
            raise coded(
                ValueError, "HP122", f"{call}: {name} is this rank, {rank}, itself"
            )
        return int(rank)

    @abstractmethod
    def all_gather_object(
        self, object_list: list[Any], obj: Any, group: Any = None
    ) -> None:
        """Fills ``object_list``, one slot per rank, with every rank's ``obj``."""

    @abstractmethod
    def longest_wait(self) -> tuple[str, float] | None:
        """Returns (collective, seconds) of the longest wait for other ranks now in progress on any thread, or None."""

    @contextmanager
    def checked_collectives(self) -> Iterator[None]:
        """Makes the ranks compare op, dtype, shape and splits before each collective, within a context.

        A mismatch raises a ValueError on every rank. HYPER_PARALLEL_CHECK=1 enables the check for a whole program.
        """
        before, self._checks_collectives = self._checks_collectives, True
        try:
            yield
        finally:
            self._checks_collectives = before

    @contextmanager
    def checked_order(self) -> Iterator[None]:
        """Makes the ranks compare which collectives they issue, within a context.

        A mismatch raises a CommunicationError on every rank of the group that shows each rank's line of code. The
        check costs one message to the job's store per collective. HYPER_PARALLEL_CHECK_ORDER=1 enables it for a
        whole program, =first:N for the first N collectives of each group, =0 for none. On torch the first 100 of
        each group are compared by default; ranks that wait for each other in collectives of different groups are
        detected only if the check was requested.
        """
        before = self._compared_first, self._seeks_circles
        self._compared_first, self._seeks_circles = ALL, True
        try:
            yield
        finally:
            self._compared_first, self._seeks_circles = before

    @contextmanager
    def listen_to_collectives(
        self, listener: Callable[[Traffic], None]
    ) -> Iterator[None]:
        """Calls ``listener`` with every collective that this rank starts on any thread, within a context."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)
