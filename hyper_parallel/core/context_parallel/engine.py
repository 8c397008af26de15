# SPDX-License-Identifier: Apache-2.0
"""Attention on a sequence that several ranks share: one autograd function for each way in which keys travel.

    output = attend(query, key, value, Task(division, CAUSAL, scale))

Everything here is about plain shards, (batch, heads, positions of this rank, head_dim). Ranks may have different
numbers of positions, and none. Communication goes on while blocks are computed that do not need it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.context_parallel.blocks import Block, Visibility
from hyper_parallel.core.context_parallel.division import (
    Division,
    Heads,
    merge_neighbours,
)
from hyper_parallel.core.context_parallel.exchange import Exchange
from hyper_parallel.core.context_parallel.kernel import Gradients, Merged, Operands
from hyper_parallel.core.context_parallel.rotation import Ring, add_to, pack, unpack
from hyper_parallel.core.dtensor.geometry import Spans
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.pending import start_all_gather, start_reduce_scatter

platform = get_platform()


@dataclass(frozen=True)
class Task:
    """One attention, as every rank of the division knows it.

    ``mask``: what is given beside ``sight``, with a row for each query that this rank has after the exchange of heads
    and a column for each position of the keys, or one for all; not differentiable.
    """

    division: Division
    sight: Visibility
    scale: float
    mask: Any = None

    @property
    def queries(self) -> Spans:
        """Where the queries of this rank lie in the sequence, after the exchange."""
        return self.division.joined_queries().spans

    def keys_of(self, owner: int) -> Spans:
        """The same for the keys of a rank in the ring."""
        return self.division.joined_keys(owner).spans

    def sizes(self) -> list[int]:
        """How many keys each rank in the ring has."""
        count = len(self.division.outer)
        return [self.division.joined_keys(owner).size for owner in range(count)]

    def operands(self, query: Any, key: Any, value: Any, keys: Spans) -> Operands:
        """For keys that lie at these spans."""
        mask = self.mask
        if mask is not None and mask.shape[3] > 1:
            spans = merge_neighbours(keys) or ((0, 0),)
            parts = [mask[..., start : start + size] for start, size in spans]
            mask = parts[0] if len(parts) == 1 else platform.cat(parts, 3)
        return Operands(query, key, value, self.scale, mask)


def attend(query: Any, key: Any, value: Any, task: Task) -> Any:
    """This rank's part of the attention of all ranks' queries to all ranks' keys; differentiable once."""
    division = task.division
    if 0 in query.shape[:2]:  # on all of these ranks alike: nothing to send either
        return _attend_nothing(query, key, value)
    exchange = None
    if division.degree > 1:
        heads = Heads(query.shape[1], key.shape[1], division.degree)
        exchange = Exchange.of(division, heads)
        query, key, value = exchange_heads(query, key, value, exchange)
    name = "local"
    if len(division.outer) > 1:
        name = "ring" if division.rotates else "gather"
    output = _functions()[name].apply(query, key, value, task)
    return output if exchange is None else _return_heads(output, exchange)


def _attend_nothing(query: Any, key: Any, value: Any) -> Any:
    """The empty output of a rank without rows of the batch, or without heads."""
    shape = (*query.shape[:3], value.shape[3])
    empty = platform.zeros(shape, dtype=query.dtype, device=query.device)
    return platform.keep_in_graph(empty, [query, key, value])


def exchange_heads(query: Any, key: Any, value: Any, exchange: Exchange) -> Any:
    """Every position of this rank's heads; differentiable once."""
    return _functions()["exchange"].apply(query, key, value, exchange)


def _return_heads(output: Any, exchange: Exchange) -> Any:
    return _functions()["return"].apply(output, exchange)


