# SPDX-License-Identifier: Apache-2.0
"""Less memory for activations: compute them again in backward, or keep them in host memory until then.

block = platform.ckpt_wrapper(block, context_fn=lambda: platform.create_selective_checkpoint_contexts(["matmul"]))
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import mindspore
from mindspore import nn

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.mindspore import private
from hyper_parallel.platform.mindspore.cpu import randomness
from hyper_parallel.platform.mindspore.determinism import Determinism
from hyper_parallel.platform.mindspore.selective import selective_contexts, watching
from hyper_parallel.platform.mindspore.swap import SwapToHost
from hyper_parallel.platform.platform import Platform
from hyper_parallel.platform.swap_storage import SwapStorage


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
        self,
        module: Any,
        checkpoint_fn: Callable[..., Any] | None = None,
        **checkpoint_fn_kwargs: Any,
    ) -> Any:
        if checkpoint_fn is not None and not callable(checkpoint_fn):
            raise coded(
                ValueError,
                "HP136",
                f"ckpt_wrapper: checkpoint_fn must be a function or None, got {checkpoint_fn!r}",
            )

        def run(
            _cell: Any, construct: Callable[..., Any], args: Any, kwargs: Any
        ) -> Any:
            if checkpoint_fn is not None:
                return checkpoint_fn(construct, *args, **checkpoint_fn_kwargs, **kwargs)
            # The module's keywords must not clash with those of the recompute.
            return checkpoint(
                lambda *values: construct(*values, **kwargs),
                *args,
                **checkpoint_fn_kwargs,
            )

        return _running("ckpt_wrapper", "Recomputed", module, run)

    def swap_wrapper(
        self,
        module: Any,
        policy_fn: Callable[[Any], bool] | None = None,
        swap_fn: Callable[..., Any] | None = None,
    ) -> Any:
        """Untested on hardware: copies from and to an accelerator."""
        SwapToHost(policy_fn)  # a bad policy is refused here, not in the first forward

        def run(
            cell: Any, construct: Callable[..., Any], args: Any, kwargs: Any
        ) -> Any:
            if swap_fn is not None:
                return swap_fn(construct, *args, **kwargs)
            with SwapToHost(
                policy_fn, itertools.chain(cell.get_parameters(), cell.buffers())
            ):
                return construct(*args, **kwargs)

        return _running("swap_wrapper", "Swapped", module, run)

    def create_selective_checkpoint_contexts(
        self,
        policy_fn_or_list: Any,
        allow_cache_entry_mutation: bool = False,
        storage: SwapStorage | None = None,
    ) -> tuple[Any, Any]:
        """As torch's, with MUST_SWAP; views and in-place operators always run again.

        The policy gets operators that ``get_op_name`` knows; a list has such, functions like ``mint.matmul``, or names.
        On distributed tensors an operator is one with the communication that it needs.

        Untested on hardware: MUST_SWAP's copies, and the changes that an accelerator counts.
        """
        return selective_contexts(
            policy_fn_or_list, allow_cache_entry_mutation, storage
        )

    def async_save_on_cpu(
        self,
        policy_fn: Callable[[Any], bool] | None = None,
        spared: Iterable[Any] = (),
        storage: SwapStorage | None = None,
    ) -> SwapToHost:
        """Untested on hardware: copies from and to an accelerator."""
        return SwapToHost(policy_fn, spared, storage=storage)


def noop_context_fn() -> tuple[
    AbstractContextManager[Any], AbstractContextManager[Any]
]:
    """Two contexts that do nothing."""
    return nullcontext(), nullcontext()


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Runs a function without keeping what backward needs, which is computed again then, with the same random numbers.

    ``nn.Dropout`` and its like have numbers of their own on a CPU, which nobody can turn back: here they draw from the
    platform's.
    """
    if use_reentrant:
        raise coded(
            ValueError,
            "HP136",
            "checkpoint: MindSpore's reentrant recompute draws other random numbers the second time and works "
            "under value_and_grad alone; use_reentrant must be False",
        )

    if debug:
        raise coded(
            ValueError,
            "HP136",
            "checkpoint: debug=True lists the operators of both runs, which MindSpore does not report; leave it out",
        )
    determinism = Determinism() if determinism_check != "none" else None

    def contexts() -> tuple[Any, Any]:
        first, again = context_fn()
        state = randomness.state() if preserve_rng_state else None
        return _Run(first, None, None), _Run(again, state, determinism)

    options = {"use_reentrant": False, "early_stop": early_stop, "context_fn": contexts}
    with nullcontext() if determinism is None else determinism.watching():
        return mindspore.recompute(watching(function), *args, **options, **kwargs)


class _Run:
    """The user's context of a run, with random numbers from where they stood; every backward enters its own anew."""

    def __init__(
        self, context: Any, state: Any, determinism: Determinism | None
    ) -> None:
        self._context, self._state = context, state
        self._determinism = determinism
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        if self._determinism is not None:
            self._determinism.begin()
        with ExitStack() as stack:
            stack.enter_context(randomness.replayable())
            if self._state is not None:
                stack.callback(randomness.put_back, randomness.state())
                randomness.put_back(self._state)
            stack.enter_context(self._context)
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> Any:
        suppresses = self._entered.pop().__exit__(*error)
        if self._determinism is not None and error[0] is None:
            self._determinism.end()
        return suppresses


def _running(call: str, what: str, module: Any, run: Callable[..., Any]) -> Any:
    """A Cell that shares everything with another one and runs its ``construct`` in another way.

    Both have one dictionary of attributes, so that names, parameters, hooks, indexing and state are the same by nature.
    """
    if not isinstance(module, nn.Cell):
        raise coded(
            ValueError,
            "HP136",
            f"{call}: expected a mindspore.nn.Cell to wrap, got {type(module).__name__}",
        )

    def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, super(kind, self).construct, args, kwargs)

    kind: Any = type(
        f"{what}{type(module).__name__}", (type(module),), {"construct": construct}
    )
    return private.cell_on(kind, vars(module))
