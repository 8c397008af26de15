# SPDX-License-Identifier: Apache-2.0
"""Gradients of gradients: through operators, redistributions, styles and hooks, against one device in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from torch import nn

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.dtensor import collectives
from hyper_parallel.core.dtensor.modes import implicit_replication
from hyper_parallel.core.shard import OperatorError
from hyper_parallel.core.tensor_parallel import (
    ColwiseParallel,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from hyper_parallel.testing import on_ranks

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def draw(*shape, seed=0):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def put(tensor, mesh, placements):
    """A leaf with these values; of a pending sum the first rank has more than all, and others take away."""
    if P not in placements:
        return distribute_tensor(tensor, mesh, placements).requires_grad_()
    first = mesh.get_coordinate()[placements.index(P)] == 0
    count = mesh.size(placements.index(P))
    part = tensor * (count if first else -1)
    others = [R if p == P else p for p in placements]
    local = distribute_tensor(part, mesh, others).to_local()
    return DTensor.from_local(
        local.clone(), mesh, placements, shape=tuple(tensor.shape)
    ).requires_grad_()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def both_orders(call, leaves):
    """The gradients of a loss, and of a sum of squares and products of them."""
    first = torch.autograd.grad(call(*leaves), leaves, create_graph=True)
    penalty = sum((g * g).sum() for g in first)
    second = torch.autograd.grad(penalty, leaves, allow_unused=True)
    return [whole(g).detach() for g in first], [
        g if g is None else whole(g) for g in second
    ]


def check(call, operands, mesh, placements):
    """Both orders on a mesh against the plain tensors."""
    expected = both_orders(call, [t.clone().requires_grad_() for t in operands])
    found = both_orders(
        call, [put(t, mesh, list(p)) for t, p in zip(operands, placements, strict=True)]
    )
    for mine, true in zip(
        itertools.chain(*found), itertools.chain(*expected), strict=True
    ):
        zero = torch.zeros_like(mine if true is None else true)
        torch.testing.assert_close(
            zero if mine is None else mine,
            zero if true is None else true,
            rtol=1e-9,
            atol=1e-9,
        )


def contraction(x, w):
    return (x @ w.t()).pow(2).mean()


def three_factors(x, a, b):
    return ((x * a) * b).square().sum()


def attention(q, k, v):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v).square().sum()


def embedding(table):
    with implicit_replication():
        return F.embedding(torch.tensor([1, 0, 1, 4]), table).pow(3).sum()


def overwritten(x, value):
    """Of some shards nothing is left, of others all."""
    y = x.roll(1, 1)
    y[2:] = 2.0
    y[:1] = value
    return y.pow(3).sum()


def view_of_changed(x):
    y = x * x
    view = y.view(-1)
    y.exp_()
    return view[0:1].pow(3).sum()


CALLS = {
    "contraction": (contraction, [(4, 8), (5, 8)]),
    "a contraction with empty shards": (contraction, [(1, 3), (1, 3)]),
    "three factors": (three_factors, [(4, 3), (4, 3), (4, 3)]),
    "three factors with empty shards": (three_factors, [(1, 2), (1, 2), (1, 2)]),
    "a function of a sum": (lambda x: x.square().sum().sin(), [(5,)]),
    "a difference": (lambda x, y: F.mse_loss(x, y).sin(), [(3, 2), (3, 2)]),
    "a product": (lambda x: x.prod(0).sin().sum(), [(3, 2)]),
    "norms": (
        lambda x: x.norm(dim=0).pow(3).sum() + x.std() + x.logsumexp(0).square().sum(),
        [(5, 3)],
    ),
    "extremes": (lambda x: x.amax(0).pow(3).sum() * x.amin(), [(5, 3)]),
    "softmax": (
        lambda x, w: ((x @ w).softmax(-1)[..., 0]).square().sum(),
        [(3, 5), (5, 4)],
    ),
    "layer norm": (lambda x, w: F.layer_norm(x, (4,), w).pow(3).sum(), [(3, 4), (4,)]),
    "convolution": (lambda x, w: F.conv1d(x, w).pow(3).sum(), [(2, 4, 5), (3, 4, 2)]),
    "embedding": (embedding, [(5, 3)]),
    "moves": (
        lambda x: (x.t().reshape(-1)[2:7].flip(0).cumsum(0)).pow(3).sum(),
        [(4, 3)],
    ),
    "overwritten shards": (overwritten, [(3, 2), (2,)]),
    "a view of a changed tensor": (view_of_changed, [(4, 2)]),
    "a view of a changed tensor with empty shards": (view_of_changed, [(1, 1)]),
    "attention": (attention, [(1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)]),
    "attention with an empty shard": (
        attention,
        [(1, 1, 1, 2), (1, 1, 3, 2), (1, 1, 3, 2)],
    ),
}


def placements_for(shapes):
    """Every placement of each operand beside copies of the others, and some combinations."""
    options = [[R, P, *map(Shard, range(len(shape)))] for shape in shapes]
    for i, choices in enumerate(options):
        for choice in choices:
            yield tuple(choice if j == i else R for j in range(len(shapes)))
    if len(shapes) > 1:
        yield from list(itertools.product(*options))[3::5]


@on_ranks(2)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_gradients_are_those_of_one_device(name):
    call, shapes = CALLS[name]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    operands = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    for places in dict.fromkeys(placements_for(shapes)):
        check(call, operands, mesh, [[place] for place in places])


@on_ranks(2)
def test_attention_whose_kernel_is_not_chosen():
    """The fused kernel has no second derivative, but a rank without queries does not call it: none may."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    operands = [draw(1, 2, 3, 4, seed=i) for i in range(3)]

    def call(*leaves):
        if isinstance(leaves[0], DTensor):
            return F.scaled_dot_product_attention(*leaves).square().sum()
        return attention(*leaves)

    check(call, operands, mesh, [[S0], [S0], [S0]])
    with pytest.raises(
        RuntimeError, match="derivative for .*attention.* is not implemented"
    ):
        check(call, operands, mesh, [[R], [R], [R]])  # the control, on all ranks alike


