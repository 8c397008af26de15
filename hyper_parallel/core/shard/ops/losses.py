# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that torch gives them
"""Softmax and losses. A mean over a batch that is cut is exact, however much the pieces differ in size.

mse_loss        "..., ... ->"            a local mean for its share of the global count
cross_entropy   "n c! d, n d -> n d"     its mean is the sum over the weight of all targets that count; where classes
                                         are cut, sharded_cross_entropy has it
nll_loss        "n c d, n d -> n d"      classes may be cut: each rank has the targets among its own
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.ops.sharded_cross_entropy import (
    LONG,
    class_dim,
    losses_of_cut_classes,
)
from hyper_parallel.core.shard.ops.staged_reductions import (
    elementwise,
    exponentials_in_stages,
    is_cut,
    reduced_dims,
    wide,
)
from hyper_parallel.core.shard.rule import Rule
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()
call = platform.operator

# --- softmax


def _whole_or(handler: Callable[..., Any]) -> Callable[..., Any]:
    def rule(input: Any, dim: Any, **_: Any) -> Any:
        if dim is None:
            return None  # torch chooses one, and warns
        return (
            handler
            if is_cut(input, reduced_dims(input, dim))
            else Rule("... {dim}! -> ... {dim}!")
        )

    return rule


def _softmax(input: Any, dim: int, dtype: Any, **_: Any) -> Any:
    values = _wide_values(input, dtype)
    top, total, scaled = exponentials_in_stages(values, reduced_dims(input, dim))
    return (scaled / _known(total, top)).to(dtype or input.dtype)


def _log_softmax(input: Any, dim: int, dtype: Any, **_: Any) -> Any:
    values = _wide_values(input, dtype)
    top, total, _ = exponentials_in_stages(values, reduced_dims(input, dim))
    return (values - top - elementwise(lambda x: x.log(), _known(total, top))).to(
        dtype or input.dtype
    )


def _wide_values(input: Any, dtype: Any) -> Any:
    """In a dtype in which so many may be added that half precision overflows."""
    return input.reduce_partial().to(wide(dtype or input.dtype))


def _known(total: Any, top: Any) -> Any:
    """The sum, or a nan where the largest is not finite: then nothing has a share, as in torch."""
    return total + elementwise(lambda x: x - x, top)


def _softmin(input: Any, dim: int, dtype: Any, **_: Any) -> Any:
    return _softmax(-input, dim, dtype)


for _name, _handler in (
    ("softmax", _softmax),
    ("log_softmax", _log_softmax),
    ("softmin", _softmin),
):
    operator(_name, "input, dim=None, dtype=None, _stacklevel=3", _whole_or(_handler))

ALONG = "... {dim}! -> ... {dim}!"
BACKWARD = Rule(ALONG.replace(" ->", ", ... {dim}! ->"), linear=((0,),))
operator("_safe_softmax", "input, dim, dtype=None", Rule(ALONG))
operator(
    "_softmax_backward_data _log_softmax_backward_data",
    "grad_output, output, dim, input_dtype",
    BACKWARD,
)


def _gumbel_softmax(logits: Any, tau: float, hard: bool, dim: int, **_: Any) -> Any:
    logits = logits.reduce_partial()
    noise = -call("log")(call("empty_like")(platform.detach(logits)).exponential_())
    soft = call("softmax")((logits + noise) / tau, dim)
    if not hard:
        return soft
    best = call("max")(soft, dim, keepdim=True)[1]
    return (
        call("zeros_like")(platform.detach(logits)).scatter(dim, best, 1.0)
        - platform.detach(soft)
        + soft
    )


operator(
    "gumbel_softmax",
    "logits, tau=1, hard=False, eps=1e-10, dim=-1",
    handler=_gumbel_softmax,
)

# --- losses of elements, of vectors and of their pairs

LOSSES = {  # the operands and their dims, of which "..." is left in the result, and the other parameters
    "mse_loss l1_loss": ("input ..., target ..., weight ...", ""),
    "smooth_l1_loss": ("input ..., target ...", "beta=1.0"),
    "huber_loss": ("input ..., target ..., weight ...", "delta=1.0"),
    "binary_cross_entropy": ("input ..., target ..., weight ...", ""),
    "binary_cross_entropy_with_logits": (
        "input ..., target ..., weight ..., pos_weight ...",
        "",
    ),
    "kl_div": ("input ..., target ...", "log_target=False"),
    "poisson_nll_loss": (
        "input ..., target ...",
        "log_input=True, full=False, eps=1e-08",
    ),
    "gaussian_nll_loss": ("input ..., target ..., var ...", "full=False, eps=1e-06"),
    "soft_margin_loss": ("input ..., target ...", ""),
    "hinge_embedding_loss": ("input ..., target ...", "margin=1.0"),
    "margin_ranking_loss": ("input1 ..., input2 ..., target ...", "margin=0"),
    "cosine_embedding_loss": ("input1 ... d!, input2 ... d!, target ...", "margin=0"),
    "triplet_margin_loss": (
        "anchor ... d!, positive ... d!, negative ... d!",
        "margin=1.0, p=2, eps=1e-06, swap=False",
    ),
    "multi_margin_loss": ("input ... c!, target ..., weight c!", "p=1, margin=1.0"),
    "multilabel_margin_loss": ("input ... c!, target ... c!", ""),
    "multilabel_soft_margin_loss": ("input ... c!, target ... c!, weight ... c!", ""),
}
REDUCTIONS = ("none", "sum", "mean")
REDUCTION = "size_average=None, reduce=None, reduction='mean'"


def _asked(
    reduction: Any = "mean", size_average: Any = None, reduce: Any = None, **_: Any
) -> Any:
    """The reduction, which older code says by two booleans."""
    if size_average is None and reduce is None:
        return reduction
    return "none" if reduce is False else "sum" if size_average is False else "mean"


def _loss(operands: list[str], patterns: list[str]) -> Callable[..., Any]:
    def rule(**arguments: Any) -> Any:
        reduction = _asked(**arguments)
        if reduction not in REDUCTIONS:
            return _by_batch if reduction == "batchmean" else None
        if patterns[:2] == ["... c!", "..."] and len(arguments["input"].shape) == len(
            arguments["target"].shape
        ):
            return None  # one sample without a batch, whose target has one
        dims, result, broadcast = patterns, "...", "rest"
        if _is_short(**arguments):  # one variance for all of the last dim
            if len(arguments["target"].shape) != len(arguments["input"].shape):
                return None
            dims, result, broadcast = ["... d", "... d", "..."], "... d", "all"
        text = f"{', '.join(dims)} -> {result if reduction == 'none' else ''}"
        return RuleForCall(
            Rule(text, broadcast=broadcast),
            operands=[arguments.get(name) for name in operands],
        )

    return rule


def _is_short(input: Any = None, var: Any = None, **_: Any) -> bool:
    return isinstance(var, DTensor) and 0 < len(var.shape) == len(input.shape) - 1


def _by_batch(input: Any, target: Any, log_target: bool, **_: Any) -> Any:
    total = call("kl_div")(input, target, reduction="sum", log_target=log_target)
    return total / input.shape[0] if input.shape else total


def _by_weight(name: str, unweighted: Callable[..., Any]) -> Callable[..., Any]:
    """The mean of a loss that is divided by its weights."""

    def handler(input: Any, target: Any, weight: Any, **_: Any) -> Any:
        total = call(name)(input, target, reduction="sum", weight=weight)
        return total / call("sum")(weight).reduce_partial()

    def rule(**arguments: Any) -> Any:
        by_weight = arguments["weight"] is not None and _asked(**arguments) == "mean"
        return handler if by_weight else unweighted(**arguments)

    return rule


def _loss_of_shard(here: ShardContext, **arguments: Any) -> Any:
    """The loss of a shard; of a mean its share, and nothing of an empty one."""
    reduction = _asked(**arguments)
    given = {
        name: value
        for name, value in arguments.items()
        if name not in ("size_average", "reduce", "reduction")
    }
    if here.share == 0:  # not every kernel adds up nothing to zero
        return call("sum")(here.function(**given, reduction="none"))
    found = here.function(**given, reduction=reduction)
    return found * here.share if reduction == "mean" and here.share != 1 else found


for _names, (_operands, _others) in LOSSES.items():
    _pairs = [text.strip().partition(" ") for text in _operands.split(",")]
    _rule = _loss(
        [name for name, _, _ in _pairs], [pattern for _, _, pattern in _pairs]
    )
    _first = ", ".join(
        name + "=None" * name.endswith("weight") for name, _, _ in _pairs
    )
    for _name in _names.split():
        _own = _by_weight(_name, _rule) if _name in ("mse_loss", "l1_loss") else _rule
        operator(
            _name,
            f"{_first}, *, {_others + ', ' * bool(_others)}{REDUCTION}",
            _own,
            local=_loss_of_shard,
            order_free=True,
        )


def _triplet(
    anchor: Any,
    positive: Any,
    negative: Any,
    distance_function: Any,
    margin: float,
    swap: bool,
    reduction: str,
) -> Any:
    """By distances that the user may choose."""
    distance = distance_function or call("pairwise_distance")
    away = distance(anchor, negative)
    if swap:
        away = call("minimum")(away, distance(positive, negative))
    losses = call("clamp_min")(distance(anchor, positive) - away + margin, 0)
    return losses if reduction == "none" else call(reduction)(losses)


operator(
    "triplet_margin_with_distance_loss",
    "anchor, positive, negative, *, distance_function=None, margin=1.0, swap=False, reduction='mean'",
    lambda reduction, **_: _triplet if reduction in REDUCTIONS else None,
)

# --- losses of classes


def _class_dim(input: Any) -> int:
    return class_dim(len(input.shape))


def _class_texts(input: Any, target: Any) -> tuple[list[str], str]:
    """The dims of the scores, the targets and the weights, and of the losses; a target may be one number a class."""
    names = [f"d{i}" for i in range(len(input.shape))]
    names[_class_dim(input)] = "c"
    losses = " ".join(name for name in names if name != "c")
    return [
        " ".join(names),
        " ".join(names) if _are_shares(input, target) else losses,
        "c",
    ], losses


def _are_shares(input: Any, target: Any) -> bool:
    """Whether the target gives each class its share, and not the number of one."""
    return bool(tuple(input.shape) == tuple(target.shape))


def _of_classes(
    cut_classes: Callable[..., Any] | None, mean: Callable[..., Any], linear: bool
) -> Callable[..., Any]:
    def rule(input: Any, target: Any, weight: Any, **more: Any) -> Any:
        if cut_classes is not None and is_cut(input, (_class_dim(input),)):
            return (
                cut_classes  # whatever else is asked for, the classes are not gathered
            )
        reduction = _asked(**more)
        if reduction not in REDUCTIONS:
            return None
        dims, losses = _class_texts(input, target)
        whole = set() if cut_classes is None else {"c"}
        if reduction == "mean" and not _are_shares(input, target):
            if is_cut(input, reduced_dims(input, None)):
                return mean
            whole = {*losses.split(), "c"}
        marked = [" ".join(n + "!" * (n in whole) for n in dim.split()) for dim in dims]
        text = f"{', '.join(marked)} -> {losses if reduction == 'none' else ''}"
        return RuleForCall(
            Rule(text, linear=((0,),) if linear else (), broadcast="none"),
            operands=[input, target, weight],
        )

    return rule


def _mean_of(losses: Any, target: Any, weight: Any, ignore_index: int) -> Any:
    """The mean over the targets that count, each with the weight of its class."""
    with platform.no_grad():
        count = DTensor.dispatch(
            weight_of_targets, (target, weight, ignore_index), {}
        ).reduce_partial()
    return (call("sum")(losses, dtype=wide(losses.dtype)) / count).to(losses.dtype)


def weight_of_targets(target: Any, weight: Any, ignore_index: int) -> Any:
    """The weights of the classes of all targets that count, added up; one for each where there are none."""
    kept = target != ignore_index
    if weight is None:
        return kept.sum()
    return (weight[(target * kept).to(LONG)] * kept).sum(dtype=wide(weight.dtype))


def _nll_of_shard(
    here: ShardContext,
    input: Any,
    target: Any,
    weight: Any,
    ignore_index: int,
    **more: Any,
) -> Any:
    """Where classes are cut, the losses of the targets that are among this rank's."""
    if not here.is_cut("c"):
        return _loss_of_shard(
            here,
            input=input,
            target=target,
            weight=weight,
            ignore_index=ignore_index,
            **more,
        )
    at, start, size = _class_dim(input), here.offset("c"), here.size("c")
    target = target.to(LONG)
    kept = target != ignore_index
    mine = kept & (target >= start) & (target < start + size)
    losses = input.sum(
        at
    )  # of no classes: zero, and in the graph as on the other ranks
    if size:
        index = (target - start) * mine
        losses = -input.gather(at, index.unsqueeze(at)).squeeze(at)
        losses = (losses if weight is None else losses * weight[index]).masked_fill(
            ~mine, 0
        )
    # An out-of-range target belongs to no rank; make the loss nan.
    losses = losses.masked_fill(
        kept & ((target < 0) | (target >= here.whole("c"))), float("nan")
    )
    return losses if _asked(**more) == "none" else losses.sum()


