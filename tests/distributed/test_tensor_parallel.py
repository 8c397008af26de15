# SPDX-License-Identifier: Apache-2.0
"""Styles and plans on real ranks against one device: values, gradients, collectives, tables and errors."""

import contextlib
import copy
import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.dtensor.initialisation import (
    init_empty_weights,
    init_parameters,
)
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.dtensor.modes import strict
from hyper_parallel.core.tensor_parallel import (
    FusedColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicated,
    parallel_table,
    replicate,
)
from hyper_parallel.testing import on_ranks

R, S = Replicate(), Shard
WHOLE = {"use_local_output": False}


def tp(ranks=2):
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))


def draw(*shape, seed=1):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def fresh(make, *args, **kwargs):
    torch.manual_seed(0)
    return make(*args, **kwargs).double()


def same(mine, true):
    whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
    torch.testing.assert_close(whole.detach(), true.detach(), rtol=1e-9, atol=1e-9)


def same_gradients(many, one):
    for (name, mine), true in zip(
        many.named_parameters(), one.parameters(), strict=True
    ):
        assert mine.grad is not None, name
        same(mine.grad, true.grad)


class Block(nn.Module):
    """Attention and an MLP, written for one device with sizes that hold for any number of heads."""

    def __init__(self, dim=8, heads=4, hidden=12):
        super().__init__()
        self.size = dim // heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.gate, self.down = (
            nn.Linear(dim, hidden),
            nn.Linear(dim, hidden),
            nn.Linear(hidden, dim),
        )
        self.dropout = nn.Dropout(0.0)

    def split(self, x):
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (self.split(part(h)) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.o(y.transpose(1, 2).flatten(2)))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def block_plan(sequence_parallel, local):
    """By torch's default modules hand out plain shards; else distributed tensors."""
    out = S(1) if sequence_parallel else R
    given = {"input_layouts": out} if local and sequence_parallel else {}
    how = {"use_local_output": local}
    plan = {
        **{name: ColwiseParallel(**given, **how) for name in ("[qkv]", "up", "gate")},
        **{name: RowwiseParallel(output_layouts=out, **how) for name in ("o", "down")},
    }
    if sequence_parallel:
        plan["norm?"] = SequenceParallel(**how)
    elif not local:
        plan[""] = Replicated()
    return plan


