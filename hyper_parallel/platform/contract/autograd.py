# SPDX-License-Identifier: Apache-2.0
"""Autograd: what is recorded, and what backward does with the leaves.

Example::

    with platform.no_grad():
        y = platform.detach(x)
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hyper_parallel.platform.contract.tensors import Tensors
from hyper_parallel.platform.error_codes import coded


class Autograd(Tensors):
    """Recording, running backward, and the gradients of leaves."""

    Function: type[Any]
    # For functions whose backward may be recorded, even if the framework's own second derivatives are wrong.
    HigherOrderFunction: type[Any]

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

    def is_recording_disabled(self) -> bool:
        """Returns whether ``no_grad()`` is in effect."""
        return False

    def without_autocast(self, tensor: Any) -> AbstractContextManager[Any]:
        """Has operators on the tensor's device compute in the dtypes of their operands within a context."""
        del tensor
        return nullcontext()

    @abstractmethod
    def is_recorded(self, tensor: Any) -> bool:
        """Returns whether operations on the tensor are currently recorded for backward."""

    def use_leaf(self, leaf: Any) -> Any:
        """Returns what a computation is given in place of a leaf.

        It may change that in place, and another leaf may get the very same tensor as its gradient.
        """
        return leaf

    def replayed_views(self) -> AbstractContextManager[Any]:
        """Records views of empty tensors with the same graph as views of non-empty ones, within a context."""
        return nullcontext()

    @abstractmethod
    def tape(self) -> AbstractContextManager[Any]:
        """Records operations within a context, so that ``backward`` can start from their results.

        PyTorch records by default. MindSpore records within ``value_and_grad`` and within this context only.
        """

    def backward(
        self,
        outputs: Sequence[Any],
        gradients: Sequence[Any] | None = None,
        *,
        keep_graph: bool = False,
    ) -> None:
        """Runs backward from several outputs with the given gradients and accumulates into the leaves.

        A gradient may be None for an output with one element. ``keep_graph``: the same outputs may be used again.
        """
        tensors, seeds = self._find_roots(outputs, gradients)
        self._run_backward(tensors, seeds, keep_graph)

    def backward_inputs(
        self,
        outputs: Sequence[Any],
        gradients: Sequence[Any] | None,
        inputs: Sequence[Any],
    ) -> Callable[[], None]:
        """Accumulates the gradients of plain leaves that are inputs; returns a function that does all other leaves.

        A framework that cannot take a backward apart does all of it at once.
        """
        tensors, seeds = self._find_roots(outputs, gradients)
        return self._run_backward_inputs(tensors, seeds, inputs)

    def _find_roots(
        self, outputs: Sequence[Any], gradients: Sequence[Any] | None
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The plain tensors that backward starts from, and their gradients."""
        given = [None] * len(outputs) if gradients is None else list(gradients)
        if not outputs or len(given) != len(outputs):
            raise coded(
                ValueError,
                "HP145",
                f"backward: {len(outputs)} outputs need as many gradients, got {len(given)}",
            )
        roots = []
        for index, (output, gradient) in enumerate(zip(outputs, given, strict=True)):
            self._check_root(f"outputs[{index}]", output, gradient)
            roots.append(self._root(output, gradient))
        tensors, seeds = zip(*roots, strict=True)
        return tensors, seeds

    def _check_root(self, name: str, output: Any, gradient: Any) -> None:
        if not self.is_tensor(output) or not self.requires_grad(output):
            raise coded(
                ValueError,
                "HP145",
                f"backward: {name} was not recorded; compute it within platform.tape(), from a tensor that requires "
                "a gradient",
            )
        shape = tuple(output.shape)
        if gradient is None and math.prod(shape) != 1:
            raise coded(
                ValueError,
                "HP145",
                f"backward: {name} of shape {shape} has more than one element and needs a gradient",
            )
        if gradient is not None and tuple(gradient.shape) != shape:
            raise coded(
                ValueError,
                "HP145",
                f"backward: the gradient of {name} has shape {tuple(gradient.shape)}, not {shape}",
            )

    def _root(self, output: Any, gradient: Any) -> tuple[Any, Any]:
        """Returns the plain tensor that backward starts from, and its gradient."""
        if isinstance(output, self.DTensorBase):
            root: tuple[Any, Any] = output.current()._backward_root(gradient)
            return root
        return output, self.full_like(output, 1) if gradient is None else gradient

    @abstractmethod
    def _run_backward(
        self, tensors: Sequence[Any], gradients: Sequence[Any], keep_graph: bool
    ) -> None:
        """Runs backward from plain tensors."""

    def _run_backward_inputs(
        self,
        tensors: Sequence[Any],
        gradients: Sequence[Any],
        inputs: Sequence[Any],  # noqa: ARG002 - all leaves get theirs
    ) -> Callable[[], None]:
        """Runs backward from plain tensors to the inputs; returns a function that runs the rest of it."""
        self._run_backward(tensors, gradients, keep_graph=False)
        return _do_nothing

    @abstractmethod
    def saved_tensors(
        self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]
    ) -> AbstractContextManager[Any]:
        """Passes tensors that autograd saves within a context through ``pack``, and through ``unpack`` in backward."""

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
    def keep_in_graph(self, result: Any, operands: Sequence[Any]) -> Any:
        """Adds zero-gradient edges from the result to every operand, so that all ranks run the same backward."""

    @abstractmethod
    def can_defer_gradient(self, leaf: Any) -> bool:
        """Returns whether a leaf's gradient may be completed when the running backward ends, unseen by any hook."""

    def can_defer_gradients(
        self,
        leaves: Sequence[Any],
        context: Any,  # noqa: ARG002 - a framework may ask it
    ) -> bool:
        """The same for several inputs of an autograd function; ``context`` is that of its running backward."""
        return all(self.can_defer_gradient(leaf) for leaf in leaves)

    @abstractmethod
    def defer_gradient(
        self, leaf: Any, part: Any, sum_now: Callable[[], Any]
    ) -> tuple[Any, Callable[[Any], None]]:
        """Promises a leaf's gradient for the end of the running backward.

        Returns what an autograd function returns for the leaf now, and a function that takes the gradient later.
        ``part`` is what the leaf would get at once, None for zeros; ``sum_now()`` gives the gradient to whoever cannot
        wait.
        """

    @abstractmethod
    def gradient_of(self, leaf: Any) -> Any:
        """Returns the gradient that backward has accumulated into a leaf, or None."""

    @abstractmethod
    def forget_gradient(self, leaf: Any) -> None:
        """Removes the gradient of a leaf."""

    @abstractmethod
    def accumulate_gradient(self, leaf: Any, gradient: Any) -> None:
        """Adds to the gradient of a leaf; ``gradient`` itself may become the leaf's gradient."""

    @abstractmethod
    def backward_number(self) -> int:
        """Returns an identifier of the running backward pass, the innermost one; -1 outside of all."""

    def forget_failed_backwards(self) -> None:
        """Frees what backward passes that raised have left for their end; does nothing while one runs."""

    @abstractmethod
    def before_backward_of(
        self, outputs: Sequence[Any], call: Callable[[], None]
    ) -> None:
        """Calls a function whenever backward reaches the operation that produced one of the plain tensors."""

    @abstractmethod
    def after_backward_to(self, tensor: Any, call: Callable[[], None]) -> Any:
        """Returns an alias of a plain tensor, and calls a function when the alias's gradient is complete."""

    def in_backward(self) -> AbstractContextManager[Any]:
        """A context in which collectives count as those of backward, for frameworks that cannot tell by themselves."""
        return nullcontext()

    @abstractmethod
    def after_backward(self, call: Callable[[], None]) -> None:
        """Calls a function once, when the running backward has finished and before its caller continues."""


def _do_nothing() -> None:
    """What is left of a backward that is complete."""
