# SPDX-License-Identifier: Apache-2.0
"""Dropout as on one device, so that two steps can be compared: on a mesh it draws other numbers for every piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hyper_parallel.core.shard.arguments import replicated
from hyper_parallel.core.shard.ops import OPERATORS
from hyper_parallel.core.shard.ops.operator import ON_CHANGE
from hyper_parallel.platform import get_platform

platform = get_platform()

MULTIPLYING = ("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout")


@contextmanager
def dropout_of_one_device() -> Iterator[None]:
    """A context in which dropout of a distributed tensor drops what it would drop of the whole on one device."""
    usual = {name: OPERATORS[name] for name in MULTIPLYING if name in OPERATORS}
    _put(
        {
            name: replace(op, rule=None, local=None, handler=_dropping(name))
            for name, op in usual.items()
        }
    )
    try:
        yield
    finally:
        _put(usual)


def _put(operators: dict[str, Any]) -> None:
    OPERATORS.update(operators)
    for told in ON_CHANGE:
        told()


def _dropping(name: str) -> Callable[..., Any]:
    def drop(input: Any, p: float, training: bool, **_: Any) -> Any:  # noqa: A002 - torch's name for it
        if not training or p == 0:
            return input
        ones = platform.ones(tuple(input.shape), dtype=input.dtype, device=input.device)
        kept = platform.operator(name)(
            ones, p, True
        )  # every rank draws the same: all were seeded alike
        return input * replicated(kept, input)

    return drop
