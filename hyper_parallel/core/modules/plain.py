# SPDX-License-Identifier: Apache-2.0
"""Models in which plain tensors count as the same on every rank, so that code for one device runs as it is."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.modules.axis import MeshAxis, Wrap, batch_of
from hyper_parallel.core.modules.boundary import (
    Leave,
    arguments_wrapped_after,
    attach,
)
from hyper_parallel.core.modules.running import begin_model, end_model
from hyper_parallel.platform import get_platform

platform = get_platform()
_INSIDE = "_hyper_parallel_inside_replicated"


def treat_plain_as_replicated(
    module: Any, axis: MeshAxis, phase: str, *, source: Any, leave: Leave | None = None
) -> None:
    """Wraps plain inputs of a module as distributed tensors; plain tensors that it makes count as replicated.

    ``leave(module, output)`` runs after that has ended and may replace the output.
    """
    wrap = axis.wrap_fn()

    def enter(owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        excluded = arguments_wrapped_after(owner, phase)
        args, kwargs = _wrap_all(wrap, owner, args, kwargs, excluded)
        begin_model()
        return args, kwargs

    def end(owner: Any, output: Any) -> Any:
        end_model()
        return None if leave is None else leave(owner, output)

    def undo(_: Any) -> None:
        end_model()

    attach(module, phase, enter=enter, leave=end, on_error=undo, source=source)


def _wrap_all(
    wrap: Wrap,
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    excluded: set[int | str],
) -> Any:
    """Wraps all plain tensors in the arguments but those that styles of the module wrap by their own layouts."""

    def wrap_own(value: Any) -> Any:
        return wrap(module, value)

    if not excluded:
        return platform.apply_to_tensors(wrap_own, (args, kwargs))
    wrapped_args = [
        value if index in excluded else platform.apply_to_tensors(wrap_own, value)
        for index, value in enumerate(args)
    ]
    wrapped_kwargs = {
        name: value if name in excluded else platform.apply_to_tensors(wrap_own, value)
        for name, value in kwargs.items()
    }
    return tuple(wrapped_args), wrapped_kwargs


def mark_inside_replicated(module: Any) -> None:
    """Makes distributed outputs the default of the modules inside this one."""
    for _, inner in platform.get_cells_and_names(module):
        if inner is not module:
            setattr(inner, _INSIDE, True)


def keeps_distributed(module: Any) -> bool:
    """Whether outputs stay distributed by default: the module is inside a replicated one, or on a data axis."""
    return _INSIDE in vars(module) or batch_of(module) is not None
