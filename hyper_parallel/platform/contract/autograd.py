# SPDX-License-Identifier: Apache-2.0
"""Autograd: what is recorded, and what backward does with the leaves.

Example::

    with platform.no_grad():
        y = platform.detach(x)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hyper_parallel.platform.contract import PlatformType
from hyper_parallel.platform.error_codes import coded


class Autograd(ABC):
    """Recording, running backward, and the gradients of leaves."""

    Function: type[Any]
    platform_type: PlatformType

    @abstractmethod
    def requires_grad(self, tensor: Any) -> bool:
        """Returns whether the tensor requires a gradient or was computed from one that does."""

    @abstractmethod
    def set_requires_grad(self, tensor: Any, requires_grad: bool) -> Any:
        """Sets whether a leaf requires a gradient; returns it."""

    @abstractmethod
    def detach(self, tensor: Any) -> Any:
        """Returns the same data outside the graph."""

    @abstractmethod
    def no_grad(self) -> AbstractContextManager[Any]:
        """Disables recording for backward within a context."""

    @abstractmethod
    def recording(self, on: bool) -> AbstractContextManager[Any]:
        """Enables or disables recording for backward within a context."""

    @abstractmethod
    def is_recorded(self, tensor: Any) -> bool:
        """Returns whether operations on the tensor are currently recorded for backward."""

    def replayed_views(self) -> AbstractContextManager[Any]:
        """Records views of empty tensors with the same graph as views of non-empty ones, within a context."""
        return nullcontext()

    @abstractmethod
    def gradients(
        self, function: Callable[..., Any], inputs: Sequence[Any]
    ) -> list[Any]:
        """Returns the gradients of a scalar function with respect to its tensor arguments."""

    def second_gradients(
        self,
        function: Callable[..., Any],  # noqa: ARG002
        inputs: Sequence[Any],  # noqa: ARG002
        directions: Sequence[Any],  # noqa: ARG002
    ) -> Any:
        """Returns the gradients of the function's gradients multiplied by ``directions``; None for unused inputs.

        ``directions``: a tensor for each input that the function is differentiated by first, None for the others.
        """
        raise coded(
            NotImplementedError,
            "HP142",
            f"second_gradients: not supported on {self.platform_type.value}, which has wrong ones",
        )

    @abstractmethod
    def tied(self, result: Any, operands: Sequence[Any]) -> Any:
        """Adds zero-gradient edges from the result to every operand, so that all ranks run the same backward."""

    @abstractmethod
    def accumulates_gradient(self, leaf: Any) -> bool:
        """Returns whether the running backward only accumulates into the leaf's gradient, unseen by any hook."""

    @abstractmethod
    def accumulate_gradient(self, leaf: Any, gradient: Any) -> None:
        """Adds to the gradient of a leaf; ``gradient`` itself may become the leaf's gradient."""

    @abstractmethod
    def backward_number(self) -> int:
        """Returns an identifier of the running backward pass."""

    @abstractmethod
    def after_backward(self, call: Callable[[], None]) -> None:
        """Calls a function once, when the running backward has finished and before its caller continues."""
