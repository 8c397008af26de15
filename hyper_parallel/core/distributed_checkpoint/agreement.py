# SPDX-License-Identifier: Apache-2.0
"""Agreement between the ranks of a save or a load: they exchange values, and an error on one raises on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import code_of, coded, without_hint

T = TypeVar("T")


class Ranks:
    """The participating ranks: all, or with ``alone`` this one. If ``silent`` they do not communicate."""

    def __init__(self, *, alone: bool = False, silent: bool = False) -> None:
        platform = get_platform()
        self.world_size = 1 if alone else platform.get_world_size()
        self.rank = 0 if alone else platform.get_rank()
        self.is_silent = silent or self.world_size == 1
        self._group: Any = None

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the rank that writes what is written once."""
        return self.rank == 0

    def beside(self) -> Ranks:
        """The same ranks with a group of their own, so that they can talk while the others are in use."""
        made = Ranks(alone=self.world_size == 1)
        if made.world_size > 1:
            made._group = get_platform().split_group(
                None, [list(range(made.world_size))], group_desc="checkpoints"
            )
        return made

    def gather(self, value: T) -> list[T]:
        """Every rank's value."""
        if self.is_silent:
            return [value]
        everyone: list[Any] = [None] * self.world_size
        get_platform().all_gather_object(everyone, value, self._group)
        return everyone

    def all_reduce_max(self, numbers: list[int]) -> list[int]:
        """For each of some int64 numbers the largest of all ranks, in one exchange."""
        if self.is_silent:
            return numbers
        platform = get_platform()
        data = platform.zeros(
            (len(numbers),),
            dtype=platform.str_to_dtype("int64"),
            device=platform.device(),
        )
        for place, number in enumerate(numbers):
            data[place] = number
        return [
            int(number)
            for number in platform.tensor_to_numpy(
                platform.all_reduce(data, self._group, op="max")
            )
        ]

    def agree(self, look: Callable[[], bytes], token: str) -> tuple[bool, str]:
        """Whether all find the same 16 bytes, and one token of theirs; if some rank finds an error, all raise it."""
        error, digest = _attempted(look)
        if self.is_silent and self.world_size > 1:
            self._raise(error)
            return True, digest.hex()[:16]  # the one token that all of them have
        own = np.frombuffer(digest or bytes(16), ">i8").tolist()
        numbers = [
            int(error is not None),
            *own,
            *(-1 - number for number in own),
            int(token, 16) >> 1,
        ]
        failed, *found, chosen = self.all_reduce_max(numbers)
        if failed:
            self._raise(error)
        return found[: len(own)] == [
            -1 - number for number in found[len(own) :]
        ], f"{chosen:016x}"

    def together(
        self, work: Callable[[], T], undo: Callable[[], None] = lambda: None
    ) -> T:
        """What the work returns, if it succeeds on all ranks; otherwise all raise the error of the first that failed.

        Each rank's own error is the cause of its; whatever is not an error of ours or of the system passes through,
        after the others have been told.
        """
        error, result = _attempted(work)
        if self.all_reduce_max([int(error is not None)]) != [0]:
            undo()
            self._raise(error)
        return result

    def _raise(self, error: BaseException | None) -> None:
        """On all ranks, if any has an error: raises its own, or that of the first that has one."""
        told = self.gather(_told(error))
        if error is not None and not isinstance(error, (CheckpointError, OSError)):
            raise error
        if any(one is not None for one in told):
            raise _joined(told) from error


def _attempted(work: Callable[[], T]) -> tuple[BaseException | None, T]:
    try:
        return None, work()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - told to the others, then raised
        return error, None  # type: ignore[return-value]


def _told(error: BaseException | None) -> Any:
    if error is None:
        return None
    return (
        error
        if isinstance(error, CheckpointError)
        else f"{type(error).__name__}: {error}"
    )


def _joined(told: list[Any]) -> CheckpointError:
    failed = [(rank, error) for rank, error in enumerate(told) if error is not None]
    rank, first = failed[0]
    if len(told) == 1 and isinstance(first, CheckpointError):
        return first
    others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
    if isinstance(first, CheckpointError):
        told_by = f"{without_hint(first, first.message)} [rank {rank}{others}]"
        return coded(
            CheckpointError,
            code_of(first) or "HP517",
            told_by,
            file=first.file,
            field=first.field,
        )
    return coded(CheckpointError, "HP517", f"rank {rank} failed: {first}{others}")
