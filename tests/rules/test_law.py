# SPDX-License-Identifier: Apache-2.0
"""The law of placements and gradients by brute force, on operator lines with their torch functions.

Sizes that divide, sizes that do not, and sizes that leave ranks with nothing. Rules broken on purpose must fail.
"""

from dataclasses import replace
from math import inf, prod

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (everyone's name for it)
from rules.simulated import Case, Here, bind, check, draw, evaluate

from hyper_parallel.core.shard.notation import from_equation
from hyper_parallel.core.shard.rule import REPLICATE, SUM, Rule, einsum, lookup, move, pointwise, reduction

SIZES = {"even": {"a": 4, "b": 8, "c": 12}, "uneven": {"a": 5, "b": 6, "c": 7}, "empty": {"a": 3, "b": 2, "c": 1}}
ALIKE = {"a": 4, "b": 4, "c": 4}  # for controls: no shape gives the fault away

# --- local functions: what changes in a call on pieces


def mean(*names, dim):
    """The local sum over the global count."""
    return lambda here, x: x.sum(dim) / prod(here.whole(name) for name in names)


def extreme(function, dim, identity):
    """A reduction that gives the identity for an empty piece, which torch refuses."""
    return lambda x: getattr(x, function)(dim) if x.shape[dim] else x.sum(dim) + identity


def masked(read, name, dim):
    """Reads a table of which this rank has some rows; a row of zeros stands for the others."""

    def run(here, table, index):
        start, size = here.span(name)
        mine = (index >= start) & (index < start + size)
        padded = torch.cat([table, torch.zeros_like(table.sum(dim, keepdim=True))], dim)
        return read(padded, torch.where(mine, index - start, size))

    return run


def embedding(here, index, table):
    return masked(lambda rows, i: F.embedding(i, rows), "v", 0)(here, table, index)


def group_norm(here, x, weight, bias):
    groups = here.size("g")
    return F.group_norm(x, groups, weight, bias) if groups else x * 1


def conv2d(x, weight, bias):
    if x.shape[1] and weight.shape[0]:
        return F.conv2d(x, weight, bias)
    return x.new_zeros(x.shape[0], weight.shape[0], x.shape[2] - 1, x.shape[3] - 1) + bias[:, None, None]


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def split_dim(here, x):
    return x.reshape(here.size("a"), here.size("b"), here.size("c"))


def regroup(here, x):
    return x.reshape(here.size("a"), here.size("b") * here.size("c"))


def expand(here, x):
    return x.expand(-1, here.size("n"), -1)


def tril(here, x):
    return x.tril(1 + here.offset("r") - here.offset("c"))


def cross_entropy(kind):
    return lambda x, target: F.cross_entropy(x, target, reduction=kind)


def equation(text):
    return einsum(from_equation(text), broadcast="all")


def contract(text):
    return lambda *operands: torch.einsum(text, *operands)


# --- the table: name, rule, function, shapes, factors that may be sharded, ways for a Partial to pass

R1, R2, R3 = "...[-1]", "...[-2] ...[-1]", "...[-3] ...[-2] ...[-1]"
DIM, KEEPDIM, TWO = "... {dim} -> ...", "... {dim} -> ... {dim=1}", "{dim}[0] {dim}[1] ...[-1]"
GONE, SAME, OUT = "... {dim}! -> ...", "... {dim}! -> ... {dim}!", "... {dim}! -> ... {dim=out}!"
TOPK, SPLIT = "... {dim}! -> ... {dim=k}!, ... {dim=k}!", "... {dim}! -> [... {dim=part}!]"
TRANSPOSE = "... {dim0=a} {dim1=b} -> ... {dim0=b} {dim1=a}"
NORM, GROUP_NORM = "... n!, n!, n! -> ... n!", "b (g c) y! x!, (g c), (g c) -> b (g c) y! x!"
SDPA, GROUPED = "b h s d!, b h t! d!, b h t! e -> b h s e", "b (h g) s d!, b h t! d!, b h t! e -> b (h g) s e"
CONV = "b ci y! x!, co ci ky! kx!, +co -> b co y2! x2!"
SELECT, GATHER = "... {dim=v}@, j -> ... {dim=j}", "... {dim=v}@, ... {dim=j} -> ... {dim=j}"
INDEX_ADD = "+... {dim=v}!, j, ... {dim=j} -> ... {dim=v}!"
ADD_AT = Rule(INDEX_ADD, linear=((2,),), broadcast="none")
TOGETHER, EACH = pointwise(2, linear=[(0, 1)]), pointwise(2, linear=[0, 1])
LINEAR, ADDMM = einsum("... k, n k, +n -> ... n"), einsum("+m n, m k, k n -> m n")
MATMUL, BADDBMM = einsum("... m k, ... k n -> ... m n"), einsum("+b m n, b m k, b k n -> b m n")
BMM, KEPT, LOST = einsum("b m k, b k n -> b m n"), Rule(SAME), Rule("... {dim} -> ... {dim}")
MEAN_OF_TWO = mean("{dim}[0]", "{dim}[1]", dim=(2, 0))
INDEX_SELECT = masked(lambda table, i: table.index_select(1, i), "v", 1)
GATHERED = masked(lambda table, i: table.gather(1, i), "v", 1)
D0, D1, D2, D02 = {"dim": 0}, {"dim": 1}, {"dim": -1}, {"dim": (2, 0)}

CASES = [
    Case("relu", pointwise(1), torch.relu, "ab", R2),
    Case("gelu of a scalar", pointwise(1), F.gelu, ".", ""),
    Case("neg", pointwise(1, linear=0), torch.neg, "abc", R3, 2),
    Case("scale", pointwise(1, linear=0), lambda x: 2.5 * x, "ab", R2, 2),
    Case("add", TOGETHER, torch.add, "ab ab", R2, 2),
    Case("add broadcast", TOGETHER, torch.add, "abc b1", R3, 2),
    Case("add both ways", TOGETHER, torch.add, "1b a1", R2, 2),
    Case("sub", TOGETHER, torch.sub, "ab b", R2, 2),
    Case("mul", EACH, torch.mul, "ab a1", R2, 4),
    Case("div", pointwise(2, linear=0), torch.div, "ab b", R2, 2),
    Case("where", pointwise(3, [(1, 2)]), lambda c, x, y: torch.where(c > 0, x, y), "ab b ab", R2, 2, ints={0: 2}),
    Case("addcmul", pointwise(3, linear=[(0, 1), (0, 2)]), torch.addcmul, "ab b a1", R2, 4),
    Case("mm", einsum("m k, k n -> m n"), torch.mm, "ab bc", "m k n", 4),
    Case("mv", einsum("m k, k -> m"), torch.mv, "ab b", "m k", 4),
    Case("dot", einsum("k, k ->"), torch.dot, "b b", "k", 4),
    Case("outer", einsum("m, n -> m n"), torch.outer, "a b", "m n", 4),
    Case("bmm", BMM, torch.bmm, "abc acb", "b m k n", 4),
    Case("matmul", MATMUL, torch.matmul, "abc cb", "...[-1] m k n", 4),
    Case("matmul broadcast", MATMUL, torch.matmul, "a1bc bca", R2 + " m k n", 4),
    Case("linear", LINEAR, F.linear, "abc bc b", R2 + " k n", 4),
    Case("linear, one bias for all", LINEAR, F.linear, "ab cb 1", "...[-1] k n", 4),
    Case("linear without bias", LINEAR, F.linear, "ab cb -", "...[-1] k n", 4),
    Case("addmm", ADDMM, torch.addmm, "ac ab bc", "m n k", 4),
    Case("addmm, a row", ADDMM, torch.addmm, "c ab bc", "n m k", 4),
    Case("baddbmm", BADDBMM, torch.baddbmm, "a1b abc acb", "b n m k", 4),
    Case("ij,jk->ik", equation("ij,jk->ik"), contract("ij,jk->ik"), "ab bc", "i j k", 4),
    Case("ijk->ki", equation("ijk->ki"), contract("ijk->ki"), "abc", "i j k", 2),
    Case("i,ij,j->", equation("i,ij,j->"), contract("i,ij,j->"), "a ab b", "i j", 6),
    Case("bij,bkj broadcast", equation("bij,bkj"), contract("bij,bkj"), "1bc acc", "b i j k", 4),
    Case("ii->i", equation("ii->i"), contract("ii->i"), "bb", "", 2),
    Case("conv2d", einsum(CONV), conv2d, "ab34 cb22 c", "b ci co", 4, {"y2": 2, "x2": 3}),
    Case("sum", reduction("sum", DIM), lambda x: x.sum(1), "abc", R2 + " {dim}", 2, D1),
    Case("sum keepdim", reduction("sum", KEEPDIM), lambda x: x.sum(-1, True), "ab", "...[-1] {dim}", 2, D2),
    Case("sum of two", reduction("sum", KEEPDIM), lambda x: x.sum((2, 0), True), "abc", TWO, 2, D02),
    Case("sum of all", reduction("sum", DIM), torch.sum, "ab", "{dim}[0] {dim}[1]", 2, {"dim": None}),
    Case("sum of a scalar", reduction("sum", KEEPDIM), lambda x: x.sum(0, True), ".", "", 2, D0),
    Case("mean", reduction("mean", DIM), mean("{dim}", dim=1), "abc", R2 + " {dim}", 2, D1, local=True),
    Case("mean of two", reduction("mean", DIM), MEAN_OF_TWO, "abc", TWO, 2, D02, local=True),
    Case("mean of equal parts", reduction("avg", DIM), lambda x: x.mean(0), "ba", "...[-1] {dim}", 2, D0),
    Case("amax", reduction("max", DIM), extreme("amax", 0, -inf), "bc", "...[-1] {dim}", 1, D0),
    Case("amin", reduction("min", DIM), extreme("amin", 1, inf), "abc", R2 + " {dim}", 1, D1),
    Case("prod", reduction("prod", DIM), lambda x: x.prod(1), "ab", "...[-1] {dim}", 1, D1),
    Case("max with its place", Rule("... {dim}! -> ..., ..."), lambda x: x.max(1), "ab", R1, 0, D1),
    Case("logsumexp", Rule(GONE), lambda x: x.logsumexp(0), "abc", R2, 0, D0),
    Case("softmax", KEPT, lambda x: x.softmax(1), "abc", R2, 0, D1),
    Case("log_softmax", KEPT, lambda x: x.log_softmax(-1), "ab", R1, 0, D2),
    Case("cumsum", Rule(SAME, linear=((0,),)), lambda x: x.cumsum(0), "ab", R1, 2, D0),
    Case("sort", Rule("... {dim}! -> ... {dim}!, ... {dim}!"), lambda x: x.sort(1), "ab", R1, 0, D1),
    Case("topk", Rule(TOPK), lambda x: x.topk(1, 0), "ab", R1, 0, {"dim": 0, "k": 1}),
    Case("layer_norm", Rule(NORM), lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), "abc c c", R2),
    Case("layer_norm alone", Rule(NORM), lambda x, w, b: F.layer_norm(x, x.shape[-1:]), "ab - -", R1),
    Case("rms_norm", Rule("... n!, n! -> ... n!"), lambda x, w: F.rms_norm(x, x.shape[-1:], w), "abc c", R2),
    Case("group_norm", Rule(GROUP_NORM), group_norm, "ab34 b b", "b g", 0, {"g": 2}, local=True),
    Case("cross_entropy none", Rule("n c!, n -> n"), cross_entropy("none"), "bc b", "n", ints={1: "c"}),
    Case("cross_entropy sum", Rule("n c!, n ->"), cross_entropy("sum"), "bc b", "n", ints={1: "c"}),
    Case("sdpa", Rule(SDPA), sdpa, "2ab5 2a35 2a34", "b h s e"),
    Case("sdpa grouped", Rule(GROUPED), sdpa, "28a5 2435 2434", "b h s e"),
    Case("sdpa, one key head", Rule(GROUPED), sdpa, "2ba5 2135 2134", "b g s e"),
    Case("transpose", move(TRANSPOSE), lambda x: x.mT, "abc", "...[-1] a b", 5, {"dim0": -1, "dim1": 1}),
    Case("permute", move("a b c -> c a b"), lambda x: x.permute(2, 0, 1), "abc", "a b c", 5),
    Case("merge", move("a b c -> (a b) c"), lambda x: x.flatten(0, 1), "abc", "a c", 5),
    Case("split a dim", move("(a b) c -> a b c"), split_dim, "8a", "a c", 5, {"b": 2}, local=True),
    Case("regroup", move("(a b) c -> a (b c)"), regroup, "8a", "a", 5, {"b": 2}, local=True),
    Case("squeeze", move("... {dim=1} -> ..."), lambda x: x.squeeze(1), "a1b", R2, 5, D1),
    Case("unsqueeze", move("... -> ... {dim=1}"), lambda x: x.unsqueeze(-1), "ab", R2, 5, D2),
    Case("expand", move("... {dim=1} -> ... {dim=n}"), expand, "a1b", R2 + " n", 5, {"dim": 1, "n": "c"}, local=True),
    Case("cat", move("[... {dim}!] -> ... {dim}!"), lambda xs: torch.cat(xs, 1), "[ab,ac,a1]", R1, 5, D1),
    Case("stack", move("[...] -> ... {dim}!"), lambda xs: torch.stack(xs, 1), "[ab,ab,ab]", R2, 5, D1),
    Case("split", move(SPLIT), lambda x: x.split([3, 1, 2], 1), "a6", R1, 5, {"dim": 1, "part": (3, 1, 2)}),
    Case("chunk", move(SPLIT), lambda x: x.chunk(4, 0), "6a", R1, 5, {"dim": 0, "part": (2, 2, 2)}),
    Case("unbind", move("... {dim}! -> [...]"), lambda x: x.unbind(0), "ab", R1, 5, D0),
    Case("flip", move(SAME), lambda x: x.flip(0, 2), "abc", R1, 5, D02),
    Case("roll", move(SAME), lambda x: x.roll(1, 0), "ab", R1, 5, D0),
    Case("slice", move(OUT), lambda x: x[:, :2], "a5", R1, 5, {"dim": 1, "out": 2}),
    Case("pad", move(OUT), lambda x: F.pad(x, (1, 1)), "a5", R1, 5, {"dim": 1, "out": 7}),
    Case("select", move(GONE), lambda x: x[:, -1], "ab", R1, 5, D1),
    Case("tril", move("... r c -> ... r c"), tril, "abc", "...[-1] r c", 5, local=True),
    Case("embedding", lookup("..., v@ d -> ... d"), embedding, "ab ca", R2 + " v d", 2, ints={0: "c"}, local=True),
    Case("index_select", lookup(SELECT), INDEX_SELECT, "abc 6", R2 + " v j", 2, D1, {1: "b"}, local=True),
    Case("gather", lookup(GATHER), GATHERED, "ab a6", "...[-1] v j", 2, D1, {1: "b"}, local=True),
    Case("index_add", ADD_AT, lambda x, i, y: x.index_add(1, i, y), "ab c ac", "...[-1] j", 2, D1, {1: "b"}),
    Case("one_hot", Rule("... -> ... c!"), lambda x: F.one_hot(x, 5), "ab", R2, 0, {"c": 5}, {0: 5}),
]


