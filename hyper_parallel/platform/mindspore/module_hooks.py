# SPDX-License-Identifier: Apache-2.0
"""Backward hooks of Cells with distributed tensors: set on the shards, and called with the gradients of shards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hyper_parallel.platform.mindspore.dtensor_base import DTensorBase


def hook_shards(usual: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the primitive that sets the hooks of a Cell's inputs or outputs."""

    @functools.wraps(usual)
    def call(primitive: Any, args: Any) -> Any:
        items = args if isinstance(args, tuple) else (args,)
        if not any(isinstance(item, DTensorBase) for item in items):
            return usual(primitive, args)
        hooked = usual(primitive, tuple(_local(item) for item in items))
        results = tuple(
            _like(item, local) for item, local in zip(items, hooked, strict=True)
        )
        return results if isinstance(args, tuple) else results[0]

    return call


def _local(item: Any) -> Any:
    return item.to_local() if isinstance(item, DTensorBase) else item


def _like(item: Any, local: Any) -> Any:
    if not isinstance(item, DTensorBase):
        return local
    return item.layout.tensor(local, tuple(item.shape))
