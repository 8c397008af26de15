# SPDX-License-Identifier: Apache-2.0
"""Communication in the graph: the backward of each function is its adjoint.

Example::

    whole = platform.differentiable_all_gather_concat(shard, group, concat_size=4, concat_dim=0)
    whole.sum().backward()                     # reduce-scatters the gradient
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from hyper_parallel.platform.contract.collectives import Collectives

if TYPE_CHECKING:
    from hyper_parallel.platform.platform import Platform
    from hyper_parallel.platform.transform import TensorTransform


class DifferentiableCollectives(Collectives):
    """Collectives that autograd differentiates, and the gradient reduction that is pending."""

    _grad_reduction: tuple[Any, Callable[[], Any] | None] | None = None

    @abstractmethod
    def differentiable_all_reduce(self, data: Any, op: str, group: Any) -> Any:
        """Reduces over the group; backward is the adjoint (max and min route the gradient to the winners)."""

    @abstractmethod
    def reduction_gradient(
        self, op: str, grad: Any, data: Any, result: Any, group: Any
    ) -> Any:
        """Returns the gradient of this rank's ``data`` given that of the reduction's ``result`` over the group."""

    @abstractmethod
    def differentiable_all_gather_concat(
        self,
        data: Any,
        group: Any,
        concat_size: int,
        concat_dim: int,
        sizes: Sequence[int] | None = None,
    ) -> Any:
        """Concatenates every rank's ``data`` along ``concat_dim``; backward is a reduce-scatter.

        ``sizes``: each rank's size along ``concat_dim``, if they differ.
        """

    @abstractmethod
    def differentiable_reduce_scatter(
        self, data: Any, dev_num: int, axis: int, op: str, group: Any
    ) -> Any:
        """Reduces over the group and keeps this rank's chunk of ``axis``, sized as by torch.chunk; backward gathers."""

    @abstractmethod
    def differentiable_all_to_all(
        self, input_data: Any, output_shape: Sequence[int], group: Any
    ) -> Any:
        """Exchanges equal chunks of dim 0; backward is the reverse exchange."""

    @abstractmethod
    def differentiable_all_to_all_single(
        self,
        input_tensor: Any,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        group: Any,
    ) -> Any:
        """Exchanges chunks of dim 0 of any sizes, including zero; backward is the reverse exchange."""

    @abstractmethod
    def start_differentiable_all_to_all_single(
        self,
        input_tensor: Any,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        group: Any,
    ) -> Callable[[], Any]:
        """Begins ``differentiable_all_to_all_single``; what it returns waits for the result, and is called once.

        What is computed between the two is computed while chunks travel, and so is its backward.
        """

    @abstractmethod
    def differentiable_sync_hook(self, x: Any, hook_name: str, coordinator: Any) -> Any:
        """Returns ``x``; forward and backward each synchronize with the other thread at the coordinator."""

    def set_grad_reduce_handle(
        self, handle: Any, post_process: Callable[[], Any] | None = None
    ) -> None:
        """Finishes the pending gradient reduction, then makes ``handle`` the pending one."""
        self.wait_grad_handle()
        self._grad_reduction = (handle, post_process)

    def wait_grad_handle(self) -> None:
        """Waits for the pending gradient reduction, if any, and runs its post_process."""
        pending, self._grad_reduction = self._grad_reduction, None
        if pending is None:
            return
        handle, post_process = pending
        if handle is not None:
            handle.wait()
        if post_process is not None:
            post_process()

    def _forget_groups(self) -> None:
        self._grad_reduction = None
        super()._forget_groups()

    def get_tensor_transform(self) -> TensorTransform:
        """Returns the steps of a redistribution as differentiable functions of a local tensor."""
        from hyper_parallel.platform.transform import TensorTransform

        return TensorTransform(cast("Platform", self))
