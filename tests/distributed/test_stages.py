# SPDX-License-Identifier: Apache-2.0
"""Reductions, losses and attention where something is cut along what they reduce: what is communicated, and edges."""

from math import inf, nan

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from torch import nn

from hyper_parallel import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.dtensor.modes import explicit, strict
from hyper_parallel.testing import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("xyz"[: len(shape)]))


def cut(values, dim=0, mesh=None):
    values = (
        values
        if isinstance(values, torch.Tensor)
        else torch.tensor(values, dtype=torch.float64)
    )
    return distribute_tensor(
        values.requires_grad_(values.is_floating_point()),
        mesh or mesh_of(4),
        [Shard(dim)],
    )


CALLS = {
    "vector_norm": lambda x, t: torch.linalg.vector_norm(x),
    "norm": lambda x, t: x.norm(dim=1).sum(),
    "amax": lambda x, t: x.amax(1).sum(),
    "max": lambda x, t: x.max(1).values.sum(),
    "logsumexp": lambda x, t: x.logsumexp(1).sum(),
    "std": lambda x, t: x.std(1).sum(),
    "cross_entropy": F.cross_entropy,
    "nll_loss": F.nll_loss,
}


@on_ranks(4)
def test_a_dim_that_is_cut_is_not_gathered():
    """Nor is it in explicit mode that anything must be redistributed by hand."""
    mesh = mesh_of(4)
    x, target = (
        cut(torch.randn(8, 400), 1, mesh),
        distribute_tensor(torch.arange(8), mesh, [R]),
    )
    for name, call in CALLS.items():
        with CommunicationLedger(mesh) as ledger, strict(), explicit():
            call(x, target).reduce_partial().backward()
        assert sum(entry.nbytes for entry in ledger.entries) < x.to_local().numel(), (
            name,
            ledger.table(),
        )


@on_ranks(4)
def test_a_nan_is_not_lost_between_ranks():
    for values in ([1.0, 2.0, nan, 3.0], [nan, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, nan]):
        for call in (
            torch.amax,
            torch.amin,
            torch.max,
            torch.min,
            lambda x: x.max(0)[0],
            lambda x: x.norm(inf),
        ):
            assert call(cut(values)).full_tensor().isnan()


@on_ranks(4)
def test_shards_of_nothing_but_infinities():
    """As masked scores are: the others' softmax must not become a nan."""
    values = [[1.0, 2.0], [-inf, -inf], [3.0, -inf], [-inf, -inf]]
    for call in (
        lambda x: x.logsumexp((0, 1)),
        lambda x: x.softmax(0)[:, 0].square().sum(),
        lambda x: x.amax(),
    ):
        plain = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        mine, true = cut(values), call(plain)
        found = call(mine)
        torch.testing.assert_close(found.full_tensor(), true)
        found.reduce_partial().backward()
        true.backward()
        torch.testing.assert_close(mine.grad.full_tensor(), plain.grad)
    assert torch.amax(cut([-inf] * 6)).item() == -inf
    assert cut([-inf] * 6).logsumexp(0).item() == -inf


@on_ranks(4)
def test_means_of_half_precision_do_not_overflow():
    x = cut(torch.full((64, 64), 60000.0, dtype=torch.float16), 0)
    assert x.mean().full_tensor() == 60000.0
    assert F.l1_loss(x, x * 0).full_tensor() == 60000.0
    many = cut(torch.zeros(1, 100_000, dtype=torch.float16), 1)
    assert many.softmax(1).full_tensor()[0, 0] == torch.tensor(
        1e-5, dtype=torch.float16
    )
    assert many.logsumexp(1).full_tensor() == torch.tensor(100_000.0).log().half()
    scores = torch.zeros(64, 2, dtype=torch.float16)
    scores[:, 1] = 40000.0
    loss = F.cross_entropy(
        cut(scores),
        distribute_tensor(torch.zeros(64, dtype=torch.long), mesh_of(4), [S0]),
    )
    assert loss.full_tensor() == 40000.0
    assert loss.dtype is torch.float16


@on_ranks(4)
def test_a_target_that_is_no_class_is_seen():
    scores, target = (
        cut(torch.randn(3, 8), 1),
        distribute_tensor(torch.tensor([1, 9, 2]), mesh_of(4), [R]),
    )
    with pytest.raises(
        IndexError, match="target 9 is out of bounds: there are 8 classes"
    ):
        F.cross_entropy(scores, target, reduction="none")


@on_ranks(4)
def test_the_first_of_several_that_tie():
    x = cut(torch.tensor([2, 7, 7, 1, 7, 0]))
    assert x.argmax(0).full_tensor() == 1
    assert x.max(0).indices.full_tensor() == 1
    assert x.argmin(0).full_tensor() == 5
    assert x.max(0).values.full_tensor() == 7


@on_ranks(4)
def test_what_torch_refuses_is_refused():
    x = cut(torch.randn(8, 4))
    for call in (
        lambda: x.sum(2),
        lambda: x.amax(-3),
        lambda: x.softmax(5),
        lambda: torch.linalg.vector_norm(x, 2, 4),
    ):
        with pytest.raises((IndexError, ValueError)):
            call()
    with pytest.raises(ValueError, match="more than 1 value"):
        F.batch_norm(cut(torch.randn(1, 4), 0), None, None, training=True)


@on_ranks(4)
def test_batch_norm_learns_the_statistics_of_the_whole_batch():
    mesh = mesh_of(4)
    torch.manual_seed(0)
    plain, mine = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    for store in (mine._parameters, mine._buffers):
        for name, tensor in list(store.items()):
            made = distribute_tensor(tensor.detach(), mesh, [R])
            store[name] = nn.Parameter(made) if store is mine._parameters else made
    for _ in range(3):
        x = torch.randn(10, 3, 2, dtype=torch.float64)
        torch.testing.assert_close(
            mine(distribute_tensor(x, mesh, [S0])).full_tensor(), plain(x)
        )
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(
            getattr(mine, name).full_tensor(), getattr(plain, name)
        )
    x = torch.randn(10, 3, 2, dtype=torch.float64)
    torch.testing.assert_close(
        mine.eval()(distribute_tensor(x, mesh, [S0])).full_tensor(), plain.eval()(x)
    )


# --- dropout in attention


def attended(placements, **how):
    """What of ones is kept: rows of the attention's own weights, which dropout changes."""
    mesh = mesh_of(2, 2)
    torch.manual_seed(5)
    q, k, v = (
        distribute_tensor(torch.ones(4, 4, 8, 4), mesh, placements) for _ in range(3)
    )
    q.requires_grad_()
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, **how)


@on_ranks(4)
def test_attention_drops_the_same_on_copies_and_not_on_pieces():
    for placements in ([R, R], [S0, R], [S1, S0], [R, Shard(2)]):
        found = [None] * 4
        torch.distributed.all_gather_object(
            found, attended(placements).to_local().detach()
        )
        cuts = [p.is_shard() for p in placements]
        for one, a in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
            for other, b in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)][:one]):
                differ = any(
                    i != j for i, j, is_cut in zip(a, b, cuts, strict=True) if is_cut
                )
                assert torch.equal(found[one], found[other]) != differ, placements


@on_ranks(4)
def test_attention_drops_all_dims_of_a_value_alike():
    with strict():
        whole = attended([R, Shard(3)], is_causal=True).full_tensor()
    assert torch.equal(whole[..., 0], whole[..., 3])
    assert (whole == 0).any()
    assert isinstance(attended([R, S0]), DTensor)
