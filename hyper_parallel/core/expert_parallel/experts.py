# SPDX-License-Identifier: Apache-2.0
"""Runs experts on this rank's rows: dispatch, gather, compute, reduce, combine; all on plain tensors.

outputs = run_tokens(experts, tokens, index, weights)       each token's weighted sum of its experts' outputs
outputs = run_rows(experts, rows, counts)                   of rows that are sorted by expert already

``experts`` says how many there are, where they are, and how this rank computes its own. Nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.expert_parallel.capacity import Capacity, keep_within
from hyper_parallel.core.expert_parallel.dispatcher import DispatchContext
from hyper_parallel.core.expert_parallel.order import (
    count_tokens,
    sort_by_expert,
    sort_chunks,
)
from hyper_parallel.core.expert_parallel.telemetry import note_call
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.adjoints import reduce_scatter

platform = get_platform()


@dataclass(frozen=True)
class Where:
    """Along which axes experts are shared: ``ep`` whole ones, ``tp`` the hidden features of each."""

    ep: DeviceMesh | None = None
    tp: DeviceMesh | None = None

    @property
    def divides_tokens(self) -> bool:
        """Whether the ranks of ``tp`` take a part of the tokens each until these meet their experts."""
        return self.ep is not None and self.tp is not None


@dataclass(frozen=True)
class Experts:
    """The experts of one module in one call.

    ``compute(rows, sizes)``: this rank's experts on their rows; ``sizes``: how many each has. ``exchange``: the style
    that brings rows to their ranks. ``meanwhile``: work that needs no expert, done while rows travel to them.
    """

    module: Any
    count: int
    where: Where
    compute: Callable[[Any, Sequence[int]], Any]
    exchange: Any = None
    meanwhile: Callable[[], None] | None = None


def run_tokens(
    experts: Experts,
    tokens: Any,
    index: Any,
    weights: Any,
    *,
    weighs_inputs: bool = False,
    capacity: Capacity | None = None,
) -> Any:
    """The weighted sum of what the experts of each token make of it; ``index``, ``weights``: [tokens, k]."""
    given = int(tokens.shape[0])
    kept = keep_within(capacity, tokens, index, weights, experts.count)
    order = sort_by_expert(kept.index)
    counts = count_tokens(kept.index, experts.count + 1)[: experts.count]
    rows = order.spread(kept.tokens)
    row_weights = order.sort_choices(kept.weights.to(tokens.dtype))
    if weighs_inputs:
        rows = rows * row_weights
    # Choices without an expert are sorted last.
    rows = rows[: int(rows.shape[0]) - kept.left_out] if kept.left_out else rows
    note_call(rows, counts, kept.dropped, experts.where.ep)
    results = run_rows(experts, rows, counts)
    if kept.left_out:
        shape = (kept.left_out, results.shape[1])
        nothing = platform.zeros(shape, dtype=results.dtype, device=results.device)
        results = platform.cat([results, nothing], 0)
    if not weighs_inputs:
        results = results * row_weights
    outputs = order.gather(results)
    return outputs if int(outputs.shape[0]) == given else outputs[:given]


def run_rows(experts: Experts, rows: Any, counts: Any) -> Any:
    """What the experts make of rows that are sorted by expert, in the same order.

    Along ``tp``, if there is no ``ep``, results are parts of a sum.
    """
    where, module = experts.where, experts.module
    if where.ep is None:
        if experts.meanwhile is not None:
            experts.meanwhile()
        return experts.compute(rows, counts.tolist())
    tokens, local_counts, context = _dispatch(experts, rows, counts, where.ep)
    is_known = isinstance(context, DispatchContext)
    # Known already, they are not copied from the device a second time.
    sizes = context.counts if is_known else local_counts.tolist()
    if where.tp is None or where.tp.size() == 1:
        results = experts.compute(tokens, sizes)
    else:
        results = _run_gathered(experts, tokens, sizes, where.tp)
    return experts.exchange._token_combine(module, results, where.ep, context)


def _dispatch(experts: Experts, rows: Any, counts: Any, ep: DeviceMesh) -> Any:
    exchange, inputs = experts.exchange, (rows, counts)
    if experts.meanwhile is None:
        return exchange._token_dispatch(experts.module, inputs, ep)
    return exchange._dispatch_beside(experts.module, inputs, ep, experts.meanwhile)


def _run_gathered(
    experts: Experts, rows: Any, sizes: Sequence[int], tp: DeviceMesh
) -> Any:
    """Computes the rows of all ranks of ``tp``, each of which has a part of every expert, and returns this rank's."""
    group, ranks = tp.get_group(), tp.size()
    chunks = _gather_sizes(sizes, rows, group, ranks)
    lengths = [sum(chunk) for chunk in chunks]
    joint = platform.differentiable_all_gather_concat(rows, group, ranks, 0, lengths)
    order = sort_chunks(chunks, joint)
    if order is not None:
        joint = order.spread(joint)
    totals = [sum(of_expert) for of_expert in zip(*chunks, strict=True)]
    results = experts.compute(joint, totals)
    if order is not None:
        results = order.gather(results)
    return reduce_scatter(platform, results, 0, lengths, "sum", group)


def _gather_sizes(
    sizes: Sequence[int], like: Any, group: Any, ranks: int
) -> list[list[int]]:
    """How many rows every rank has for each expert."""
    own = platform.tensor(list(sizes)).to(like.device)
    everyone = platform.all_gather_into_tensor(own, group).reshape((ranks, -1))
    chunks: list[list[int]] = everyone.tolist()
    return chunks