def one(name):
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_choice_gives_the_undistributed_results_and_gradients(case, sizes):
    assert check(case, SIZES[sizes]) > 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_choice_is_missing(case):
    choices = bind(case, SIZES["even"], draw(case, SIZES["even"])).choices()
    assert {choice.factor for choice in choices if choice.kind == "shard"} == set(case.shards.split())
    assert [choice.kind for choice in choices].count("carry") == case.carries
    assert len(set(choices)) == len(choices)


# --- controls: what is broken on purpose is found

BROKEN = [
    ("softmax", LOST, "the whole mark is lost"),
    ("log_softmax", LOST, "the whole mark is lost"),
    ("cumsum", LOST, "the whole mark is lost"),
    ("flip", LOST, "the whole mark is lost"),
    ("layer_norm", Rule("... n, n, n -> ... n"), "the whole mark is lost"),
    ("rms_norm", Rule("... n, n -> ... n"), "the whole mark is lost"),
    ("sdpa", Rule("b h s d!, b h t d!, b h t e -> b h s e"), "keys may be sharded"),
    ("sdpa", Rule("b h s d, b h t! d, b h t! e -> b h s e"), "what is summed before the softmax may be sharded"),
    ("logsumexp", Rule(DIM), "summed as if it were a sum"),
    ("relu", pointwise(1, linear=0), "not linear"),
    ("add", pointwise(2, linear=[0]), "linear in one alone: the other is added once a rank"),
    ("sub", pointwise(2, linear=[0, 1]), "linear in each alone"),
    ("mul", pointwise(2, linear=[(0, 1)]), "linear in both together"),
    ("div", pointwise(2, linear=[1]), "not linear in the divisor"),
    ("where", pointwise(3, linear=[1]), "linear in one branch alone"),
    ("addcmul", pointwise(3, linear=[(0, 1, 2)]), "linear in all together"),
    ("mm", Rule("m k, k n -> m n", linear=((0, 1),)), "linear in both together"),
    ("linear", einsum("... k, n k, n -> ... n"), "the plus is lost"),
    ("addmm", einsum("m n, m k, k n -> m n"), "the plus is lost"),
    ("index_add", Rule(INDEX_ADD.replace("+", ""), linear=((2,),)), "the plus is lost"),
    ("sum", reduction("max", DIM), "a wrong reduction"),
    ("sum", reduction("avg", DIM), "a wrong reduction"),
    ("mean", reduction("avg", DIM), "a wrong reduction"),
    ("amax", reduction("sum", DIM), "a wrong reduction"),
    ("amin", reduction("max", DIM), "a wrong reduction"),
    ("prod", reduction("sum", DIM), "a wrong reduction"),
    ("cumsum", move(SAME), "linear, but not for every kind of Partial"),
    ("permute", move("a b c -> c b a"), "two dims taken for each other"),
]


