# SPDX-License-Identifier: Apache-2.0
"""Activations: recomputing them in backward, or keeping them in host memory until then.

Example::

    block = platform.ckpt_wrapper(block)
    loss = platform.checkpoint(function, x, use_reentrant=False)
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.platform.swap_storage import SwapStorage


class CheckpointPolicy(enum.Enum):
    """What selective recompute does with an operator's output; MUST_SWAP keeps it in host memory until backward."""

    MUST_SAVE = "must_save"
    PREFER_SAVE = "prefer_save"
    MUST_RECOMPUTE = "must_recompute"
    PREFER_RECOMPUTE = "prefer_recompute"
    MUST_SWAP = "must_swap"


class Activations(ABC):
    """Recompute and swap."""

    @property
    @abstractmethod
    def checkpoint(self) -> Callable[..., Any]:
        """Returns the framework's recompute function."""

    @property
    @abstractmethod
    def noop_context_fn(self) -> Callable[[], tuple[Any, Any]]:
        """Returns a function that makes the two contexts of a recompute that do nothing."""

    @abstractmethod
    def ckpt_wrapper(
        self,
        module: Any,
        checkpoint_fn: Callable[..., Any] | None = None,
        **checkpoint_fn_kwargs: Any,
    ) -> Any:
        """Returns a module that runs ``module`` under recompute, with the same state_dict keys."""

    @abstractmethod
    def swap_wrapper(
        self,
        module: Any,
        policy_fn: Callable[[Any], bool] | None = None,
        swap_fn: Callable[..., Any] | None = None,
    ) -> Any:
        """Returns a module that keeps its saved activations in host memory until backward, with the same keys.

        ``swap_fn(function, *args, **kwargs)`` runs the module's function in place of the default, and decides itself.
        """

    @abstractmethod
    def create_selective_checkpoint_contexts(
        self,
        policy_fn_or_list: Any,
        allow_cache_entry_mutation: bool = False,
        storage: SwapStorage | None = None,
    ) -> tuple[Any, Any]:
        """Returns the contexts of a recompute by operator: from a policy function or a list of operators to save.

        ``storage`` takes over the outputs that the policy swaps; without one their copies start at once.
        """

    @abstractmethod
    def async_save_on_cpu(
        self,
        policy_fn: Callable[[Any], bool] | None = None,
        spared: Iterable[Any] = (),
        storage: SwapStorage | None = None,
    ) -> AbstractContextManager[Any]:
        """Moves saved tensors to host memory within a context, and prefetches them in backward.

        What shares memory with ``spared`` stays on the device. ``storage`` takes over the tensors; without one their
        copies start at once.
        """
