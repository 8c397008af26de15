# SPDX-License-Identifier: Apache-2.0
"""Controls: what is broken on purpose, in a rule, a local function or a stage, is found by the checks."""

from dataclasses import replace
from unittest import mock

import pytest
from rules.cases import CASES, COMPOSITES
from rules.faults import ALIKE, is_found, itself, takes
from rules.framework import detached, its, unruled_is_an_error
from rules.operators import check
from rules.outcomes import found_here, known
from rules.test_controls_of_sequences import BROKEN as OF_SEQUENCES
from rules.test_dispatch import compare

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.ops import losses, norms, reductions, staged_reductions
from hyper_parallel.core.shard.ops.operator import OPERATORS
from hyper_parallel.core.shard.rule import Rule, einsum, pointwise, reduction
from hyper_parallel.testing import run_ranks

ALL = {case.name: case for case in [*CASES, *COMPOSITES]}


def shorter(here, input, normalized_shape, **more):  # noqa: A002 - as torch calls it
    """The norm of what the shard has of the last dim."""
    return here.function(input, input.shape[-1:], **more)


SUMMED, ALONG = "... {dim} -> ...", "... {dim} -> ... {dim}"
QKV, IWB = ("query", "key", "value"), ("input", "weight", "bias")
BCE = "binary_cross_entropy_with_logits"
BROKEN = [  # the case, the operator, what is broken in it, why that is wrong
    (
        "linear",
        "linear",
        {"rule": einsum("... k, n k, n -> ... n")},
        "the plus is lost",
    ),
    ("addmm", "addmm", {"rule": einsum("m n, m k, k n -> m n")}, "the plus is lost"),
    (
        "bmm",
        "bmm",
        {"rule": Rule("b m k, b k n -> b m n", linear=((0, 1),))},
        "linear in both together",
    ),
    (
        "matmul of batches",
        "matmul",
        {"rule": Rule("b m k, b k n -> b m n", "max")},
        "products are summed",
    ),
    ("dot", "dot", {"rule": Rule("k, k ->", "avg")}, "products are summed"),
    ("sum over a dim", "sum", {"rule": reduction("max", SUMMED)}, "a wrong reduction"),
    ("sum of ints", "sum", {"rule": reduction("prod", SUMMED)}, "a wrong reduction"),
    (
        "mean over two",
        "mean",
        {"local": itself},
        "a local mean for a share of the global one",
    ),
    ("nansum", "nansum", {"rule": reduction("max", SUMMED)}, "a wrong reduction"),
    (
        "prod over a dim",
        "prod",
        {"rule": lambda **_: reduction("sum", "... {dim} -> ... {dim=1}")},
        "a wrong reduction",
    ),
    ("amax", "amax", {"rule": Rule(SUMMED)}, "a wrong reduction"),
    ("amax", "amax", {"rule": Rule("... {dim}! -> ...", linear=((0,),))}, "not linear"),
    (
        "argmax over a dim",
        "argmax",
        {"rule": Rule("... {dim} -> ... {dim=1}", "max")},
        "places in the shard",
    ),
    ("all over a dim", "all", {"rule": Rule(SUMMED, "max")}, "a wrong reduction"),
    ("logsumexp", "logsumexp", {"rule": Rule(SUMMED)}, "summed as if it were a sum"),
    (
        "var_mean",
        "var_mean",
        {"rule": Rule("... {dim} -> ..., ...", "avg")},
        "each rank has a mean of its own",
    ),
    ("norm 1", "norm", {"rule": reduction("sum", SUMMED)}, "not linear"),
    (
        "vector_norm over a dim",
        "vector_norm",
        {"rule": Rule("... {dim} -> ... {dim=1}")},
        "a sum of norms",
    ),
    (
        "median over a dim",
        "median",
        {"rule": Rule("... {dim} -> ... {dim=1}, ... {dim=1}", "avg")},
        "of shards",
    ),
    ("cumsum", "cumsum", {"rule": Rule(ALONG)}, "the whole mark is lost"),
    (
        "cumprod",
        "cumprod",
        {"rule": Rule("... {dim}! -> ... {dim}!", linear=((0,),))},
        "not linear",
    ),
    ("softmax", "softmax", {"rule": Rule(ALONG)}, "the whole mark is lost"),
    (
        "log_softmax",
        "log_softmax",
        {"rule": Rule("... {dim}! -> ... {dim}!", linear=((0,),))},
        "not linear",
    ),
    (
        "mse_loss, mean",
        "mse_loss",
        {"local": itself},
        "a local mean for a share of the global one",
    ),
    (
        "mse_loss, sum",
        "mse_loss",
        {"rule": Rule("..., ... ->", "avg")},
        "a wrong reduction",
    ),
    ("l1_loss, none", "l1_loss", {"rule": pointwise(2, linear=[(0, 1)])}, "not linear"),
    ("logits", BCE, {"local": itself}, "a local mean for a share of the global one"),
    (
        "triplet_margin_loss, none",
        "triplet_margin_loss",
        {"rule": Rule("... d, ... d, ... d -> ...")},
        "a sum of norms",
    ),
    (
        "cross_entropy of shares, none",
        "cross_entropy",
        {"rule": Rule("n c, n c, c -> n")},
        "the whole mark is lost",
    ),
    (
        "cross_entropy of shares",
        "cross_entropy",
        {"local": itself},
        "a local mean for a share of the global one",
    ),
    (
        "nll_loss, none",
        "nll_loss",
        {"local": losses._loss_of_shard, "rule": Rule("n c, n -> n")},
        "targets of others",
    ),
    (
        "layer_norm",
        "layer_norm",
        {"rule": takes("... n, n, n -> ... n", *IWB), "local": shorter},
        "not whole",
    ),
    (
        "rms_norm",
        "rms_norm",
        {"rule": takes("... n, n -> ... n", *IWB[:2]), "local": shorter},
        "not whole",
    ),
    (
        "group_norm of rows",
        "group_norm",
        {"local": itself},
        "as many groups in fewer channels",
    ),
    (
        "batch_norm",
        "batch_norm",
        {"rule": takes("b c s!, c, c -> b c s!", *IWB)},
        "not whole",
    ),
    (
        "instance_norm alone",
        "instance_norm",
        {"rule": Rule("b c s t! -> b c s t!")},
        "the whole mark is lost",
    ),
    ("normalize", "normalize", {"rule": Rule(ALONG)}, "the whole mark is lost"),
    (
        "cosine_similarity",
        "cosine_similarity",
        {"rule": Rule("... {dim}, ... {dim} -> ...")},
        "summed as if it were a sum",
    ),
    (
        "attention",
        "scaled_dot_product_attention",
        {"rule": takes("b h s d!, b h t d!, b h t e -> b h s e", *QKV)},
        "keys",
    ),
    (
        "attention",
        "scaled_dot_product_attention",
        {"rule": takes("b h s d, b h t! d, b h t! e -> b h s e", *QKV)},
        "dims",
    ),
    (
        "attention, causal",
        "scaled_dot_product_attention",
        {"local": itself},
        "every shard is the first",
    ),
    (
        "attention, grouped",
        "scaled_dot_product_attention",
        {"rule": takes("b (g h) s d!, b h t! d!, b h t! e -> b (g h) s e", *QKV)},
        "a shard of the queries' heads has not its key heads",
    ),
    (
        "attention of three dims",
        "scaled_dot_product_attention",
        {"rule": takes("b s d!, b t! d!, b t! e -> b s e", *QKV, linear=((1,),))},
        "not linear in the keys",
    ),
]
HERE = found_here([*BROKEN, *OF_SEQUENCES])


