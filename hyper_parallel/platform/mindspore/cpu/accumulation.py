# SPDX-License-Identifier: Apache-2.0
"""Gradients that are views, on their way into leaves that have a gradient: MindSpore adds their memory as it lies.

A linear layer's gradient for its weight is the transpose of a product, and came out transposed in a second backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hyper_parallel.platform.mindspore import private


@contextmanager
def contiguous_gradients(outputs: Sequence[Any]) -> Iterator[None]:
    """A backward from these outputs in which leaves get their gradients in order of memory."""
    hooks = [leaf.register_prehook(_reorder) for leaf in _find_leaves(outputs)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _find_leaves(outputs: Sequence[Any]) -> list[Any]:
    """The nodes of leaves that a backward reaches."""
    stack = [private.node(output) for output in outputs]
    seen: set[int] = set()
    leaves = []
    while stack:
        node = stack.pop()
        if node is None or node._unique_id() in seen:
            continue
        seen.add(node._unique_id())
        if node.is_leaf():
            leaves.append(node)
        else:
            stack += [below for below, _ in node.next_functions]
    return leaves


def _reorder(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        one if one is None or one.is_contiguous() else one.contiguous()
        for one in gradients
    )