@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks(4)
def test_a_block_is_what_megatron_would_write(ranks):
    mesh = init_device_mesh("cpu", (4 // ranks, ranks), mesh_dim_names=("rest", "tp"))[
        "tp"
    ]
    one = fresh(Block)
    x = draw(2, 8, 8)
    true_x = x.clone().requires_grad_()
    one(true_x).pow(2).sum().backward()
    for local in (True, False):
        for cut in (True, False):
            many = parallelize_module(copy.deepcopy(one), mesh, block_plan(cut, local))
            layout = S(1) if cut else R
            mine = distribute_tensor(x.clone().requires_grad_(), mesh, [layout])
            enters = mine.to_local() * 1 if local else mine * 1
            with CommunicationLedger(mesh) as ledger, strict():
                y = many(enters)
            forward = ledger.counts()
            assert isinstance(y, DTensor) != local
            y = DTensor.from_local(y, mesh, [layout]) if local else y
            loss = y.pow(2).sum()
            ledger.entries.clear()
            with ledger:
                loss.backward()
            backward = ledger.counts()
            same(y, one(x))
            same(mine.grad, true_x.grad)
            if cut:
                assert forward == {
                    "all_gather_into_tensor": 2,
                    "reduce_scatter_tensor": 2,
                }, ledger.table()
                # The gradients of both norms and of the row-wise biases are summed together at the end.
                sums = backward.pop("all_reduce")
                assert sums == 1, ledger.table()
                assert backward == {
                    "all_gather_into_tensor": 2,
                    "reduce_scatter_tensor": 2,
                }, ledger.table()
            else:
                assert forward == {"all_reduce": 2}
                assert backward == {"all_reduce": 2}, ledger.table()
            for (name, p), true in zip(
                many.named_parameters(), one.parameters(), strict=True
            ):
                if isinstance(p, DTensor) or not cut:
                    same(p.grad, true.grad)
                else:
                    raise AssertionError(name)


@on_ranks(2)
def test_styles_place_parameters_inputs_and_outputs():
    mesh, x = tp(), draw(3, 4, 6)
    linear = fresh(nn.Linear, 6, 10)
    column = parallelize_module(copy.deepcopy(linear), mesh, ColwiseParallel())
    assert column.weight.placements == column.bias.placements == (S(0),)
    assert isinstance(column.weight, nn.Parameter)
    y = column(x)
    assert type(y) is torch.Tensor
    same(y, linear(x).chunk(2, -1)[mesh.get_local_rank()])
    column = parallelize_module(
        copy.deepcopy(linear), mesh, ColwiseParallel(output_layouts=R, **WHOLE)
    )
    assert column(x).placements == (R,)
    same(column(x), linear(x))
    cut = distribute_tensor(x, mesh, [S(1)])
    same(column(cut), linear(x))  # a distributed tensor says itself how it lies
    column = parallelize_module(
        copy.deepcopy(linear), mesh, ColwiseParallel(input_layouts=S(0), **WHOLE)
    )
    rows = draw(4, 6)
    same(column(rows.chunk(2)[mesh.get_local_rank()]), linear(rows))

    row = parallelize_module(copy.deepcopy(linear), mesh, RowwiseParallel())
    assert row.weight.placements == (S(1),)
    assert row.bias.placements == (R,)
    same(row(x.chunk(2, -1)[mesh.get_local_rank()]), linear(x))
    row = parallelize_module(
        copy.deepcopy(linear),
        mesh,
        RowwiseParallel(input_layouts=R, output_layouts=S(1), **WHOLE),
    )
    assert row(x).placements == (S(1),)
    same(row(x), linear(x))
    row = parallelize_module(
        copy.deepcopy(linear),
        mesh,
        RowwiseParallel(input_layouts=R, output_layouts=Partial()),
    )
    parts = DTensor.from_local(row(x), mesh, [Partial()])
    same(parts, linear(x))

    ids = torch.tensor([[0, 3, 6], [2, 2, 5]])
    table = fresh(nn.Embedding, 7, 5, padding_idx=2)
    for style, placement, uneven in (
        (ColwiseParallel(**WHOLE), S(1), S(2)),
        (RowwiseParallel(**WHOLE), S(0), R),
    ):
        many = parallelize_module(copy.deepcopy(table), mesh, style)
        assert many.weight.placements == (placement,)
        y = many(ids)
        assert y.placements == (uneven,)
        same(y, table(ids))
        y.pow(2).sum().backward()
        table.zero_grad()
        table(ids).pow(2).sum().backward()
        same(many.weight.grad, table.weight.grad)


@on_ranks(2)
def test_convolutions():
    mesh, image = tp(), draw(2, 4, 5, 5)
    for make, size in ((nn.Conv2d, 3), (nn.ConvTranspose2d, 3)):
        one = fresh(
            lambda make=make, size=size: nn.Sequential(
                make(4, 6, size), nn.ReLU(), make(6, 3, size)
            )
        )
        plan = {"0": ColwiseParallel(**WHOLE), "2": RowwiseParallel(**WHOLE)}
        many = parallelize_module(copy.deepcopy(one), mesh, plan)
        with CommunicationLedger(mesh) as ledger:
            y = many(image)
            y.pow(2).sum().backward()
        assert ledger.counts() == {"all_reduce": 1}, ledger.table()
        one(image).pow(2).sum().backward()
        same(y, one(image))
        same_gradients(many, one)


class Fused(nn.Module):
    def __init__(self, dim=8, heads=4, kv=2, hidden=6, equal=False):
        super().__init__()
        self.size, self.equal = dim // heads, equal
        self.sizes = [dim, kv * self.size, kv * self.size] if not equal else [dim] * 3
        self.qkv, self.o = nn.Linear(dim, sum(self.sizes)), nn.Linear(dim, dim)
        self.gate_up, self.down = (
            nn.Linear(dim, 2 * hidden, bias=False),
            nn.Linear(hidden, dim),
        )

    def forward(self, x):
        if self.equal:
            q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.size)).unbind(2)
        else:
            q, k, v = (
                part.unflatten(-1, (-1, self.size))
                for part in self.qkv(x).split(self.sizes, -1)
            )
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


