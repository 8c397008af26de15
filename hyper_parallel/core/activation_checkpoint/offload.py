# SPDX-License-Identifier: Apache-2.0
"""Swap: what a function saves for backward waits in host memory, and is back before backward needs it.

block = swap_wrapper(block)
y = swap(function, x, policy_fn=lambda tensor: tensor.ndim == 3)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hyper_parallel.core.activation_checkpoint.groups import new_storage
from hyper_parallel.platform import CheckpointPolicy, get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()

# Smaller tensors cost more to copy than their memory is worth.
SMALLEST_BYTES = 1024

_VERDICTS = {
    "MUST_SAVE": False,
    "PREFER_SAVE": False,
    "MUST_SWAP": True,
    "MUST_CPU_OFFLOAD": True,  # torch's names
    "PREFER_CPU_OFFLOAD": True,
}


def swap(
    function: Callable[..., Any],
    *args: Any,
    policy_fn: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Runs ``function(*args, **kwargs)`` and keeps what it saves for backward in host memory until then.

    ``policy_fn(tensor)`` returns MUST_SWAP, MUST_SAVE or a bool for each saved tensor; without one, tensors of at least
    1 KiB are swapped. Parameters, buffers, views of them and inputs that require no gradient stay on the device.
    """
    decide = _read_policy("swap", policy_fn)
    return _run(decide, function, function, *args, **kwargs)


def swap_wrapper(
    module: Any, policy_fn: Callable[[Any], CheckpointPolicy | bool] | None = None
) -> Any:
    """Returns a module that runs ``module`` under :func:`swap`, with the same parameter names and state dict."""
    decide = _read_policy("swap_wrapper", policy_fn)
    return platform.swap_wrapper(
        module, swap_fn=functools.partial(_run, decide, module)
    )


def swap_inputs_of(tensors: Sequence[Any]) -> AbstractContextManager[Any]:
    """Returns a context in which a recompute keeps its inputs in host memory; the caller's own tensors stay valid."""
    parameters = [
        tensor for tensor in tensors if isinstance(tensor, platform.Parameter)
    ]
    return platform.async_save_on_cpu(None, parameters, new_storage())


def _run(
    decide: Callable[[Any], bool],
    owner: Any,
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs a function, which may be that of the module ``owner``, with its saved tensors in host memory."""
    spared = [*_tensors_of(owner), *_inputs_without_gradient((args, kwargs))]
    with platform.async_save_on_cpu(decide, spared, new_storage()):
        return function(*args, **kwargs)


def _tensors_of(owner: Any) -> Iterator[Any]:
    """The parameters and buffers of a module, or of the module that a method belongs to."""
    module = getattr(owner, "__self__", owner)
    if not isinstance(module, platform.Module):
        return
    for _, part in platform.get_cells_and_names(module):
        for _, tensor in platform.own_tensors(part):
            yield tensor


def _inputs_without_gradient(tree: Any) -> list[Any]:
    """The inputs that nobody computed (batches, masks, tables): their owner keeps them, so swapping frees nothing."""
    inputs: list[Any] = []

    def note(tensor: Any) -> Any:
        if not platform.requires_grad(tensor) and not platform.is_meta(tensor):
            inputs.append(tensor)
        return tensor

    platform.apply_to_tensors(note, tree)
    return inputs


# --- policies


def _read_policy(
    caller: str, policy_fn: Callable[[Any], Any] | None
) -> Callable[[Any], bool]:
    if policy_fn is None:
        return _is_large
    if not callable(policy_fn):
        raise coded(
            ValueError,
            "HP442",
            f"{caller}: policy_fn must be a function of a tensor, or None; got {policy_fn!r}",
        )
    return functools.partial(_ask, policy_fn)


def _is_large(tensor: Any) -> bool:
    return bool(tensor.nbytes >= SMALLEST_BYTES)


def _ask(policy_fn: Callable[[Any], Any], tensor: Any) -> bool:
    answer = policy_fn(tensor)
    if isinstance(answer, bool):
        return answer
    verdict = _VERDICTS.get(getattr(answer, "name", ""))
    if verdict is None:
        raise coded(
            ValueError,
            "HP442",
            f"swap: the policy returned {answer!r} for a tensor of shape {tuple(tensor.shape)}; expected MUST_SWAP, "
            "MUST_SAVE or a bool. To recompute activations, use checkpoint()",
        )
    return verdict
