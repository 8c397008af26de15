# SPDX-License-Identifier: Apache-2.0
"""What the modules of a model cost, by name: counted from their sizes, or measured.

count_costs(model)["blocks.0"]            the elements of its matrices
measure_costs(model, ids)["blocks.0"]     seconds of its forward
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from typing import Any

from hyper_parallel.core.modules.blocks import modules_by_name
from hyper_parallel.core.modules.boundary import attach
from hyper_parallel.platform import get_platform

platform = get_platform()


def count_costs(model: Any) -> dict[str, float]:
    """The costs of all modules by the sizes of their matrices; a table that is only looked up costs nothing."""
    own = {}
    for name, module in platform.get_cells_and_names(model):
        tensors = dict(platform.own_tensors(module)).values()
        sizes = [math.prod(one.shape) for one in tensors if len(one.shape) > 1]
        own[name] = 0 if platform.is_embedding_module(module) else sum(sizes)
    return {
        name: float(sum(own[inner] for inner in own if is_within(inner, name)))
        for name in own
    }


def measure_costs(
    model: Any, *args: Any, repeats: int = 5, **kwargs: Any
) -> dict[str, float]:
    """The medians of the seconds that all modules take in forward; ``model(*args, **kwargs)`` runs some times.

    Backward takes about twice as long for every module, so forward tells how to divide a model. Where computation goes
    on after a call has returned, as on an accelerator, each module is waited for.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    handles = [
        _time(module, seconds[name]) for name, module in modules_by_name(model).items()
    ]
    try:
        with platform.no_grad():
            for _ in range(repeats + 1):  # the first one sets things up
                model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: statistics.median(found[1:]) if len(found) > 1 else 0.0
        for name, found in seconds.items()
    }


def is_within(inner: str, outer: str) -> bool:
    """Whether a module is another one or inside it, by their names."""
    return not outer or inner == outer or inner.startswith(f"{outer}.")


def _time(module: Any, found: list[float]) -> Any:
    """Notes the time from entering a module to leaving it; returns what can be removed."""
    began: list[float] = []

    def enter(_: Any, args: Any, kwargs: Any) -> None:
        _wait_for((args, kwargs))
        began.append(time.perf_counter())

    def leave(_: Any, output: Any) -> None:
        _wait_for(output)
        found.append(time.perf_counter() - began.pop())

    return attach(module, "trace", enter=enter, leave=leave, source="measure_costs")


def _wait_for(tree: Any) -> None:
    """Untested on hardware: waits until tensors are computed, by reading an element of each."""
    if platform.device_type() != "cpu":
        platform.apply_to_tensors(lambda one: one.reshape(-1)[:1].tolist(), tree)
