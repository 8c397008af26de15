# SPDX-License-Identifier: Apache-2.0
"""Wraps the submodules of a model that a function selects.

apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.activation_checkpoint.recompute import checkpoint_wrapper
from hyper_parallel.core.modules.blocks import count_elements
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


def apply_activation_checkpointing(
    model: Any,
    checkpoint_wrapper_fn: Callable[[Any], Any] | None = None,
    check_fn: Callable[[Any], bool] | None = None,
    auto_wrap_policy: Callable[..., bool] | None = None,
) -> None:
    """Replaces submodules of ``model`` by wrapped ones, in place; the model itself is not wrapped.

    ``check_fn(module)`` selects them; without it, all are. ``auto_wrap_policy(module, recurse, nonwrapped_numel)``
    selects in its place, as torch's do: with ``recurse=True`` it says whether to look inside a module.
    ``checkpoint_wrapper_fn`` wraps a module; the default is :func:`checkpoint_wrapper`. A module that is used in
    several places stays shared. Lists of modules are not wrapped, but what is in them.
    """
    if check_fn is not None and auto_wrap_policy is not None:
        raise coded(
            ValueError,
            "HP441",
            "apply_activation_checkpointing: check_fn and auto_wrap_policy exclude each other",
        )
    policy = auto_wrap_policy
    if policy is None:
        policy = _make_policy(check_fn)
    _Wrapping(checkpoint_wrapper_fn or checkpoint_wrapper, policy).wrap_inside(model)


def _make_policy(check_fn: Callable[[Any], bool] | None) -> Callable[..., bool]:
    def policy(module: Any, recurse: bool, nonwrapped_numel: int) -> bool:  # noqa: ARG001 - torch's protocol
        return recurse or check_fn is None or check_fn(module)

    return policy


class _Wrapping:
    """One walk over a model, the inner modules first."""

    def __init__(self, wrap: Callable[[Any], Any], policy: Callable[..., bool]) -> None:
        self._wrap, self._policy = wrap, policy
        # By identity: a module that is met again, under another name, has been dealt with.
        self._seen: dict[int, tuple[Any, Any]] = {}
        self._wrapped_numel: dict[int, int] = {}

    def wrap_inside(self, parent: Any) -> int:
        """Wraps submodules and returns how many elements of parameters are in wrapped ones."""
        total = 0
        for name, child in platform.own_modules(parent):
            if id(child) not in self._seen:
                self._seen[id(child)] = child, child
                self._visit(child)
            _, wrapped = self._seen[id(child)]
            if wrapped is not child:
                platform.replace_submodule(parent, name, wrapped)
            total += self._wrapped_numel.get(id(child), 0)
        return total

    def _visit(self, module: Any) -> None:
        numel = count_elements(module)
        inside = 0
        if self._policy(module=module, recurse=True, nonwrapped_numel=numel):
            inside = self.wrap_inside(module)
        self._wrapped_numel[id(module)] = inside
        if platform.is_module_list(module):
            return
        if self._policy(module=module, recurse=False, nonwrapped_numel=numel - inside):
            self._seen[id(module)] = module, self._wrap(module)
            self._wrapped_numel[id(module)] = numel