@on_ranks(4)
@pytest.mark.parametrize(
    "name",
    ["contraction", "a contraction with empty shards", "softmax", "norms", "moves"],
)
def test_on_two_axes(name):
    call, shapes = CALLS[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    operands = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    options = [
        list(
            itertools.product(
                [R, S0, P][: 2 + (len(s) > 1)], [R, *map(Shard, range(len(s)))]
            )
        )
        for s in shapes
    ]
    for places in list(itertools.product(*options))[::7]:
        check(call, operands, mesh, places)


def third_order(call, leaves):
    """The gradients of a sum of squares of gradients of gradients."""
    loss = call(*leaves)
    for _ in range(2):
        firsts = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        loss = sum((g * g).sum() for g in firsts if g is not None)
    return [whole(g) for g in torch.autograd.grad(loss, leaves)]


@on_ranks(2)
@pytest.mark.parametrize(
    "name",
    [
        "contraction",
        "a contraction with empty shards",
        "softmax",
        "norms",
        "layer norm",
    ],
)
def test_the_third_order(name):
    call, shapes = CALLS[name]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    operands = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    true = third_order(call, [t.clone().requires_grad_() for t in operands])
    for places in dict.fromkeys(placements_for(shapes)):
        pairs = zip(operands, places, strict=True)
        mine = third_order(call, [put(t, mesh, [place]) for t, place in pairs])
        torch.testing.assert_close(mine, true, rtol=1e-8, atol=1e-8)


@on_ranks(2)
def test_a_wrong_adjoint_is_found():
    """The control: without the sum of the gradient's gradient, as it once was, the comparison fails."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    operands, placements = [draw(4, 8), draw(5, 8, seed=1)], [[R], [S1]]
    usual = collectives.pending_sums
    try:
        _replace_pending_sums(lambda layout: ())
        with pytest.raises(AssertionError):
            check(contraction, operands, mesh, placements)
    finally:
        _replace_pending_sums(usual)
    check(contraction, operands, mesh, placements)


def _replace_pending_sums(function):
    collectives.pending_sums = function
    collectives._dual.cache_clear()
    collectives._backward_way.cache_clear()


@on_ranks(2)
@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max", "min", "prod"])
@pytest.mark.parametrize("source", [R, S0, S1, P])
def test_redistribution_to_and_from_pending_reductions(reduce_op, source):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    operand = draw(3, 2).abs() + 0.5

    def through(x):
        if isinstance(x, DTensor):
            x = x.redistribute(mesh, [Partial(reduce_op)]).redistribute(mesh, [S0])
        return x.pow(3).sum().sin()

    check(through, [operand], mesh, [[source]])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(6),
            nn.Linear(6, 8),
            nn.Linear(8, 6),
        )

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


LOCAL = {"use_local_output": False}
PLANS = {
    "tensor parallel": {
        "up": ColwiseParallel(**LOCAL),
        "down": RowwiseParallel(**LOCAL),
        "": Replicated(),
    },
    "sequence parallel": {
        "norm": SequenceParallel(**LOCAL),
        "up": ColwiseParallel(input_layouts=Shard(1), **LOCAL),
        "down": RowwiseParallel(output_layouts=Shard(1), **LOCAL),
        "": Replicated(),
    },
}


def penalty_of_gradients(model, x):
    """A gradient penalty by the parameters and one by the input, and their gradients."""
    loss = model(x).pow(2).mean()
    named = dict(model.named_parameters())
    by_parameters = torch.autograd.grad(loss, list(named.values()), create_graph=True)
    (by_input,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (
        sum(g.pow(2).sum() for g in by_parameters) + (by_input.pow(2).sum() - 1) ** 2
    ).backward()
    return {name: whole(p.grad) for name, p in named.items()}


@on_ranks(4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("sizes", [(1, 4), (2, 2)])
def test_a_gradient_penalty_under_a_plan(plan, sizes):
    torch.manual_seed(0)
    model, x = Net().double(), draw(4, 5, 6, seed=3)
    expected = penalty_of_gradients(model, x.clone().requires_grad_())
    model.zero_grad()
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], PLANS[plan])
    found = penalty_of_gradients(model, x.clone().requires_grad_())
    for name, true in expected.items():
        torch.testing.assert_close(found[name], true, rtol=1e-9, atol=1e-9)


@on_ranks(2)
def test_hooks_see_gradients_of_gradients():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))

    def run(x):
        y = x.square()
        total = y.sum(0)  # pending on the mesh
        total.register_hook(lambda g: g * 2)
        (g,) = torch.autograd.grad(total.sin().sum(), x, create_graph=True)
        return torch.autograd.grad(g.pow(2).sum(), x)[0]

    for shape in ((4, 2), (1, 2)):
        operand = draw(*shape)
        expected = run(operand.clone().requires_grad_())
        for place in (S0, S1, R):
            found = run(distribute_tensor(operand, mesh, [place]).requires_grad_())
            torch.testing.assert_close(found.full_tensor(), expected)


@on_ranks(2)
def test_gradients_may_be_asked_for_with_a_gradient_that_requires_one():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))

    def run(x, seed):
        (g,) = torch.autograd.grad(x.pow(3).sum(0), x, seed, create_graph=True)
        return torch.autograd.grad(g.pow(2).sum(), [x, seed])

    operands = draw(4, 2), draw(2, seed=1)
    expected = run(*(t.clone().requires_grad_() for t in operands))
    found = run(put(operands[0], mesh, [S0]), put(operands[1], mesh, [R]))
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.full_tensor(), true)


@on_ranks(2)
def test_what_has_no_second_derivative_says_so_on_all_ranks():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    scores = put(draw(3, 4), mesh, [S1])
    target = distribute_tensor(torch.tensor([0, 3, 1]), mesh, [R])
    (g,) = torch.autograd.grad(
        F.cross_entropy(scores, target), scores, create_graph=True
    )
    with pytest.raises(OperatorError, match="no second derivative"):
        torch.autograd.grad(g.pow(2).sum(), scores)
