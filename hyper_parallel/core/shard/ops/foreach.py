# SPDX-License-Identifier: Apache-2.0
"""Operators on lists of tensors, as optimizers use them: one call on all shards where those of an index lie alike.

Where they do not, or where a reduction is pending, each index is done by the operator on single tensors. The names are
torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.modes import MODES
from hyper_parallel.core.shard.arguments import OperatorError, refuse_copy
from hyper_parallel.core.shard.ops.operator import operator
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()
Tensor = platform.Tensor

PREFIX = "_foreach_"


def _lists(values: Sequence[Any]) -> list[Sequence[Any]]:
    """The lists of tensors among the arguments, without those that are empty."""
    return [value for value in values if _is_list(value) and value]


def _is_list(value: Any) -> bool:
    """Whether it is a list of tensors, plain and distributed ones; an empty one is too."""
    return isinstance(value, (list, tuple)) and all(
        isinstance(one, Tensor) for one in value
    )


def _differing(values: Sequence[Any]) -> int | None:
    """The first index whose tensors do not lie alike; None where all shards can be computed together."""
    lists = _lists(values)
    single = [value for value in values if isinstance(value, Tensor)]
    if not lists or not all(map(_is_number, single)):
        return 0
    for index, (first, *others) in enumerate(zip(*lists, strict=True)):
        if not all(_lie_alike(first, other) for other in (first, *others)):
            return index
    return None


def _lie_alike(first: Any, other: Any) -> bool:
    """Whether the shard of one can meet that of the other: a plain tensor meets plain ones."""
    if isinstance(first, DTensor) and first._layout.is_partial():
        return False
    if other is first or _is_copied_scalar(other):
        return True
    if isinstance(first, DTensor) and isinstance(other, DTensor):
        return other._layout is first._layout and other._shape == first._shape
    return not isinstance(first, DTensor) and not isinstance(other, DTensor)


def _is_number(tensor: Any) -> bool:
    """Whether a tensor for all indices is a number that every rank has: a learning rate may have a dim of size 1."""
    one_element = not isinstance(tensor, DTensor) and math.prod(tensor.shape) == 1
    return _is_copied_scalar(tensor.reshape(()) if one_element else tensor)


def _is_copied_scalar(tensor: Any) -> bool:
    """Whether every rank has this number, and none needs the sum of its gradient over the ranks."""
    is_partial = isinstance(tensor, DTensor) and tensor._layout.is_partial()
    return not (tensor.shape or is_partial or platform.is_recorded(tensor))


def _refuse_mixtures(name: str, values: Sequence[Any]) -> None:
    """An error, before anything is changed, where a plain tensor meets a distributed one at the same index."""
    if MODES.replicate_plain:
        return
    for index, entries in enumerate(zip(*_lists(values), strict=True)):
        sized = [entry for entry in entries if entry.shape]
        if len({isinstance(entry, DTensor) for entry in sized}) > 1:
            layout = next(
                entry._layout for entry in sized if isinstance(entry, DTensor)
            )
            raise coded(
                OperatorError,
                "HP304",
                f"{name}: at index {index} a plain tensor meets a distributed one in {layout}. Lists may hold "
                "both, but entries of the same index must all be plain or all be distributed: "
                "distribute_tensor(tensor, mesh, placements)",
            )


def _shards(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value._local
    return [_shards(one) for one in value] if _is_list(value) else value


def _on_shards(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return func(
        *map(_shards, args), **{name: _shards(value) for name, value in kwargs.items()}
    )


def _refuse_copies(name: str, targets: Sequence[Any]) -> None:
    for target in targets:
        if isinstance(target, DTensor):
            refuse_copy(name, target)


def _elementwise(name: str) -> Callable[..., Any]:
    """One call on the shards, or the single operator index by index."""
    inplace = name.endswith("_")
    single = name.removeprefix(PREFIX).rstrip("_")

    def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        values = [*args, *kwargs.values()]
        first = next(value for value in values if _is_list(value))
        _refuse_mixtures(name, values)
        if inplace:
            _refuse_copies(name, first)
        if _differing(values) is None:
            found = _on_shards(func, args, kwargs)
            return first if inplace else tuple(map(_as, found, first))
        done = [
            _one(single, inplace, *_at(index, args, kwargs))
            for index in range(len(first))
        ]
        return first if inplace else tuple(done)

    return run


def _as(local: Any, like: Any) -> Any:
    """A result as distributed as the operand that it was computed from."""
    return (
        DTensor(local, like._layout, like._shape)
        if isinstance(like, DTensor)
        else local
    )


def _at(
    index: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of one index, from lists of tensors and of numbers."""

    def one(value: Any) -> Any:
        return value[index] if isinstance(value, (list, tuple)) else value

    return [one(value) for value in args], {
        _SINGULAR.get(name, name): one(value) for name, value in kwargs.items()
    }


