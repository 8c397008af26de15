# SPDX-License-Identifier: Apache-2.0
"""Backward hooks of torch's modules with distributed tensors: set on the shards, called with distributed gradients.

torch sets such hooks with an autograd function, which sees only the wrapper of a distributed tensor. This class
replaces the one that sets them; for plain tensors it behaves like it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.hooks import BackwardHook

from hyper_parallel.platform.torch.dtensor_base import DTensorBase


class ShardBackwardHook(BackwardHook):
    """The backward hooks of one call of a module."""

    def __init__(
        self, module: Any, user_hooks: Iterable[Any], user_pre_hooks: Iterable[Any]
    ) -> None:
        self._inputs: dict[int, DTensorBase] = {}
        self._outputs: dict[int, DTensorBase] = {}
        super().__init__(
            module,
            [self._told(h) for h in user_hooks],
            [self._told_before(h) for h in user_pre_hooks],
        )

    def setup_input_hook(self, args: Any) -> Any:
        """Sets the hooks of the inputs."""
        return self._on_shards(super().setup_input_hook, args, self._inputs)

    def setup_output_hook(self, args: Any) -> Any:
        """Sets the hooks of the outputs."""
        return self._on_shards(super().setup_output_hook, args, self._outputs)

    def _on_shards(
        self, set_hooks: Callable[[Any], Any], args: Any, like: dict[int, DTensorBase]
    ) -> Any:
        several = isinstance(args, tuple)
        items = args if several else (args,)
        like.update(
            {
                i: item.gradient_source()
                for i, item in enumerate(items)
                if isinstance(item, DTensorBase)
            }
        )
        if not like:
            return set_hooks(args)
        found = set_hooks(
            tuple(like[i]._local if i in like else item for i, item in enumerate(items))
        )
        made = tuple(
            like[i]._twin(item) if i in like else item for i, item in enumerate(found)
        )
        return made if several else made[0]

    def _told(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def on_shards(module: Any, grad_inputs: Any, grad_outputs: Any) -> Any:
            changed = hook(
                module,
                _wrapped(grad_inputs, self._inputs),
                _wrapped(grad_outputs, self._outputs),
            )
            return _unwrapped(changed, self._inputs)

        return on_shards

    def _told_before(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def on_shards(module: Any, grad_outputs: Any) -> Any:
            return _unwrapped(
                hook(module, _wrapped(grad_outputs, self._outputs)), self._outputs
            )

        return on_shards


def _wrapped(gradients: Any, like: dict[int, DTensorBase]) -> Any:
    return tuple(
        like[i]._gradient_of(g) if i in like and g is not None else g
        for i, g in enumerate(gradients)
    )


def _unwrapped(gradients: Any, like: dict[int, DTensorBase]) -> Any:
    if gradients is None:
        return None
    items = gradients if isinstance(gradients, tuple) else (gradients,)
    made = (
        like[i].gradient_of_shard(g) if isinstance(g, DTensorBase) else g
        for i, g in enumerate(items)
    )
    return tuple(made)
