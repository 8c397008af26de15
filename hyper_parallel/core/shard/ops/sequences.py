# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that torch gives them
"""Sequences of different lengths: each lies whole on one rank, which of them where is free.

ctc_loss         "t! b c!, b s!, b, b -> b"             a mean is the local one for its share of the batch
embedding_bag    "b n!, v@ d, b n! -> b d"              rows of the table that are others' have the weight zero
segment_reduce   "n! ..., s! -> s! ..."
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.shard.arguments import OperatorError
from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.ops.staged_reductions import nothing
from hyper_parallel.core.shard.rule import Rule
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()
call = platform.operator

# --- ctc_loss

REDUCTIONS = ("none", "mean", "sum")  # by their numbers in torch


def _named(reduction: Any) -> Any:
    return REDUCTIONS[reduction] if isinstance(reduction, int) else reduction


def _ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    reduction: Any,
    **_: Any,
) -> Any:
    if _named(reduction) not in REDUCTIONS or len(log_probs.shape) != 3:
        return None
    # Targets that lie one after the other are found by all lengths before them.
    dims = ("b s!", "b", "b") if len(targets.shape) == 2 else ("s!", "b", "l!")
    rule = Rule(
        f"t! b c!, {', '.join(dims)} -> {'b' if _named(reduction) == 'none' else ''}",
        broadcast="none",
    )
    return RuleForCall(
        rule,
        operands=[
            log_probs,
            targets,
            _or_none(input_lengths),
            _or_none(target_lengths),
        ],
    )


def _or_none(lengths: Any) -> Any:
    """Lengths may be numbers, which every rank has."""
    return lengths if platform.is_tensor(lengths) else None


def _ctc_of_shard(
    here: ShardContext,
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    reduction: Any,
    **more: Any,
) -> Any:
    start, size, reduction = here.offset("b"), here.size("b"), _named(reduction)
    if size == 0:
        return nothing(here, log_probs)
    own = slice(start, start + size)
    if len(targets.shape) == 1:
        ends = [0]
        for length in (
            target_lengths.tolist()
            if platform.is_tensor(target_lengths)
            else target_lengths
        ):
            ends.append(ends[-1] + int(length))
        targets, target_lengths = (
            targets[ends[start] : ends[start + size]],
            target_lengths[own],
        )
    elif not platform.is_tensor(target_lengths):
        target_lengths = target_lengths[own]
    if not platform.is_tensor(input_lengths):
        input_lengths = input_lengths[own]
    found = here.function(
        log_probs, targets, input_lengths, target_lengths, reduction=reduction, **more
    )
    return found * here.share if reduction == "mean" and here.share != 1 else found


operator(
    "ctc_loss",
    "log_probs, targets, input_lengths, target_lengths, blank=0, reduction='mean', zero_infinity=False",
    _ctc_loss,
    local=_ctc_of_shard,
)

# --- bags of rows


def _embedding_bag(
    input: Any,
    weight: Any,
    offsets: Any,
    max_norm: Any,
    scale_grad_by_freq: bool,
    mode: str,
    sparse: bool,
    per_sample_weights: Any,
    include_last_offset: bool,
    **_: Any,
) -> Any:
    if max_norm is not None or sparse:
        raise coded(
            OperatorError,
            "HP312",
            "embedding_bag: neither max_norm nor sparse gradients are for distributed tensors",
        )
    if scale_grad_by_freq or 0 in input.shape:
        return None
    # A bag that is one of many in a row is not counted here: its mean needs all rows.
    rows = "v@" if mode == "sum" or (mode == "mean" and offsets is None) else "v!"
    linear = () if mode == "max" else ((1,),)
    dims, bags, sizes = "b n!", "b", {}
    if offsets is not None:
        dims, bags, sizes = "n!", "o!", {"o": offsets.shape[0] - include_last_offset}
    rule = Rule(
        f"{dims}, {rows} d, k!, {dims} -> {bags} d", linear=linear, broadcast="none"
    )
    return RuleForCall(rule, sizes, [input, weight, offsets, per_sample_weights])


def _bags_of_shard(
    here: ShardContext,
    input: Any,
    weight: Any,
    mode: str,
    padding_idx: int | None,
    **more: Any,
) -> Any:
    if 0 in here.shape():
        return nothing(here, weight, more["per_sample_weights"])
    given = {
        key: more[key]
        for key in ("offsets", "per_sample_weights", "include_last_offset")
    }
    if not here.is_cut("v"):
        return here.function(input, weight, mode=mode, padding_idx=padding_idx, **given)
    start, size, whole = here.offset("v"), here.size("v"), here.whole("v")
    counted = input != (-1 if padding_idx is None else padding_idx % whole)
    shares = counted.to(weight.dtype)
    if mode == "mean":
        shares = shares / shares.sum(1, keepdim=True).clamp(min=1)
    if given["per_sample_weights"] is not None:
        shares = given["per_sample_weights"] * shares
    mine = (input >= start) & (input < start + size)
    if not bool(((input >= 0) & (input < whole)).all()):
        raise IndexError(
            f"embedding_bag: index out of range of a table of {whole} rows"
        )
    given["per_sample_weights"] = shares.masked_fill(~mine, 0)
    # A rank without rows has one of zeros, in the graph as on the others.
    table = weight if size else platform.cat([weight, weight.sum(0, keepdim=True)])
    return here.function((input - start) * mine, table, mode="sum", **given)


operator(
    "embedding_bag",
    "input, weight, offsets=None, max_norm=None, norm_type=2, scale_grad_by_freq=False, mode='mean', sparse=False, "
    "per_sample_weights=None, include_last_offset=False, padding_idx=None",
    _embedding_bag,
    local=_bags_of_shard,
)

# --- segments


def _segment_reduce(
    data: Any, lengths: Any, indices: Any, offsets: Any, dim: int, **_: Any
) -> Any:
    told = lengths if lengths is not None else offsets
    if dim != 0 or indices is not None or told is None or len(told.shape) != 1:
        return None
    count = told.shape[0] - (offsets is not None and lengths is None)
    rest = " ".join(f"d{i}" for i in range(1, len(data.shape)))
    rule = Rule(f"n! {rest}, k! -> s! {rest}", broadcast="none")
    return RuleForCall(rule, {"s": count}, [data, told])


operator(
    "segment_reduce",
    "data, reduce, *, lengths=None, indices=None, offsets=None, dim=0, unsafe=False, initial=None",
    _segment_reduce,
)