_SINGULAR = {"self": "input", "scalars": "value", "weights": "weight"}


def _one(name: str, inplace: bool, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if name in ("addcmul", "addcdiv") and len(args) == 4:
        kwargs = {**kwargs, "value": args.pop()}
    if not inplace:
        return platform.operator(name)(*args, **kwargs)
    change = getattr(args[0], f"{name}_", None)  # maximum and minimum have none
    return (
        change(*args[1:], **kwargs)
        if change
        else args[0].copy_(platform.operator(name)(*args, **kwargs))
    )


def _each(single: Callable[..., Any]) -> Callable[..., Any]:
    """Index by index, by a function of a single tensor."""
    return lambda _, args, kwargs: tuple(
        single(one, *args[1:], **kwargs) for one in args[0]
    )


def _norm(tensor: Any, ord: Any = 2, dtype: Any = None) -> Any:  # noqa: A002 - torch's name for it
    return platform.operator("vector_norm")(tensor, ord, dtype=dtype)


def _powsum(tensor: Any, ord: Any = 2, dtype: Any = None) -> Any:  # noqa: A002 - torch's name for it
    return (tensor if dtype is None else tensor.to(dtype)).abs().pow(ord).sum()


UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round "
    "rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
)
OTHERS = "add addcdiv addcmul clamp_max clamp_min div lerp maximum minimum mul pow sub"
for _name in (*UNARY.split(), *OTHERS.split()):
    for _spelled in (f"{PREFIX}{_name}", f"{PREFIX}{_name}_"):
        operator(_spelled, "*args", direct=_elementwise(_spelled), lists=True)
for _spelled in ("_foreach_copy_", "_foreach_zero_", "_foreach_clone"):
    operator(_spelled, "*args", direct=_elementwise(_spelled), lists=True)
operator("_foreach_norm", "*args", direct=_each(_norm), lists=True)
operator("_foreach_powsum", "*args", direct=_each(_powsum), lists=True)
operator("_foreach_max", "*args", direct=_each(lambda tensor: tensor.max()), lists=True)

# --- whole optimizer steps


def _fused(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """On the shards, for what lies alike: an optimizer's step is the same for every element."""
    name = platform.op_name_of(func).name
    values = [*args, *(value for value in kwargs.values() if value is not None)]
    _refuse_mixtures(name, values)
    differing = _differing(values)
    if differing is not None:
        entries = [line[differing] for line in _lists(values)]
        layouts = [
            str(entry._layout) if isinstance(entry, DTensor) else "plain"
            for entry in entries
        ]
        raise coded(
            OperatorError,
            "HP316",
            f"{name}: tensor {differing} of each list must lie alike, without a pending reduction; they lie as "
            f"{', '.join(layouts)}. Redistribute the gradient, or construct the optimizer with fused=False",
        )
    for line in _lists(values):
        _refuse_copies(name, line)
    _on_shards(func, args, kwargs)
    for line in _lists(values):
        _note_changes(line)
    return None


def _note_changes(tensors: Sequence[Any]) -> None:
    """These kernels do not count their changes: what was gathered before would be handed out again."""
    for tensor in tensors:
        platform.note_change(_shards(tensor))


operator(
    "_fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_",
    "*args",
    direct=_fused,
    lists=True,
)

# --- gradients of a scaled loss


def _unscale(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """On the shards; what is not finite on one rank counts on all of them, so that all skip the step."""
    by_name = dict(zip(("self", "found_inf", "inv_scale"), args, strict=False)) | kwargs
    gradients, found, scale = (
        by_name[name] for name in ("self", "found_inf", "inv_scale")
    )
    if _differing([gradients]) is not None:
        raise coded(
            OperatorError,
            "HP316",
            "unscaling gradients: a reduction is pending on some of them; reduce_partial() first",
        )
    _refuse_copies("unscaling gradients", gradients)
    func(_shards(gradients), _shards(found), _shards(scale))
    _note_changes(gradients)
    distributed = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    for mesh in dict.fromkeys(gradient.device_mesh for gradient in distributed):
        group = platform.create_group(list(mesh.rank_list))
        most = platform.get_tensor_transform().all_reduce(_shards(found), "max", group)
        _shards(found).copy_(most)


operator(
    "_amp_foreach_non_finite_check_and_unscale_", "*args", direct=_unscale, lists=True
)
