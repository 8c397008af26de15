# SPDX-License-Identifier: Apache-2.0
"""Models on the meta device, and a platform whose collectives only count; imported when a model is planned."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental import _config as fx_config
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.platform.axes import separate_axes
from hyper_parallel.platform.platform import Platform

_MOST_RANKS = 1 << 20
Listener = Callable[[str, tuple[Any, ...], Any], None]


def copy_without_data(module: Any) -> Any:
    """A copy of a module on the meta device."""
    with _CopyToMeta():
        return copy.deepcopy(module)


class _CopyToMeta(TorchFunctionMode):
    """Has deepcopy copy tensors to the meta device; those of parameters are copied by clone."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.clone:
            return torch.empty_like(args[0].detach(), device="meta")
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = torch.empty_like(tensor.detach(), device="meta")
        return memo[id(tensor)]


class _GuessTruth(TorchFunctionMode):
    """Answers what values would: checks of inputs hold for all elements, and exceptions for none."""

    def __init__(self) -> None:
        super().__init__()
        self._unlikely: dict[int, Any] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__contains__":
            return False
        if name == "__bool__":
            return id(args[0]) not in self._unlikely
        result = func(*args, **(kwargs or {}))
        if name == "any":
            self._unlikely[id(result)] = result
        return result


class _GuessNumbers(TorchDispatchMode):
    """Has a number that code reads from a tensor be 1: it may become a size."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            kinds = (args[0].is_floating_point(), args[0].dtype is torch.bool)
            return {(True, False): 1.0, (False, True): True}.get(kinds, 1)
        if func is torch.ops.aten._unique2.default:  # all values are different
            values = args[0].reshape(-1)
            places = values.new_empty(args[0].shape, dtype=torch.int64)
            return values.clone(), places, torch.empty_like(values, dtype=torch.int64)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _all_count() -> Iterator[None]:
    """Has every element count as one that is not zero, so that masks select all."""
    name = "meta_nonzero_assume_all_nonzero"
    before = getattr(fx_config, name)
    setattr(fx_config, name, True)
    try:
        yield
    finally:
        setattr(fx_config, name, before)


class Listening(TorchFunctionMode):
    """Tells a listener of every function."""

    def __init__(self, platform: Any, listener: Listener) -> None:
        super().__init__()
        self._platform, self._listener = platform, listener

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = (*args, *(kwargs or {}).values())
        self._listener(getattr(func, "__name__", ""), given, result)
        return result


# --- simulated ranks


class _Group:
    """The ranks that would communicate, of which this process is the first."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(sorted(ranks))

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(0)


class _Done:
    """A collective that has ended as soon as it begins."""

    def wait(self) -> bool:
        return True


@contextlib.contextmanager
def simulate(platform: Platform) -> Iterator[None]:
    """This process as rank 0 of any mesh, where new tensors have no data."""
    # Modules keep the platform from when they were imported, so the object itself becomes another for a while.
    kind = type(platform)
    platform.__class__ = _simulated(kind)
    try:
        with (
            torch.device("meta"),
            _GuessTruth(),
            _GuessNumbers(),
            _all_count(),
            separate_axes(),
        ):
            yield
    finally:
        platform.__class__ = kind


@functools.cache
def _simulated(kind: Any) -> Any:  # noqa: C901 - one method for each collective
    """The platform's class, with ranks that are not there."""

    class Simulated(kind):
        def get_rank(self) -> int:
            return 0

        def get_world_size(self) -> int:
            return _MOST_RANKS

        def get_created_group(self, rank_list: Any) -> Any:
            return _Group(rank_list)

        def get_process_group_ranks(self, group: Any = None) -> list[int]:
            return list(group.ranks)

        def get_group_local_rank(self, group: Any = None) -> int:
            return int(group.rank())

        def _group(self, call: str, group: Any) -> Any:
            return group if isinstance(group, _Group) else super()._group(call, group)

        def _count(self, call: str, group: _Group, nbytes: int) -> None:
            if group.size() > 1:
                self._tell(call, group.ranks, nbytes)

        def all_reduce(
            self, data: Any, group_info: Any, async_op: bool = False, op: str = "sum"
        ) -> Any:
            del op
            size = group_info.size()
            self._count("all_reduce", group_info, 2 * data.nbytes * (size - 1) // size)
            return (data, _Done()) if async_op else data

        def all_gather_into_tensor(
            self, data: Any, group_info: Any, async_op: bool = False
        ) -> Any:
            size = group_info.size()
            received = data.nbytes * (size - 1)
            self._count("all_gather_into_tensor", group_info, received)
            rows = data if data.dim() else data.view(1)
            output = rows.new_empty((size * rows.shape[0], *rows.shape[1:]))
            return (output, _Done()) if async_op else output

        def reduce_scatter_tensor(
            self, data: Any, group_info: Any, async_op: bool = False, op: str = "sum"
        ) -> Any:
            del op
            size = group_info.size()
            received = data.nbytes * (size - 1) // size
            self._count("reduce_scatter_tensor", group_info, received)
            output = data.new_empty((data.shape[0] // size, *data.shape[1:]))
            return (output, _Done()) if async_op else output

        def _exchange(
            self,
            call: str,
            source: Any,
            shape: Sequence[int],
            output_splits: Any,
            input_splits: Any,
            group: Any,
        ) -> Any:
            del output_splits, input_splits
            size = group.size()
            self._count(call, group, source.nbytes * (size - 1) // size)
            return source.new_empty(tuple(shape)), _Done()

        def broadcast(
            self, data: Any, src: int, group: Any, async_op: bool = False
        ) -> Any:
            del src, group
            return (data, _Done()) if async_op else data

    return Simulated