@functools.cache
def _functions() -> dict[str, Any]:
    """The autograd functions, made when the framework is known."""

    class ExchangeHeads(platform.Function):  # type: ignore[name-defined, misc]
        @staticmethod
        def forward(
            ctx: Any, query: Any, key: Any, value: Any, exchange: Exchange
        ) -> Any:
            ctx.exchange = exchange
            starts = (exchange.start_query, exchange.start_key, exchange.start_key)
            tensors = (query, key, value)
            pending = [
                start(tensor) for start, tensor in zip(starts, tensors, strict=True)
            ]
            return tuple(one.finish() for one in pending)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            _check_first_order()
            exchange = ctx.exchange
            starts = (exchange.return_query, exchange.return_key, exchange.return_key)
            pending = [start(grad) for start, grad in zip(starts, grads, strict=True)]
            return (*(one.finish() for one in pending), None)

    class ReturnHeads(platform.Function):  # type: ignore[name-defined, misc]
        @staticmethod
        def forward(ctx: Any, output: Any, exchange: Exchange) -> Any:
            ctx.exchange = exchange
            return exchange.return_query(output).finish()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            _check_first_order()
            return ctx.exchange.start_query(grad).finish(), None

    def function(run: Any, run_back: Any) -> Any:
        class Attend(platform.Function):  # type: ignore[name-defined, misc]
            @staticmethod
            def forward(ctx: Any, query: Any, key: Any, value: Any, task: Task) -> Any:
                ctx.task = task
                output, saved = run(query, key, value, task)
                ctx.save_for_backward(query, output, *saved, *_mark(task, query))
                return output

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                _check_first_order()
                query, output, logsumexp, key, value = ctx.saved_tensors[:5]
                gradients = Gradients(grad, output, logsumexp)
                of_key, of_value = run_back(gradients, query, key, value, ctx.task)
                of_query = gradients.of_query(query)
                return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None

        return Attend

    return {
        "exchange": ExchangeHeads,
        "return": ReturnHeads,
        "local": function(_run_local, _run_local_back),
        "gather": function(_run_gathered, _run_gathered_back),
        "ring": function(_run_ring, _run_ring_back),
    }


def _mark(task: Task, like: Any) -> list[Any]:
    """For what a context hides, an empty tensor whose shape differs if something else is hidden in a recomputation.

    Without it a recomputation outside of the context would give wrong gradients; so the framework's check fails.
    """
    sight = task.sight
    if sight.documents is None and sight.before is None:
        return []
    shape = (hash(sight) % 2**20, 0)
    return [platform.empty(shape, dtype=like.dtype, device=like.device)]


def _check_first_order() -> None:
    # Functions of a framework that has no second gradients refuse them by themselves.
    checks = platform.Function is platform.HigherOrderFunction
    if checks and not platform.is_recording_disabled():
        raise coded(
            NotImplementedError,
            "HP806",
            "context parallel: gradients of gradients are not supported; leave create_graph out, or call attention on "
            "distributed tensors outside of any context parallel context, where they are exact",
        )


# Each of the following returns (output, what backward needs): the logarithms of the sums, keys and values. The reverse
# adds to the gradients of the queries and returns those of this rank's keys and values.


def _run_local(query: Any, key: Any, value: Any, task: Task) -> Any:
    merged = Merged(query, value)
    keys = task.keys_of(task.division.outer_index)
    operands = task.operands(query, key, value, keys)
    merged.add(operands, task.sight.blocks(task.queries, keys))
    output, logsumexp = merged.result()
    return output, (logsumexp, key, value)


def _run_local_back(
    gradients: Gradients, query: Any, key: Any, value: Any, task: Task
) -> Any:
    keys = task.keys_of(task.division.outer_index)
    operands = task.operands(query, key, value, keys)
    return gradients.add(operands, task.sight.blocks(task.queries, keys))


# --- keys and values of all ranks at once


class _Part:
    """The keys of consecutive ranks, and where they begin and end in those of all ranks."""

    def __init__(self, task: Task, first: int, last: int) -> None:
        sizes = task.sizes()
        self.start, self.stop = sum(sizes[:first]), sum(sizes[:last])
        self.spans: Spans = tuple(
            span for owner in range(first, last) for span in task.keys_of(owner)
        )
        self._task = task

    def operands(self, query: Any, keys: Any, values: Any) -> Operands:
        return self._task.operands(
            query,
            keys[:, :, self.start : self.stop],
            values[:, :, self.start : self.stop],
            self.spans,
        )

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self._task.sight.blocks(self._task.queries, self.spans)


def _parts(task: Task) -> tuple[_Part, _Part, _Part]:
    """The keys before this rank's, its own, and those after."""
    own, count = task.division.outer_index, len(task.division.outer)
    return (
        _Part(task, 0, own),
        _Part(task, own, own + 1),
        _Part(task, own + 1, count),
    )


