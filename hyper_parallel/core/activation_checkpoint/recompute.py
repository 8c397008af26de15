# SPDX-License-Identifier: Apache-2.0
"""Recompute: a function runs without keeping its activations, and runs again when backward needs them.

block = checkpoint_wrapper(block)                       the whole block runs again
block = checkpoint_wrapper(block, policy_fn=policy)     the policy decides for each operator
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

from hyper_parallel.core.activation_checkpoint.groups import new_storage
from hyper_parallel.core.activation_checkpoint.offload import swap_inputs_of
from hyper_parallel.core.dtensor.modes import capture_modes
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


@dataclass(frozen=True)
class Options:
    """The options of a recompute, without those that only have one legal value."""

    swap_inputs: bool = False
    policy_fn: Any = None
    context_fn: Callable[[], tuple[Any, Any]] | None = None
    preserve_rng_state: bool = True
    determinism_check: str = "default"
    debug: bool = False
    early_stop: bool = True


_OPTION_NAMES = {"use_reentrant", *(field.name for field in fields(Options))}


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    swap_inputs: bool = False,
    policy_fn: Any = None,
    **kwargs: Any,
) -> Any:
    """Runs ``function(*args, **kwargs)`` without keeping its activations; backward runs it again.

    The second run draws the same random numbers. ``policy_fn(ctx, op, *args, **kwargs)`` returns a
    ``CheckpointPolicy`` for each operator; a list of operators saves their outputs. ``swap_inputs`` keeps the
    function's inputs in host memory until backward. Also taken from ``kwargs``, and not passed on: ``use_reentrant``
    (None or False), ``context_fn``, ``preserve_rng_state``, ``determinism_check``, ``debug`` and ``early_stop``, as in
    torch.utils.checkpoint.
    """
    given = {name: kwargs.pop(name) for name in _OPTION_NAMES & kwargs.keys()}
    given |= {"swap_inputs": swap_inputs, "policy_fn": policy_fn}
    return _run(_read_options("checkpoint", given), function, *args, **kwargs)


def checkpoint_wrapper(
    module: Any,
    checkpoint_impl: Any = None,
    checkpoint_fn: Callable[..., Any] | None = None,
    **checkpoint_fn_kwargs: Any,
) -> Any:
    """Returns a module that runs ``module`` under :func:`checkpoint`, with the same parameter names and state dict.

    ``checkpoint_fn_kwargs`` are the options of :func:`checkpoint`, or those of ``checkpoint_fn``, which takes its
    place. ``checkpoint_impl`` is accepted for code written for torch; its REENTRANT is refused.
    """
    if getattr(checkpoint_impl, "name", "NO_REENTRANT") != "NO_REENTRANT":
        raise _refuse_reentrance("checkpoint_wrapper", "checkpoint_impl=REENTRANT")
    if checkpoint_fn is not None:
        return platform.ckpt_wrapper(module, checkpoint_fn, **checkpoint_fn_kwargs)
    options = _read_options("checkpoint_wrapper", checkpoint_fn_kwargs)
    return platform.ckpt_wrapper(module, functools.partial(_run, options))


def checkpoint_sequential(
    functions: Any,
    segments: int,
    input: Any,  # noqa: A002 - torch's name for it
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Runs functions one after another in ``segments`` parts, each under :func:`checkpoint` except the last.

    ``functions``: a sequential module or a list of modules or functions. ``kwargs`` are options of :func:`checkpoint`.
    """
    functions = list(functions)
    if not isinstance(segments, int) or not 1 <= segments <= len(functions):
        raise coded(
            ValueError,
            "HP441",
            f"checkpoint_sequential: segments must be between 1 and the number of functions, {len(functions)}; got "
            f"{segments!r}",
        )
    given = {"use_reentrant": use_reentrant, **kwargs}
    options = _read_options("checkpoint_sequential", given)
    size = len(functions) // segments
    last = size * (segments - 1)
    for start in range(0, last, size):
        part = functions[start : start + size]
        input = _run(options, functools.partial(_call_in_turn, part), input)  # noqa: A001
    return _call_in_turn(functions[last:], input)


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False
) -> tuple[Any, Any]:
    """Returns the contexts of forward and recompute for ``context_fn`` of :func:`checkpoint`.

    The policy is asked once for each operator, in forward; the recompute follows its answers.
    """
    return platform.create_selective_checkpoint_contexts(
        policy_fn_or_list, allow_cache_entry_mutation, new_storage()
    )


def is_recomputing() -> bool:
    """Returns whether this thread runs a function again for backward, so that counters can skip the second run."""
    return _STATE.depth > 0


class _State(threading.local):
    """How many recomputes this thread is in: a checkpoint may be inside another one."""

    depth = 0


_STATE = _State()


