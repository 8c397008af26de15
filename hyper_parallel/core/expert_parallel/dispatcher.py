# SPDX-License-Identifier: Apache-2.0
"""The exchange of rows between the ranks that share the experts.

rows, counts, ctx = dispatcher.dispatch(module, (rows, counts), mesh["ep"])
rows = dispatcher.combine(module, compute(rows, counts), mesh["ep"], ctx)

Rows are sorted by expert before and after. Within an expert those of the first rank come first, and those of one rank
keep their order. Every rank takes part in every exchange, whatever it has to send.

    finish = dispatcher.start(module, (rows, counts), mesh["ep"])
    ...                                     computation while rows travel
    rows, counts, ctx = finish()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.expert_parallel.order import RowOrder, sort_chunks
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


@dataclass(frozen=True)
class DispatchContext:
    """What ``combine`` needs of one ``dispatch``; every call has its own.

    ``sent``, ``received``: how many rows go to each rank and come from it. ``counts``: how many each expert of this
    rank has. ``order``: the permutation of what arrives; None where nothing moves.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    counts: tuple[int, ...]
    order: RowOrder | None = None


class AllToAllTokenDispatcher:
    """Sends every row to the rank of its expert, and results back: no row is dropped."""

    def dispatch(
        self, module: Any, inputs: Sequence[Any], device_mesh: DeviceMesh
    ) -> tuple[Any, Any, DispatchContext]:
        """(this rank's rows, how many each of its experts has, the context for ``combine``).

        ``inputs``: rows sorted by expert, and how many each expert of all ranks has.
        """
        return self.start(module, inputs, device_mesh)()

    def start(
        self, module: Any, inputs: Sequence[Any], device_mesh: DeviceMesh
    ) -> Callable[[], tuple[Any, Any, DispatchContext]]:
        """Begins ``dispatch``; what it returns waits for the rows and returns what ``dispatch`` does, once."""
        rows, counts = inputs
        ranks = device_mesh.size()
        num_experts = int(counts.shape[0])
        check_experts(num_experts, ranks, f"{type(module).__name__}: dispatch")
        if ranks == 1:
            own_counts = tuple(counts.tolist())
            total = sum(own_counts)
            context = DispatchContext((total,), (total,), own_counts)
            return lambda: (rows, counts, context)
        arriving, own = self._exchange_counts(counts, device_mesh)
        sent = tuple(map(sum, own))
        received = tuple(map(sum, arriving))
        self._check_rows(rows, sent)
        wait = platform.start_differentiable_all_to_all_single(
            rows, sent, received, device_mesh.get_group()
        )

        def finish() -> tuple[Any, Any, DispatchContext]:
            arrived = wait()
            order = sort_chunks(arriving, arrived)
            if order is not None:
                arrived = order.spread(arrived)
            totals = tuple(map(sum, zip(*arriving, strict=True)))
            local_counts = platform.tensor(list(totals)).to(counts.device)
            context = DispatchContext(sent, received, totals, order)
            return arrived, local_counts.to(counts.dtype), context

        return finish

    def combine(
        self,
        module: Any,
        routed_output: Any,
        device_mesh: DeviceMesh,
        ctx: DispatchContext,
    ) -> Any:
        """The results of the rows that this rank gave to ``dispatch``, in the order in which it gave them."""
        if not isinstance(ctx, DispatchContext):
            raise coded(
                RuntimeError,
                "HP452",
                f"{type(module).__name__}: combine needs the context that dispatch has returned, got "
                f"{type(ctx).__name__}",
            )
        if device_mesh.size() == 1:
            return routed_output
        if ctx.order is not None:
            routed_output = ctx.order.gather(routed_output)
        return platform.differentiable_all_to_all_single(
            routed_output, ctx.received, ctx.sent, device_mesh.get_group()
        )

    def _exchange_counts(
        self, counts: Any, mesh: DeviceMesh
    ) -> tuple[list[list[int]], list[list[int]]]:
        """By rank, how many rows arrive for each expert here, and how many leave for each expert there."""
        ranks = mesh.size()
        shape = (ranks, int(counts.shape[0]) // ranks)
        own = counts.reshape(shape)
        arriving, _ = platform.all_to_all_single(own, shape, mesh.get_group())
        joined = platform.cat([arriving.reshape(shape), own], 0)
        both = joined.tolist()  # one copy to the host
        return both[:ranks], both[ranks:]

    def _check_rows(self, rows: Any, sent: Sequence[int]) -> None:
        if int(rows.shape[0]) != sum(sent):
            raise coded(
                ValueError,
                "HP452",
                f"dispatch: {int(rows.shape[0])} rows were given, but the experts have {sum(sent)} according to their "
                "counts",
            )


def check_experts(num_experts: int, ranks: int, name: str) -> None:
    """Raises if ranks cannot have equally many experts."""
    if num_experts % ranks:
        raise coded(
            ValueError,
            "HP451",
            f"{name}: {num_experts} experts cannot be shared evenly by {ranks} ranks; take a mesh whose size divides "
            "the number of experts",
        )