def _run_gathered(query: Any, key: Any, value: Any, task: Task) -> Any:
    group = platform.create_group(list(task.division.outer))
    before, own, after = _parts(task)
    pending = [
        start_all_gather(platform, tensor, 2, task.sizes(), group)
        for tensor in (key, value)
    ]
    merged = Merged(query, value)
    merged.add(task.operands(query, key, value, own.spans), own.blocks)
    keys, values = (one.finish() for one in pending)
    for part in (before, after):
        merged.add(part.operands(query, keys, values), part.blocks)
    output, logsumexp = merged.result()
    return output, (logsumexp, keys, values)


def _run_gathered_back(
    gradients: Gradients, query: Any, keys: Any, values: Any, task: Task
) -> Any:
    group = platform.create_group(list(task.division.outer))
    before, own, after = _parts(task)
    of_parts = [
        list(gradients.add(part.operands(query, keys, values), part.blocks))
        for part in (before, after)
    ]
    pending = []
    for tensor in (keys, values):
        earlier, later = (found.pop(0) for found in of_parts)
        shape = (*tensor.shape[:2], own.stop - own.start, tensor.shape[3])
        none = platform.zeros(shape, dtype=earlier.dtype, device=earlier.device)
        joined = platform.cat([earlier, none, later], 2)
        pending.append(
            start_reduce_scatter(platform, joined, 2, task.sizes(), "sum", group)
        )
    of_own = gradients.add(own.operands(query, keys, values), own.blocks)
    return tuple(
        one.finish() + found for one, found in zip(pending, of_own, strict=True)
    )


# --- keys and values of one rank after the other


class _Round:
    """Where parcels of keys and values are in a ring, and what they look like."""

    def __init__(self, task: Task, key: Any, value: Any) -> None:
        self.ring = Ring(task.division.outer, task.division.outer_index)
        self._task, self._sizes = task, task.sizes()
        self._like = key, value

    def shapes(self, step: int) -> list[tuple[int, ...]]:
        """The shapes of the keys and values that are here at a step."""
        size = self._sizes[self.ring.owner(step)]
        return [(*x.shape[:2], size, x.shape[3]) for x in self._like]

    def start(self, parcel: Any, step: int) -> Any:
        """Passes on what is here at a step."""
        count = sum(a * b * c * d for a, b, c, d in self.shapes(step + 1))
        return self.ring.start(parcel, count)

    def blocks(self, step: int) -> tuple[Block, ...]:
        return self._task.sight.blocks(self._task.queries, self._keys(step))

    def operands(self, query: Any, parcel: Any, step: int) -> Operands:
        key, value = unpack(parcel, self.shapes(step))
        return self._task.operands(query, key, value, self._keys(step))

    def _keys(self, step: int) -> Spans:
        return self._task.keys_of(self.ring.owner(step))


def _run_ring(query: Any, key: Any, value: Any, task: Task) -> Any:
    around = _Round(task, key, value)
    merged = Merged(query, value)
    parcel = pack([key, value])
    last = around.ring.size - 1
    with around.ring:
        for step in range(last + 1):
            pending = around.start(parcel, step) if step < last else None
            merged.add(around.operands(query, parcel, step), around.blocks(step))
            parcel = parcel if pending is None else pending.finish()
    output, logsumexp = merged.result()
    return output, (logsumexp, key, value)


def _run_ring_back(
    gradients: Gradients, query: Any, key: Any, value: Any, task: Task
) -> Any:
    """The gradients of a rank's keys travel one step behind them, and one step longer, to their owner."""
    around = _Round(task, key, value)
    parcel, waiting = pack([key, value]), None
    last = around.ring.size - 1
    with around.ring:
        for step in range(last + 1):
            pending = around.start(parcel, step) if step < last else None
            operands = around.operands(query, parcel, step)
            found = list(gradients.add(operands, around.blocks(step)))
            of_parcel = pack(found) if waiting is None else waiting.finish()
            if waiting is not None:
                add_to(of_parcel, found)
            del found
            waiting = around.start(of_parcel, step)
            parcel = parcel if pending is None else pending.finish()
    assert waiting is not None
    return unpack(waiting.finish(), around.shapes(last + 1))
