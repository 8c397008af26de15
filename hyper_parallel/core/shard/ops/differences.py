# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A001, A002, A006 - operands have the names that torch gives them
"""Differences and distances, and views as copies: what lies side by side is whole, the rest may be cut.

diff   "... {dim}! -> ... {dim=out}!"       cdist   "... r d!, ... s d! -> ... r s"
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.ops.pointwise import is_inexact
from hyper_parallel.core.shard.ops.staged_reductions import reduced_dims
from hyper_parallel.core.shard.ops.views import ints, positions
from hyper_parallel.core.shard.rule import Rule, einsum
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import REDUCE_OPS

platform = get_platform()
call = platform.operator

# --- along a dim


def _diff(input: Any, n: int, dim: int, prepend: Any, append: Any) -> Any:
    if not input.shape:
        return None
    if n == 0:
        return lambda input, **_: input.clone()  # whatever is given with it
    if prepend is not None or append is not None:
        return _diff_of_joined
    (at,) = positions(dim, len(input.shape))
    rule = Rule(
        "... {dim}! -> ... {dim=out}!",
        linear=((0,),) if is_inexact(input.dtype) else (),
    )
    return RuleForCall(rule, {"out": max(0, input.shape[at] - n)})


def _diff_of_joined(input: Any, n: int, dim: int, prepend: Any, append: Any) -> Any:
    (at,) = positions(dim, len(input.shape))
    one = [1 if i == at else size for i, size in enumerate(input.shape)]
    parts = [part for part in (prepend, input, append) if part is not None]
    parts = [part if part.shape else part.expand(one) for part in parts]
    return call("diff")(call("cat")(parts, at), n, at)


def _gradient(input: Any, spacing: Any, dim: Any, edge_order: int) -> tuple[Any, ...]:
    """One result for each dim; a dim's spacing is a number or the places of its elements."""
    dims = reduced_dims(input, dim)
    spacings = (
        spacing
        if isinstance(spacing, (list, tuple))
        else [1 if spacing is None else spacing] * len(dims)
    )
    if len(spacings) != len(dims):
        raise RuntimeError(f"gradient: {len(spacings)} spacings for {len(dims)} dims")
    pairs = zip(dims, spacings, strict=True)
    return tuple(
        DTensor.dispatch(slope, (input, step, at, edge_order), {}) for at, step in pairs
    )


def slope(input: Any, spacing: Any, dim: int, edge_order: int) -> Any:
    """How fast the elements change along a dim."""
    return call("gradient")(input, spacing=[spacing], dim=[dim], edge_order=edge_order)[
        0
    ]


def _slope(input: Any, spacing: Any, **_: Any) -> RuleForCall:
    rule = Rule("... {dim=n}!, n! -> ... {dim=n}!", linear=((0,),), broadcast="none")
    return RuleForCall(
        rule, operands=[input, spacing if isinstance(spacing, DTensor) else None]
    )


def _areas(result: str) -> Callable[..., Any]:
    """The rule for sums of trapezoids, each as wide as two places lie apart."""

    def rule(y: Any, x: Any, dim: int, **_: Any) -> RuleForCall:
        (at,) = positions(dim, len(y.shape))
        sizes = {
            "dim": at - len(y.shape),
            "out": max(0, y.shape[at] - 1),
        }  # from the end: x may have fewer dims
        places = "n!" if x is not None and len(x.shape) == 1 else "... {dim=n}!"
        return RuleForCall(
            einsum(f"... {{dim=n}}!, {places} -> {result}"), sizes, [y, x]
        )

    return rule


operator("diff", "input, n=1, dim=-1, prepend=None, append=None", _diff)
operator(
    "gradient", "input, *, spacing=None, dim=None, edge_order=1", handler=_gradient
)
operator("slope", "input, spacing, dim, edge_order", _slope)
operator("trapezoid trapz", "y, x=None, *, dx=1, dim=-1", _areas("..."))
operator("cumulative_trapezoid", "y, x=None, *, dx=1, dim=-1", _areas("... {dim=out}!"))

# --- between rows

MANY = 25  # rows from which torch takes a product of matrices if the choice is its own


def _cdist(
    here: ShardContext, input: Any, other: Any, p: Any, compute_mode: Any
) -> Any:
    """The way of computing that torch takes for the whole, so that the numbers are the same."""
    if compute_mode is None or compute_mode == "use_mm_for_euclid_dist_if_necessary":
        many = here.whole("r") > MANY or here.whole("s") > MANY
        compute_mode = f"{'use' if many else 'donot_use'}_mm_for_euclid_dist"
    return here.function(input, other, p, compute_mode)


