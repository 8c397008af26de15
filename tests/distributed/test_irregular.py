# SPDX-License-Identifier: Apache-2.0
"""Tensors that are cut section by section, between real ranks: values, gradients, placements and what they cost."""

import copy
import io
import itertools
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import one_layout, split_up
from rules.cases import FAMILIES, attention, joins
from rules.operators import SIZES, draw, flat, leaf, like
from thorough import THOROUGH, compare_few_collectives
from torch import nn
from torch.utils._pytree import tree_leaves

from hyper_parallel import (
    DTensor,
    FusedShard,
    Layout,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    ZigzagShard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.core.distributed_checkpoint import load, save
from hyper_parallel.core.dtensor import dtensor, interop
from hyper_parallel.core.dtensor.collectives import redistribute
from hyper_parallel.core.dtensor.initialisation import (
    init_empty_weights,
    init_parameters,
)
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.dtensor.modes import explicit
from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER
from hyper_parallel.core.shard.arguments import OperatorError
from hyper_parallel.core.shard.custom_shard import custom_shard
from hyper_parallel.core.shard.ops.operator import OPERATORS
from hyper_parallel.testing import RankError, on_ranks, run_ranks
from hyper_parallel.verification import verify

R = Replicate()
LONG = 300.0  # seconds, for tests of many operators
SECTIONS = [
    (8, 4, 4),
    (4, 4, 4),
    (3, 5),
    (1, 2),
    (2, 0, 3),
    (6, 6),
]  # equal, uneven, empty on some ranks, empty
ON_MESHES = (
    [
        *((sections, (2,)) for sections in SECTIONS),
        *((sections, (4,)) for sections in ((8, 4, 4), (3, 5))),
        *((sections, (2, 2)) for sections in ((8, 4, 4), (2, 0, 3))),
    ]
    if THOROUGH
    else [((8, 4, 4), (2,)), ((1, 2), (2,)), ((3, 5), (4,)), ((2, 0, 3), (2, 2))]
)


def mesh_of(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


def placed(mesh, placement, batch=R):
    """Along tp as told; along dp, if there is one, ``batch``."""
    return [batch] * (mesh.ndim - 1) + [placement]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def normal(*shape, seed=0):
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


# --- redistribution


def irregular_placements(dim, sections, ranks):
    """One placement of each kind that divides a dim of these sections."""
    size = sum(sections)
    sizes = [0] * ranks  # the last rank holds most, the first of three nothing
    for index in range(size):
        sizes[-1 - min(index % 3, ranks - 1)] += 1
    return [FusedShard(dim, sections), RaggedShard(dim, sizes), ZigzagShard(dim)]


@st.composite
def layouts(draw, mesh, ndim, dim, sections):
    """A layout in which any axis or none cuts a dim section by section, and the others do as they like."""
    drawn = draw(one_layout(mesh, ndim, ops=(None, "sum")))
    if not draw(st.booleans()):
        return drawn
    axis = draw(st.integers(0, mesh.mesh.ndim - 1))
    placements = [Replicate() if p.is_shard(dim) else p for p in drawn.placements]
    kinds = irregular_placements(dim, sections, mesh.mesh_shape[axis])
    placements[axis] = draw(st.sampled_from(kinds))
    # An axis whose factor counted the one that was replaced is outermost now.
    placements = [
        Shard(p.dim) if type(p) is not Shard and p.is_shard() and p.dim != dim else p
        for p in placements
    ]
    return mesh(placements).bind(ndim)


@st.composite
def moves(draw, ranks):
    mesh = Layout(
        *draw(
            st.sampled_from(
                {2: [((2,), ("a",))], 4: [((4,), ("a",)), ((2, 2), ("a", "b"))]}[ranks]
            )
        )
    )
    ndim = draw(st.integers(1, 3))
    dim = draw(st.integers(0, ndim - 1))
    sections = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    shape = [draw(st.integers(1, 5)) for _ in range(ndim)]
    shape[dim] = sum(sections)
    others = [sections, tuple(reversed(sections))]
    pair = [
        draw(layouts(mesh, ndim, dim, draw(st.sampled_from(others)))) for _ in range(2)
    ]
    return (*pair, tuple(shape))


def move(source, target, shape, shards, weights):
    place = source.mesh.get_coordinate()
    local = torch.tensor(shards[place], requires_grad=True)
    moved = redistribute(local, source, target, shape)
    (moved * torch.tensor(weights[place])).sum().backward()
    everything = redistribute(
        moved.detach(), target, target.with_placements([R] * target.mesh.ndim), shape
    )
    return moved.detach().numpy(), local.grad.numpy(), everything.numpy()


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_layout_to_any_other(ranks):
    @settings(max_examples=80 if THOROUGH else 25, deadline=None, derandomize=True)
    @given(moves(ranks), st.integers(0, 1000))
    def property_holds(drawn, seed):
        source, target, shape = drawn
        rng = np.random.default_rng(seed)
        values, weight = rng.standard_normal(shape), rng.standard_normal(shape)
        weights = split_up(weight, target.reset_partial(), rng)
        results = run_ranks(
            move, ranks, source, target, shape, split_up(values, source, rng), weights
        )
        places = itertools.product(*(range(n) for n in source.mesh_shape))
        expected, gradients = (
            split_up(values, target, rng),
            split_up(weight, source.reset_partial(), rng),
        )
        for place, (moved, gradient, everything) in zip(places, results, strict=True):
            if not target.is_partial():
                np.testing.assert_allclose(moved, expected[place], rtol=1e-12)
            np.testing.assert_allclose(everything, values, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(
                gradient, gradients[place], rtol=1e-12, atol=1e-12
            )

    property_holds()


@on_ranks(4)
@pytest.mark.parametrize("sections", SECTIONS)
def test_gradients_that_come_in_parts(sections):
    layout, shape = Layout((4,), ("tp",)), (sum(sections), 3)
    fused, copied = layout([FusedShard(0, sections)]).bind(2), layout([R]).bind(2)
    parts = [normal(*shape, seed=rank) for rank in range(4)]
    local = fused.part_of(normal(*shape, seed=9)).requires_grad_()
    gathered = redistribute(local, fused, copied, shape, summed=(0,))
    close(gathered, normal(*shape, seed=9))
    (gathered * parts[get_platform().get_rank()]).sum().backward()
    close(local.grad, fused.part_of(sum(parts)))


@on_ranks(4)
def test_only_the_axis_that_changes_communicates():
    mesh = mesh_of((2, 2))
    fused = FusedShard(0, (4, 2, 2))
    whole_tensor = normal(8, 6)
    pending = DTensor.from_local(
        Layout.from_device_mesh(mesh)([R, fused]).part_of(whole_tensor),
        mesh,
        [Partial(), fused],
    )
    with CommunicationLedger(mesh) as ledger:
        reduced = pending.redistribute(None, [R, fused])
        cut = reduced.redistribute(None, [Shard(1), fused])
        back = cut.redistribute(None, [R, fused])
    assert [(entry.collective, entry.axis) for entry in ledger.entries] == [
        ("all_reduce", "dp"),
        ("all_gather_into_tensor", "dp"),
    ]
    close(back.full_tensor(), 2 * whole_tensor)


def swapped(shape, sections):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    fused, data = FusedShard(0, sections), normal(*shape)
    x = distribute_tensor(data, mesh, [Shard(1), fused, Shard(2)]).requires_grad_()
    with CommunicationLedger(mesh) as ledger:
        y = x.redistribute(None, [Shard(2), fused, Shard(1)])
    assert torch.equal(y.to_local(), y.layout.part_of(data))
    assert all(
        set(entry.axis) <= set("ac") or "[" in entry.axis for entry in ledger.entries
    )
    (y * distribute_tensor(data, mesh, y.placements)).sum().backward()
    assert torch.equal(x.grad.full_tensor(), data)


@pytest.mark.parametrize("sections", [(4, 2), (3, 1, 2)])
def test_two_axes_change_places_around_the_sections(sections):
    run_ranks(swapped, 8, (6, 4, 6), sections, timeout=LONG)


# --- tensors


@on_ranks(4)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@pytest.mark.parametrize(
    ("sections", "kind"),
    [
        (sections, kind)
        for number, sections in enumerate(SECTIONS)
        for kind in range(3)
        if THOROUGH or kind == number % 3
    ],
)
def test_tensors_come_and_go(mesh_shape, sections, kind):
    mesh, data = mesh_of(mesh_shape), normal(sum(sections), 3)
    ranks = mesh_shape[-1]
    placements = placed(mesh, irregular_placements(0, sections, ranks)[kind])
    with CommunicationLedger(mesh) as ledger:
        made = distribute_tensor(data, mesh, placements)
    assert ledger.counts() == {}
    assert torch.equal(made.to_local(), made.layout.part_of(data))
    assert torch.equal(made.full_tensor(), data)
    if kind != 2 or len(data) % (2 * ranks) == 0:  # a zigzag does not know the size
        again = DTensor.from_local(made.to_local(), mesh, placements, run_check=True)
        assert again.shape == data.shape
    assert torch.equal(
        DTensor.from_local(
            made.to_local(), mesh, placements, shape=data.shape
        ).full_tensor(),
        data,
    )
    assert torch.equal(copy.deepcopy(made).full_tensor(), data)
    assert copy.deepcopy(made).placements == tuple(placements)
    assert torch.equal(
        made.redistribute(None, placed(mesh, Shard(0))).to_local(),
        made.layout.regular().part_of(data),
    )
    for factory in ("rand", "randn"):
        torch.manual_seed(5)
        expected = getattr(torch, factory)(data.shape)
        torch.manual_seed(5)
        assert torch.equal(
            getattr(dtensor, factory)(data.shape, mesh, placements).full_tensor(),
            expected,
        )
    for factory in ("zeros", "ones"):
        found = getattr(dtensor, factory)(data.shape, mesh, placements)
        assert found.layout is made.layout
        assert torch.equal(found.full_tensor(), getattr(torch, factory)(data.shape))
    torch.manual_seed(6)
    expected = torch.empty_like(data).normal_()
    torch.manual_seed(6)
    assert torch.equal(torch.empty_like(made).normal_().full_tensor(), expected)
    torch.manual_seed(6)
    drawn = torch.randn_like(made)
    assert drawn.layout is made.layout
    assert torch.equal(drawn.full_tensor(), expected)


@on_ranks(2)
def test_what_cannot_be():
    mesh = mesh_of((2,))
    with pytest.raises(ValueError, match="add up to 8, but dim 0 has size 9"):
        distribute_tensor(torch.zeros(9), mesh, [FusedShard(0, (4, 4))])
    with pytest.raises(ValueError, match="shard of shape"):
        DTensor.from_local(torch.zeros(5), mesh, [FusedShard(0, (4, 4))])
    made = distribute_tensor(torch.zeros(8), mesh, [FusedShard(0, (4, 4))])
    with pytest.raises(
        ValueError,
        match=r"no placement like F\(0; 4\+4\).*redistribute\(\) to Shard\(0\)",
    ):
        interop.to_native(made)
    assert interop.to_native(made.redistribute(None, [Shard(0)])).shape == (8,)


# --- operators: (the call, the placement of its result along tp, how often it communicates in forward)


def kept(dim=-1):
    return lambda sections, ndim: FusedShard(dim % ndim, sections)


def lies(placement):
    return lambda sections, ndim: placement


KEPT = {
    "pointwise": (lambda t: t["x"] * 2 + 1, kept(), 0),
    "gelu": (lambda t: F.gelu(t["x"]), kept(), 0),
    "two alike": (lambda t: t["x"] * t["x"].sin(), kept(), 0),
    "with a copy": (lambda t: t["x"] * t["r"], kept(), 0),
    "a copy with it": (lambda t: t["r"] + t["x"], kept(), 0),
    "with what broadcasts": (lambda t: t["x"] * t["one"], kept(), 0),
    "with what is cut as one": (lambda t: t["x"] * t["s"], kept(), 1),
    "with other sections": (lambda t: t["x"] * t["o"], kept(), 1),
    "where": (lambda t: torch.where(t["x"] > 0, t["x"], t["r"]), kept(), 0),
    "masked_fill": (lambda t: t["x"].masked_fill(t["x"] > 0, 2.0), kept(), 0),
    "clone": (lambda t: t["x"].clone().contiguous().to(torch.float64), kept(), 0),
    "dropout that is off": (
        lambda t: F.dropout(t["x"], 0.5, training=False),
        kept(),
        0,
    ),
    "linear into it": (lambda t: F.linear(t["h"], t["w"], t["b"]), kept(), 0),
    "linear and bias from elsewhere": (
        lambda t: F.linear(t["h"], t["w"], t["r"]),
        kept(),
        0,
    ),
    "addmm into it": (
        lambda t: torch.addmm(t["b"], t["h"].reshape(-1, 5), t["wt"]),
        kept(),
        0,
    ),
    "Conv1D": (
        lambda t: torch.addmm(t["b"], t["h"].view(-1, 5), t["wt"]).view(4, 3, -1),
        kept(),
        0,
    ),
    "matmul into it": (lambda t: t["h"] @ t["wt"], kept(), 0),
    "einsum into it": (
        lambda t: torch.einsum("bsk,nk->bns", t["h"], t["w"]),
        kept(1),
        0,
    ),
    "linear out of it": (lambda t: F.linear(t["x"], t["wt"]), lies(Partial()), 0),
    "sum over it": (lambda t: t["x"].sum(-1), lies(Partial()), 0),
    "sum over all": (lambda t: t["x"].sum(), lies(Partial()), 0),
    "sum over another": (lambda t: t["x"].sum(1), kept(), 0),
    "transpose": (lambda t: t["x"].transpose(1, 2), kept(1), 0),
    "permute": (lambda t: t["x"].permute(2, 0, 1), kept(0), 0),
    "w.T": (lambda t: t["w"].t(), kept(1), 0),
    "unsqueeze": (lambda t: t["x"].unsqueeze(1), kept(), 0),
    "unsqueeze after": (lambda t: t["x"].unsqueeze(-1), kept(2), 0),
    "squeeze": (lambda t: t["x"].unsqueeze(1).squeeze(1), kept(), 0),
    "expand": (lambda t: t["x"].unsqueeze(1).expand(4, 2, 3, -1), kept(), 0),
    "flatten others": (lambda t: t["x"].flatten(0, 1), kept(), 0),
    "view others": (
        lambda t: t["x"].view(-1, t["x"].size(-1)).view(4, 3, -1),
        kept(),
        0,
    ),
    "reshape others": (lambda t: t["x"].reshape(2, 6, -1), kept(), 0),
    "chunk another": (lambda t: t["x"].chunk(3, 1)[1], kept(), 0),
    "split another": (lambda t: t["x"].split(2, 1)[1], kept(), 0),
    "narrow another": (lambda t: t["x"].narrow(1, 1, 2), kept(), 0),
    "index another": (lambda t: t["x"][:, 1:, None], kept(), 0),
    "number in another": (lambda t: t["x"][:, -1], kept(), 0),
    "zeros_like": (lambda t: torch.zeros_like(t["x"]) + t["x"], kept(), 0),
    "foreach": (lambda t: torch._foreach_add([t["x"]], [t["x"]])[0], kept(), 0),
    "view_as": (lambda t: t["x"].view_as(t["x"].sin()), kept(), 0),
}
ELSE = {
    "softmax": lambda t: t["x"].softmax(-1),
    "cumsum": lambda t: t["x"].cumsum(-1),
    "sort": lambda t: t["x"].sort(-1).values,
    "argsort": lambda t: t["x"].argsort(-1),
    "topk": lambda t: t["x"].topk(2, -1),
    "cat along it": lambda t: torch.cat([t["x"], t["x"] * 2], -1),
    "cat along another": lambda t: torch.cat([t["x"], t["x"] * 2], 1),
    "stack": lambda t: torch.stack([t["x"], t["x"]], 1),
    "flip": lambda t: t["x"].flip(-1),
    "roll": lambda t: t["x"].roll(1, -1),
    "every other": lambda t: t["x"][..., ::2],
    "one": lambda t: t["x"][..., 1],
    "not along borders": lambda t: t["x"][..., 1:2],
    "narrow": lambda t: t["x"].narrow(-1, 1, 1),
    "uneven split": lambda t: t["x"].split(2, -1),
    "tensor index": lambda t: t["x"][..., t["i"]],
    "tensor index in another": lambda t: t["x"][:, t["i"]],
    "index_select": lambda t: t["x"].index_select(2, t["i"]),
    "gather": lambda t: t["x"].gather(2, t["x"].argsort(-1)),
    "max": lambda t: t["x"].max(-1),
    "max of all": lambda t: t["x"].max(),
    "argmax": lambda t: t["x"].argmax(-1),
    "amax": lambda t: t["x"].amax(-1),
    "mean": lambda t: t["x"].mean(-1),
    "mean of all": lambda t: t["x"].mean(),
    "mean of another": lambda t: t["x"].mean(1),
    "var": lambda t: t["x"].var(-1),
    "norm": lambda t: t["x"].norm(dim=-1),
    "norm of all": lambda t: t["x"].norm(3),
    "norm of another": lambda t: torch.linalg.vector_norm(t["x"], dim=1),
    "largest of another": lambda t: t["x"].amax(1),
    "largest norm": lambda t: torch.linalg.vector_norm(t["x"], float("inf")),
    "logsumexp": lambda t: t["x"].logsumexp(-1),
    "layer_norm": lambda t: F.layer_norm(t["x"], t["x"].shape[-1:]),
    "rms_norm": lambda t: F.rms_norm(t["x"], t["x"].shape[-1:]),
    "pad": lambda t: F.pad(t["x"], (1, 1)),
    "repeat": lambda t: t["x"].repeat(1, 1, 2),
    "repeat_interleave": lambda t: t["x"].repeat_interleave(2, -1),
    "flatten": lambda t: t["x"].flatten(),
    "flatten it": lambda t: t["x"].flatten(1),
    "unbind": lambda t: t["x"].unbind(-1)[0],
    "triu": lambda t: t["x"].triu(),
    "diff": lambda t: t["x"].diff(dim=-1),
    "outer": lambda t: torch.einsum("bsn,btn->bst", t["x"], t["x"]),
    "mse_loss": lambda t: F.mse_loss(t["x"], t["r"].expand(4, 3, -1)),
    "take": lambda t: t["x"].take(t["i"]),
    "hstack": lambda t: torch.hstack([t["x"], t["x"]]),
    "equal": lambda t: torch.equal(t["x"], t["x"].clone()),
    "allclose": lambda t: torch.allclose(t["x"], t["x"] + 1),
    "item": lambda t: t["x"].sum().item(),
    "reversed": lambda t: t["x"].flipud(),
    "conv1d": lambda t: F.conv1d(t["x"], t["x"].new_ones(2, 3, 1)),
    "glu": lambda t: F.glu(torch.cat([t["x"], t["x"]], -1)),
    "trapezoid": lambda t: torch.trapezoid(t["x"], dim=-1),
    "median": lambda t: t["x"].median(-1).values,
    "unique": lambda t: torch.unique(t["x"].detach()),
}
WHOLE = {"unique"}  # runs on whole tensors, with a warning the first time


def operands(sections):
    n = sum(sections)
    return {
        "x": normal(4, 3, n, seed=1),
        "r": normal(n, seed=2),
        "s": normal(4, 3, n, seed=3),
        "o": normal(n, seed=4),
        "one": normal(4, 3, 1, seed=5),
        "h": normal(4, 3, 5, seed=6),
        "w": normal(n, 5, seed=7),
        "wt": normal(5, n, seed=8),
        "b": normal(n, seed=9),
    }


def placements_on(mesh, sections, batch):
    along = {
        "x": placed(mesh, FusedShard(-1, sections), batch),
        "s": placed(mesh, Shard(-1), batch),
        "h": placed(mesh, R, batch),
        "one": placed(mesh, R, batch),
        "o": placed(mesh, FusedShard(0, sections[::-1])),
        "w": placed(mesh, FusedShard(0, sections)),
        "wt": placed(mesh, FusedShard(1, sections)),
        "b": placed(mesh, FusedShard(0, sections)),
    }
    return lambda name: along.get(name, placed(mesh, R))


def both(sections, mesh, batch):
    """The operands on one device and distributed, all leaves that get gradients."""
    plain = {name: value.requires_grad_() for name, value in operands(sections).items()}
    at = placements_on(mesh, sections, batch)
    spread = {
        name: distribute_tensor(value, mesh, at(name)) for name, value in plain.items()
    }
    index = torch.tensor([1, 0, 1])
    plain["i"], spread["i"] = index, distribute_tensor(index, mesh, placed(mesh, R))
    return plain, spread


def several(result):
    return list(result) if isinstance(result, (tuple, list)) else [result]


def compare(call, plain, spread):
    """The results of a call on the distributed operands, after comparing them and all gradients."""
    expected = several(call(plain))
    with CommunicationLedger() as ledger:
        found = several(call(spread))
    counts = ledger.counts()
    assert len(found) == len(expected)
    wholes = [whole(one) for one in found]
    for one, truth in zip(wholes, expected, strict=True):
        close(torch.as_tensor(one), torch.as_tensor(truth))
    for values in (wholes, expected):
        parts = [
            (one * normal(*one.shape, seed=11)).sum()
            for one in values
            if getattr(one, "requires_grad", False)
        ]
        if parts:
            sum(parts).backward()
    for name, truth in plain.items():
        mine = spread[name].grad
        assert (truth.grad is None) == (
            mine is None or not mine.full_tensor().any()
        ) or mine is not None, name
        if truth.grad is not None and mine is not None:
            assert mine.placements == spread[name].placements, name
            close(mine.full_tensor(), truth.grad)
        elif truth.grad is not None:
            assert not truth.grad.any(), name
    return found, counts


def batches(mesh):
    return [R] if mesh.ndim == 1 else [Shard(0)]


def check_all(check, cases, sections, mesh_shape):
    """On a rank: every case with every way in which the batch may lie; all that fail are named."""
    mesh, failed = mesh_of(mesh_shape), []
    for batch, (name, case) in itertools.product(batches(mesh), cases.items()):
        try:
            check(name, case, sections, *both(sections, mesh, batch))
        except Exception as error:
            failed.append(f"{name}, batch {batch}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


def check_kept(name, case, sections, plain, spread):
    call, lying, counts = case
    (found,), costs = compare(call, plain, spread)
    assert found.placements[-1] == lying(sections, found.ndim), found.placements
    if not (name == "with other sections" and sections == sections[::-1]):
        assert sum(costs.values()) == counts, costs


def kept_on_ranks(sections, mesh_shape):
    with compare_few_collectives():
        check_all(check_kept, KEPT, sections, mesh_shape)


def else_on_ranks(sections, mesh_shape):
    with compare_few_collectives():
        check_all(check_else, ELSE, sections, mesh_shape)


def check_else(name, call, sections, plain, spread):
    if name == "uneven split" and sum(sections) < 4:
        return
    with warnings.catch_warnings():
        if name in WHOLE:
            warnings.filterwarnings("ignore", "unique has no rule")
        compare(call, plain, spread)


@pytest.mark.parametrize(("sections", "mesh_shape"), ON_MESHES)
def test_what_does_not_care_about_order_keeps_the_sections(sections, mesh_shape):
    run_ranks(
        kept_on_ranks, int(np.prod(mesh_shape)), sections, mesh_shape, timeout=LONG
    )


@pytest.mark.parametrize(("sections", "mesh_shape"), ON_MESHES)
def test_everything_else_sees_a_dim_that_is_cut_as_one(sections, mesh_shape):
    run_ranks(
        else_on_ranks, int(np.prod(mesh_shape)), sections, mesh_shape, timeout=LONG
    )


# --- taken apart


def check_apart(call, plain, spread, placements):
    """Views along the borders of sections: nothing is communicated, and the parts lie so along tp."""
    found, costs = compare(call, plain, spread)
    assert costs == {}, costs
    assert [one.placements[-1] for one in found] == placements, [
        str(one.placements[-1]) for one in found
    ]
    memory = {
        one.to_local().untyped_storage().data_ptr() for one in (spread["x"], *found)
    }
    assert len(memory) == 1


def apart(sections, mesh_shape):
    mesh = mesh_of(mesh_shape)
    borders = [0, *itertools.accumulate(sections)]
    cut, count = Shard(2), len(sections)
    last = (
        sections[1:]
        if 0 not in sections[1:]
        else tuple(size for size in sections[1:] if size)
    )
    rest = FusedShard(2, last) if len(last) > 1 else cut
    cases = {
        "split": (lambda t: t["x"].split(sections, -1), [cut] * count),
        "torch.split": (
            lambda t: torch.split(t["x"], list(sections), dim=2),
            [cut] * count,
        ),
        "split_with_sizes": (
            lambda t: t["x"].split_with_sizes(sections, 2),
            [cut] * count,
        ),
        "tensor_split": (
            lambda t: t["x"].tensor_split(borders[1:-1], -1),
            [cut] * count,
        ),
        "first and rest": (
            lambda t: t["x"].split((borders[1], borders[-1] - borders[1]), -1),
            [cut, rest],
        ),
        "narrow": (
            lambda t: t["x"].narrow(-1, borders[1], borders[-1] - borders[1]),
            [rest],
        ),
        "slice": (lambda t: t["x"][..., borders[-2] :], [cut]),
        "slice of the first": (lambda t: t["x"][:, :, : borders[1]], [cut]),
        "slices": (
            lambda t: [t["x"][..., a:b] for a, b in itertools.pairwise(borders)],
            [cut] * count,
        ),
        "and of others": (lambda t: t["x"][:, 1:, borders[1] :], [rest]),
        "and a number": (lambda t: t["x"][:, 1, borders[-2] :], [Shard(1)]),
        "and a new dim": (lambda t: t["x"][:, :, None, borders[-2] :], [Shard(3)]),
        "transposed": (
            lambda t: t["x"].transpose(1, 2).split(sections, 1),
            [Shard(1)] * count,
        ),
    }
    if len(set(sections)) == 1:
        size = sections[0]
        cases |= {
            "chunk": (lambda t: t["x"].chunk(count, -1), [cut] * count),
            "split by size": (lambda t: t["x"].split(size, -1), [cut] * count),
            "unflatten": (lambda t: t["x"].unflatten(-1, (count, size)), [Shard(3)]),
            "view": (lambda t: t["x"].view(4, 3, count, -1), [Shard(3)]),
            "view of heads": (lambda t: t["x"].view(4, 3, count, -1, 1), [Shard(3)]),
            "unflatten to heads": (
                lambda t: t["x"].unflatten(-1, (count, size, 1)),
                [Shard(3)],
            ),
            "reshape with others": (
                lambda t: t["x"].reshape(12, count, size),
                [Shard(2)],
            ),
            "three of heads": (
                lambda t: t["x"].view(4, 3, count, size, 1).unbind(2),
                [Shard(2)] * count,
            ),
        }
    failed = []
    for batch, (name, (call, placements)) in itertools.product(
        batches(mesh), cases.items()
    ):
        try:
            check_apart(call, *both(sections, mesh, batch), placements)
        except Exception as error:
            failed.append(f"{name}, batch {batch}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize(("sections", "mesh_shape"), ON_MESHES)
def test_it_is_taken_apart_along_borders(sections, mesh_shape):
    run_ranks(apart, int(np.prod(mesh_shape)), sections, mesh_shape, timeout=LONG)


@on_ranks(2)
def test_heads_of_unequal_sections():
    mesh = mesh_of((2,))
    plain, spread = both((8, 4, 4), mesh, R)
    (found,), costs = compare(lambda t: t["x"].view(4, 3, 8, 2), plain, spread)
    assert costs == {}
    assert found.placements == (FusedShard(2, (4, 2, 2)),)
    plain, spread = both((8, 4, 4), mesh, R)
    parts, costs = compare(
        lambda t: t["x"].view(4, 3, -1, 2).split((4, 2, 2), 2), plain, spread
    )
    assert costs == {}
    assert [part.placements for part in parts] == [(Shard(2),)] * 3
    plain, spread = both((6, 6), mesh, R)  # heads of 4: none is whole on a rank
    (found,), costs = compare(lambda t: t["x"].view(4, 3, 3, 4), plain, spread)
    assert sum(costs.values()) == 1


# --- every operator of the tables


def agree(found, expected):
    assert len(found) == len(expected)
    for one, truth in zip(found, expected, strict=True):
        if isinstance(truth, torch.Tensor):
            torch.testing.assert_close(
                one, truth.detach(), rtol=1e-7, atol=1e-7, equal_nan=True
            )
        else:
            assert one == truth


def outcome(call, structure, leaves):
    """The results of a call as whole tensors, and the gradients of its operands."""
    results = [whole(one) for one in tree_leaves(call(*like(structure, leaves)))]
    differentiable = [
        one for one in results if isinstance(one, torch.Tensor) and one.requires_grad
    ]
    if differentiable:
        weights = [normal(*one.shape, seed=3).to(one.dtype) for one in differentiable]
        sum(
            (one * weight).sum().abs()
            for one, weight in zip(differentiable, weights, strict=True)
        ).backward()
    gradients = [whole(one.grad) if one.grad is not None else None for one in leaves]
    return [
        one.detach() if isinstance(one, torch.Tensor) else one for one in results
    ], gradients


def run_case(case, arrays, mesh, number, placement, truth):
    """The case with one operand cut so and the others copied, compared with the outcome of the plain one."""
    expected, gradients = truth
    placements = [[placement if i == number else R] for i in range(len(flat(arrays)))]
    pairs = zip(flat(arrays), placements, strict=True)
    found, mine = outcome(
        case.call,
        arrays,
        [distribute_tensor(leaf(one), mesh, placed) for one, placed in pairs],
    )
    agree(found, expected)
    for one, gradient in zip(mine, gradients, strict=True):
        if one is not None:
            agree([one], [torch.zeros_like(one) if gradient is None else gradient])


def is_refused(error, case, arrays, mesh, number, dim, truth):
    """Whether an error is one that says so, such as for running statistics, or the dim cannot be cut as one either."""
    try:
        run_case(case, arrays, mesh, number, Shard(dim), truth)
    except Exception:
        return True
    return isinstance(error, OperatorError)


def some_dims(case, ndim):
    """Two of three, others for other cases."""
    return [dim for dim in range(ndim) if (dim + len(case.name)) % 3 or ndim == 1]


def check_case(case, mesh):
    """With each dim of each operand cut section by section: what failed, how much ran, what is refused."""
    sizes = next(name for name in ("uneven", "even", "empty") if name in case.sizes)
    arrays = draw(case, SIZES[sizes], np.random.default_rng(0))
    truth = outcome(case.call, arrays, [leaf(array) for array in flat(arrays)])
    failed, ran, refused = [], 0, []
    for number, array in enumerate(flat(arrays)):
        for dim in range(array.ndim) if THOROUGH else some_dims(case, array.ndim):
            size = array.shape[dim]
            # So that no rank holds as much as of a dim that is chunked.
            ones = min(3, size)
            kinds = [
                FusedShard(dim, (1,) * ones + (size - ones,)),
                RaggedShard(dim, (size // 3, size - size // 3)),
                ZigzagShard(dim),
            ]
            # One kind for each dim of each case, another for the next.
            one = [kinds[(number + dim + len(case.name)) % len(kinds)]]
            for placement in kinds if THOROUGH else one:
                try:
                    run_case(case, arrays, mesh, number, placement, truth)
                    ran += 1
                except Exception as error:
                    told = f"{case.name}, operand {number}, {placement}: {type(error).__name__}: {error}"
                    (
                        refused
                        if is_refused(error, case, arrays, mesh, number, dim, truth)
                        else failed
                    ).append(told)
    return failed, ran, refused


def family_on_ranks(number):
    """How much ran, and what cannot be cut as one either."""
    mesh, failed, count, refused = mesh_of((2,)), [], 0, []
    for case in CASES_OF[number]:
        with warnings.catch_warnings(), compare_few_collectives():
            warnings.simplefilter("ignore")
            wrong, ran, no = check_case(case, mesh)
        failed, count, refused = failed + wrong, count + ran, refused + no
    assert not failed, "\n".join(failed)
    return count, refused


CASES_OF = [
    [case for case in (*f.CASES, *getattr(f, "COMPOSITES", ())) if case.sizes]
    for f in FAMILIES
]


@pytest.mark.parametrize(
    "number",
    [i for i, cases in enumerate(CASES_OF) if cases],
    ids=lambda i: FAMILIES[i].__name__,
)
def test_every_operator_that_takes_a_shard_takes_sections(number):
    for ran, refused in run_ranks(family_on_ranks, 2, number, timeout=LONG):
        assert ran > 4 * len(refused), refused


def family_gone_wrong(number):
    """With operators that ask where their piece begins run on sections as well."""
    before = dict(OPERATORS)
    for name, op in before.items():
        OPERATORS[name] = replace(op, order_free=True)
    _OP_DISPATCHER.forget()
    try:
        family_on_ranks(number)
    finally:
        OPERATORS.update(before)
        _OP_DISPATCHER.forget()


@pytest.mark.parametrize(
    "family", [attention, joins], ids=lambda family: family.__name__
)
def test_the_check_finds_operators_that_must_not_run_on_sections(family):
    with pytest.raises(RankError, match=r"[FGZ]\("):
        run_ranks(family_gone_wrong, 2, FAMILIES.index(family), timeout=LONG)


# --- in place


IN_PLACE = {
    "add_": lambda t: t["x"].add_(1.5),
    "mul_ by its like": lambda t: t["x"].mul_(t["x"].sin()),
    "mul_ by a copy": lambda t: t["x"].mul_(t["r"]),
    "add_ what is cut as one": lambda t: t["x"].add_(t["s"]),
    "another one's target": lambda t: t["s"].add_(t["x"]),
    "copy_": lambda t: t["x"].copy_(t["s"]),
    "into a copy": lambda t: t["s"].copy_(t["x"]),
    "zero_": lambda t: t["x"].zero_(),
    "cumsum_": lambda t: t["x"].cumsum_(-1),
    "softmax into": lambda t: torch.softmax(t["x"] * 2, -1, out=t["x"]),
    "setitem": lambda t: t["x"].__setitem__((slice(None), 1), 3.0),
    "setitem across": lambda t: t["x"].__setitem__((..., slice(1, 2)), t["one"]),
    "setitem by tensors": lambda t: t["x"].__setitem__((..., t["i"]), 2.0),
    "setitem by a mask": lambda t: t["x"].__setitem__(t["x"] > 0, 0.5),
    "masked_fill_": lambda t: t["x"].masked_fill_(t["x"] > 0, 2.0),
    "index_fill_": lambda t: t["x"].index_fill_(2, t["i"], 2.0),
    "index_copy_": lambda t: t["x"].index_copy_(1, t["i"][:2], t["x"][:, :2] * 2),
    "triu_": lambda t: t["x"].triu_(),
    "a part": lambda t: t["x"].split(SECTIONS[0], -1)[1].mul_(3.0),
    "a slice": lambda t: t["x"][..., : SECTIONS[0][0]].add_(1.0),
    "heads": lambda t: t["x"].view(4, 3, -1, 2).mul_(2.0),
    "relu_": lambda t: F.relu(t["x"], inplace=True),
    "foreach": lambda t: torch._foreach_mul_([t["x"], t["w"]], 2.0),
    "foreach mixed": lambda t: torch._foreach_add_([t["x"]], [t["s"]]),
    "addcmul_": lambda t: t["x"].addcmul_(t["x"], t["s"], value=0.5),
    "clamp_": lambda t: t["x"].clamp_(-0.5, 0.5),
}


def changed_in_place(mesh_shape):
    mesh, failed = mesh_of(mesh_shape), []
    for batch, (name, call) in itertools.product(batches(mesh), IN_PLACE.items()):
        plain, spread = both(SECTIONS[0], mesh, batch)
        try:
            with torch.no_grad():
                call(plain)
                call(spread)
            for key, truth in plain.items():
                close(spread[key].full_tensor(), truth.detach())
            assert spread["x"].placements[-1] == FusedShard(2, SECTIONS[0])
        except Exception as error:
            failed.append(f"{name}, batch {batch}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_no_change_in_place_is_lost(mesh_shape):
    run_ranks(changed_in_place, int(np.prod(mesh_shape)), mesh_shape, timeout=LONG)


@on_ranks(2)
def test_changes_of_copies_are_refused():
    mesh = mesh_of((2,))
    _, spread = both(SECTIONS[0], mesh, R)
    with torch.no_grad():
        for view in (
            lambda x: x[..., 1:3],
            lambda x: x.flip(0)[..., 1:2],
            lambda x: x.flatten(1),
            lambda x: x.unbind(-1)[0],
        ):
            with pytest.raises(OperatorError, match="it is a copy"):
                view(spread["x"]).add_(1.0)


@on_ranks(4)
@pytest.mark.parametrize("placement", [FusedShard(1, (1, 2)), Shard(1)])
def test_a_view_is_one_where_a_rank_has_nothing(placement):
    mesh, data = mesh_of((4,)), normal(4, 3).requires_grad_()
    expected, found = data * 1, distribute_tensor(data, mesh, [placement]) * 1
    for one in (expected, found):
        one.view(2, 2, 3).mul_(2)
        one.transpose(0, 1).add_(1)
    close(found.full_tensor(), expected)


@on_ranks(2)
def test_gradients_pass_changes_in_place():
    mesh = mesh_of((2,))

    def call(t):
        y = t["x"] * 2
        y[..., 1:3] = t["one"]
        y.mul_(t["r"])
        y[:, 0] = 1.0
        return y.split(SECTIONS[0], -1)

    compare(call, *both(SECTIONS[0], mesh, R))


@on_ranks(2)
def test_explicit_mode_refuses_to_cut_it_as_one():
    mesh = mesh_of((2,))
    _, spread = both(SECTIONS[0], mesh, R)
    with explicit():
        spread["x"].mul(2).split(SECTIONS[0], -1)
        for call in (
            lambda t: t["x"].softmax(-1),
            lambda t: t["x"].max(-1),
            lambda t: torch.hstack([t["x"], t["x"]]),
        ):
            with pytest.raises(OperatorError, match=r"explicit mode.*F\(2; 8\+4\+4\)"):
                call(spread)


@on_ranks(2)
def test_the_norm_of_all_gathers_one_number():
    mesh, data = mesh_of((2,)), normal(14, 6)
    parameter = nn.Parameter(distribute_tensor(data, mesh, [FusedShard(0, (7, 2, 5))]))
    parameter.grad = distribute_tensor(data * 3, mesh, [FusedShard(0, (7, 2, 5))])
    truth = nn.Parameter(data.clone())
    truth.grad = data * 3
    with CommunicationLedger(mesh) as ledger:
        found = nn.utils.clip_grad_norm_([parameter], 1.0)
    close(whole(found), nn.utils.clip_grad_norm_([truth], 1.0))
    close(parameter.grad.full_tensor(), truth.grad)
    assert ledger.nbytes() <= 16


@on_ranks(2)
def test_a_function_on_shards():
    mesh, data = mesh_of((2,)), normal(8, 3)
    x = distribute_tensor(data, mesh, [FusedShard(0, (3, 5))])
    assert x.local_shape != x.layout.regular().local_shape(
        x.shape
    )  # no rank has what a plain cut gives
    doubled = custom_shard(lambda x: x * 2, mesh, [FusedShard(0, (3, 5))])(x)
    close(doubled.full_tensor(), data * 2)
    for wrong in (FusedShard(0, (5, 3)), Shard(0)):
        if x.layout.with_placements([wrong]).local_shape(x.shape) != x.local_shape:
            with pytest.raises(ValueError, match="do not make a tensor"):
                custom_shard(lambda x: x, mesh, [wrong])(x)


# --- layers


class Separate(nn.Module):
    """Attention with three projections, then a gated layer with two."""

    def __init__(self, dim=16, heads=4, kv_heads=2, hidden=12):
        super().__init__()
        size = dim // heads
        self.heads = heads, kv_heads, size
        self.qkv = nn.ModuleList(
            nn.Linear(dim, n * size, dtype=torch.float64)
            for n in (heads, kv_heads, kv_heads)
        )
        self.out = nn.Linear(dim, dim, bias=False, dtype=torch.float64)
        self.gate, self.up = (
            nn.Linear(dim, hidden, bias=False, dtype=torch.float64) for _ in range(2)
        )
        self.down = nn.Linear(hidden, dim, bias=False, dtype=torch.float64)

    def project(self, x):
        return [layer(x) for layer in self.qkv]

    def gated(self, x):
        return self.gate(x), self.up(x)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (
            one.view(b, s, -1, self.heads[2]).transpose(1, 2) for one in self.project(x)
        )
        x = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        ).transpose(1, 2)
        x = self.out(x.flatten(2))
        x = x.reduce_partial() if isinstance(x, DTensor) else x
        gate, up = self.gated(x)
        return self.down(F.silu(gate) * up)


class Fused(Separate):
    """The same with one projection for each."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        layers, gates = self.qkv, (self.gate, self.up)
        self.sections = [layer.out_features for layer in layers]
        self.gate_up = nn.Linear(
            self.out.in_features,
            2 * self.gate.out_features,
            bias=False,
            dtype=torch.float64,
        )
        self.qkv = nn.Linear(
            self.out.in_features, sum(self.sections), dtype=torch.float64
        )
        with torch.no_grad():
            self.qkv.weight.copy_(torch.cat([layer.weight for layer in layers]))
            self.qkv.bias.copy_(torch.cat([layer.bias for layer in layers]))
            self.gate_up.weight.copy_(torch.cat([layer.weight for layer in gates]))
        del self.gate, self.up

    def project(self, x):
        return self.qkv(x).split(self.sections, dim=-1)

    def gated(self, x):
        return self.gate_up(x).chunk(2, dim=-1)


def made(kind):
    torch.manual_seed(0)
    return kind()


def distribute(model, mesh):
    """Column by column into the shards, row by row out of them; what is fused, section by section."""
    for name, parameter in list(model.named_parameters()):
        owner, _, key = name.rpartition(".")
        along = Shard(1) if owner in ("out", "down") else Shard(0)
        if owner in ("qkv", "gate_up"):
            sections = model.sections if owner == "qkv" else (12, 12)
            along = FusedShard(0, sections)
        module = model.get_submodule(owner)
        setattr(
            module,
            key,
            nn.Parameter(
                distribute_tensor(parameter.detach(), mesh, placed(mesh, along))
            ),
        )
    return model


@on_ranks(2)
def test_fused_layers_cost_what_separate_ones_cost():
    mesh, x = mesh_of((2,)), normal(3, 5, 16)
    truth = made(Separate)(x)
    counts = []
    for kind in (Separate, Fused):
        model = distribute(made(kind), mesh)
        inputs = distribute_tensor(x, mesh, [R]).requires_grad_()
        with CommunicationLedger(mesh) as ledger:
            y = model(inputs).redistribute(None, [R])
            y.sum().backward()
        close(y.to_local(), truth)
        counts.append((ledger.counts(backward=False), ledger.counts(backward=True)))
        with explicit():  # the sums that are pending are the only thing that moves
            attention = model.project(inputs)
        assert all(one.placements == (Shard(2),) for one in attention)
    assert counts[0] == counts[1], counts
    assert counts[0] == ({"all_reduce": 2}, {"all_reduce": 2})


class Conv1D(nn.Module):
    """A layer as GPT-2 has it: the weight is transposed."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(normal(inputs, outputs, seed=1))
        self.bias = nn.Parameter(normal(outputs, seed=2))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(
            *x.shape[:-1], -1
        )


@on_ranks(2)
def test_conv1d_of_gpt2():
    mesh, x = mesh_of((2,)), normal(3, 5, 4)
    layer, truth = Conv1D(4, 24), Conv1D(4, 24)
    layer.weight = nn.Parameter(
        distribute_tensor(layer.weight.detach(), mesh, [FusedShard(1, (8, 8, 8))])
    )
    layer.bias = nn.Parameter(
        distribute_tensor(layer.bias.detach(), mesh, [FusedShard(0, (8, 8, 8))])
    )
    inputs = distribute_tensor(x, mesh, [R]).requires_grad_()
    with CommunicationLedger(mesh) as ledger:
        parts = layer(inputs).split(8, dim=2)
        heads = [part.view(3, 5, 4, 2).transpose(1, 2) for part in parts]
        loss = F.scaled_dot_product_attention(*heads).sum()
        loss.backward()
    expected = [
        part.view(3, 5, 4, 2).transpose(1, 2) for part in truth(x).split(8, dim=2)
    ]
    expected = F.scaled_dot_product_attention(*expected).sum()
    expected.backward()
    assert ledger.counts() == {"all_reduce": 1}
    close(loss.full_tensor(), expected)
    close(layer.weight.grad.full_tensor(), truth.weight.grad)
    close(layer.bias.grad.full_tensor(), truth.bias.grad)


# --- training


OPTIMIZERS = {
    "plain": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@on_ranks(4)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_steps(name, mesh_shape):
    mesh, sections = mesh_of(mesh_shape), (7, 2, 5)
    weight, bias = normal(14, 6, seed=1), normal(14, seed=2)
    truth = [nn.Parameter(weight.clone()), nn.Parameter(bias.clone())]
    along = placed(mesh, FusedShard(0, sections))
    spread = [
        nn.Parameter(distribute_tensor(value, mesh, along)) for value in (weight, bias)
    ]
    batch = placed(mesh, R, Shard(0))
    optimizers = [OPTIMIZERS[name](truth), OPTIMIZERS[name](spread)]
    for step in range(4):
        x = normal(8, 6, seed=10 + step)
        totals = []
        for (w, b), optimizer, inputs in zip(
            (truth, spread),
            optimizers,
            (x, distribute_tensor(x, mesh, batch)),
            strict=True,
        ):
            optimizer.zero_grad()
            q, k, v = F.linear(inputs, w, b).split(sections, -1)
            loss = q.pow(2).sum() + k.sin().sum() * 2 + (v * v.sigmoid()).sum()
            loss.backward()
            totals.append(get_platform().clip_grad_norm_([w, b], 5.0))
            optimizer.step()
        close(totals[1], totals[0])
        for mine, expected in zip(spread, truth, strict=True):
            assert mine.grad.placements == mine.placements == tuple(along)
            close(mine.grad.full_tensor(), expected.grad)
            close(mine.full_tensor(), expected.detach())
    if name != "sgd":
        state = optimizers[1].state[spread[0]]
        assert state["exp_avg"].placements == tuple(along)
        close(state["exp_avg"].full_tensor(), optimizers[0].state[truth[0]]["exp_avg"])


@on_ranks(2)
def test_state_dicts_are_those_of_one_device():
    mesh = mesh_of((2,))
    model, other = distribute(made(Fused), mesh), made(Fused)
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), other.state_dict()[name]), name
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    stored = io.BytesIO()
    torch.save(
        {name: value.full_tensor() for name, value in model.state_dict().items()},
        stored,
    )
    stored.seek(0)
    found = torch.load(stored)
    again = distribute(made(Fused), mesh)
    for name, parameter in again.named_parameters():
        get_platform().load_into_param(parameter, found[name])
        assert torch.equal(parameter.to_local(), model.get_parameter(name).to_local())
    third = distribute(made(Fused), mesh)
    third.load_state_dict(model.state_dict())
    third.qkv.weight.data = copy.deepcopy(model.qkv.weight).detach()
    for name, parameter in third.named_parameters():
        assert torch.equal(parameter.full_tensor(), found[name])


@on_ranks(2)
def test_parameters_are_drawn_as_on_one_device():
    mesh = mesh_of((2,))
    torch.manual_seed(3)
    truth = nn.Linear(6, 15)
    with init_empty_weights():
        layer = nn.Linear(6, 15)
    platform = get_platform()
    layer.weight, layer.bias = (
        platform.set_layout_into_parameter(
            parameter, Layout.from_device_mesh(mesh)([FusedShard(0, (7, 5, 3))])
        )
        for parameter in (layer.weight, layer.bias)
    )
    torch.manual_seed(3)
    init_parameters(layer)
    assert torch.equal(layer.weight.full_tensor(), truth.weight)
    assert torch.equal(layer.bias.full_tensor(), truth.bias)
    nn.init.ones_(layer.bias)
    torch.manual_seed(4)
    nn.init.xavier_uniform_(layer.weight)
    torch.manual_seed(4)
    assert torch.equal(
        layer.weight.full_tensor(), nn.init.xavier_uniform_(truth.weight)
    )


# --- checkpoints and verify


PLACEMENTS = {
    "fused": FusedShard(0, (9, 5)),
    "ragged": RaggedShard(0, (3, 0, 10, 1)),
    "zigzag": ZigzagShard(0),
    "chunks": Shard(0),
    "replicated": R,
}


def save_and_load(folder, source, target):
    mesh, data = mesh_of((4,)), normal(14, 3)
    stored = {"w": distribute_tensor(data, mesh, [PLACEMENTS[source]])}
    save(stored, checkpoint_id=folder)
    empty = {"w": dtensor.zeros(data.shape, mesh, [PLACEMENTS[target]]).double()}
    load(empty, checkpoint_id=folder)
    assert torch.equal(empty["w"].full_tensor(), data)
    assert empty["w"].placements == (PLACEMENTS[target],)


@pytest.mark.parametrize("source", PLACEMENTS)
@pytest.mark.parametrize("target", ["ragged", "zigzag", "chunks"])
def test_checkpoints_lead_from_any_placement_to_any_other(tmp_path, source, target):
    run_ranks(save_and_load, 4, str(tmp_path / "checkpoint"), source, target)


def irregular_model():
    return nn.Sequential(nn.Linear(6, 14), nn.GELU(), nn.Linear(14, 5)).double()


def distribute_rows(model, mesh, placement):
    platform, first = get_platform(), model[0]
    layout = Layout.from_device_mesh(mesh)([placement])
    for name in ("weight", "bias"):
        parameter = platform.set_layout_into_parameter(getattr(first, name), layout)
        setattr(first, name, parameter)
    for parameter in (model[2].weight, model[2].bias):
        replicated = Layout.from_device_mesh(mesh)([R])
        name = "bias" if parameter.ndim == 1 else "weight"
        setattr(
            model[2], name, platform.set_layout_into_parameter(parameter, replicated)
        )
    return model


@on_ranks(4)
@pytest.mark.parametrize("kind", ["fused", "ragged", "zigzag"])
def test_a_layer_with_irregular_outputs_trains_as_on_one_device(kind):
    mesh, x = mesh_of((4,)), normal(7, 6)
    torch.manual_seed(1)
    truth = irregular_model()
    model = distribute_rows(copy.deepcopy(truth), mesh, PLACEMENTS[kind])
    optimizers = [torch.optim.AdamW(one.parameters(), 0.05) for one in (truth, model)]
    for _ in range(3):
        losses = [
            truth(x).pow(2).mean(),
            model(distribute_tensor(x, mesh, [R])).pow(2).mean(),
        ]
        close(losses[1].full_tensor(), losses[0])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for mine, true in zip(model.parameters(), truth.parameters(), strict=True):
            assert mine.grad.placements == mine.placements
            close(mine.grad.full_tensor(), true.grad)
            close(mine.full_tensor(), true.detach())


def put_zigzag(model, mesh):
    return distribute_rows(model, mesh, PLACEMENTS["zigzag"])


def put_ragged_wrongly(model, mesh):
    """With the rows of a rank in another order."""
    model = distribute_rows(model, mesh, PLACEMENTS["ragged"])
    with torch.no_grad():
        local = model[0].weight.to_local()
        local.copy_(local.flip(0))
    return model


@on_ranks(4)
def test_verify_knows_irregular_placements():
    mesh = mesh_of((4,))

    def rows():
        return (normal(4, 6),)

    def loss(model, x):
        if isinstance(next(model.parameters()), DTensor):
            x = distribute_tensor(x, mesh, [R])
        return model(x).pow(2).mean()

    report = verify(irregular_model, put_zigzag, mesh, rows, loss=loss)
    assert report.check().ok
    wrong = verify(irregular_model, put_ragged_wrongly, mesh, rows, loss=loss)
    assert not wrong.ok
    assert any(one.name == "0.weight" for one in wrong.wrong)
