# SPDX-License-Identifier: Apache-2.0
"""What only code outside this package calls: public, tested, and used by nothing above the platform.

The author of a new framework writes the other parts first; these complete the public interface. A method that the
package begins to use moves to the part that it belongs to; ``tests/guards`` checks that.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hyper_parallel.platform.contract.tensors import Tensors

if TYPE_CHECKING:
    from hyper_parallel.platform.micro_batch import MicroBatch
    from hyper_parallel.platform.platform import Platform


class External(Tensors):
    """Groups, tensors, modules and streams for users' own code."""

    @abstractmethod
    def get_global_rank(self, group: Any, group_rank: int) -> int:
        """Returns the global rank of the member with rank ``group_rank`` in ``group``."""

    @abstractmethod
    def send_object_list(
        self, obj_list: list[Any], dst: int | None = None, group: Any = None
    ) -> None:
        """Sends picklable objects to global rank ``dst``."""

    @abstractmethod
    def recv_object_list(
        self, obj_list: list[Any], src: int | None = None, group: Any = None
    ) -> int:
        """Fills ``obj_list`` with the objects sent by global rank ``src``; returns the sender's rank."""

    @abstractmethod
    def differentiable_all_to_all_single_async(
        self,
        input_tensor: Any,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        group: Any,
    ) -> Any:
        """Starts differentiable_all_to_all_single and waits on the stream, if the device has streams.

        Not tested on an accelerator.
        """

    @abstractmethod
    def differentiable_async_a2a_launch(
        self,
        x: Any,
        group: Any,
        world_size: int,
        concat_dim: int,
        split_dim: int,
        handle_box: list[Any] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Starts the exchange that ``differentiable_async_a2a_wait`` finishes; returns (x, work, out_perm).

        Pass the returned ``x`` to the wait: with the wait's ``handle_box``, its backward waits for the reverse
        exchange that the wait's backward started and assembles the gradient.
        """

    @abstractmethod
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
        """Finishes a launched exchange: gathers ``concat_dim`` and shards ``split_dim``, in the graph of x.

        ``out_perm[i]`` is the chunk that came from rank i. Backward launches the reverse exchange; with
        ``handle_box`` it appends ``(work, buffer)`` to it and returns zeros, and whoever waits adds the gradient.
        """

    def cast_fp_tensor(self, dtype: Any, x: Any) -> Any:
        """Casts ``x`` to ``dtype`` if it is a floating-point tensor, else returns ``x`` unchanged."""
        return x.to(dtype) if self.is_tensor(x) and self.is_floating_point(x) else x

    @abstractmethod
    def get_tensor_storage_size(self, tensor: Any) -> int:
        """Returns the number of bytes of the tensor's elements on this rank."""

    @abstractmethod
    def new_tensor(self, tensor_shape: Any, tensor_type: Any, device: Any) -> Any:
        """Returns an uninitialized tensor of this shape, dtype and device."""

    @abstractmethod
    def new_zero_parameter(
        self, param_shape: Any, param_type: Any, requires_grad: bool, device: Any
    ) -> Any:
        """Returns a parameter of zeros."""

    @abstractmethod
    def set_tensor_requires_grad(self, input_tensor: Any) -> Any:
        """Makes the tensor a leaf that requires a gradient, and returns it."""

    def set_layout_into_parameter(self, param: Any, layout: Any) -> Any:
        """Returns a parameter that holds this rank's shard of ``param`` as a DTensor of that layout."""
        from hyper_parallel.platform.parameters import shard_parameter

        return shard_parameter(cast("Platform", self), param, layout)

    @abstractmethod
    def _shard_of(self, param: Any, layout: Any) -> Any:
        """Returns this rank's shard of a plain parameter, in memory of its own."""

    @abstractmethod
    def _parameter_of(self, tensor: Any, like: Any) -> Any:
        """Returns a parameter of this tensor with the name and requires_grad of another."""

    @abstractmethod
    def get_param_local_shape(self, param: Any) -> Any:
        """Returns the shape of the data on this rank."""

    @abstractmethod
    def get_param_type_size(self, param: Any) -> int:
        """Returns the number of bytes per element of the parameter."""

    @abstractmethod
    def is_linear_module(self, module: Any) -> bool:
        """Returns whether the module is a linear layer."""

    _checkpoint_formats: tuple[str, ...] = ("safetensors",)

    def save_checkpoint(
        self, cell: Any, file_path: Any, ckpt_format: str = "safetensors"
    ) -> None:
        """Writes a module or a dict of tensors atomically to one file."""
        from hyper_parallel.platform.parameters import save_file

        save_file(cast("Platform", self), cell, file_path, ckpt_format)

    def load_checkpoint(
        self, file_path: Any, ckpt_format: str = "safetensors"
    ) -> dict[str, Any]:
        """Returns the tensors of a file by name; never unpickles code."""
        from hyper_parallel.platform.parameters import load_file

        return load_file(cast("Platform", self), file_path, ckpt_format)

    @abstractmethod
    def _write_checkpoint(
        self, state: Mapping[str, Any], path: Path, ckpt_format: str
    ) -> None:
        """Writes this rank's part of the tensors to a file."""

    @abstractmethod
    def _read_checkpoint(self, path: Path, ckpt_format: str) -> dict[str, Any]:
        """Reads the tensors of a file; raises SafetensorError if a safetensors file is damaged."""

    def micro_batch(
        self,
        micro_batch_num: int,
        args_batch_dim: Sequence[Any] | None = None,
        kwargs_batch_dim: Mapping[str, Any] | None = None,
    ) -> MicroBatch:
        """Returns a callable that splits args and kwargs into ``micro_batch_num`` lists along each batch dim."""
        from hyper_parallel.platform.micro_batch import MicroBatch

        platform = cast("Platform", self)
        return MicroBatch(platform, micro_batch_num, args_batch_dim, kwargs_batch_dim)

    @abstractmethod
    def new_stream(self) -> Any:
        """Creates a stream of the device; on a CPU, an object that does nothing."""

    @abstractmethod
    def get_stream_context(self) -> Callable[[Any], AbstractContextManager[Any]]:
        """Returns the context that makes a stream current: ``with platform.get_stream_context()(stream):``."""

    @abstractmethod
    def get_current_stream(self) -> Any:
        """Returns the current stream of the device."""

    @abstractmethod
    def new_event(self) -> Any:
        """Creates an event of the device; on a CPU, an object that does nothing."""

    @abstractmethod
    def get_symmetric_memory_handler(self) -> Any:
        """Returns the handler of buffers that every rank of a group can read and write directly."""

    @abstractmethod
    def profiler_record(self, name: str) -> AbstractContextManager[Any]:
        """Labels a context as ``name`` in the framework's profiler."""