@pytest.mark.parametrize(("name", "rule", "why"), BROKEN)
def test_control_a_broken_rule_is_found(name, rule, why):
    case = one(name)
    check(case, ALIKE)
    with pytest.raises(AssertionError):
        check(replace(case, rule=rule), ALIKE)


@pytest.mark.parametrize("side", ["operands", "results", "grads_in", "grads_out"])
@pytest.mark.parametrize("name", ["linear", "mul", "embedding", "layer_norm", "expand"])
def test_control_a_choice_with_one_wrong_placement_is_found(name, side):
    """Replicate for Partial, or the reverse, in any place of any choice."""
    case = one(name)
    _, *choices = bind(case, ALIKE, draw(case, ALIKE)).choices()
    wrong = {REPLICATE: SUM, SUM: REPLICATE}
    found = 0
    for choice in choices:
        places = getattr(choice, side)
        for i, place in enumerate(places):
            floating = side in ("results", "grads_in") or i not in case.ints
            if place in wrong and floating:
                broken = replace(choice, **{side: (*places[:i], wrong[place], *places[i + 1 :])})
                with pytest.raises(AssertionError):
                    check(case, ALIKE, choices=[broken])
                found += 1
    assert found > 0 or side in ("results", "grads_in")


def test_control_a_call_without_its_local_function_is_found():
    for name, run in [
        ("tril", lambda here, x: x.tril(1)),
        ("mean", lambda here, x: x.mean(1)),
        ("expand", lambda here, x: x.expand(-1, here.whole("n"), -1)),
        ("index_select", lambda here, x, i: x.index_select(1, i % max(x.shape[1], 1))),
    ]:
        with pytest.raises(AssertionError):
            check(replace(one(name), run=run), ALIKE)


@pytest.mark.parametrize(("name", "sizes"), [("merge", "uneven"), ("mean of equal parts", "uneven")])
def test_control_a_cut_that_does_not_fit_is_found(name, sizes):
    with pytest.raises(AssertionError):
        check(one(name), SIZES[sizes], allowed=lambda *_: True)


TORCH = {
    "mean": lambda x: x.mean(1),
    "mean of two": lambda x: x.mean((2, 0)),
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(1),
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "conv2d": F.conv2d,
    "expand": lambda x: x.expand(-1, 12, -1),
    "tril": lambda x: x.tril(1),
    "embedding": F.embedding,
    "index_select": lambda x, i: x.index_select(1, i),
    "gather": lambda x, i: x.gather(1, i),
}


@pytest.mark.parametrize("name", TORCH)
def test_a_local_function_on_one_rank_is_the_operator_itself(name):
    case = one(name)
    operands = draw(case, SIZES["even"])
    (result,) = evaluate(case, Here(bind(case, SIZES["even"], operands)), operands)
    torch.testing.assert_close(result, TORCH[name](*operands))