@on_ranks(2)
def test_fused_projections_cost_what_separate_ones_do():
    mesh, x = tp(), draw(2, 5, 8)
    for equal in (True, False):
        for hidden in (6, 5):  # 5 is cut into 3 and 2
            one = fresh(Fused, equal=equal, hidden=hidden)
            plan = {
                "qkv": FusedColwiseParallel(
                    sections=3 if equal else one.sizes,
                    heads=12 if equal else 8,
                    **WHOLE,
                ),
                "gate_up": FusedColwiseParallel(sections=2, **WHOLE),
                "o": RowwiseParallel(**WHOLE),
                "down": RowwiseParallel(**WHOLE),
                "": Replicated(),
            }
            many = parallelize_module(copy.deepcopy(one), mesh, plan)
            mine, true = x.clone().requires_grad_(), x.clone().requires_grad_()
            with CommunicationLedger(mesh) as ledger, strict():
                y = many(mine)
                y.pow(2).sum().backward()
            assert ledger.counts(backward=False) == {"all_reduce": 2}, ledger.table()
            assert ledger.counts(backward=True) == {"all_reduce": 2}, ledger.table()
            one(true).pow(2).sum().backward()
            same(y, one(x))
            same(mine.grad, true.grad)
            same_gradients(many, one)
            for name, value in many.state_dict().items():  # in the order of one device
                assert torch.equal(value.full_tensor(), one.state_dict()[name])


class Tied(nn.Module):
    def __init__(self, vocab=11, dim=6):
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(vocab, dim),
            nn.Linear(dim, vocab, bias=False),
        )
        self.norm = nn.LayerNorm(dim)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids)))


@on_ranks(2)
def test_tied_weights_stay_tied():
    mesh, ids = tp(), torch.tensor([[1, 10, 3], [4, 4, 0]])
    one = fresh(Tied)
    plan = {
        "embed": RowwiseParallel(**WHOLE),
        "head": ColwiseParallel(**WHOLE),
        "": Replicated(),
    }
    for chosen in (
        plan,
        {name: plan[name] for name in ("embed", "")},
        {name: plan[name] for name in ("head", "")},
    ):
        is_forgotten = "embed" not in chosen
        with (
            pytest.warns(UserWarning, match="'embed' shares its table")
            if is_forgotten
            else contextlib.nullcontext()
        ):
            many = parallelize_module(copy.deepcopy(one), mesh, chosen)
        assert many.head.weight is many.embed.weight
        assert many.head.weight.placements == (S(0),)
        assert len(list(many.parameters())) == 3
        copied = copy.deepcopy(one)
        optimizer, expected = (
            torch.optim.AdamW(net.parameters(), lr=0.1) for net in (many, copied)
        )
        for _ in range(3):
            loss = F.cross_entropy(
                many(ids).flatten(0, 1), distribute_tensor(ids.flatten(), mesh, [R])
            )
            true = F.cross_entropy(copied(ids).flatten(0, 1), ids.flatten())
            same(loss, true)
            for value, update in ((loss, optimizer), (true, expected)):
                update.zero_grad()
                value.backward()
                update.step()
        same(many.head.weight, copied.head.weight)
    with pytest.raises(
        ValueError,
        match=r"head: .* already lies in .* where two share a parameter their styles must",
    ):
        parallelize_module(
            copy.deepcopy(one),
            mesh,
            {"embed": ColwiseParallel(), "head": ColwiseParallel()},
        )


class Tagged(nn.Module):
    def forward(self, a, n, b=None):
        self.seen = (a, b)
        return a * n, (b if b is not None else a)


@on_ranks(2)
def test_prepare_inputs_and_outputs():
    mesh = tp()
    rank, x = mesh.get_local_rank(), draw(4, 6)
    part = x.chunk(2)[rank]

    def made(style):
        return parallelize_module(Tagged(), mesh, style)

    module = made(
        PrepareModuleInput(input_layouts=(S(0), None), desired_input_layouts=(R, None))
    )
    y, _ = module(part, 3)
    assert module.seen[0].placements == (R,)
    same(y, x * 3)
    module = made(
        PrepareModuleInput(
            input_layouts=(S(0), None),
            desired_input_layouts=(S(1), None),
            input_kwarg_layouts={"b": R},
            desired_input_kwarg_layouts={"b": S(1)},
            use_local_output=True,
        )
    )
    module(part, 3, b=x)
    for value in module.seen:
        assert type(value) is torch.Tensor
        same(value, x.chunk(2, 1)[rank])
    module = made(
        PrepareModuleOutput(
            output_layouts=(S(0), None), desired_output_layouts=(R, None)
        )
    )
    y, other = module(part, 2)
    same(y, x * 2)
    assert other is part
    module = made(
        PrepareModuleOutput(
            output_layouts=[S(0), S(0)], desired_output_layouts=[S(1), R], **WHOLE
        )
    )
    y, other = module(part, 2)
    assert (y.placements, other.placements) == ((S(1),), (R,))
    module = made(
        PrepareModuleInputOutput(
            input_layouts=(R, None),
            desired_input_layouts=(S(0), None),
            use_local_input=True,
            output_layouts=(S(0), None),
            desired_output_layouts=(R, None),
        )
    )
    y, _ = module(x, 5)
    assert tuple(module.seen[0].shape) == (2, 6)
    same(y, x * 5)