def _pdist(input: Any, **_: Any) -> RuleForCall:
    return RuleForCall(Rule("r! d! -> pairs!"), {"pairs": math.comb(input.shape[0], 2)})


def _renorm(input: Any, dim: int, **_: Any) -> Rule:
    """Each part along the dim has a norm of its own, over all other dims."""
    (at,) = positions(dim, len(input.shape))
    names = " ".join(f"d{i}{'' if i == at else '!'}" for i in range(len(input.shape)))
    return Rule(f"{names} -> {names}", broadcast="none")


operator(
    "cdist",
    "input, other, p=2.0, compute_mode=None",
    Rule("... r d!, ... s d! -> ... r s"),
    local=_cdist,
)
operator("pdist", "input, p=2.0", _pdist)
operator("renorm", "input, p, dim, maxnorm", _renorm)

# --- places and shapes


def _unravel_index(indices: Any, shape: Any) -> Any:
    sizes, indices = ints(shape), indices.to(platform.str_to_dtype("int64"))
    if not sizes:
        return ()
    steps = list(
        itertools.accumulate(
            sizes[:0:-1], initial=1, func=lambda step, size: step * size
        )
    )[::-1]
    return tuple(
        indices // step % size for step, size in zip(steps, sizes, strict=True)
    )


def _sum_to_size(input: Any, size: Any) -> Any:
    """The inverse of expand: what it would repeat is added up."""
    wanted, ndim = ints(size), len(input.shape)
    if wanted == tuple(input.shape):
        return input
    aligned = (1,) * (ndim - len(wanted)) + wanted
    if len(wanted) > ndim or any(
        asked not in (1, have) for asked, have in zip(aligned, input.shape, strict=True)
    ):
        raise RuntimeError(
            f"size {list(wanted)} is not expandable to size {list(input.shape)}"
        )
    dims = [
        i
        for i, (asked, have) in enumerate(zip(aligned, input.shape, strict=True))
        if asked != have
    ]
    return (call("sum")(input, dims, True) if dims else input).reshape(wanted)


def _diagonal_scatter(
    input: Any, src: Any, dim1: int, dim2: int, **_: Any
) -> RuleForCall:
    one, other = positions((dim1, dim2), len(input.shape))
    names = [f"d{i}{'!' if i in (one, other) else ''}" for i in range(len(input.shape))]
    kept = [name for i, name in enumerate(names) if i not in (one, other)]
    text = f"{' '.join(names)}, {' '.join([*kept, 'line!'])} -> {' '.join(names)}"
    return RuleForCall(
        Rule(text, linear=((0, 1),), carries=REDUCE_OPS, broadcast="none"),
        operands=[input, src],
    )


operator("unravel_index", "indices, shape", handler=_unravel_index)
operator("sum_to_size", "input, *size", handler=_sum_to_size, any_layout=True)
operator("diagonal_scatter", "input, src, offset=0, dim1=0, dim2=1", _diagonal_scatter)

# --- views as copies


def _slice(input: Any, dim: int, start: Any, end: Any, step: int) -> Any:
    (at,) = positions(dim, len(input.shape))
    return input[(slice(None),) * at + (slice(start, end, step),)]


def _copied(view: str) -> Callable[..., Any]:
    def direct(_: Any, args: Sequence[Any], kwargs: Any) -> Any:
        named = platform.canonical_kwargs(kwargs)
        input, *more = args or [named.pop("input")]
        found = getattr(input, view)(*more, **named)
        copies = [
            one.clone().contiguous()
            for one in (found if isinstance(found, tuple) else [found])
        ]
        return tuple(copies) if isinstance(found, tuple) else copies[0]

    return direct


VIEWS = "diagonal expand narrow permute select split split_with_sizes squeeze t transpose unbind unfold unsqueeze view"
for _view in VIEWS.split():
    operator(f"{_view}_copy", "input", direct=_copied(_view))
operator(
    "slice",
    "input, dim=0, start=None, end=None, step=1",
    handler=_slice,
    any_layout=True,
)
operator(
    "slice_copy",
    "input, dim=0, start=None, end=None, step=1",
    handler=lambda **given: _slice(**given).clone(),
    any_layout=True,
)
operator("alias_copy", "input", handler=lambda input: input.clone(), any_layout=True)
