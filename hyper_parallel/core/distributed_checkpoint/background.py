# SPDX-License-Identifier: Apache-2.0
"""Asynchronous saves: the caller waits for a copy in host memory, a thread writes it.

response = async_save(state, checkpoint_id="runs/a/step-100")
...                                       training continues, and may modify the state
response.result()                         waits, and raises the error of the save; so does the next save
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.core.distributed_checkpoint.agreement import Ranks
from hyper_parallel.core.distributed_checkpoint.checksum import copy_bytes
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    dtype_name,
)
from hyper_parallel.core.distributed_checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from hyper_parallel.core.distributed_checkpoint.saving import Prepared
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

_HEAD_START = 0.002  # seconds for the caller to go on, who would otherwise wait for the interpreter


@dataclass(frozen=True)
class AsyncSaveResponse:
    """A save in progress; ``future`` is done when the checkpoint is complete or has failed."""

    future: Future[Metadata]

    def result(self, timeout: float | None = None) -> Metadata:
        """Waits for the checkpoint and returns its metadata; raises the error of the save."""
        QUEUE.told(self)
        return self.future.result(timeout)

    def is_done_within(self, seconds: float | None) -> bool:
        """Waits until the save is complete or has failed, at most for the timeout; returns whether it is done."""
        ended, _ = wait([self.future], seconds)
        return bool(ended)

    def done(self) -> bool:
        """Whether the save is complete or has failed."""
        return self.future.done()


class Staged(SavePlanner):
    """A plan's data, copied. Copies are kept for the next save of the same chunks."""

    _spare: dict[Any, list[Any]] = {}  # noqa: RUF012 - shared on purpose: memory outlives a save
    _lock = threading.Lock()

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.allow_pickle = getattr(planner, "allow_pickle", False)
        self._copies: dict[MetadataIndex, tuple[Any, Any]] = {}
        self._objects: dict[
            MetadataIndex, Any
        ] = {}  # lists and arrays may be changed in place like tensors
        self._error: Exception | None = None
        try:
            self._take(plan, planner)
        except Exception as error:  # noqa: BLE001 - the others are told when it is written, so that none waits now
            self._error = error

    def _take(self, plan: SavePlan, planner: SavePlanner) -> None:
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                self._objects[item.index] = copy.deepcopy(planner.get_data(item))
            else:
                self._copies[item.index] = self._copy(item, planner.get_data(item))

    def _copy(self, item: WriteItem, tensor: Any) -> tuple[Any, Any]:
        key = (item.index, tuple(tensor.shape), str(tensor.dtype))
        with self._lock:
            spare = self._spare.get(key)
            made = spare.pop() if spare else None
        if made is None:
            made = _host_memory(tensor)
        _copy_to(made, tensor)
        return key, made

    def release(self) -> None:
        """Gives the memory to the next save."""
        with self._lock:
            kept = {key: [made] for key, made in self._copies.values()}
            Staged._spare = kept  # what other saves had is let go
            self._copies = {}

    def get_data(self, item: WriteItem) -> Any:
        if self._error is not None:
            raise self._error
        return (
            self._objects[item.index]
            if item.type is WriteItemType.BYTE_IO
            else self._copies[item.index][1]
        )

    # What was planned is not planned again.
    def configure_planner(
        self, state_dict: Mapping[str, Any], **kwargs: Any
    ) -> None: ...

    def build_local_plan(self) -> SavePlan:
        raise AssertionError("the plan is made before the copy")

    def build_global_plan(self, all_plans: Any) -> Any:  # noqa: ARG002 - the protocol's
        raise AssertionError("the plan is made before the copy")

    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        return plan


def _host_memory(tensor: Any) -> Any:
    """A tensor of the same kind on the host, where copying to it is fast."""
    platform = get_platform()
    if platform.tensor_memory(tensor) is None:
        return platform.empty_like(tensor, device="cpu", pin_memory=True)
    # numpy asks for large pages where it has much to allocate, which makes both the first copy and all others faster.
    memory = np.empty(
        math.prod(tensor.shape) * platform.get_element_size(tensor), np.uint8
    )
    return platform.tensor_from_bytes(
        memory, dtype_name(tensor.dtype), tuple(tensor.shape)
    )


def _copy_to(host: Any, tensor: Any) -> None:
    memory = get_platform().tensor_memory(tensor)
    if memory is not None and memory.flags.c_contiguous:
        copy_bytes(get_platform().tensor_memory(host), memory)
    else:
        get_platform().load_into_param(host, tensor)


class _Queue:
    """Saves one after the other, in one thread that ends with the process, not with an exception of the caller."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: list[AsyncSaveResponse] = []
        self._ranks: Ranks | None = None

    def add(
        self, prepared: Prepared, staged: Staged, ranks: Ranks
    ) -> AsyncSaveResponse:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="hyper_parallel-save")
        if ranks.world_size > 1 and self._ranks is None:
            self._ranks = ranks.beside()
            get_platform().forget_groups_with(self._forget)
        beside = (
            self._ranks if ranks.world_size > 1 and self._ranks is not None else ranks
        )
        response = AsyncSaveResponse(
            self._pool.submit(_write, prepared, staged, beside)
        )
        self._waiting.append(response)
        return response

    def check(self, *, refuses: bool) -> None:
        """Raises what went wrong with earlier saves and was not asked for."""
        running = [response for response in self._waiting if not response.done()]
        ended = [response for response in self._waiting if response.done()]
        self._waiting = running
        for response in ended:
            response.future.result()
        if running and refuses:
            raise coded(
                CheckpointError,
                "HP514",
                f"{len(running)} earlier saves are still being written; wait for result(), or queue",
            )

    def drain(self) -> None:
        """Waits for earlier saves, and raises what went wrong with them."""
        for response in self._waiting:
            response.future.exception()  # waits
        self.check(refuses=False)

    def told(self, response: AsyncSaveResponse) -> None:
        """Somebody asks for this one himself."""
        self._waiting = [other for other in self._waiting if other is not response]

    def _forget(self) -> None:
        for response in (
            self._waiting
        ):  # their group is about to go; errors stay for who asks, or for the next save
            response.future.exception()
        self._ranks = None


def _write(prepared: Prepared, staged: Staged, ranks: Ranks) -> Metadata:
    time.sleep(_HEAD_START)
    try:
        return prepared.write(ranks)
    finally:
        staged.release()


QUEUE = _Queue()
