# SPDX-License-Identifier: Apache-2.0
"""Operators on lists of tensors, as optimizers use them: one call on all shards where those of an index lie alike.

Where they do not, or where a reduction is pending, each index is done by the operator on single tensors. The names are
torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.arguments import OperatorError, refuse_copy
from hyper_parallel.core.shard.ops.operator import operator
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()

PREFIX = "_foreach_"


def _differing(values: Sequence[Any]) -> int | None:
    """The first index whose tensors do not lie alike; None where all shards can be computed together."""
    lists = [value for value in values if _is_list(value)]
    single = [value for value in values if isinstance(value, DTensor)]
    if not lists or not all(map(_is_copied_scalar, single)):
        return 0
    for index, first in enumerate(lists[0]):
        for other in (line[index] for line in lists if line):
            alike = other._layout is first._layout and other._shape == first._shape
            if first._layout.is_partial() or not (alike or _is_copied_scalar(other)):
                return index
    return None


def _is_list(value: Any) -> bool:
    """Whether it is a list of distributed tensors; an empty one is too."""
    return isinstance(value, (list, tuple)) and all(isinstance(one, DTensor) for one in value)


def _is_copied_scalar(tensor: Any) -> bool:
    return not tensor._shape and not tensor._layout.is_partial()


def _shards(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value._local
    return [one._local for one in value] if _is_list(value) else value


def _on_shards(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return func(*map(_shards, args), **{name: _shards(value) for name, value in kwargs.items()})


def _refuse_copies(name: str, targets: Sequence[Any]) -> None:
    for target in targets:
        refuse_copy(name, target)


def _elementwise(name: str) -> Callable[..., Any]:
    """One call on the shards, or the single operator index by index."""
    inplace = name.endswith("_")
    single = name.removeprefix(PREFIX).rstrip("_")

    def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        first = next(value for value in (*args, *kwargs.values()) if _is_list(value))
        if inplace:
            _refuse_copies(name, first)
        if _differing([*args, *kwargs.values()]) is None:
            found = _on_shards(func, args, kwargs)
            if inplace:
                return args[0]
            pairs = zip(found, first, strict=True)
            return tuple(DTensor(local, one._layout, one._shape) for local, one in pairs)
        done = [_one(single, inplace, *_at(index, args, kwargs)) for index in range(len(first))]
        return args[0] if inplace else tuple(done)

    return run


def _at(index: int, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of one index, from lists of tensors and of numbers."""

    def one(value: Any) -> Any:
        return value[index] if isinstance(value, (list, tuple)) else value

    return [one(value) for value in args], {_SINGULAR.get(name, name): one(value) for name, value in kwargs.items()}


_SINGULAR = {"self": "input", "scalars": "value", "weights": "weight"}


def _one(name: str, inplace: bool, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if name in ("addcmul", "addcdiv") and len(args) == 4:
        kwargs = {**kwargs, "value": args.pop()}
    if not inplace:
        return platform.operator(name)(*args, **kwargs)
    change = getattr(args[0], f"{name}_", None)  # maximum and minimum have none
    return change(*args[1:], **kwargs) if change else args[0].copy_(platform.operator(name)(*args, **kwargs))


def _each(single: Callable[..., Any]) -> Callable[..., Any]:
    """Index by index, by a function of a single tensor."""
    return lambda _, args, kwargs: tuple(single(one, *args[1:], **kwargs) for one in args[0])


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
        operator(_spelled, "*args", direct=_elementwise(_spelled))
for _spelled in ("_foreach_copy_", "_foreach_zero_", "_foreach_clone"):
    operator(_spelled, "*args", direct=_elementwise(_spelled))
operator("_foreach_norm", "*args", direct=_each(_norm))
operator("_foreach_powsum", "*args", direct=_each(_powsum))
operator("_foreach_max", "*args", direct=_each(lambda tensor: tensor.max()))

# --- whole optimizer steps


def _fused(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """On the shards, for what lies alike: an optimizer's step is the same for every element."""
    name = getattr(func, "__name__", str(func))
    differing = _differing([*args, *(value for value in kwargs.values() if value is not None)])
    if differing is not None:
        lists = [value for value in args if _is_list(value) and value]
        layouts = [str(line[differing]._layout) for line in lists]
        raise OperatorError(
            coded(
                "HP316",
                f"{name}: tensor {differing} of each list must lie alike, without a pending reduction; they lie as "
                f"{', '.join(layouts)}. Redistribute the gradient, or construct the optimizer with fused=False",
            )
        )
    _refuse_copies(name, args[0])
    _on_shards(func, args, kwargs)
    for tensor in (tensor for line in args if _is_list(line) for tensor in line):
        # These kernels do not: what was gathered before would be handed out again.
        platform.note_change(getattr(tensor, "_local", tensor))
    return None


operator("_fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_", "*args", direct=_fused)

# --- gradients of a scaled loss


def _unscale(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:  # noqa: ARG001 - there are none
    """On the shards; what is not finite on one rank counts on all of them, so that all skip the step."""
    gradients, found, scale = args
    if _differing([gradients]) is not None:
        raise OperatorError(
            coded("HP316", "unscaling gradients: a reduction is pending on some of them; reduce_partial() first")
        )
    func(_shards(gradients), found._local, scale._local)
    for mesh in dict.fromkeys(gradient.device_mesh for gradient in gradients):
        group = platform.create_group(list(mesh.rank_list))
        found._local.copy_(platform.get_tensor_transform().all_reduce(found._local, "max", group))


operator("_amp_foreach_non_finite_check_and_unscale", "*args", direct=_unscale)
