# SPDX-License-Identifier: Apache-2.0
"""Backward in two parts on torch: first the gradients of inputs, later those of parameters.

Operators that lead both to an input and to a parameter are where the parts meet. The first part runs backward to the
inputs and notes what gradients come to these operators; the second runs each of them again, towards its parameters
only. A parameter that several such operators lead to by one way would be counted more than once: its gradient is
computed in the first part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import GraphExecGroup

Node = Any


def backward_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> Callable[[], None]:
    """Accumulates the gradients of inputs, and of parameters that cannot wait; returns what does the others."""
    leads = _find_leads(outputs, inputs)
    meetings, inseparable = _find_meetings(leads)
    captured: dict[Node, tuple[Any, ...]] = {}
    hooks = [
        node.register_prehook(lambda given, node=node: captured.update({node: given}))
        for node in meetings
    ]
    now = [*inputs, *(node.variable for node in inseparable)]
    try:
        torch.autograd.backward(
            list(outputs), list(gradients), retain_graph=bool(meetings), inputs=now
        )
    finally:
        for hook in hooks:
            hook.remove()

    def backward_parameters() -> None:
        # A checkpoint is recomputed once for all operators: no two of them need the same saved tensor.
        with GraphExecGroup():
            for node, leaves in meetings.items():
                _run_towards(node, captured.pop(node, None), leaves)

    return backward_parameters


def _run_towards(
    node: Node, given: tuple[Any, ...] | None, leaves: Sequence[Node]
) -> None:
    """Runs one operator's backward, only for the parameters that it leads to."""
    pairs = [
        (GradientEdge(node, position), gradient)
        for position, gradient in enumerate(given or ())
        if gradient is not None
    ]
    if pairs:
        edges, gradients = zip(*pairs, strict=True)
        parameters = [leaf.variable for leaf in leaves]
        torch.autograd.backward(edges, gradients, retain_graph=True, inputs=parameters)


class _Leads(NamedTuple):
    """The graph above outputs: their nodes, all nodes in reverse order of use, and those that lead to an input."""

    roots: set[Node]
    order: list[Node]
    to_input: set[Node]


def _find_leads(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> _Leads:
    ends = {_node_of(tensor) for tensor in inputs}
    roots = {_node_of(output) for output in outputs}
    order = _sort_nodes(roots)
    to_input = set()
    for node in order:  # what a node leads to comes before it
        if node in ends or any(child in to_input for child in _children(node)):
            to_input.add(node)
    return _Leads(roots, order, to_input)


def _node_of(tensor: torch.Tensor) -> Node:
    return torch.autograd.graph.get_gradient_edge(tensor).node


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _sort_nodes(roots: Iterable[Node]) -> list[Node]:
    """All nodes below the roots; each after those that it leads to."""
    order: list[Node] = []
    state: dict[Node, bool] = {}  # whether a node is done
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node not in state:
            state[node] = False
            stack += [child for child in _children(node) if child not in state]
        else:
            stack.pop()
            if not state[node]:
                state[node] = True
                order.append(node)
    return order


def _find_meetings(leads: _Leads) -> tuple[dict[Node, list[Node]], list[Node]]:
    """Meeting nodes -> the leaves below each; and the leaves that more than one way leads to."""
    owners: dict[Node, set[Node]] = defaultdict(set)  # of what leads to no input
    for root in leads.roots - leads.to_input:
        owners[root] = {root}
    for node in reversed(leads.order):
        for child in _children(node):
            if child not in leads.to_input:
                is_meeting = node in leads.to_input
                owners[child] |= {node} if is_meeting else owners[node]
    shared = {node for node, above in owners.items() if len(above) != 1}
    meetings: dict[Node, list[Node]] = defaultdict(list)
    inseparable = []
    for node in leads.order:
        if not hasattr(node, "variable") or node in leads.to_input:
            continue
        owner = next(iter(owners[node]))
        if node in shared or owner not in leads.to_input:
            inseparable.append(node)
        else:
            meetings[owner].append(node)
    return dict(meetings), inseparable
