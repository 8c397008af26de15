# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002, A006 - operands have the names that torch gives them
"""Several tensors into one, one into several, and elements put to other places: what is touched is whole.

cat     "[... {dim}!] -> ... {dim}!"            split   "... {dim}! -> [... {dim=part}!]"
repeat  "a b! -> a n!"  of repeat(1, 3)         tril    "... r c -> ... r c", the diagonal shifted for each shard
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.shard.arguments import replicated
from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.ops.views import diagonal_size, ints, moved, positions
from hyper_parallel.core.shard.rule import Rule, move
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import REDUCE_OPS

platform = get_platform()

Dims = Sequence[int]

# --- joins


def _cat(input: Sequence[Any], **_: Any) -> Any:
    if any(tuple(one.shape) == (0,) for one in input) and any(
        len(one.shape) != 1 for one in input
    ):
        return _cat_with_empty
    return move("[... {dim}!] -> ... {dim}!")


def _cat_with_empty(input: Sequence[Any], dim: int) -> Any:
    """A tensor of shape (0,) may be among tensors of any dims: torch's custom from the time before empty shapes."""
    like = next(tuple(one.shape) for one in input if len(one.shape) != 1)
    (at,) = positions(dim, len(like))
    empty = [0 if i == at else size for i, size in enumerate(like)]
    return platform.operator("cat")(
        [one.view(empty) if tuple(one.shape) == (0,) else one for one in input], dim
    )


def _joined(at_least: int, dim: int) -> Callable[..., Any]:
    """cat of tensors that have so many dims at least."""

    def handler(input: Sequence[Any]) -> Any:
        tensors = platform.operator(f"atleast_{at_least}d")(*input)
        tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
        return platform.operator("cat")(
            tensors, 0 if len(tensors[0].shape) == 1 else dim
        )

    return handler


def _column_stack(input: Sequence[Any]) -> Any:
    columns = [one.reshape((-1, 1)) if len(one.shape) < 2 else one for one in input]
    return platform.operator("cat")(columns, 1)


operator("cat", "input, dim=0", _cat)
operator("stack", "input, dim=0", move("[...] -> ... {dim}!"))
operator("hstack", "input", handler=_joined(1, 1))
operator("vstack row_stack", "input", handler=_joined(2, 0))
operator("dstack", "input", handler=_joined(3, 2))
operator("column_stack", "input", handler=_column_stack)

# --- splits

SPLIT = move("... {dim}! -> [... {dim=part}!]")


def _parts_of(size: int, step: int) -> list[int]:
    """Parts of ``step``, the last one with what is left; one empty part of nothing."""
    if step <= 0:
        return [size] if size == 0 else []
    return [min(step, size - start) for start in range(0, size, step)] or [0]


def _split(input: Any, split_size: Any, dim: int) -> Any:
    (at,) = positions(dim, len(input.shape))
    parts = (
        _parts_of(input.shape[at], split_size)
        if isinstance(split_size, int)
        else list(split_size)
    )
    return RuleForCall(SPLIT, {"part": parts}) if parts else None