@on_ranks(2)
def test_prepare_refuses_what_does_not_fit():
    mesh, x = tp(), draw(4, 6)
    with pytest.raises(
        AssertionError,
        match="input_layouts and desired_input_layouts must have one length",
    ):
        PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=(R,))
    with pytest.raises(AssertionError, match="must have one length"):
        PrepareModuleInput(input_layouts=R)
    with pytest.raises(AssertionError, match="must name the same arguments"):
        PrepareModuleInput(
            input_kwarg_layouts={"a": R}, desired_input_kwarg_layouts={"b": R}
        )
    with pytest.raises(
        AssertionError,
        match="output_layouts and desired_output_layouts must have one length",
    ):
        PrepareModuleOutput(output_layouts=(R, R), desired_output_layouts=R)
    module = parallelize_module(
        Tagged(), mesh, PrepareModuleInput(input_layouts=R, desired_input_layouts=R)
    )
    with pytest.raises(
        ValueError, match="1 input layouts were given, but it has 2 inputs"
    ):
        module(x, 2)
    module = parallelize_module(
        Tagged(),
        mesh,
        PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=(R, R)),
    )
    with pytest.raises(ValueError, match="input 1 has the layout R, but it is int"):
        module(x, 2)
    module = parallelize_module(
        Tagged(), mesh, PrepareModuleOutput(output_layouts=R, desired_output_layouts=R)
    )
    with pytest.raises(
        ValueError, match="1 output layouts were given, but it has 2 outputs"
    ):
        module(x, 2)


@on_ranks(2)
def test_a_plan_tells_what_it_did():
    mesh = tp()
    net = nn.Sequential(Block(), Block(), nn.Linear(8, 3))
    with pytest.warns(
        UserWarning, match=r"'\*.qq' matches no module; did you mean .*\.q"
    ) as told:
        parallelize_module(
            net, mesh, {"*.qq": ColwiseParallel(), "*.q": ColwiseParallel(heads=4)}
        )
    assert len(told) == 1
    assert told[0].filename == __file__
    table = parallel_table(net).splitlines()
    [line] = [line for line in table if line.startswith("*.q ")]
    assert (
        " ".join(line.split())
        == "*.q ColwiseParallel(heads=4) weight [S(0)] [8, 8], bias [S(0)] [8] 2"
    )
    [line] = [line for line in table if line.startswith("2 ")]
    assert "plain" in line
    assert table[-1].startswith(
        "plain on every rank: 0.norm1.weight, 0.norm1.bias, 0.norm2.weight, 0.k.weight"
    )
    with pytest.warns(UserWarning, match="there is no plan"):
        parallelize_module(nn.Linear(2, 2), mesh)


