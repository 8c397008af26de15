# SPDX-License-Identifier: Apache-2.0
"""Keeps torch.compile away from distributed tensors, which it cannot trace; functions of plain shards may be compiled.

The compiler asks every object that it meets what it is. Those that belong to a mesh answer with an error, before
anything is compiled; outside a compilation they answer as others do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._guards import CompileContext

from hyper_parallel.platform.error_codes import coded


def refuse_tracing(what: Callable[[], str]) -> None:
    """Ends a compilation, whether its graph may have breaks or not; does nothing outside of one."""
    if CompileContext.try_get() is None:
        return
    NotCompilable = _error_class()  # noqa: N806 - a class
    raise coded(
        NotCompilable,
        "HP143",
        f"torch.compile: {what()}, which cannot be traced, because layouts and collectives are decided while the "
        "operators run; run the model without torch.compile, and compile functions of plain shards in it: call "
        "torch.compile(function) within local_map() or custom_shard(), or on to_local()",
        first_useful_frame=None,
    )


@functools.cache
def _error_class() -> Any:
    """An error that the compiler passes on as it is; others it breaks the graph for, or calls internal."""
    from torch._dynamo.exc import ShortenTraceback  # loaded by whoever compiles

    return type("NotCompilable", (ShortenTraceback,), {"__module__": __name__})