class _Repeated:
    """A call that knows whether it runs for the first time or again."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._has_run = False

    def __call__(self, *values: Any) -> Any:
        again, self._has_run = self._has_run, True
        _STATE.depth += again
        try:
            return self._call(*values)
        finally:
            _STATE.depth -= again


def _read_options(caller: str, given: Mapping[str, Any]) -> Options:
    unknown = sorted(given.keys() - _OPTION_NAMES)
    if unknown:
        raise coded(
            ValueError,
            "HP441",
            f"{caller}: unknown options {', '.join(unknown)}; expected some of {', '.join(sorted(_OPTION_NAMES))}",
        )
    options = dict(given)
    if options.pop("use_reentrant", None):
        raise _refuse_reentrance(caller, "use_reentrant=True")
    read = Options(**options)
    if read.policy_fn is not None and read.context_fn is not None:
        raise coded(
            ValueError,
            "HP441",
            f"{caller}: policy_fn and context_fn exclude each other; a policy makes its own contexts",
        )
    if read.policy_fn is not None and not _is_policy(read.policy_fn):
        raise coded(
            ValueError,
            "HP441",
            f"{caller}: policy_fn must be a function (ctx, op, *args, **kwargs) or a list of operators to save, got "
            f"{read.policy_fn!r}",
        )
    return read


def _is_policy(policy: Any) -> bool:
    return callable(policy) or isinstance(policy, (list, tuple, set, frozenset))


def _refuse_reentrance(caller: str, given: str) -> ValueError:
    return coded(
        ValueError,
        "HP440",
        f"{caller}: {given} is not supported: a reentrant recompute runs a backward inside backward, which loses "
        "keyword and nested arguments, inputs without gradients and the hooks around it; leave it out",
    )


# --- running


def _run(
    options: Options, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Runs a function under recompute; its keyword arguments cannot clash with the options."""
    values = (*args, *kwargs.values())
    call = functools.partial(_call_by_position, function, tuple(kwargs))
    call = functools.partial(_call_within, capture_modes(), call)
    swapping: AbstractContextManager[Any] = nullcontext()
    if options.swap_inputs:
        call, values = _take_tensors_out(call, values, platform.tree_map)
        swapping = swap_inputs_of(values)
    elif any(isinstance(value, platform.DTensorBase) for value in values):
        call, values = _take_tensors_out(call, values, _map_tuple)
    with swapping:
        return platform.checkpoint(
            _Repeated(call),
            *values,
            use_reentrant=False,
            context_fn=_choose_contexts(options),
            preserve_rng_state=options.preserve_rng_state,
            determinism_check=options.determinism_check,
            debug=options.debug,
            early_stop=options.early_stop,
        )


def _choose_contexts(options: Options) -> Callable[[], tuple[Any, Any]]:
    if options.policy_fn is not None:
        return functools.partial(
            create_selective_checkpoint_contexts, options.policy_fn
        )
    return options.context_fn or platform.noop_context_fn


def _call_by_position(
    function: Callable[..., Any], names: Sequence[str], *values: Any
) -> Any:
    """Calls a function with its last values by name."""
    count = len(values) - len(names)
    keywords = dict(zip(names, values[count:], strict=True))
    return function(*values[:count], **keywords)


def _call_within(
    context: Callable[[], AbstractContextManager[Any]],
    function: Callable[..., Any],
    *values: Any,
) -> Any:
    """Calls a function as within the contexts of its first call, which have ended when it is called again."""
    with context():
        return function(*values)


def _call_in_turn(functions: Sequence[Callable[..., Any]], value: Any) -> Any:
    for function in functions:
        value = function(value)
    return value


class _Slot:
    """The place of a tensor that was taken out of nested arguments."""

    def __init__(self, index: int) -> None:
        self.index = index


def _map_tuple(function: Callable[[Any], Any], values: tuple[Any, ...]) -> Any:
    """As tree_map, but containers among the values are leaves, so that the function gets the caller's own."""
    return tuple(map(function, values))


def _take_tensors_out(
    call: Callable[..., Any], values: tuple[Any, ...], map_values: Callable[..., Any]
) -> tuple[Any, tuple[Any, ...]]:
    """Returns a call that takes the plain tensors among its arguments by themselves, and these tensors.

    The recompute saves the tensors that it gets directly, where they can be swapped; it holds on to anything else.
    Distributed tensors are held: hooks on saved tensors, such as those of a swap around this, cannot see their data.
    """
    tensors: list[Any] = []

    def take_out(leaf: Any) -> Any:
        if not platform.is_tensor(leaf) or isinstance(leaf, platform.DTensorBase):
            return leaf
        tensors.append(leaf)
        return _Slot(len(tensors) - 1)

    tree = map_values(take_out, values)
    taken = functools.partial(_call_with_tensors, call, tree, map_values)
    return taken, tuple(tensors)


def _call_with_tensors(
    call: Callable[..., Any],
    tree: tuple[Any, ...],
    map_values: Callable[..., Any],
    *tensors: Any,
) -> Any:
    def put_back(leaf: Any) -> Any:
        return tensors[leaf.index] if isinstance(leaf, _Slot) else leaf

    return call(*map_values(put_back, tree))