@on_ranks(4)
def test_bad_plans_are_refused():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(
        ValueError,
        match=r"expected a mesh of one axis, got .*; take one of its axes, mesh\['tp'\]",
    ):
        parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
    four = tp(4)
    with pytest.raises(
        ValueError,
        match=r"0.q: ColwiseParallel: 6 heads cannot be shared evenly by the 4 ranks of",
    ):
        parallelize_module(
            nn.Sequential(Block(12, 6)), four, {"*.q": ColwiseParallel(heads=6)}
        )
    with pytest.raises(ValueError, match="8 outputs are not those of 3 heads"):
        parallelize_module(nn.Linear(4, 8), four, ColwiseParallel(heads=3))
    with pytest.raises(
        ValueError,
        match=r"8 heads in sections of \(8, 4, 4\) cannot be shared evenly by the 4 ranks",
    ):
        parallelize_module(
            nn.Linear(8, 16), four, FusedColwiseParallel(sections=(8, 4, 4), heads=8)
        )
    with pytest.raises(ValueError, match="16 outputs are not 3 sections of a size"):
        parallelize_module(nn.Linear(8, 16), four, FusedColwiseParallel(sections=3))
    with pytest.raises(
        ValueError, match=r"sections \(8, 4\) do not add up to 16 outputs"
    ):
        parallelize_module(
            nn.Linear(8, 16), four, FusedColwiseParallel(sections=(8, 4))
        )
    with pytest.raises(
        TypeError,
        match="norm1: RowwiseParallel: expected a linear layer, .* got LayerNorm",
    ):
        parallelize_module(Block(), four, {"norm1": RowwiseParallel()})
    with pytest.raises(TypeError, match="expected a style for 'q', got 'colwise'"):
        parallelize_module(Block(), four, {"q": "colwise"})
    with pytest.raises(
        TypeError, match=r"input_layouts: expected a placement .* got \(Shard"
    ):
        ColwiseParallel(input_layouts=(S(0),))
    linear = parallelize_module(nn.Linear(4, 8), four, ColwiseParallel())
    with pytest.raises(
        ValueError,
        match=r"weight of Linear already lies in .*; a module takes one style, and",
    ):
        parallelize_module(linear, four, RowwiseParallel())
    with pytest.raises(
        ValueError, match="Linear: expected a tensor as its first positional argument"
    ):
        linear(input=torch.ones(2, 4))
    other = init_device_mesh(
        "cpu",
        (2,),
        mesh_dim_names=("tp",),
        rank_list=[four.rank // 2 * 2, four.rank // 2 * 2 + 1],
    )
    with pytest.raises(ValueError, match="which is not an axis of the tensor's mesh"):
        linear(distribute_tensor(torch.ones(2, 4), other, [R]))
    with pytest.raises(TypeError, match="abstract"):
        ParallelStyle()


@on_ranks(2)
def test_uneven_sizes():
    mesh = tp()
    one = fresh(lambda: nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 5)))
    x = draw(3, 5, 6)
    for local in (True, False):  # the row-wise layer knows how many features there are
        plan = {
            "0": ColwiseParallel(use_local_output=local),
            "2": RowwiseParallel(use_local_output=local),
        }
        many = parallelize_module(copy.deepcopy(one), mesh, plan)
        y = many(x)
        same(y, one(x))
        y.pow(2).sum().backward()
        one.zero_grad()
        one(x).pow(2).sum().backward()
        same_gradients(many, one)
    # A sequence of 5 in plain shards: nobody could tell from one of them how long it is.
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=S(1))}
    many = parallelize_module(copy.deepcopy(one), mesh, plan)
    with pytest.raises(
        ValueError,
        match=r"output of shape \(3, 5, 5\) .* different sizes.*use_local_output=False",
    ):
        many(x)
    plan = {
        "0": ColwiseParallel(**WHOLE),
        "2": RowwiseParallel(output_layouts=S(1), **WHOLE),
    }
    many = parallelize_module(copy.deepcopy(one), mesh, plan)
    assert many(x).placements == (S(1),)
    same(many(x), one(x))


@on_ranks(4)
def test_data_and_tensor_parallel_together():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, place = draw(4, 8, 8), mesh.get_coordinate()[0]
    one = fresh(Block)
    truth = one(x)
    truth.pow(2).mean().backward()
    for cut in (True, False):
        many = copy.deepcopy(one)
        plan = block_plan(cut, local=False)
        plan.pop("", None)
        parallelize_module(many, mesh["tp"], plan)
        replicate(many, mesh["dp"])
        assert all(p.device_mesh == mesh for p in many.parameters())
        assert many.q.weight.placements == (R, S(0))
        with CommunicationLedger(mesh) as ledger:
            y = many(x.chunk(2)[place])
            y.pow(2).mean().backward()
        same(y, truth)
        same_gradients(many, one)
        along = [
            entry.axis
            for entry in ledger.entries
            if entry.collective == "all_reduce" and entry.axis != "tp"
        ]
        assert along == (["dp", "all axes"] if cut else ["dp"]), (
            ledger.table()
        )  # gradients of norms along both
    with pytest.raises(ValueError, match="copied along a data axis already"):
        replicate(many, mesh["dp"])
    many = copy.deepcopy(one)
    replicate(
        parallelize_module(
            many, mesh["tp"], block_plan(sequence_parallel=False, local=True)
        ),
        mesh["dp"],
    )
    with pytest.raises(
        ValueError,
        match=r"plain shard, but in this model plain tensors are taken for copies; say use_loc",
    ):
        many(x.chunk(2)[place])


