# SPDX-License-Identifier: Apache-2.0
"""Communication in the graph, for any framework: checks of the arguments, then the collectives of ``adjoints``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.platform.checks import (
    check_all_to_all,
    check_count,
    check_dim,
    check_hook,
    check_pieces,
    check_sizes,
    check_split,
    check_tensor,
    check_transposed,
)
from hyper_parallel.platform.platform import Platform


class Differentiable(Platform):
    """Collectives that autograd differentiates, for any framework with the plain ones.

    Each method imports its collective when it is first called, which keeps importing the library light.
    """

    def differentiable_all_reduce(self, data: Any, op: str, group: Any) -> Any:
        from hyper_parallel.platform.adjoints import all_reduce

        call = "differentiable_all_reduce"
        resolved = self._group(call, group)
        check_tensor(self, call, data)
        self._check_reducible(call, data, op, resolved)
        return all_reduce(self, data, op, resolved)

    def reduction_gradient(
        self, op: str, grad: Any, data: Any, result: Any, group: Any
    ) -> Any:
        from hyper_parallel.platform.adjoints import differentiate_reduction

        resolved = self._group("reduction_gradient", group)
        return differentiate_reduction(self, op, grad, data, result, resolved)

    def differentiable_all_gather_concat(
        self,
        data: Any,
        group: Any,
        concat_size: int,
        concat_dim: int,
        sizes: Sequence[int] | None = None,
    ) -> Any:
        from hyper_parallel.platform.adjoints import all_gather

        call = "differentiable_all_gather_concat"
        resolved = self._group(call, group)
        check_tensor(self, call, data)
        dim = check_dim(call, "concat_dim", data, concat_dim)
        check_count(call, "concat_size", concat_size, resolved)
        sizes = check_sizes(call, data, dim, sizes, resolved)
        return all_gather(self, data, dim, sizes, resolved)

    def differentiable_reduce_scatter(
        self, data: Any, dev_num: int, axis: int, op: str, group: Any
    ) -> Any:
        from hyper_parallel.platform.adjoints import reduce_scatter
        from hyper_parallel.platform.transform import chunk_sizes

        call = "differentiable_reduce_scatter"
        resolved = self._group(call, group)
        check_tensor(self, call, data)
        dim = check_dim(call, "axis", data, axis)
        check_count(call, "dev_num", dev_num, resolved)
        self._check_reducible(call, data, op, resolved)
        sizes = chunk_sizes(data.shape[dim], dev_num)
        return reduce_scatter(self, data, dim, sizes, op, resolved)

    def differentiable_all_to_all(
        self, input_data: Any, output_shape: Sequence[int], group: Any
    ) -> Any:
        from hyper_parallel.platform.adjoints import all_to_all

        call = "differentiable_all_to_all"
        resolved = self._group(call, group)
        check_tensor(self, call, input_data)
        return all_to_all(self, input_data, tuple(output_shape), resolved)

    def differentiable_all_to_all_single(
        self,
        input_tensor: Any,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        group: Any,
    ) -> Any:
        call = "differentiable_all_to_all_single"
        return self._exchange_rows(
            call, input_tensor, input_splits, output_splits, group
        )

    def start_differentiable_all_to_all_single(
        self,
        input_tensor: Any,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        group: Any,
    ) -> Callable[[], Any]:
        from hyper_parallel.platform.adjoints import start_exchange

        call = "differentiable_all_to_all_single"
        how = self._check_exchange(
            call, input_tensor, input_splits, output_splits, group
        )
        return start_exchange(self, call, input_tensor, *how)

    def differentiable_all_to_all_single_async(
        self,
        input_tensor: Any,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        group: Any,
    ) -> Any:
        # Waiting is waiting on the stream where the device has streams; on a CPU a tensor may not be handed out
        # before it is there.
        call = "differentiable_all_to_all_single_async"
        return self._exchange_rows(
            call, input_tensor, input_splits, output_splits, group
        )

    def _exchange_rows(
        self,
        call: str,
        x: Any,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        group: Any,
    ) -> Any:
        from hyper_parallel.platform.adjoints import exchange

        how = self._check_exchange(call, x, input_splits, output_splits, group)
        return exchange(self, call, x, *how)

    def _check_exchange(
        self,
        call: str,
        x: Any,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        group: Any,
    ) -> tuple[list[int], list[int], Any]:
        """(input splits, output splits, group), checked."""
        resolved = self._group(call, group)
        check_tensor(self, call, x)
        size = resolved.size()
        splits = check_all_to_all(call, x, input_splits, output_splits, size)
        return *splits, resolved

    def differentiable_async_a2a_launch(
        self,
        x: Any,
        group: Any,
        world_size: int,
        concat_dim: int,
        split_dim: int,
        handle_box: list[Any] | None = None,
    ) -> tuple[Any, Any, Any]:
        from hyper_parallel.platform.adjoints import launch_all_to_all

        call = "differentiable_async_a2a_launch"
        resolved = self._group(call, group)
        check_tensor(self, call, x)
        # The wait uses the other dim.
        _, split = check_transposed(
            call, x, world_size, concat_dim, split_dim, resolved
        )
        check_split(call, x, split, world_size)
        return launch_all_to_all(self, call, x, split, resolved, handle_box)

    def differentiable_async_a2a_wait(
        self,
        x: Any,
        work: Any,
        out_perm: Any,
        group: Any,
        world_size: int,
        concat_dim: int,
        split_dim: int,
        handle_box: list[Any] | None = None,
    ) -> Any:
        from hyper_parallel.platform.adjoints import finish_all_to_all

        call = "differentiable_async_a2a_wait"
        resolved = self._group(call, group)
        check_tensor(self, call, x)
        concat, split = check_transposed(
            call, x, world_size, concat_dim, split_dim, resolved
        )
        check_pieces(call, x, out_perm, split, world_size)
        return finish_all_to_all(
            self, x, work, out_perm, concat, split, resolved, handle_box
        )

    def differentiable_sync_hook(self, x: Any, hook_name: str, coordinator: Any) -> Any:
        from hyper_parallel.platform.adjoints import synchronize

        check_hook(hook_name)
        check_tensor(self, "differentiable_sync_hook", x)
        return synchronize(self, x, hook_name, coordinator)

    def p2p_exchange(self, tensor: Any, peer_rank: int, group: Any = None) -> Any:
        from hyper_parallel.platform.adjoints import swap

        resolved = self._group("p2p_exchange", group)
        check_tensor(self, "p2p_exchange", tensor)
        self._check_member("p2p_exchange", "peer_rank", peer_rank, resolved)
        if peer_rank == self.get_rank():
            return self.operator("clone")(tensor)
        return swap(self, tensor, peer_rank, resolved)
