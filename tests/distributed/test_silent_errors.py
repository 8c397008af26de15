# SPDX-License-Identifier: Apache-2.0
"""What goes wrong elsewhere without an error: each by its name, values and gradients against one device."""

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
from hyper_parallel.core.dtensor.modes import strict
from hyper_parallel.testing import on_ranks

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def draw(*shape, seed=0):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def integers(high, *shape, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def mesh_of(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple("xyz"[: len(sizes)]))


def put(tensor, mesh, placements):
    """A leaf with these values; the parts of a pending sum have nothing in common with their sum."""
    if P not in placements:
        return distribute_tensor(tensor.clone(), mesh, placements).requires_grad_(
            tensor.is_floating_point()
        )
    assert mesh.ndim == 1
    count, seeds = mesh.size(), range(100, 99 + mesh.size())
    parts = [draw(*tensor.shape, seed=seed) * 3 for seed in seeds]
    parts.append(tensor - sum(parts))
    assert len(parts) == count
    return DTensor.from_local(parts[mesh.rank], mesh, placements).requires_grad_()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(call, *operands, sizes=(2,)):
    """``call`` of (tensor, its placements) on a mesh, all by rules, against the plain call; the distributed results."""
    mesh = mesh_of(*sizes)
    mine = [put(t, mesh, p if isinstance(p, list) else [p]) for t, p in operands]
    plain = [t.clone().requires_grad_(t.is_floating_point()) for t, _ in operands]
    with strict():
        found = call(*mine)
    expected = call(*plain)
    pairs = list(
        zip(
            *(
                (x,) if isinstance(x, torch.Tensor) else tuple(x)
                for x in (found, expected)
            ),
            strict=True,
        )
    )
    losses = [0, 0]
    for seed, pair in enumerate([whole(t) for t in pair] for pair in pairs):
        torch.testing.assert_close(*pair, rtol=1e-10, atol=1e-10)
        if pair[1].requires_grad:
            losses = [
                loss + (t * draw(*t.shape, seed=seed + 50)).sum()
                for loss, t in zip(losses, pair, strict=True)
            ]
    if isinstance(losses[1], torch.Tensor):
        for loss in losses:
            loss.backward()
        for one, true in zip(mine, plain, strict=True):
            if true.grad is not None:
                torch.testing.assert_close(
                    whole(one.grad), true.grad, rtol=1e-10, atol=1e-10
                )
    return found


@on_ranks(2)
def test_a_wrong_value_and_a_wrong_gradient_would_be_seen():
    def of_shard(x):
        return x if not isinstance(x, DTensor) else x * 1.001

    def of_gradient(x):
        return x if not isinstance(x, DTensor) else x.detach() + (x - x.detach()) * 2

    for broken in (of_shard, of_gradient):
        with pytest.raises(AssertionError, match="not close"):
            compare(broken, (draw(4), S0))


# --- Partial


@on_ranks(2)
def test_a_number_added_to_a_partial():
    compare(lambda x: x + 1.5, (draw(5), P))
    compare(lambda x: 2 - x, (draw(5), P))
    compare(lambda x: (x * 1).add_(0.5), (draw(5), P))


@on_ranks(2)
def test_a_product_of_two_partials():
    compare(lambda x, y: x * y, (draw(4, 3), P), (draw(4, 3, seed=1), P))
    compare(lambda x: x * x, (draw(4, 3), P))
    compare(lambda x, y: x / y, (draw(4, 3), P), (draw(4, 3, seed=1), P))


@on_ranks(2)
def test_relu_of_a_partial():
    compare(F.relu, (draw(4, 3), P))
    compare(lambda x: F.gelu(x).exp(), (draw(4, 3), P))


@on_ranks(2)
def test_matmul_with_a_partial_input():
    for others in (R, S0, S1, P):
        compare(torch.matmul, (draw(4, 3), P), (draw(3, 5, seed=1), others))
    compare(F.linear, (draw(4, 3), P), (draw(5, 3, seed=1), S0), (draw(5, seed=2), R))


@on_ranks(2)
def test_item_of_a_partial():
    value = draw(1)[0]
    part = put(value, mesh_of(2), [P])
    assert part.detach().item() == pytest.approx(value.item(), abs=1e-12)
    assert float(part.detach()) == pytest.approx(value.item(), abs=1e-12)
    assert bool(part.detach() > value - 1) is True


@on_ranks(2)
def test_topk_and_sort_of_a_partial():
    compare(lambda x: torch.topk(x, 2), (draw(3, 5), P))
    compare(lambda x: torch.sort(x, descending=True), (draw(3, 5), P))
    compare(lambda x: x.argsort(0), (draw(3, 5), P))


# --- shapes


@on_ranks(2)
def test_reshape_that_merges_a_sharded_dim():
    for shape in [
        (4, 6),
        (5, 6),
        (1, 6),
    ]:  # even, uneven, and nothing on the second rank
        for placed in (S0, S1):
            compare(lambda x: x.reshape(-1), (draw(*shape), placed))
            compare(lambda x: x.view(2, -1), (draw(*shape), placed))
    compare(lambda x: x.reshape(6, 5), (draw(5, 6), S0))


@on_ranks(2)
def test_flatten_of_an_uneven_shard():
    compare(lambda x: x.flatten(0, 1), (draw(5, 3, 2), S0))
    compare(lambda x: x.flatten(0, 1), (draw(5, 3, 2), S1))
    compare(lambda x: x.flatten(1), (draw(2, 3, 3), S1))


@on_ranks(2)
def test_a_slice_of_a_sharded_dim_filled_in_place():
    def filled(x):
        x = x * 1
        x[1:4] = 7.0
        x[3:, 0] = -1.0
        return x

    compare(filled, (draw(5, 3), S0))
    x = put(draw(5, 3), mesh_of(2), [S0]).detach()
    with pytest.raises(RuntimeError, match="is a copy"):
        x[1:4].fill_(7.0)  # it would change a copy and nothing else
    torch.testing.assert_close(x.full_tensor(), draw(5, 3))


@on_ranks(2)
def test_argmax_over_the_sharded_dim():
    ties = torch.tensor(
        [[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64
    )
    for x in (draw(4, 5), ties):
        compare(lambda x: x.detach().argmax(1), (x, S1))
        compare(lambda x: x.detach().argmin(dim=-1, keepdim=True), (x, S1))
        compare(lambda x: x.detach().argmax(), (x, S1))
    compare(lambda x: x.max(1), (draw(4, 5), S1))


@on_ranks(4)
def test_two_mesh_axes_on_one_tensor_dim_in_either_order():
    from hyper_parallel.core.dtensor.layout import Layout

    base, data, weight = Layout((2, 2), ("x", "y")), draw(7, 3), draw(7, 3, seed=1)
    for order in (("x", "y"), ("y", "x")):
        for shape_of in (
            lambda x: x.reshape(-1),
            lambda x: x[2:6],
            lambda x: x.sum(0),
            lambda x: x.t() @ x,
        ):
            layout = base(order, "None")
            x = distribute_tensor(data, base.mesh, layout.placements).requires_grad_()
            assert x.layout.alias_placements == (order, "None")
            plain = data.clone().requires_grad_()
            shape_of(x * weight.new_tensor(2.0).item()).pow(2).sum().backward()
            shape_of(plain * 2.0).pow(2).sum().backward()
            torch.testing.assert_close(shape_of(x).full_tensor(), shape_of(plain))
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


# --- means and losses


@on_ranks(2)
def test_a_mean_over_an_uneven_dim():
    for rows in (5, 3, 1):
        compare(lambda x: x.mean(), (draw(rows, 3), S0))
        compare(lambda x: x.mean(0, keepdim=True), (draw(rows, 3), S0))
    compare(lambda x: x.var(0), (draw(5, 3), S0))


LOSSES = {
    "mse": F.mse_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "binary cross entropy": lambda x, y: F.binary_cross_entropy(
        x.sigmoid(), y.sigmoid()
    ),
    "binary cross entropy of logits": lambda x, y: F.binary_cross_entropy_with_logits(
        x, y.sigmoid()
    ),
    "l1": F.l1_loss,
}


@pytest.mark.parametrize("name", LOSSES)
@on_ranks(2)
def test_mean_reduced_losses_with_sharded_input_in_backward(name):
    for target in (S0, R, S1):
        compare(LOSSES[name], (draw(5, 3), S0), (draw(5, 3, seed=1), target))
    compare(LOSSES[name], (draw(5, 3), P), (draw(5, 3, seed=1), S0))


@on_ranks(2)
def test_cross_entropy_mean_with_ignore_index_and_class_weights_on_a_sharded_batch():
    target = torch.tensor(
        [0, 2, -100, 1, -100]
    )  # the second rank has one that counts, of three
    for smoothing in (0.0, 0.1):
        for scores in (S0, S1, R):
            for placed in (S0, R):
                compare(
                    lambda x, w, y, s=smoothing: F.cross_entropy(
                        x, y, w.detach(), label_smoothing=s
                    ),
                    (draw(5, 3), scores),
                    (draw(3, seed=1).exp(), R),
                    (target, placed),
                )
    compare(
        lambda x, y: F.cross_entropy(x, y, ignore_index=2),
        (draw(5, 3), S0),
        (target.abs() % 3, S0),
    )
    compare(
        lambda x, y: F.nll_loss(x.log_softmax(1), y), (draw(5, 3), S0), (target, S0)
    )


# --- parameters


@on_ranks(2)
def test_an_embedding_with_sharded_rows_and_padding_idx():
    rows = torch.tensor([[0, 4, 2], [4, 4, 1], [3, 0, 4]])
    for padding in (0, 4, -1):  # a row of either rank, and the last
        for index in (R, S0):
            compare(
                lambda w, i, p=padding: F.embedding(i, w, padding_idx=p),
                (draw(5, 3), S0),
                (rows, index),
            )


@on_ranks(2)
def test_layer_norm_weights_under_a_sequence_sharded_input():
    for placed in (S0, S1):
        compare(
            lambda x, w, b: F.layer_norm(x, (4,), w, b),
            (draw(2, 5, 4), placed),
            (draw(4, seed=1), R),
            (draw(4, seed=2), R),
        )
    compare(
        lambda x, w: F.rms_norm(x, (4,), w), (draw(2, 5, 4), S1), (draw(4, seed=1), R)
    )


@on_ranks(2)
def test_a_bias_under_a_sharded_contraction():
    operands = (draw(4, 5), S1), (draw(3, 5, seed=1), S1)
    found = compare(F.linear, *operands, (draw(3, seed=2), R))
    assert found.placements == (P,)  # the bias is in one of the parts
    compare(F.linear, *operands, (draw(3, seed=2), S0))
    compare(
        lambda x, w, b: torch.addmm(b, x, w.t(), beta=0.5),
        *operands,
        (draw(3, seed=2), R),
    )


@on_ranks(2)
def test_convolution_sharded_on_anything_but_the_batch():
    x, w, b = draw(2, 4, 7, 5), draw(6, 4, 3, 3, seed=1), draw(6, seed=2)
    for dim in range(4):
        for weight in (R, *(Shard(d) for d in range(4))):
            compare(
                lambda x, w, b: F.conv2d(x, w, b, padding=1),
                (x, Shard(dim)),
                (w, weight),
                (b, R),
            )
    compare(
        lambda x, w, b: F.conv2d(x, w, b, stride=2, groups=2),
        (x, Shard(2)),
        (w[:, :2], R),
        (b, S0),
    )
    compare(
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        (x, Shard(3)),
        (draw(4, 3, 2, 2, seed=1), R),
    )
    compare(F.conv1d, (draw(2, 3, 8), Shard(2)), (draw(4, 3, 3, seed=1), R))
    compare(lambda x: F.max_pool2d(x, 2), (x, Shard(2)))
    compare(lambda x: F.avg_pool2d(x, 3, padding=1), (x, Shard(3)))


# --- other gradients


@on_ranks(2)
def test_backward_of_amax_and_the_infinity_norm():
    tied = torch.tensor(
        [[2.0, -3.0, 3.0], [2.0, 3.0, 1.0], [0.0, -3.0, 1.0]], dtype=torch.float64
    )
    for x in (draw(5, 3), tied):  # those that tie share the gradient, also across ranks
        for placed in (S0, S1, P):
            compare(lambda x: x.amax(0), (x, placed))
            compare(lambda x: x.amin((0, 1)), (x, placed))
            compare(lambda x: torch.linalg.vector_norm(x, float("inf")), (x, placed))
            compare(
                lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1), (x, placed)
            )


@on_ranks(2)
def test_the_gradient_of_the_source_of_a_scatter():
    index = torch.tensor([[0, 3, 1], [4, 1, 3]])
    for target in (R, S0, S1):
        for source in (R, S0, S1):
            compare(
                lambda x, y, i: x.scatter_add(0, i, y),
                (draw(5, 3), target),
                (draw(2, 3, seed=1), source),
                (index, R),
            )
            compare(
                lambda x, y, i: x.scatter(0, i, y),
                (draw(5, 3), target),
                (draw(2, 3, seed=1), source),
                (index, source),
            )


# --- values that depend on more than a shard


@on_ranks(2)
def test_dropout_on_replicas_and_on_shards():
    torch.manual_seed(3)
    mesh = mesh_of(2)
    copies = distribute_tensor(torch.ones(64, 64), mesh, [R])
    mine = nn.Dropout(0.5)(copies).to_local()
    [first, second] = DTensor.from_local(mine[None], mesh, [S0]).full_tensor()
    assert torch.equal(
        first, second
    )  # replicas that differ are not one tensor any more
    assert 0.4 < (first == 0).double().mean() < 0.6
    shards = distribute_tensor(torch.ones(64, 64), mesh, [S0])
    dropped = nn.Dropout(0.5)(shards).full_tensor()
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(
        dropped[:32], dropped[32:]
    )  # the same pattern twice would be a worse dropout
    assert 0.4 < (dropped == 0).double().mean() < 0.6


@on_ranks(2)
def test_one_hot_with_inferred_classes_on_a_shard():
    classes = torch.tensor([0, 4, 1, 2, 1])  # the second rank's largest is 2
    found = compare(F.one_hot, (classes, S0))
    assert found.shape == (5, 5)
    compare(F.one_hot, (integers(7, 3, 5), S1))