@on_ranks(4)
def test_data_parallel_alone_and_other_batch_dims():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    one = fresh(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)))
    x = draw(6, 8, 3)
    one(x).pow(2).mean().backward()
    many = replicate(copy.deepcopy(one), mesh, batch_dim=1)
    y = many(x.chunk(4, 1)[mesh.get_local_rank()])
    assert y.placements == (S(1),)
    with CommunicationLedger(mesh) as ledger:
        y.pow(2).mean().backward()
    assert ledger.counts() == {"all_reduce": 1}
    same(y, one(x))
    same_gradients(many, one)
    for mine, true in zip(
        replicate(different(mesh.rank), mesh).parameters(),
        different(0).parameters(),
        strict=True,
    ):
        same(mine, true)  # all have the first rank's
    with pytest.raises(ValueError, match=r"must be axes of one mesh"):
        net = parallelize_module(
            nn.Linear(4, 4),
            init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)),
            ColwiseParallel(),
        )
        replicate(net, mesh)


def different(seed):
    torch.manual_seed(seed)
    return nn.Linear(4, 8)


@on_ranks(2)
def test_whose_parameters_count():
    mesh = tp()
    rank = mesh.get_local_rank()
    for source in (0, 1):
        many = parallelize_module(
            different(rank), mesh, ColwiseParallel(), src_data_rank=source
        )
        same(many.weight, different(source).weight)
    many = parallelize_module(
        different(rank), mesh, ColwiseParallel(), src_data_rank=None
    )
    assert torch.equal(many.weight.to_local(), different(rank).weight.chunk(2)[rank])
    many = parallelize_module(different(rank), mesh, Replicated(), src_data_rank=1)
    assert torch.equal(many.weight.to_local(), different(1).weight)


@on_ranks(2)
def test_parameters_without_data():
    mesh = tp()
    torch.manual_seed(0)
    true = Block()
    torch.manual_seed(0)
    with init_empty_weights():
        many = Block()
    parallelize_module(many, mesh, block_plan(sequence_parallel=True, local=False))
    assert all(p.is_meta for p in many.parameters())
    init_parameters(many)
    for mine, expected in zip(many.parameters(), true.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), expected)


@on_ranks(2)
def test_copies_of_a_parallel_model_and_errors_within_it():
    mesh, x = tp(), draw(2, 4, 8)
    one = fresh(Block)
    many = parallelize_module(
        copy.deepcopy(one), mesh, block_plan(sequence_parallel=False, local=False)
    )
    twin = copy.deepcopy(many)
    assert twin.q.weight is not many.q.weight
    same(twin(x), one(x))
    with pytest.raises(ValueError, match="factor n0 has size 7"):
        many(draw(2, 4, 7))
    with pytest.raises(RuntimeError, match="is a plain tensor among"):
        many.q.weight + torch.ones(
            8, 8, dtype=torch.float64
        )  # what holds within the model does not hold after it
    same(many(x), one(x))


@on_ranks(4)
def test_dropout_keeps_replicas_in_step():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    one = fresh(Block)
    one.dropout.p = 0.5
    x = draw(4, 8, 8)
    for cut in (True, False):
        many = copy.deepcopy(one)
        plan = block_plan(cut, local=False)
        plan.pop("", None)
        replicate(parallelize_module(many, mesh["tp"], plan), mesh["dp"])
        optimizer = torch.optim.SGD(many.parameters(), lr=0.1)
        torch.manual_seed(7)
        outputs = []
        for _ in range(3):
            y = many(x.chunk(2)[mesh.get_coordinate()[0]])
            optimizer.zero_grad()
            y.pow(2).mean().backward()
            optimizer.step()
            outputs.append(y.full_tensor().detach())
        assert not torch.equal(outputs[0], one.eval()(x))
        for p in many.parameters():
            DTensor.from_local(
                p.to_local().detach(), mesh, p.placements, shape=p.shape, run_check=True
            )
        many.eval()
        same(many(x.chunk(2)[mesh.get_coordinate()[0]]), moved_to_one(many, one)(x))


