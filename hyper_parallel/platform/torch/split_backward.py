# SPDX-License-Identifier: Apache-2.0
"""Backward in two parts on torch: first the gradients of inputs, later those of parameters.

Operators that lead both to an input and to a parameter are where the parts meet. The first part runs backward to the
inputs and notes what gradients come to these operators; the second runs each of them again, towards its parameters
only. Computed in the first part all the same: the gradient of a parameter that several such operators lead to by one
way, which would be counted more than once, and those of layers that are recomputed, which would run again.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.utils.checkpoint import _Holder

Node = Any


def backward_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> Callable[[], None]:
    """Accumulates the gradients of leaves that are inputs, and of parameters that cannot wait; returns the rest."""
    if not inputs:  # nothing is gained by waiting
        torch.autograd.backward(list(outputs), list(gradients))
        return _do_nothing
    leads = _find_leads(outputs, inputs)
    meetings, parameters = _find_meetings(leads)
    captured: dict[Node, tuple[Any, ...]] = {}
    hooks = [
        node.register_prehook(lambda given, node=node: captured.update({node: given}))
        for node in meetings
    ]
    now = [*inputs, *(node.variable for node in parameters)]
    try:
        _run(outputs, gradients, now, keeps_graph=bool(meetings))
    finally:
        for hook in hooks:
            hook.remove()

    def backward_parameters() -> None:
        for node, leaves in meetings.items():
            _run_towards(node, captured.pop(node, None), leaves)

    return backward_parameters


def _do_nothing() -> None:
    pass


def _run_towards(
    node: Node, given: tuple[Any, ...] | None, leaves: Sequence[Node]
) -> None:
    """Runs one operator's backward, only for the parameters that it leads to."""
    given = given or ()
    edges = [
        GradientEdge(node, position)
        for position, gradient in enumerate(given)
        if gradient is not None
    ]
    if edges:
        # What was captured has been through the hooks of the operator's outputs, which run again here, on zeros.
        zeros = [one.new_zeros(()).expand_as(one) for one in given if one is not None]
        hook = node.register_prehook(lambda _: given)
        try:
            _run(edges, zeros, [leaf.variable for leaf in leaves], keeps_graph=True)
        finally:
            hook.remove()


def _run(
    roots: Sequence[Any],
    gradients: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    *,
    keeps_graph: bool,
) -> None:
    """Accumulates gradients into leaves, as torch.autograd.backward does.

    That checks gradients and makes those that are missing, which takes longer than a small operator's backward.
    """
    _engine_run_backward(
        tuple(roots),
        tuple(gradients),
        keeps_graph,
        False,
        tuple(leaves),
        allow_unreachable=True,
        accumulate_grad=True,
    )


class _Leads(NamedTuple):
    """The graph above outputs.

    ``children``: what each node leads to, which comes before it. ``leaves``: the tensors of nodes that accumulate.
    ``to_input``: the nodes that lead to an input.
    """

    roots: set[Node]
    children: dict[Node, list[Node]]
    leaves: dict[Node, torch.Tensor]
    to_input: set[Node]


def _find_leads(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> _Leads:
    roots = {_node_of(output) for output in outputs}
    children = _sort_nodes(roots)
    ends = [node for node, below in children.items() if not below]
    leaves = {node: node.variable for node in ends if hasattr(node, "variable")}
    wanted = {id(tensor) for tensor in inputs}
    to_input = {node for node, leaf in leaves.items() if id(leaf) in wanted}
    for node, below in children.items():
        if not to_input.isdisjoint(below):
            to_input.add(node)
    return _Leads(roots, children, leaves, to_input)


def _node_of(tensor: torch.Tensor) -> Node:
    node = tensor.grad_fn
    return torch.autograd.graph.get_gradient_edge(tensor).node if node is None else node


def _sort_nodes(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """All nodes below the roots and what each leads to, which comes before it."""
    done: dict[Node, list[Node]] = {}
    begun: dict[Node, list[Node]] = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node not in begun:
            below = [child for child, _ in node.next_functions if child is not None]
            begun[node] = below
            stack += [child for child in below if child not in begun]
        else:
            stack.pop()
            if node not in done:
                done[node] = begun[node]
    return done


def _find_meetings(leads: _Leads) -> tuple[dict[Node, list[Node]], list[Node]]:
    """Meeting nodes -> the leaves below each; and the leaves whose gradients cannot wait."""
    owners, recomputed = _find_owners(leads)
    inseparable = {node for node, above in owners.items() if len(above) != 1}
    inseparable |= recomputed
    meetings: dict[Node, list[Node]] = defaultdict(list)
    now = []
    for node in leads.leaves:
        if node in leads.to_input:
            continue
        owner = next(iter(owners[node]))
        if node in inseparable or owner not in leads.to_input:
            now.append(node)
        else:
            meetings[owner].append(node)
    return dict(meetings), now


def _find_owners(leads: _Leads) -> tuple[dict[Node, set[Node]], set[Node]]:
    """For each node that leads to no input the meetings and roots above it; and those below a recomputation."""
    owners: dict[Node, set[Node]] = defaultdict(set)
    recomputed: set[Node] = set()
    for root in leads.roots - leads.to_input:
        owners[root] = {root}
    for node, below in reversed(leads.children.items()):
        apart = [child for child in below if child not in leads.to_input]
        if not apart:
            continue
        above = {node} if node in leads.to_input else owners[node]
        for child in apart:
            owners[child] |= above
        if node in recomputed or _waits_for_recomputation(node):
            recomputed.update(apart)
    return owners, recomputed


def _waits_for_recomputation(node: Node) -> bool:
    """Whether what an operator has saved is computed again when backward needs it."""
    for name in _saved_names(node.__class__):
        saved = getattr(node, name)
        for one in saved if isinstance(saved, tuple) else (saved,):
            if isinstance(getattr(one, "data", None), _Holder):
                return True
    return False


@functools.lru_cache(maxsize=1024)  # autograd functions may be classes of a moment
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