def _nll_mean(input: Any, target: Any, weight: Any, ignore_index: int, **_: Any) -> Any:
    losses = call("nll_loss")(
        input, target, weight, ignore_index=ignore_index, reduction="none"
    )
    return _mean_of(losses, target, weight, ignore_index)


def _cross_entropy_mean(
    input: Any,
    target: Any,
    weight: Any,
    ignore_index: int,
    label_smoothing: float,
    **_: Any,
) -> Any:
    more = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    losses = call("cross_entropy")(input, target, weight, reduction="none", **more)
    return _mean_of(losses, target, weight, ignore_index)


def _cross_entropy_of_cut_classes(
    input: Any,
    target: Any,
    weight: Any,
    ignore_index: int,
    label_smoothing: float,
    **more: Any,
) -> Any:
    reduction = _asked(**more)
    if reduction not in REDUCTIONS:
        raise coded(
            ValueError,
            "HP315",
            f"cross_entropy: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}",
        )
    found, weights = losses_of_cut_classes(
        input, target, weight, ignore_index, label_smoothing
    )
    if reduction == "mean" and not _are_shares(input, target):
        with platform.no_grad():
            count = call("sum")(weights).reduce_partial()
        found = call("sum")(found) / count
    elif reduction != "none":
        found = call(reduction)(found)
    return found.to(_dtype_of_losses(input))


