# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of collectives, and the meetings of their hooks, for every framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.platform.agreement import dtype_name
from hyper_parallel.platform.error_codes import coded

if TYPE_CHECKING:
    from hyper_parallel.platform.platform import Platform

REDUCE_OPS = ("sum", "avg", "max", "min", "prod")

# (role in forward, role in backward). A and C stand before a communication, B and D after it; backward passes them
# the other way round.
HOOK_ROLES = {
    "A": ("COMM", "COMPUTE"),
    "B": ("COMPUTE", "COMM"),
    "C": ("COMM", "COMPUTE"),
    "D": ("COMPUTE", "COMM"),
}


def check_hook(hook_name: Any) -> None:
    """A ValueError if there is no such hook."""
    if hook_name not in HOOK_ROLES:
        raise coded(
            ValueError,
            "HP450",
            f"differentiable_sync_hook: hook_name must be one of {', '.join(HOOK_ROLES)}, got {hook_name!r}",
        )


def meet(coordinator: Any, role: str) -> None:
    """Waits at the coordinator, if it is enabled, until the other side is there."""
    if not coordinator.is_enabled():
        return
    if role == "COMPUTE":
        # This hook stands behind a communication of this side: it has been dispatched.
        coordinator.notify_dispatched(coordinator.COMM)
    coordinator.rendezvous(getattr(coordinator, role))


def check_tensor(platform: Platform, call: str, data: Any) -> None:
    """A TypeError that names the call if ``data`` is no tensor."""
    if not platform.is_tensor(data):
        raise coded(
            TypeError, "HP120", f"{call}: expected a tensor, got {type(data).__name__}"
        )


def check_reduction(platform: Platform, call: str, data: Any, op: str) -> None:
    """A ValueError if ``op`` is unknown or is not defined for the tensor's dtype."""
    if op == "sum":
        return
    if op not in REDUCE_OPS:
        raise coded(
            ValueError,
            "HP121",
            f"{call}: op must be one of {', '.join(REDUCE_OPS)}, got {op!r}",
        )
    kind = platform.dtype_kind(data.dtype)
    if op == "avg" and kind not in ("float", "complex"):
        raise coded(
            ValueError,
            "HP121",
            f"{call}: avg needs a floating-point tensor, got {dtype_name(data)}; reduce with sum and divide",
        )
    if kind == "complex" and op in ("max", "min", "prod"):
        raise coded(
            ValueError, "HP121", f"{call}: {op} is not defined for {dtype_name(data)}"
        )


def check_dim(call: str, name: str, data: Any, dim: Any) -> int:
    """The dim counted from the front; a ValueError if the tensor has no such dim."""
    if not isinstance(dim, int) or not -data.ndim <= dim < data.ndim:
        raise coded(
            ValueError,
            "HP123",
            f"{call}: {name} must be a dim of a tensor of shape {tuple(data.shape)}, got {dim!r}",
        )
    return int(dim % data.ndim)


def check_count(call: str, name: str, count: Any, group: Any) -> None:
    """A ValueError if the count is not the number of ranks of the group."""
    if count != group.size():
        raise coded(
            ValueError,
            "HP123",
            f"{call}: {name} must be the group's size, {group.size()}, got {count!r}",
        )


def check_sizes(
    call: str, data: Any, dim: int, sizes: Sequence[int] | None, group: Any
) -> list[int]:
    """Every rank's size along a dim, the same where none are given; a ValueError if they do not fit."""
    here, count = data.shape[dim], group.size()
    found = [here] * count if sizes is None else list(sizes)
    if len(found) != count or found[group.rank()] != here:
        raise coded(
            ValueError,
            "HP123",
            f"{call}: sizes must give one size a rank along dim {dim}, this rank's being {here}; got {found} for "
            f"{count} ranks on group rank {group.rank()}",
        )
    return found


def check_all_to_all(
    call: str,
    x: Any,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    size: int,
) -> tuple[list[int], list[int]]:
    """(input splits, output splits) of dim 0, equal ones where none are given; a ValueError if they do not fit."""
    if x.ndim == 0:
        raise coded(
            ValueError,
            "HP123",
            f"{call}: expected a tensor with at least one dim, got a scalar",
        )
    if (input_splits is None or output_splits is None) and x.shape[0] % size:
        raise coded(
            ValueError,
            "HP123",
            f"{call}: without splits, dim 0 of {tuple(x.shape)} must be divisible by {size} ranks",
        )
    inputs = _check_splits(call, "input_splits", input_splits, size, x.shape[0])
    rows = None if output_splits is not None else x.shape[0]
    return inputs, _check_splits(call, "output_splits", output_splits, size, rows)


def _check_splits(
    call: str, name: str, splits: Sequence[int] | None, size: int, total: int | None
) -> list[int]:
    if splits is None:
        assert total is not None
        return [total // size] * size
    found = [int(s) for s in splits]
    if len(found) != size or min(found) < 0:
        raise coded(
            ValueError,
            "HP123",
            f"{call}: {name} must be {size} sizes, one a rank, none negative, got {found}",
        )
    if total is not None and sum(found) != total:
        raise coded(
            ValueError,
            "HP123",
            f"{call}: {name} {found} add up to {sum(found)}, but dim 0 has {total}",
        )
    return found


def check_transposed(
    call: str, x: Any, world_size: int, concat_dim: int, split_dim: int, group: Any
) -> tuple[int, int]:
    """(concat_dim, split_dim) from the front; a ValueError if they or the number of ranks do not fit."""
    check_count(call, "world_size", world_size, group)
    concat, split = (
        check_dim(call, "concat_dim", x, concat_dim),
        check_dim(call, "split_dim", x, split_dim),
    )
    if concat == split:
        raise coded(
            ValueError,
            "HP123",
            f"{call}: concat_dim and split_dim are both {concat}; they must differ",
        )
    return concat, split


def check_split(call: str, x: Any, split: int, world_size: int) -> None:
    """A ValueError if a dim cannot be cut into equal pieces."""
    if x.shape[split] % world_size:
        raise coded(
            ValueError,
            "HP123",
            f"{call}: split_dim {split} of {tuple(x.shape)} is not divisible by {world_size} ranks",
        )


def check_pieces(call: str, x: Any, pieces: Any, split: int, world_size: int) -> None:
    """A ValueError if there is not one piece of ``x`` a rank."""
    piece = list(x.shape)
    piece[split] //= world_size
    if list(pieces.shape) != [world_size, *piece]:
        raise coded(
            ValueError,
            "HP123",
            f"{call}: out_perm must hold one piece a rank, {[world_size, *piece]}, got {list(pieces.shape)}",
        )
