# SPDX-License-Identifier: Apache-2.0
"""Less memory for activations: compute them again in backward, or keep them in host memory until then.

block = platform.ckpt_wrapper(block)  # passes for the block: names, attributes, class, state
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import mindspore
from mindspore import nn

from hyper_parallel.platform.mindspore import private, randomness
from hyper_parallel.platform.mindspore.swap import SwapToHost
from hyper_parallel.platform.platform import Platform


class Recompute(Platform):
    """The part of the contract that is about recompute and swap."""

    @property
    def checkpoint(self) -> Callable[..., Any]:
        """The framework's recompute function, without reentrance and with the same random numbers the second time."""
        return checkpoint

    @property
    def noop_context_fn(self) -> Callable[[], tuple[Any, Any]]:
        return noop_context_fn

    def ckpt_wrapper(
        self, module: Any, checkpoint_fn: Callable[..., Any] | None = None, **checkpoint_fn_kwargs: Any
    ) -> Any:
        if checkpoint_fn is not None and not callable(checkpoint_fn):
            raise ValueError(f"ckpt_wrapper: checkpoint_fn must be a function or None, got {checkpoint_fn!r}")

        def run(cell: Any, construct: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if checkpoint_fn is not None:
                return checkpoint_fn(construct, *args, **checkpoint_fn_kwargs, **kwargs)
            _refuse_dropout(cell)
            # The module's keywords must not clash with those of the recompute.
            return checkpoint(lambda *values: construct(*values, **kwargs), *args, **checkpoint_fn_kwargs)

        return _running("ckpt_wrapper", "Recomputed", module, run)

    def swap_wrapper(self, module: Any, policy_fn: Callable[[Any], bool] | None = None) -> Any:
        """Untested on hardware: copies from and to an accelerator."""
        SwapToHost(policy_fn)  # a bad policy is refused here, not in the first forward

        def run(cell: Any, construct: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            with SwapToHost(policy_fn, itertools.chain(cell.get_parameters(), cell.buffers())):
                return construct(*args, **kwargs)

        return _running("swap_wrapper", "Swapped", module, run)

    def create_selective_checkpoint_contexts(
        self, policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False
    ) -> NoReturn:
        """Not to be had: MindSpore does not tell of the operators that run on plain tensors."""
        raise NotImplementedError(
            "create_selective_checkpoint_contexts: MindSpore has no way to see the operators that run inside a "
            "recompute, so what to keep cannot be decided by operator; recompute smaller modules (ckpt_wrapper), or "
            "decide by tensor what goes to host memory (swap_wrapper with a policy)"
        )

    def async_save_on_cpu(self, policy_fn: Callable[[Any], bool] | None = None) -> SwapToHost:
        """Untested on hardware: copies from and to an accelerator."""
        return SwapToHost(policy_fn)


def noop_context_fn() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Two contexts that do nothing."""
    return nullcontext(), nullcontext()


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Runs a function without keeping what backward needs, which is computed again then, with the same random numbers.

    The numbers are those of the platform and of functional operators (``ops.dropout``). ``nn.Dropout`` has a generator
    of its own on a CPU, which nobody can turn back; where a Cell has one, it is refused.
    """
    if use_reentrant:
        raise ValueError(
            "checkpoint: MindSpore's reentrant recompute draws other random numbers the second time and works under "
            "value_and_grad alone; use_reentrant must be False"
        )
    if isinstance(function, nn.Cell):
        _refuse_dropout(function)

    def contexts() -> tuple[Any, Any]:
        first, again = context_fn()
        return first, _AsBefore(again, randomness.state()) if preserve_rng_state else again

    options = {"use_reentrant": False, "early_stop": early_stop, "context_fn": contexts}
    return mindspore.recompute(function, *args, **options, **kwargs)


class _AsBefore:
    """The user's context of the second run, with the random numbers of the first; every backward enters it anew."""

    def __init__(self, again: Any, state: Any) -> None:
        self._again, self._state = again, state
        self._now: list[Any] = []

    def __enter__(self) -> Any:
        self._now.append(randomness.state())
        randomness.put_back(self._state)
        return self._again.__enter__()

    def __exit__(self, *error: Any) -> Any:
        randomness.put_back(self._now.pop())
        return self._again.__exit__(*error)


def _refuse_dropout(cell: Any) -> None:
    if mindspore.get_context("device_target") != "CPU":
        return
    for name, part in cell.cells_and_names():
        if isinstance(part, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)) and part.training and _drops(part):
            raise RuntimeError(
                f"recompute of {type(cell).__name__}: {name or 'it'} is a {type(part).__name__}, whose mask on a CPU "
                "would be another one the second time, and the gradients wrong; use mindspore.ops.dropout in construct"
            )


def _drops(part: Any) -> bool:
    return bool(getattr(part, "p", 0)) or getattr(part, "keep_prob", 1.0) < 1


def _running(call: str, what: str, module: Any, run: Callable[..., Any]) -> Any:
    """A Cell that shares everything with another one and runs its ``construct`` in another way.

    Both have one dictionary of attributes, so that names, parameters, hooks, indexing and state are the same by nature.
    """
    if not isinstance(module, nn.Cell):
        raise ValueError(f"{call}: expected a mindspore.nn.Cell to wrap, got {type(module).__name__}")

    def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, super(kind, self).construct, args, kwargs)

    kind: Any = type(f"{what}{type(module).__name__}", (type(module),), {"construct": construct})
    return private.cell_on(kind, vars(module))