def _dtype_of_losses(input: Any) -> Any:
    """That of the scores; of half precision what the framework makes of it, which autocast changes."""
    if input.dtype == wide(input.dtype):
        return input.dtype
    score = platform.zeros((1,), dtype=input.dtype, device=input.device)
    return call("cross_entropy")(
        score, platform.zeros((), dtype=LONG, device=input.device)
    ).dtype


CLASSES = f"input, target, weight=None, *, ignore_index=-100, {REDUCTION}"
operator("weight_of_targets", "target, weight, ignore_index", Rule("..., c! ->"))
operator(
    "nll_loss", CLASSES, _of_classes(None, _nll_mean, linear=True), local=_nll_of_shard
)
operator(
    "cross_entropy",
    f"{CLASSES}, label_smoothing=0.0",
    _of_classes(_cross_entropy_of_cut_classes, _cross_entropy_mean, linear=False),
    local=_loss_of_shard,
    any_layout=True,
    order_free=True,
)


def _linear_cross_entropy(
    input: Any,
    linear_weight: Any,
    target: Any,
    linear_bias: Any,
    ignore_index: int | None,
    **more: Any,
) -> Any:
    """What its options say about memory is for one device: here a rank has but some of the scores."""
    classes = tuple(linear_weight.shape[:-1])  # and what else a weight has a row for
    bias = None if linear_bias is None else linear_bias.reshape(-1)
    scores = call("linear")(
        input, linear_weight.reshape(-1, linear_weight.shape[-1]), bias
    )
    more["ignore_index"] = -100 if ignore_index is None else ignore_index
    more.pop("options")
    return call("cross_entropy")(
        scores if len(classes) == 1 else scores.unflatten(-1, classes), target, **more
    )


operator(
    "linear_cross_entropy",
    "input, linear_weight, target, *, linear_bias=None, weight=None, reduction='mean', ignore_index=None, "
    "label_smoothing=0.0, options=None",
    handler=_linear_cross_entropy,
)
