# SPDX-License-Identifier: Apache-2.0
"""Tests that run on every rank.

@on_ranks(4)
def test_sum():
    platform = get_platform()
    assert platform.all_reduce(platform.ones(1), None).item() == 4
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from hyper_parallel.ranks import run_ranks

_F = TypeVar("_F", bound=Callable[..., Any])


def on_ranks(world_size: int, *, timeout: float | None = None) -> Callable[[_F], _F]:
    """Makes a test function run on every one of ``world_size`` ranks; goes together with pytest's parametrize."""

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def on_every_rank(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            run_ranks(function, world_size, *args, timeout=timeout, **kwargs)

        return on_every_rank  # type: ignore[return-value]

    return decorate
