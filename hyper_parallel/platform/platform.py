# SPDX-License-Identifier: Apache-2.0
"""The contract: what a framework must offer the core, and the choice of the framework.

    platform = get_platform()
    total = platform.all_reduce(x, group)

Only ``platform/<framework>/`` imports a framework. What needs none (the registry of groups, pending gradient
reductions, containers, micro batches) is written here once. The file is long because it is one table: the first
sentence of each method is its contract, and ``docs/platform.md`` is generated from it.
"""

from __future__ import annotations

import enum
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from hyper_parallel.platform import containers
from hyper_parallel.platform.axes import forget_axes
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.micro_batch import MicroBatch
from hyper_parallel.platform.order import (
    ALL,
    HYPER_PARALLEL_CHECK_ORDER,
    first_compared,
)
from hyper_parallel.platform.transform import TensorTransform

HYPER_PARALLEL_PLATFORM = "HYPER_PARALLEL_PLATFORM"
HYPER_PARALLEL_CHECK = "HYPER_PARALLEL_CHECK"
HYPER_PARALLEL_PLATFORM_MINDSPORE = "mindspore"
HYPER_PARALLEL_PLATFORM_TORCH = "torch"

# str(tuple(sorted(ranks))) -> group. The same ranks never make two groups.
EXISTING_COMM_GROUPS: dict[str, Any] = {}

REDUCE_OPS = ("sum", "avg", "max", "min", "prod")


class PlatformType(enum.Enum):
    """The frameworks that can stand behind the contract."""

    MINDSPORE = "mindspore"
    PYTORCH = "torch"


class CheckpointPolicy(enum.Enum):
    """What selective recompute does with an operator's output; MUST_SWAP keeps it in host memory until backward."""

    MUST_SAVE = "must_save"
    PREFER_SAVE = "prefer_save"
    MUST_RECOMPUTE = "must_recompute"
    PREFER_RECOMPUTE = "prefer_recompute"
    MUST_SWAP = "must_swap"


class Called(NamedTuple):
    """An operator as it was called: its name, whether its first argument is the target, its positional parameters."""

    name: str
    inplace: bool
    parameters: tuple[str, ...] | None


class NativeMesh(NamedTuple):
    """A mesh in plain values: the global ranks in nested lists, and a group an axis if this rank is among them."""

    device_type: str
    ranks: list[Any]
    names: tuple[str, ...] | None
    groups: tuple[Any, ...]


class NativeTensor(NamedTuple):
    """A distributed tensor of the framework in plain values.

    ``placements``, one an axis: ("shard", dim, split factor), ("replicate",) or ("partial", op).
    """

    local: Any
    mesh: Any
    placements: tuple[tuple[Any, ...], ...]
    shape: tuple[int, ...]
    is_parameter: bool


@dataclass(frozen=True)
class Traffic:
    """One collective as this rank sees it. ``nbytes`` is what the rank receives, in the way that moves the least."""

    collective: str
    ranks: tuple[int, ...]
    nbytes: int
    backward: bool


class Projection(NamedTuple):
    """What the dims of a module's weight are: ``out`` that of its outputs, ``into`` that of its inputs.

    ``kind`` is "linear", "embedding" or "convolution"; ``features`` is the dim of activations that the weight works on.
    """

    kind: str
    out: int
    into: int
    features: int