@pytest.mark.parametrize(
    ("name", "operator", "broken", "why"),
    HERE,
    ids=[f"{row[0]}: {row[3]}" for row in HERE],
)
def test_a_broken_rule_or_local_function_is_found(name, operator, broken, why):
    is_found(
        ALL[name], operator, broken, IndexError, RuntimeError
    )  # as for a target that is no class of the shard


def with_local(function):
    """relu with another local function."""
    return mock.patch.dict(
        OPERATORS, {"relu": replace(OPERATORS["relu"], local=function)}
    )


def test_without_gradients_the_values_are_compared():
    with with_local(lambda here, **given: here.function(detached(given["input"]))):
        assert check(ALL["relu"], ALIKE, gradients=False) > 0
        with pytest.raises(AssertionError, match="gradient"):
            check(ALL["relu"], ALIKE)
    with (
        with_local(lambda here, **given: here.function(**given) * 2),
        pytest.raises(AssertionError, match="result"),
    ):
        check(ALL["relu"], ALIKE, gradients=False)


# --- between real ranks: what has no rule of its own


def shared_extreme(values, ties, name, dim, keepdim):
    return getattr(its(values), name)(dim, keepdim=keepdim)


def weight_of_targets(target, weight, ignore_index):
    return (target == target).sum()


STAGES = [  # the case, the module, what takes the place of its function, why that is wrong
    (
        "amax of ties",
        staged_reductions,
        "shared_extreme",
        shared_extreme,
        "ranks share the gradient, not elements",
    ),
    (
        "logsumexp",
        reductions,
        "elementwise",
        lambda function, tensor: tensor,
        "there is no logarithm",
    ),
    (
        "cross_entropy, ignored",
        losses,
        "weight_of_targets",
        weight_of_targets,
        "what is ignored counts",
    ),
    (
        "batch_norm of rows, trained",
        norms,
        "_follow",
        lambda *_: None,
        "the running statistics stay",
    ),
]


def on_rank(number):
    """Whether the check finds the fault, which is the same on every rank."""
    name, module, function, replacement, _ = STAGES[number]
    base = Layout((4,), ("x",))
    with unruled_is_an_error(), mock.patch.object(module, function, replacement):
        try:
            for seed in range(6):
                compare(ALL[name], "uneven", base, seed)
        except AssertionError:
            return True
    return False


def test_a_broken_stage_is_found():
    for number, (name, *_, why) in enumerate(STAGES):
        if not known(name).runs:
            continue
        assert run_ranks(on_rank, 4, number) == [True] * 4, f"{name}: {why}"