def moved_to_one(many, one):
    twin = copy.deepcopy(one).eval()
    twin.load_state_dict(
        {name: value.full_tensor() for name, value in many.state_dict().items()}
    )
    return twin


@on_ranks(2)
def test_no_warning_in_a_plan_that_fits():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize_module(
            Block(), tp(), block_plan(sequence_parallel=True, local=False)
        )


# --- where outputs stay distributed by default


class Wide(nn.Module):
    """An MLP, written for one device, that looks at its global shape."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        h = self.up(x)
        assert h.shape[-1] == 8
        return self.down(h.relu() + torch.arange(8.0, dtype=h.dtype))


def by_default(**how):
    return {"up": ColwiseParallel(**how), "down": RowwiseParallel(**how)}


@on_ranks(4)
def test_inside_a_replicated_model_outputs_stay_distributed():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    one, x = fresh(Wide), draw(4, 6)
    one(x).pow(2).mean().backward()
    part = x.chunk(2)[mesh["dp"].get_local_rank()]

    def check(many, given):
        out = many(given)
        assert isinstance(out, DTensor)
        out.pow(2).mean().backward()
        same(out, one(x))
        same_gradients(many, one)
        assert isinstance(many.up(given), DTensor)  # also outside of the model's call

    plan = {**by_default(), "": Replicated()}
    check(parallelize_module(copy.deepcopy(one), mesh["tp"], plan), x)
    # In another order, and by replicate alone.
    many = parallelize_module(copy.deepcopy(one), mesh["tp"], Replicated())
    with pytest.raises(ValueError, match="already lies in"):
        parallelize_module(many, mesh["tp"], by_default())
    many = parallelize_module(copy.deepcopy(one), mesh["tp"], by_default())
    check(replicate(many, mesh["dp"]), part)
    twin = copy.deepcopy(many)
    assert isinstance(twin(part), DTensor)


@on_ranks(2)
def test_elsewhere_outputs_are_plain_by_default_and_what_is_said_counts():
    mesh, x = tp(), draw(4, 6)
    many = parallelize_module(fresh(Block), mesh, {"up": ColwiseParallel()})
    assert type(many.up(draw(4, 8))) is torch.Tensor
    plan = {**by_default(use_local_output=True), "": Replicated()}
    many = parallelize_module(fresh(Wide), mesh, plan)
    with pytest.raises(ValueError, match=r"plain tensors are taken for copies.*HP406"):
        many(x)
    plan = {**by_default(), "": Replicated(use_local_output=True)}
    out = parallelize_module(fresh(Wide), mesh, plan)(x)
    assert type(out) is torch.Tensor
    same(out, fresh(Wide)(x))


class Projects(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, a, b):
        return self.up(a), b


@on_ranks(4)
def test_a_style_and_a_data_axis_on_one_module_agree_on_its_inputs():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    one, x = fresh(nn.Linear, 6, 8), draw(4, 6)
    one(x).pow(2).mean().backward()
    style = RowwiseParallel(output_layouts=S(1))  # a plain input is sharded along tp
    many = parallelize_module(copy.deepcopy(one), mesh["tp"], style)
    replicate(many, mesh["dp"])
    rows = x.chunk(2)[mesh["dp"].get_local_rank()]
    out = many(rows.chunk(2, 1)[mesh["tp"].get_local_rank()])
    assert out.placements == (S(0), S(1))
    out.pow(2).mean().backward()
    same(out, one(x))
    same_gradients(many, one)
    prepare = PrepareModuleInput(
        input_kwarg_layouts={"b": S(1)}, desired_input_kwarg_layouts={"b": S(1)}
    )
    one = fresh(Projects)
    plan = {"up": ColwiseParallel(), "": prepare}
    many = parallelize_module(copy.deepcopy(one), mesh["tp"], plan)
    replicate(many, mesh["dp"])
    y, b = many(rows, b=rows.chunk(2, 1)[mesh["tp"].get_local_rank()])
    assert (y.placements, b.placements) == ((S(0), S(1)), (S(0), S(1)))
    same(y, one(x, x)[0])
    same(b, x)