class Platform(ABC):
    """What the core may ask of a framework. ``group=None`` means the default group everywhere."""

    Tensor: type[Any]
    tensor: Callable[..., Any]
    Parameter: type[Any]
    Module: type[Any]
    DTensorBase: type[Any]
    Function: type[Any]
    PipelineStageBase: type[Any]
    platform_type: PlatformType
    tensor_dtype: Any
    _compared_by_default = (
        0  # how many collectives of each group, where the backend does not do it itself
    )

    def __init__(self) -> None:
        self._checks_collectives = os.environ.get(HYPER_PARALLEL_CHECK, "0") not in (
            "",
            "0",
        )
        asked = os.environ.get(HYPER_PARALLEL_CHECK_ORDER)
        self._compared_first = first_compared(asked, self._compared_by_default)
        self._seeks_circles = asked is not None
        self._listeners: list[Callable[[Traffic], None]] = []
        self._grad_reduction: tuple[Any, Callable[[], Any] | None] | None = None
        self._forgetters: list[Callable[[], None]] = []

    # --- ranks and groups

    @abstractmethod
    def get_rank(self) -> int:
        """This process's rank in the default group; 0 before there is one."""

    @abstractmethod
    def get_world_size(self) -> int:
        """The number of processes in the default group; 1 before there is one."""

    @abstractmethod
    def get_global_rank(self, group: Any, group_rank: int) -> int:
        """The global rank of the member that has ``group_rank`` in ``group``."""

    @abstractmethod
    def get_group_local_rank(self, group: Any = None) -> int:
        """This process's rank within ``group``."""

    @abstractmethod
    def get_process_group_ranks(self, group: Any = None) -> list[int]:
        """The global ranks of ``group``, in group order."""

    @abstractmethod
    def get_backend(self, group: Any = None) -> str:
        """The name of the group's communication backend: gloo, nccl, hccl, mccl."""

    @abstractmethod
    def init_process_group(
        self,
        backend: str | None = None,
        *,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        pg_options: Any = None,
        device_id: Any = None,
    ) -> None:
        """Joins this process to the job; does nothing if it has joined. The backend follows the device unless named.

        ``timeout`` (seconds or timedelta) bounds every collective of the default group and of the groups made from it.
        """

    @abstractmethod
    def destroy_process_group(self, group: Any = None) -> None:
        """Leaves ``group``, or, without one, every group, and forgets all that was remembered about them."""

    @abstractmethod
    def split_group(
        self,
        parent_pg: Any = None,
        split_ranks: Sequence[Sequence[int]] | None = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
    ) -> Any:
        """Makes a group for each list in ``split_ranks`` (ranks in the parent); returns the caller's own, or None."""

    def create_group(self, rank_list: Iterable[int]) -> Any:
        """The group of these global ranks, made if it does not exist; None if this process is not among them.

        Only the members need to call; they must create their common groups in the same order.
        """
        ranks = self._checked_ranks("create_group", rank_list)
        group = self.get_created_group(ranks)
        if group is None and self.get_rank() in ranks:
            group = EXISTING_COMM_GROUPS[_group_key(ranks)] = self._new_group(ranks)
        return group

    def get_created_group(self, rank_list: Iterable[int]) -> Any:
        """The group of these global ranks if it exists, else None; the order of the ranks does not matter."""
        group = EXISTING_COMM_GROUPS.get(_group_key(rank_list))
        return group if group is not None and self._group_lives(group) else None

    def mark_created_groups(self, process_group: Any) -> None:
        """Registers a group, or several in a list, that the user made, so that no second one is made of its ranks."""
        for group in (
            process_group
            if isinstance(process_group, (list, tuple))
            else [process_group]
        ):
            EXISTING_COMM_GROUPS[_group_key(self.get_process_group_ranks(group))] = (
                group
            )

    @abstractmethod
    def _new_group(self, ranks: Sequence[int], **options: Any) -> Any:
        """Makes a group of these ranks; called by its members only."""

    @abstractmethod
    def _group_lives(self, group: Any) -> bool:
        """Whether the group has not been destroyed behind our back."""

    def _checked_ranks(self, call: str, ranks: Iterable[int]) -> list[int]:
        """The ranks, sorted, or a ValueError that names what is wrong with them."""
        found = list(ranks)
        size = self.get_world_size()
        wrong = [r for r in found if not isinstance(r, int) or not 0 <= r < size]
        if not found or wrong or len(set(found)) != len(found):
            why = (
                f"{wrong} out of range"
                if wrong
                else "a rank appears twice"
                if found
                else "no ranks"
            )
            raise coded(
                ValueError,
                "HP105",
                f"{call}: expected different ranks from 0 to {size - 1}, got {found}: {why}",
            )
        return sorted(found)

    @abstractmethod
    def new_store(
        self,
        port: int = 0,
        *,
        is_master: bool,
        host: str = "127.0.0.1",
        timeout: float = 60.0,
    ) -> Any:
        """A key-value store over TCP for init_process_group(store=...); the master's ``port`` 0 means any free one."""

    @abstractmethod
    def prefix_store(self, prefix: str, store: Any) -> Any:
        """The part of ``store`` under ``prefix``, so that one store serves several jobs."""

    def forget_groups_with(self, forget: Callable[[], None]) -> None:
        """Has ``forget`` called before all groups are destroyed; for what holds groups or is using them."""
        self._forgetters.append(forget)

    def _forget_groups(self) -> None:
        EXISTING_COMM_GROUPS.clear()
        forget_axes()
        self._grad_reduction = None
        for forget in self._forgetters:
            forget()

    # --- communication

    @abstractmethod
    def barrier(
        self, group: Any = None, async_op: bool = False, device_ids: Any = None
    ) -> Any:
        """Returns when every rank of the group has called it; with ``async_op`` returns a handle."""

    @abstractmethod
    def all_reduce(
        self, data: Any, group_info: Any, async_op: bool = False, op: str = "sum"
    ) -> Any:
        """Reduces ``data`` over the group in place on every rank and returns it."""

    @abstractmethod
    def all_gather_into_tensor(
        self, data: Any, group_info: Any, async_op: bool = False
    ) -> Any:
        """Returns every rank's ``data``, of equal shapes, joined along dim 0 in rank order."""

    @abstractmethod
    def reduce_scatter_tensor(
        self, data: Any, group_info: Any, async_op: bool = False, op: str = "sum"
    ) -> Any:
        """Reduces ``data`` over the group and returns this rank's piece of equal pieces along dim 0."""

    @abstractmethod
    def all_to_all_single(
        self,
        input_tensor: Any,
        output_shape: Sequence[int],
        group: Any,
        async_op: bool = False,
    ) -> Any:
        """Sends piece i of dim 0 to rank i and joins what comes; returns (output, work), work None when synchronous."""

    @abstractmethod
    def broadcast(self, data: Any, src: int, group: Any, async_op: bool = False) -> Any:
        """Overwrites ``data`` on every rank with that of global rank ``src`` and returns it."""

    @abstractmethod
    def isend(
        self, tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0
    ) -> Any:
        """Starts sending ``tensor`` to global rank ``dst``; returns a handle."""

    @abstractmethod
    def irecv(
        self, tensor: Any, src: int | None = None, group: Any = None, tag: int = 0
    ) -> Any:
        """Starts receiving into ``tensor`` from global rank ``src`` (any rank if None); returns a handle."""

    @abstractmethod
    def p2p_exchange(self, tensor: Any, peer_rank: int, group: Any = None) -> Any:
        """Sends ``tensor`` to a peer and returns the peer's, of the same shape; backward exchanges the gradients."""

    @abstractmethod
    def send_object_list(
        self, obj_list: list[Any], dst: int | None = None, group: Any = None
    ) -> None:
        """Sends picklable objects to global rank ``dst``."""

    @abstractmethod
    def recv_object_list(
        self, obj_list: list[Any], src: int | None = None, group: Any = None
    ) -> int:
        """Fills ``obj_list`` with the objects that global rank ``src`` sent; returns the sender's rank."""

    @abstractmethod
    def all_gather_object(
        self, object_list: list[Any], obj: Any, group: Any = None
    ) -> None:
        """Fills ``object_list``, one slot a rank, with every rank's ``obj``."""

    @abstractmethod
    def longest_wait(self) -> tuple[str, float] | None:
        """(collective, seconds) of the longest wait for other ranks that lasts on any thread; None if none does."""

    @contextmanager
    def checked_collectives(self) -> Iterator[None]:
        """A context in which the ranks compare op, dtype, shape and splits before each collective.

        What does not fit together is a ValueError on every rank. HYPER_PARALLEL_CHECK=1 does so for a whole program.
        """
        before, self._checks_collectives = self._checks_collectives, True
        try:
            yield
        finally:
            self._checks_collectives = before

    @contextmanager
    def checked_order(self) -> Iterator[None]:
        """A context in which the ranks that issue different collectives are told so, with each rank's line of code.

        It is a CommunicationError on every rank of the group, and costs one message to the job's store for every
        collective. HYPER_PARALLEL_CHECK_ORDER=1 does so for a whole program, =first:N for the first N collectives of
        each group, =0 for none. On torch the first 100 of each group are compared by default; ranks that wait for each
        other in collectives of different groups are looked for only where the check was asked for.
        """
        before = self._compared_first, self._seeks_circles
        self._compared_first, self._seeks_circles = ALL, True
        try:
            yield
        finally:
            self._compared_first, self._seeks_circles = before

    @contextmanager
    def listen_to_collectives(
        self, listener: Callable[[Traffic], None]
    ) -> Iterator[None]:
        """A context in which ``listener`` is told of every collective that this rank starts, on any thread."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    # --- communication in the graph: backward is the adjoint

    @abstractmethod
    def differentiable_all_reduce(self, data: Any, op: str, group: Any) -> Any:
        """Reduces over the group; backward is the adjoint (max and min send the gradient to the elements that won)."""

    @abstractmethod
    def reduction_gradient(
        self, op: str, grad: Any, data: Any, result: Any, group: Any
    ) -> Any:
        """The gradient of this rank's ``data``, given that of the reduction's ``result`` over the group."""

    @abstractmethod
    def differentiable_all_gather_concat(
        self,
        data: Any,
        group: Any,
        concat_size: int,
        concat_dim: int,
        sizes: Sequence[int] | None = None,
    ) -> Any:
        """Joins every rank's ``data`` along ``concat_dim``; backward is a reduce-scatter.

        ``sizes``: each rank's size along ``concat_dim``, where they differ.
        """

    @abstractmethod
    def differentiable_reduce_scatter(
        self, data: Any, dev_num: int, axis: int, op: str, group: Any
    ) -> Any:
        """Reduces over the group and keeps this rank's piece of ``axis``, as torch.chunk cuts; backward gathers."""

    @abstractmethod
    def differentiable_all_to_all(
        self, input_data: Any, output_shape: Sequence[int], group: Any
    ) -> Any:
        """Exchanges equal pieces of dim 0; backward is the reverse exchange."""

    @abstractmethod
    def differentiable_all_to_all_single(
        self,
        input_tensor: Any,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        group: Any,
    ) -> Any:
        """Exchanges pieces of dim 0 of any sizes, zero included; backward is the reverse exchange."""

    @abstractmethod
    def differentiable_all_to_all_single_async(
        self,
        input_tensor: Any,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        group: Any,
    ) -> Any:
        """The same, returning after the launch: the wait is on the stream where the device has streams."""

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

        The returned ``x`` belongs in the wait: with the wait's ``handle_box``, its backward waits for the reverse
        exchange that the wait's backward started and puts the gradient together.
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
        """Waits for an exchange launched earlier: ``concat_dim`` whole, a part of ``split_dim``, in x's graph.

        ``out_perm[i]`` is the piece that came from rank i. Backward launches the reverse exchange; with
        ``handle_box`` it appends ``(work, buffer)`` there, hands zeros on, and whoever waits adds the gradient.
        """

    @abstractmethod
    def differentiable_sync_hook(self, x: Any, hook_name: str, coordinator: Any) -> Any:
        """The identity; forward and backward each meet the other thread at the coordinator, in that hook's role."""

    def set_grad_reduce_handle(
        self, handle: Any, post_process: Callable[[], Any] | None = None
    ) -> None:
        """Finishes the gradient reduction set before this one, then keeps ``handle`` as the pending one."""
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

    # --- tensors

    @abstractmethod
    def get_op_name(self, func: Any) -> str:
        """The operator's name without namespace and overload: "add" for torch.add, Tensor.add and aten.add.Tensor."""

    @abstractmethod
    def called(self, func: Any) -> Called:
        """What the rules call a function of the framework, and how it names its arguments."""

    @abstractmethod
    def named(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments by the names that the rules use."""

    @abstractmethod
    def operator(self, name: str) -> Callable[..., Any]:
        """The framework's function for an operator's name."""

    @abstractmethod
    def is_tensor(self, obj: Any) -> bool:
        """Whether ``obj`` is a tensor of this framework."""

    @abstractmethod
    def chunk(self, data: Any, split_dim: int, split_size: int, index: int) -> Any:
        """Piece ``index`` of ``split_size`` pieces with torch.chunk's sizes; an empty piece where there is none."""

    @abstractmethod
    def clone(self, tensor: Any) -> Any:
        """The tensor's data in memory of its own, outside the graph."""

    def in_memory_format_of(self, like: Any, tensor: Any) -> Any:  # noqa: ARG002 - for frameworks that have formats
        """The tensor with its dims in memory in the order of another's, where the framework has a name for that."""
        return tensor

    @abstractmethod
    def cat(self, tensors: Sequence[Any], dim: int = 0) -> Any:
        """The tensors joined along ``dim``."""

    @abstractmethod
    def construct_strided_slice(
        self, x: Any, begin: Sequence[int], end: Sequence[int], stride: Sequence[int]
    ) -> Any:
        """``x[begin:end:stride]`` for every dim at once, strides of any sign."""

    @abstractmethod
    def tensor_type_cast(self, input_data: Any, cast_type: str) -> Any:
        """``input_data`` in the dtype of that name."""

    def cast_fp_tensor(self, dtype: Any, x: Any) -> Any:
        """``x`` in ``dtype`` if it is a floating-point tensor, else ``x`` itself."""
        return x.to(dtype) if self.is_tensor(x) and self.is_floating_point(x) else x

    @abstractmethod
    def is_floating_point(self, tensor: Any) -> bool:
        """Whether the tensor's dtype is a floating-point one."""

    @abstractmethod
    def get_tensor_storage_size(self, tensor: Any) -> int:
        """The bytes of the tensor's elements on this rank."""

    @abstractmethod
    def get_element_size(self, tensor: Any) -> int:
        """The bytes of one element."""

    @abstractmethod
    def tensor_to_numpy(self, tensor: Any) -> Any:
        """The tensor as a numpy array, from any device; bfloat16, which numpy lacks, becomes float32."""

    @abstractmethod
    def host_tensor(self, tensor: Any) -> Any:
        """This rank's elements as a plain contiguous tensor in host memory; the tensor's own memory where it is one."""

    @abstractmethod
    def tensor_memory(self, tensor: Any) -> Any:
        """The elements of a plain tensor as an array of opaque items that shares its memory; None where none can."""

    @abstractmethod
    def memory_key(self, tensor: Any) -> Any:
        """What is equal for two tensors, and for the shards of two, that are the same elements of the same memory."""

    @abstractmethod
    def tensor_from_bytes(self, data: Any, dtype: str, shape: Sequence[int]) -> Any:
        """A plain tensor in host memory on top of a contiguous uint8 array."""

    @abstractmethod
    def str_to_dtype(self, dtype_str: str) -> Any:
        """The framework's dtype for a name as checkpoints store it: "float32", "torch.float32", "bfloat16", ..."""

    @abstractmethod
    def list_to_size(self, size_list: Sequence[int]) -> Any:
        """The framework's shape type for a list of ints."""

    @abstractmethod
    def arange(
        self,
        start: Any,
        end: Any = None,
        step: Any = 1,
        dtype: Any = None,
        device: Any = None,
    ) -> Any:
        """Numbers from ``start`` (0 if ``end`` is None) to ``end`` by ``step``."""

    @abstractmethod
    def zeros(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        """A tensor of zeros."""

    @abstractmethod
    def ones(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        """A tensor of ones."""

    @abstractmethod
    def empty(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        """A tensor whose elements are not set."""

    @abstractmethod
    def full(
        self, size: Any, fill_value: Any, dtype: Any = None, device: Any = None
    ) -> Any:
        """A tensor of one value."""

    @abstractmethod
    def rand(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        """Uniform numbers from 0 to 1."""

    @abstractmethod
    def randn(self, size: Any, dtype: Any = None, device: Any = None) -> Any:
        """Normal numbers."""

    @abstractmethod
    def full_like(self, tensor: Any, fill_value: Any, dtype: Any = None) -> Any:
        """A tensor of one value, with the shape and device of ``tensor``."""

    @abstractmethod
    def empty_like(
        self,
        tensor: Any,
        *,
        dtype: Any = None,
        device: Any = None,
        pin_memory: bool = False,
    ) -> Any:
        """An unset tensor of the shape of ``tensor``; pinned host memory where there is an accelerator."""

    @abstractmethod
    def new_tensor(self, tensor_shape: Any, tensor_type: Any, device: Any) -> Any:
        """An unset tensor of this shape, dtype and device."""

    @abstractmethod
    def new_zero_parameter(
        self, param_shape: Any, param_type: Any, requires_grad: bool, device: Any
    ) -> Any:
        """A parameter of zeros."""

    @abstractmethod
    def set_tensor_requires_grad(self, input_tensor: Any) -> Any:
        """Makes the tensor a leaf that gets a gradient, and returns it."""

    @abstractmethod
    def requires_grad(self, tensor: Any) -> bool:
        """Whether a tensor gets a gradient, or was computed from one that does."""

    @abstractmethod
    def set_requires_grad(self, tensor: Any, requires_grad: bool) -> Any:
        """Has a leaf get a gradient, or not; returns it."""

    @abstractmethod
    def detach(self, tensor: Any) -> Any:
        """The same data outside the graph."""

    @abstractmethod
    def copy_into(self, target: Any, source: Any, non_blocking: bool = False) -> None:
        """Copies a plain tensor's elements into another in place, whatever view of memory that is."""

    @abstractmethod
    def changed(self, target: Any, source: Any, non_blocking: bool = False) -> Any:
        """The plain tensor with the elements of another, as backward sees it too: a new one if need be."""

    @abstractmethod
    def assign(self, target: Any, index: Any, value: Any) -> Any:
        """The plain tensor with a value in some of its places; its old elements stay in the graph, if all are replaced.

        They do so because other ranks may keep some of theirs, and then communicate for them in backward.
        """

    @abstractmethod
    def no_grad(self) -> AbstractContextManager[Any]:
        """A context in which nothing is recorded for backward."""

    def replayed_views(self) -> AbstractContextManager[Any]:
        """A context for views of tensors without elements, in which their graph is the same as with elements."""
        return nullcontext()

    @abstractmethod
    def recording(self, on: bool) -> AbstractContextManager[Any]:
        """A context in which what is computed is recorded for backward, or is not."""

    @abstractmethod
    def gradients(
        self, function: Callable[..., Any], inputs: Sequence[Any]
    ) -> list[Any]:
        """The gradients of a function with one number as its result, for tensors that are its arguments."""

    def second_gradients(
        self,
        function: Callable[..., Any],  # noqa: ARG002
        inputs: Sequence[Any],  # noqa: ARG002
        directions: Sequence[Any],  # noqa: ARG002
    ) -> Any:
        """The gradients of the products of a function's gradients with these directions; None where there are none.

        ``directions``: a tensor for each input by which the function is differentiated first, None for the others.
        """
        raise coded(
            NotImplementedError,
            "HP142",
            f"second_gradients: not supported on {self.platform_type.value}, which has wrong ones",
        )

    @abstractmethod
    def is_recorded(self, tensor: Any) -> bool:
        """Whether what is computed from the tensor now is recorded for backward."""

    @abstractmethod
    def call_where_empty(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls a function on plain tensors, some of which have no elements on some rank, with the right result."""

    def attention_by_operators(self) -> AbstractContextManager[Any]:
        """A context in which attention is not one kernel, whose gradient may not have a gradient."""
        return nullcontext()

    @abstractmethod
    def tied(self, result: Any, operands: Sequence[Any]) -> Any:
        """The result, recorded as made from all of these operands: those that it does not depend on get zeros."""

    @abstractmethod
    def accumulates_gradient(self, leaf: Any) -> bool:
        """Whether the backward that runs now only adds to a leaf's gradient: nobody asks for it, no hook sees it."""

    @abstractmethod
    def accumulate_gradient(self, leaf: Any, gradient: Any) -> None:
        """Adds to the gradient of a leaf; the tensor may become the gradient itself."""

    @abstractmethod
    def backward_number(self) -> int:
        """What tells the backward that runs now from others."""

    @abstractmethod
    def after_backward(self, call: Callable[[], None]) -> None:
        """Calls something once, when the backward that runs now is done and before its caller goes on."""

    @abstractmethod
    def is_dense(self, tensor: Any) -> bool:
        """Whether a tensor has a place in memory for each of its elements, as a sparse one has not."""

    def can_view(
        self,
        shape: Sequence[int],  # noqa: ARG002
        strides: Sequence[int],  # noqa: ARG002
        new_shape: Sequence[int],  # noqa: ARG002
    ) -> bool:
        """Whether a tensor of this shape and these strides has a view of the new shape; asked if ``counts_changes``."""
        raise AssertionError(
            f"{self.platform_type.value} does not tell views from copies"
        )

    @abstractmethod
    def is_meta(self, tensor: Any) -> bool:
        """Whether a tensor has a shape and a dtype but no data."""

    @abstractmethod
    def version_of(self, tensor: Any) -> int | None:
        """A number that changes when the tensor is changed in place; None where nobody counts."""

    @abstractmethod
    def note_change(self, tensor: Any) -> None:
        """Counts a change of the elements that the framework could not see, so that `version_of` is another."""

    counts_changes = True  # whether `version_of` knows of every change; if not, `note_shown` and `note_alias` are told

    def note_shown(self, tensor: Any) -> None:  # noqa: B027 - a framework that counts need not know
        """Is told that a user has the tensor, or one that shares its memory, and may change it without being seen."""

    def note_alias(self, tensor: Any, source: Any) -> None:  # noqa: B027 - a framework that counts need not know
        """Is told that a tensor may share memory with another one."""

    @abstractmethod
    def memory_of(self, tensor: Any) -> MutableMapping[Any, Any]:
        """A mapping that lives as long as the tensor and does not keep it alive; for tensors made from it."""

    def tree_map(self, fn: Callable[[Any], Any], tree: Any) -> Any:
        """The same nested container with ``fn(leaf)`` at every leaf."""
        return containers.tree_map(fn, tree)

    def apply_to_tensors(self, fn: Callable[[Any], Any], container: Any) -> Any:
        """The same nested container with ``fn(tensor)`` at every tensor and all else as it is."""
        return containers.tree_map(
            lambda leaf: fn(leaf) if self.is_tensor(leaf) else leaf, container
        )

    def get_tensor_transform(self) -> TensorTransform:
        """The steps of a redistribution as functions of a local tensor, each with its backward."""
        return TensorTransform(self)

    # --- devices and randomness

    @abstractmethod
    def device_type(self) -> str:
        """The kind of device that tensors train on here: cpu, cuda, npu."""

    @abstractmethod
    def device(self, index: int | None = None) -> Any:
        """The device of that index; without one, this process's own."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seeds every generator of the framework."""

    @abstractmethod
    def get_rng_state(self) -> Any:
        """The state of the generator that draws on this process's device."""

    @abstractmethod
    def draw_seed(self) -> int:
        """A seed from the generator of the process: the same on ranks whose generators are in step."""

    @abstractmethod
    def seeded(self, seed: int) -> AbstractContextManager[Any]:
        """A context with another seed, after which the device's generator goes on as if nothing had been drawn."""

    @abstractmethod
    def set_rng_state(self, state: Any) -> None:
        """Puts a state from ``get_rng_state`` back."""

    @abstractmethod
    def get_rng_states(self) -> dict[str, Any]:
        """The states, uint8 tensors of the host, of all the framework's generators that this process draws from."""

    @abstractmethod
    def set_rng_states(self, states: Mapping[str, Any]) -> None:
        """Puts states from ``get_rng_states`` back, all or some of them."""

    # --- modules and parameters

    @abstractmethod
    def get_cell_construct(self, cell: Any) -> Callable[..., Any]:
        """The module's own computation, without hooks: forward, or construct."""

    @abstractmethod
    def get_cells_and_names(self, cell: Any) -> Iterable[tuple[str, Any]]:
        """Every submodule with its dotted name, the module itself first under ""."""

    @abstractmethod
    def parameters_dict(self, cell: Any) -> dict[str, Any]:
        """Every parameter by its dotted name."""

    @abstractmethod
    def search_parameter_by_name(
        self, cell: Any, param_name: str
    ) -> tuple[Any, str, Any] | None:
        """(owner, name in the owner, parameter) for a dotted name, or None; a leading "self." is ignored."""

    @abstractmethod
    def update_parameter_by_name(
        self, cell: Any, result: tuple[Any, str, Any], new_param: Any
    ) -> None:
        """Puts ``new_param`` in the place that ``search_parameter_by_name`` found."""

    @abstractmethod
    def set_layout_into_parameter(self, param: Any, layout: Any) -> Any:
        """A parameter that holds this rank's shard of ``param`` as a distributed tensor of that layout."""

    @abstractmethod
    def get_param_local_shape(self, param: Any) -> Any:
        """The shape of the data on this rank."""

    @abstractmethod
    def get_param_local_data(self, param: Any) -> Any:
        """The data on this rank, as a plain tensor that shares its memory."""

    @abstractmethod
    def get_param_type_size(self, param: Any) -> int:
        """The bytes of one element of the parameter."""

    @abstractmethod
    def update_param_data(self, param: Any, data: Any) -> None:
        """Makes ``data`` the parameter's data, of whatever shape; the parameter stays the same object."""

    @abstractmethod
    def load_into_param(self, param: Any, data: Any) -> None:
        """Copies full, local or distributed data into the parameter in place; a shape that fits none is an error."""

    @abstractmethod
    def init_parameters(self, module: Any, stage_index: int) -> None:
        """Gives data to parameters that were created without, each as one device would have drawn it."""

    @abstractmethod
    def is_linear_module(self, module: Any) -> bool:
        """Whether the module is a linear layer."""

    @abstractmethod
    def is_embedding_module(self, module: Any) -> bool:
        """Whether the module is an embedding."""

    @abstractmethod
    def is_compiled_module(self, module: Any) -> bool:
        """Whether the module's calls are compiled, by torch.compile(module) or module.compile()."""

    @abstractmethod
    def projection(self, module: Any) -> Projection | None:
        """Which dims of the weight of a linear layer, an embedding or a convolution are what; None for others."""

    @abstractmethod
    def register_forward_pre_hook(
        self,
        module: Any,
        hook: Callable[..., Any],
        prepend: bool = False,
        with_kwargs: bool = False,
    ) -> Any:
        """Calls ``hook`` before the module's forward; returns a handle with remove()."""

    @abstractmethod
    def register_forward_hook(
        self,
        module: Any,
        hook: Callable[..., Any],
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> Any:
        """Calls ``hook(module, args[, kwargs], output)`` after forward; what it returns replaces the output.

        ``always_call``: also where forward raised an error.
        """

    @abstractmethod
    def own_tensors(self, module: Any) -> list[tuple[str, Any]]:
        """The parameters and buffers that a module has itself, not those of its submodules."""

    @abstractmethod
    def set_own_tensor(self, module: Any, name: str, tensor: Any) -> None:
        """Puts another tensor in the place of one that a module has itself; a parameter stays a parameter."""

    @abstractmethod
    def register_full_backward_hook(
        self, module: Any, hook: Callable[..., Any], prepend: bool = False
    ) -> Any:
        """Calls ``hook(module, grad_input, grad_output)`` after the backward; returns a handle with remove()."""

    @abstractmethod
    def register_full_backward_pre_hook(
        self, module: Any, hook: Callable[..., Any], prepend: bool = False
    ) -> Any:
        """Calls ``hook(module, grad_output)`` before the module's backward; returns a handle with remove()."""

    @abstractmethod
    def get_model_state_dict(
        self, model: Any, *, options: Any = None
    ) -> dict[str, Any]:
        """The model's state dict; options: full_state_dict, cpu_offload, ignore_frozen_params."""

    @abstractmethod
    def optimizer_parts(
        self, optimizer: Any
    ) -> tuple[Sequence[dict[str, Any]], MutableMapping[Any, dict[str, Any]]]:
        """(groups, each with its "params" and options; state of each parameter), as the optimizer itself has them."""

    @abstractmethod
    def save_checkpoint(
        self, cell: Any, file_path: Any, ckpt_format: str = "safetensors"
    ) -> None:
        """Writes a module or a dict of tensors to one file, whole or not at all."""

    @abstractmethod
    def load_checkpoint(
        self, file_path: Any, ckpt_format: str = "safetensors"
    ) -> dict[str, Any]:
        """The tensors of a file by name; nothing is unpickled."""

    @abstractmethod
    def clip_grad_norm_(
        self,
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        """Scales gradients down to ``max_norm`` in place and returns the total norm before that."""

    def micro_batch(
        self,
        micro_batch_num: int,
        args_batch_dim: Sequence[Any] | None = None,
        kwargs_batch_dim: Mapping[str, Any] | None = None,
    ) -> MicroBatch:
        """A callable that splits args and kwargs into ``micro_batch_num`` lists along each tensor's batch dim."""
        return MicroBatch(self, micro_batch_num, args_batch_dim, kwargs_batch_dim)

    # --- training as a whole

    @abstractmethod
    def prepare_module(self, module: Any, dtype: str) -> Any:
        """Puts a module's tensors on this process's device, in the dtype of that name, and returns it."""

    @abstractmethod
    def new_optimizer(
        self, kind: str, groups: Sequence[Mapping[str, Any]], **options: Any
    ) -> Any:
        """An optimizer, "adamw", "adam" or "sgd", of groups of parameters, with torch's names for its options."""

    @abstractmethod
    def set_learning_rate(self, optimizer: Any, rate: float) -> None:
        """Sets the learning rate of all groups of an optimizer."""

    @abstractmethod
    def compute_gradients(
        self, loss_of: Callable[[], Any], parameters: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        """The loss that ``loss_of()`` returns, and its gradients, as clip_grad_norm_ and apply_gradients take them."""

    @abstractmethod
    def apply_gradients(self, optimizer: Any, gradients: Sequence[Any]) -> None:
        """Has an optimizer update its parameters by the gradients that compute_gradients returned, and forgets them."""

    def peak_memory(self) -> int:
        """The most bytes that tensors have taken on this process's device; on a CPU, those of the whole process."""
        if self.device_type() != "cpu":
            return self._device_memory()
        import resource  # not everywhere

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )

    @abstractmethod
    def _device_memory(self) -> int:
        """The peak of an accelerator's memory."""

    # --- recompute and swap

    @property
    @abstractmethod
    def checkpoint(self) -> Callable[..., Any]:
        """The framework's recompute function."""

    @property
    @abstractmethod
    def noop_context_fn(self) -> Callable[[], tuple[Any, Any]]:
        """Makes the two contexts of a recompute that do nothing."""

    @abstractmethod
    def ckpt_wrapper(
        self,
        module: Any,
        checkpoint_fn: Callable[..., Any] | None = None,
        **checkpoint_fn_kwargs: Any,
    ) -> Any:
        """A module that runs ``module`` under recompute, with the same state_dict keys."""

    @abstractmethod
    def swap_wrapper(
        self, module: Any, policy_fn: Callable[[Any], bool] | None = None
    ) -> Any:
        """A module whose saved activations live in host memory between forward and backward, with the same keys."""

    @abstractmethod
    def create_selective_checkpoint_contexts(
        self, policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False
    ) -> tuple[Any, Any]:
        """The contexts of a recompute that decides by operator: a policy function, or a list of operators to save."""

    @abstractmethod
    def async_save_on_cpu(
        self, policy_fn: Callable[[Any], bool] | None = None
    ) -> AbstractContextManager[Any]:
        """A context that moves saved tensors to host memory and brings them back, ahead of use, in backward."""

    # --- streams, memory, profiling, initialisation

    @abstractmethod
    def new_stream(self) -> Any:
        """A stream of the device; on a CPU an object that does nothing."""

    @abstractmethod
    def get_stream_context(self) -> Callable[[Any], AbstractContextManager[Any]]:
        """What makes a stream current: ``with platform.get_stream_context()(stream):``."""

    @abstractmethod
    def get_current_stream(self) -> Any:
        """The current stream of the device."""

    @abstractmethod
    def new_event(self) -> Any:
        """An event of the device; on a CPU an object that does nothing."""

    @abstractmethod
    def get_symmetric_memory_handler(self) -> Any:
        """Buffers that every rank of a group can read and write directly, with barrier and signal."""

    @abstractmethod
    def profiler_record(self, name: str) -> AbstractContextManager[Any]:
        """A context that shows as ``name`` in the framework's profiler."""

    @property
    @abstractmethod
    def meta_device(self) -> Any:
        """The framework's device without storage."""

    @abstractmethod
    def init_on_device(
        self, device: Any, include_buffers: bool = False
    ) -> AbstractContextManager[Any]:
        """A context in which new parameters, and buffers if asked, land on ``device``."""

    # --- the framework's own distributed tensors

    @abstractmethod
    def from_native_mesh(self, mesh: Any) -> NativeMesh:
        """The parts of the framework's own mesh."""

    @abstractmethod
    def to_native_mesh(self, parts: NativeMesh) -> Any:
        """The framework's own mesh of these parts; no groups are made."""

    @abstractmethod
    def from_native_dtensor(self, tensor: Any) -> NativeTensor:
        """The parts of the framework's own distributed tensor: the shard shares its memory, a leaf's is a leaf."""

    @abstractmethod
    def to_native_dtensor(self, parts: NativeTensor) -> Any:
        """The framework's own distributed tensor in the shard's memory: of a leaf a leaf, else in the shard's graph."""


# The chosen platform; None until get_platform() is called. Tests reset it.
platform: Platform | None = None


def get_platform() -> Platform:
    """The one platform of this process.

    HYPER_PARALLEL_PLATFORM decides; else the framework that the program has imported, if it is exactly one; else
    MindSpore if it can be had; else torch.
    """
    global platform  # noqa: PLW0603 - the contract names this variable as the cache
    if platform is None:
        platform = _choose()()
    return platform


def get_torch_platform() -> Platform:
    """The platform on PyTorch."""
    try:
        from hyper_parallel.platform.torch import TorchPlatform
    except ModuleNotFoundError as error:
        raise coded(
            ImportError,
            "HP101",
            f"PyTorch is not installed ({error}); pip install 'hyper_parallel[torch]'",
        ) from error
    return TorchPlatform()


def get_mindspore_platform() -> Platform:
    """The platform on MindSpore."""
    try:
        from hyper_parallel.platform.mindspore import MindSporePlatform
    except ModuleNotFoundError as error:
        raise coded(
            ImportError, "HP101", f"the MindSpore platform cannot be had here ({error})"
        ) from error
    chosen: Platform = MindSporePlatform()
    return chosen


def _choose() -> Callable[[], Platform]:
    makers = {
        HYPER_PARALLEL_PLATFORM_TORCH: get_torch_platform,
        HYPER_PARALLEL_PLATFORM_MINDSPORE: get_mindspore_platform,
    }
    named = os.environ.get(HYPER_PARALLEL_PLATFORM)
    if named is not None:
        if named.lower() not in makers:
            raise coded(
                ValueError,
                "HP102",
                f"{HYPER_PARALLEL_PLATFORM} must be 'torch' or 'mindspore', got {named!r}",
            )
        return makers[named.lower()]
    imported = [name for name in makers if name in sys.modules]
    if len(imported) == 1:
        return makers[imported[0]]
    return _first_that_imports


def _first_that_imports() -> Platform:
    reasons = []
    for make in (get_mindspore_platform, get_torch_platform):
        try:
            return make()
        except ImportError as error:
            reasons.append(str(error))
    raise coded(
        ImportError,
        "HP101",
        "hyper_parallel needs PyTorch or MindSpore: pip install 'hyper_parallel[torch]' or "
        f"'hyper_parallel[mindspore]' ({'; '.join(reasons)})",
    )


def _group_key(ranks: Iterable[int]) -> str:
    return str(tuple(sorted(ranks)))