def _chunk(input: Any, chunks: int, dim: int) -> Any:
    size = input.shape[positions(dim, len(input.shape))[0]]
    if chunks <= 0:
        return None
    return RuleForCall(
        SPLIT,
        {"part": [0] * chunks if size == 0 else _parts_of(size, -(-size // chunks))},
    )


def _tensor_split(input: Any, indices_or_sections: Any, dim: int) -> Any:
    size = input.shape[positions(dim, len(input.shape))[0]]
    if isinstance(indices_or_sections, int):
        count = indices_or_sections
        parts = (
            [size // count + (i < size % count) for i in range(count)]
            if count > 0
            else []
        )
    elif isinstance(indices_or_sections, (list, tuple)):
        stops = [*indices_or_sections, size]
        starts = [0, *indices_or_sections]
        parts = [
            len(range(size)[start:stop])
            for start, stop in zip(starts, stops, strict=True)
        ]
    else:
        parts = []  # a tensor, whose values may be others next time
    return RuleForCall(SPLIT, {"part": parts}) if parts else None


def _split_along(find: Callable[[int], int]) -> Callable[..., Any]:
    """tensor_split along a dim that depends on the number of dims."""

    def handler(input: Any, indices: Any) -> Any:
        dim = find(len(input.shape))
        if isinstance(indices, int) and (indices <= 0 or input.shape[dim] % indices):
            raise RuntimeError(
                f"a dim of size {input.shape[dim]} cannot be split into {indices} equal parts"
            )
        return platform.operator("tensor_split")(input, indices, dim)

    return handler


operator("split", "input, split_size, dim=0", _split, view=True)
operator("split_with_sizes", "input, split_size, dim=0", _split, view=True)
operator("chunk", "input, chunks, dim=0", _chunk, view=True)
operator("unsafe_split unsafe_split_with_sizes", "input, split_size, dim=0", _split)
operator("unsafe_chunk", "input, chunks, dim=0", _chunk)
operator("tensor_split", "input, indices_or_sections, dim=0", _tensor_split, view=True)
operator(
    "hsplit",
    "input, indices",
    handler=_split_along(lambda ndim: min(1, ndim - 1)),
    any_layout=True,
)
operator("vsplit", "input, indices", handler=_split_along(lambda _: 0), any_layout=True)
operator("dsplit", "input, indices", handler=_split_along(lambda _: 2), any_layout=True)
operator("unbind", "input, dim=0", move("... {dim}! -> [...]"), view=True)

# --- copies


def _repeat(input: Any, repeats: Any) -> Any:
    shape, counts = tuple(input.shape), ints(repeats)
    new = len(counts) - len(shape)
    if new < 0:
        raise RuntimeError(
            f"repeat: {list(counts)} has fewer entries than the tensor of shape {list(shape)} has dims"
        )
    left, right = [f"d{i}" for i in range(len(shape))], []
    sizes: dict[str, int] = {}
    for i, count in enumerate(counts):
        if i >= new and count == 1:
            right.append(left[i - new])
            continue
        right.append(f"n{i}!")
        sizes[f"n{i}"] = count * (shape[i - new] if i >= new else 1)
        if i >= new:
            left[i - new] += "!"
    return moved(left, right, **sizes)


def _tile(input: Any, dims: Any) -> Any:
    counts = ints(dims)
    return _repeat(input, (1,) * (len(input.shape) - len(counts)) + counts)


def _repeat_interleave(input: Any, repeats: Any, dim: int | None, **_: Any) -> Any:
    if not isinstance(repeats, int):
        return _repeat_each if repeats is not None else None
    if dim is None or not input.shape:
        return _repeat_flat
    (at,) = positions(dim, len(input.shape))
    names = [f"d{i}" for i in range(len(input.shape))]
    right = [f"({name} n)" if i == at else name for i, name in enumerate(names)]
    return moved(names, right, n=repeats)


def _repeat_flat(input: Any, repeats: int, **_: Any) -> Any:
    return platform.operator("repeat_interleave")(input.flatten(), repeats, 0)


def _repeat_each(input: Any, repeats: Any, dim: int | None, **_: Any) -> Any:
    """Every element so many times as a tensor says: the places to read, known to all ranks, are as many as that."""
    if dim is None or not input.shape:
        return _repeat_each(input.reshape(-1), repeats, 0)
    rows = platform.operator("repeat_interleave")(
        repeats.full_tensor().expand(input.shape[dim])
    )
    return input.index_select(dim, replicated(rows, input))


def _repeat_shard(
    here: ShardContext, input: Any, repeats: int, dim: int, **_: Any
) -> Any:
    return here.function(
        input, repeats, dim
    )  # without output_size, which is the whole's


operator("repeat", "input, *repeats", _repeat)
operator("tile", "input, *dims", _tile)
operator(
    "repeat_interleave",
    "input, repeats=None, dim=None, *, output_size=None",
    _repeat_interleave,
    local=_repeat_shard,
)

# --- other places


def _in_place_of(input: Any, dims: Any, **_: Any) -> RuleForCall:
    """These dims are whole, all where none are given; the shape stays."""
    ndim = len(input.shape)
    touched = range(ndim) if dims is None or dims == () else positions(dims, ndim)
    names = [f"d{i}{'!' if i in touched else ''}" for i in range(ndim)]
    return moved(names, names)


def _rot90(input: Any, k: int, dims: Any) -> RuleForCall:
    one, other = positions(dims, len(input.shape))
    names = [f"d{i}{'!' if i in (one, other) else ''}" for i in range(len(input.shape))]
    right = list(names)
    if k % 2:
        right[one], right[other] = right[other], right[one]
    return moved(names, right)


operator("roll", "input, shifts, dims=None", _in_place_of)
operator("flip", "input, *dims", _in_place_of)
operator("fliplr", "input", lambda input: _in_place_of(input, 1))
operator("flipud", "input", lambda input: _in_place_of(input, 0))
operator(
    "__reversed__",
    "input",
    handler=lambda input: input.flip(0) if input.shape else input,
)
operator("rot90", "input, k=1, dims=(0, 1)", _rot90)


def _pad(input: Any, pad: Any, mode: str, value: Any) -> Any:
    """Dims that get nothing may be cut; what is added is not linear unless it is zero or a copy of elements."""
    pads = ints(pad)
    ndim = len(input.shape)
    added = {
        ndim - 1 - i // 2: sum(pads[i : i + 2])
        for i in range(0, len(pads), 2)
        if any(pads[i : i + 2])
    }
    if mode == "constant":
        left = [f"d{i}{'!' if i in added else ''}" for i in range(ndim)]
        carries = REDUCE_OPS if not value else ()
    else:
        # torch takes no empty dims here, except a batch: only that may be cut.
        batch = 0 if ndim == len(pads) // 2 + 2 else -1
        left = [f"d{i}{'' if i == batch else '!'}" for i in range(ndim)]
        carries = REDUCE_OPS
    right = [f"o{i}!" if i in added else name for i, name in enumerate(left)]
    sizes = {f"o{i}": input.shape[i] + more for i, more in added.items()}
    rule = Rule(
        f"{' '.join(left)} -> {' '.join(right)}",
        linear=((0,),),
        carries=carries,
        broadcast="none",
    )
    return RuleForCall(rule, sizes)


operator("pad", "input, pad, mode='constant', value=None", _pad)


def _triangle(here: ShardContext, input: Any, diagonal: int) -> Any:
    return here.function(input, diagonal + here.offset("r") - here.offset("c"))


operator("tril triu", "input, diagonal=0", move("... r c -> ... r c"), local=_triangle)


def _diag(input: Any, diagonal: int) -> Any:
    if len(input.shape) == 1:
        return moved(
            ["d!"],
            ["r!", "c!"],
            r=input.shape[0] + abs(diagonal),
            c=input.shape[0] + abs(diagonal),
        )
    if len(input.shape) != 2:
        return None
    return moved(
        ["r!", "c!"], ["d!"], d=diagonal_size(input.shape[0], input.shape[1], diagonal)
    )


def _diag_embed(input: Any, offset: int, dim1: int, dim2: int) -> RuleForCall:
    ndim = len(input.shape) + 1
    one, other = positions((dim1, dim2), ndim)
    kept = [f"d{i}" for i in range(ndim - 2)]
    size = input.shape[-1] + abs(offset)
    following = iter(kept)
    right = [
        "r!" if i == one else "c!" if i == other else next(following)
        for i in range(ndim)
    ]
    return moved([*kept, "last!"], right, r=size, c=size)


operator("diag", "input, diagonal=0", _diag)
operator("diag_embed", "input, offset=0, dim1=-2, dim2=-1", _diag_embed)
operator(
    "diagflat",
    "input, offset=0",
    handler=lambda input, offset: input.reshape(-1).diag(offset),
)
