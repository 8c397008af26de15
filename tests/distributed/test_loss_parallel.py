# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of scores whose classes are cut: as on one device, in one exchange, without gathering the scores."""

import itertools
import threading
import warnings
from math import inf
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from live_bytes import LiveBytes
from torch import nn

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.dtensor.modes import explicit, implicit_replication, strict
from hyper_parallel.core.dtensor.placement_types import FusedShard
from hyper_parallel.core.shard.arguments import OperatorError
from hyper_parallel.core.shard.ops import sharded_cross_entropy
from hyper_parallel.core.tensor_parallel.loss import loss_parallel
from hyper_parallel.testing import on_ranks

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
IGNORED = 2
CLOSE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}


def mesh_of(*sizes):
    return init_device_mesh(
        "cpu", sizes, mesh_dim_names=("tp",) if len(sizes) == 1 else ("dp", "tp")
    )


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def classes(high, *shape, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def weights(count, dtype=torch.float64):
    return (draw(count, seed=9).abs() + 0.1).to(dtype)


def targets_of(shape, seed=1):
    return classes(
        shape[min(len(shape) - 1, 1)],
        *shape[:1][: len(shape) - 1],
        *shape[2:],
        seed=seed,
    )


def put(tensor, mesh, placements):
    return distribute_tensor(tensor.clone(), mesh, placements).requires_grad_(
        tensor.is_floating_point()
    )


def close(found, expected, nan=False):
    found = found.full_tensor() if isinstance(found, DTensor) else found
    limit = CLOSE[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit, equal_nan=nan)


def backward(losses):
    """Of a sum in which no two losses count the same."""
    (losses * draw(*losses.shape, seed=77).to(losses.dtype)).sum().backward()


def as_on_one_device(mesh, scores, placements, target, nan=False, **more):
    """Compares losses and gradients with the plain call; the ledger of the distributed one."""
    mine, plain = put(scores, mesh, placements), scores.clone().requires_grad_()
    with CommunicationLedger(mesh) as ledger, strict():
        losses = F.cross_entropy(mine, target, **more).full_tensor()
        backward(losses)
    whole = {
        name: value.detach().full_tensor() if isinstance(value, DTensor) else value
        for name, value in more.items()
    }
    expected = F.cross_entropy(
        plain, target.full_tensor() if isinstance(target, DTensor) else target, **whole
    )
    assert losses.dtype == expected.dtype
    assert mine.grad.placements == mine.placements
    close(losses, expected, nan)
    backward(expected)
    close(mine.grad, plain.grad, nan)
    return ledger


def is_one_exchange(ledger, axis="tp"):
    """One all-gather over the classes' axis in forward, and nothing at all over it in backward."""
    over = [entry for entry in ledger.entries if entry.axis in (axis, "all axes")]
    assert [(e.collective, e.backward) for e in over] == [
        ("all_gather_into_tensor", False)
    ], ledger.table()


SHAPES = {  # of the scores; how they lie on dp and tp, and how their targets lie on dp
    "one position": ((9,), [R, S0], R),
    "rows": ((5, 9), [S0, S1], S0),
    "pixels": ((3, 9, 4), [S0, S1], S0),
    "pixels cut in two": ((3, 7, 5), [S2, S1], S1),
    "many pixels": ((2, 8, 2, 3), [S0, S1], S0),
}


@pytest.mark.parametrize("name", SHAPES)
@on_ranks(4)
def test_every_option_on_a_mesh_of_data_and_classes(name):
    mesh = mesh_of(2, 2)
    shape, placements, batch = SHAPES[name]
    target, count = targets_of(shape), shape[min(len(shape) - 1, 1)]
    scores, placed = draw(*shape) * 3, distribute_tensor(target, mesh, [batch, R])
    ignored = (-100, int(target.flatten()[0]))
    options = itertools.product(
        ("none", "sum", "mean"), (None, R, S0), (0.0, 0.3, 1.0), ignored
    )
    for reduction, weight, smoothing, ignore_index in options:
        ledger = as_on_one_device(
            mesh,
            scores,
            placements,
            placed,
            nan=not target.shape,  # the mean of nothing
            weight=None
            if weight is None
            else distribute_tensor(weights(count), mesh, [R, weight]),
            reduction=reduction,
            label_smoothing=smoothing,
            ignore_index=ignore_index,
        )
        is_one_exchange(ledger)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@on_ranks(4)
def test_uneven_and_empty_pieces_of_classes(count):
    """Of five classes the fourth of four ranks has none."""
    mesh = mesh_of(4)
    scores, target = draw(6, count), distribute_tensor(classes(count, 6), mesh, [R])
    for smoothing, weight in itertools.product(
        (0.0, 0.2), (None, distribute_tensor(weights(count), mesh, [R]))
    ):
        ledger = as_on_one_device(
            mesh, scores, [S1], target, label_smoothing=smoothing, weight=weight
        )
        is_one_exchange(ledger)


@on_ranks(2)
def test_two_ranks():
    mesh = mesh_of(2)
    for reduction in ("none", "sum", "mean"):
        is_one_exchange(
            as_on_one_device(
                mesh,
                draw(3, 5),
                [S1],
                distribute_tensor(classes(5, 3), mesh, [R]),
                reduction=reduction,
            )
        )


@on_ranks(4)
def test_more_ranks_than_positions():
    mesh = mesh_of(2, 2)
    target = distribute_tensor(classes(6, 1), mesh, [S0, R])
    weight = distribute_tensor(weights(6), mesh, [R, R])
    for reduction in ("none", "sum", "mean"):
        is_one_exchange(
            as_on_one_device(
                mesh, draw(1, 6), [S0, S1], target, reduction=reduction, weight=weight
            )
        )


@on_ranks(4)
def test_classes_on_several_axes():
    mesh = mesh_of(2, 2)
    for count in (3, 8, 11):
        target = distribute_tensor(classes(count, 4), mesh, [R, R])
        weight = distribute_tensor(weights(count), mesh, [S0, R])
        more = {"weight": weight, "label_smoothing": 0.1, "ignore_index": IGNORED}
        ledger = as_on_one_device(mesh, draw(4, count), [S1, S1], target)
        is_one_exchange(ledger, "all axes")
        ledger = as_on_one_device(mesh, draw(4, count), [S1, S1], target, **more)
        assert ledger.counts(backward=True) == {}
        inner_first = Layout.from_device_mesh(mesh)("None", ("tp", "dp"))
        as_on_one_device(mesh, draw(4, count), inner_first, target, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@on_ranks(4)
def test_other_precisions(dtype):
    mesh = mesh_of(2, 2)
    scores = draw(8, 33, dtype=dtype) * 2
    target = distribute_tensor(classes(33, 8), mesh, [S0, R])
    for reduction, smoothing in itertools.product(("none", "sum", "mean"), (0.0, 0.1)):
        weight = distribute_tensor(weights(33, dtype), mesh, [R, R])
        more = {"reduction": reduction, "label_smoothing": smoothing}
        as_on_one_device(mesh, scores, [S0, S1], target, **more)
        as_on_one_device(mesh, scores, [S0, S1], target, weight=weight, **more)


@on_ranks(2)
def test_half_precision_within_autocast_and_of_large_scores():
    mesh = mesh_of(2)
    scores, target = (
        draw(4, 6, dtype=torch.bfloat16),
        distribute_tensor(classes(6, 4), mesh, [R]),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        as_on_one_device(mesh, scores, [S1], target)
    far = (
        draw(4, 6, dtype=torch.float32) + 10_000
    )  # one over a thousand is their last digit
    as_on_one_device(mesh, far, [S1], target, label_smoothing=0.1)
    as_on_one_device(mesh, draw(4, 6) * 1000, [S1], target, label_smoothing=0.1)


@on_ranks(4)
def test_targets_in_shares_of_all_classes():
    mesh = mesh_of(2, 2)
    for shape in ((7,), (5, 7), (3, 7, 2)):
        placements = [R, S0] if len(shape) == 1 else [S0, S1]
        dim = min(len(shape) - 1, 1)
        shares = draw(*shape, seed=3).softmax(dim)
        for lies, reduction, smoothing in itertools.product(
            (placements, [R, R], [R, placements[1]]),
            ("none", "sum", "mean"),
            (0.0, 0.2),
        ):
            more = {"reduction": reduction, "label_smoothing": smoothing}
            as_on_one_device(
                mesh, draw(*shape), placements, put(shares, mesh, lies).detach(), **more
            )
            operands = draw(*shape), shares, weights(7)
            mine = [
                put(t, mesh, p)
                for t, p in zip(operands, (placements, lies, [R, R]), strict=True)
            ]
            plain = [t.clone().requires_grad_() for t in operands]
            found, expected = (
                F.cross_entropy(*mine, **more),
                F.cross_entropy(*plain, **more),
            )
            close(found, expected)
            backward(found.full_tensor())
            backward(expected)
            for one, other in zip(mine, plain, strict=True):
                assert one.grad.placements == one.placements
                close(one.grad, other.grad)


@on_ranks(4)
def test_targets_and_weights_that_lie_otherwise_are_brought():
    mesh = mesh_of(2, 2)
    for lies in ([R, S0], [S0, S0], [S0, R], [R, R]):
        target = distribute_tensor(classes(9, 8), mesh, lies)
        for weight in ([S0, S0], [S0, R], [R, S0]):
            given = distribute_tensor(weights(9), mesh, weight)
            for reduction in ("none", "mean"):
                as_on_one_device(
                    mesh,
                    draw(8, 9),
                    [S0, S1],
                    target,
                    weight=given,
                    reduction=reduction,
                )


@on_ranks(2)
def test_a_pending_sum_is_taken_first():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    scores, target = draw(4, 6), distribute_tensor(classes(6, 4), mesh, [R, R])
    part = scores.clone().requires_grad_()
    mine = DTensor.from_local(part, mesh, [Partial(), S1], shape=(4, 12))
    both = torch.cat([scores, scores], 1).requires_grad_()
    loss, expected = (
        F.cross_entropy(mine, target),
        F.cross_entropy(both, target.full_tensor()),
    )
    close(loss, expected)
    loss.backward()
    expected.backward()
    close(part.grad, both.grad.chunk(2, 1)[mesh.rank])


@on_ranks(4)
def test_a_pending_sum_over_the_batch_axis():
    mesh = mesh_of(2, 2)
    scores, other = draw(4, 6), draw(4, 6, seed=5)
    target = distribute_tensor(classes(6, 4), mesh, [R, R])
    parts = [scores - other, other]
    place = mesh.get_coordinate()
    part = parts[place[0]].chunk(2, 1)[place[1]].clone().requires_grad_()
    loss = F.cross_entropy(DTensor.from_local(part, mesh, [Partial(), S1]), target)
    plain = scores.clone().requires_grad_()
    expected = F.cross_entropy(plain, target.full_tensor())
    close(loss, expected)
    loss.backward()
    expected.backward()
    close(part.grad, plain.grad.chunk(2, 1)[place[1]])


@on_ranks(4)
def test_classes_that_are_masked_out():
    """A rank of nothing but minus infinities, too."""
    mesh = mesh_of(4)
    scores = draw(5, 8)
    scores[:, 2:4] = -inf
    scores[1, :6] = -inf
    scores[2, 7] = -inf
    target = torch.tensor([0, 6, 1, 4, 5])
    for chosen in (
        target,
        torch.tensor([0, 6, 1, 3, 5]),
    ):  # the loss of a class that cannot be is infinite
        placed = distribute_tensor(chosen, mesh, [R])
        for reduction in ("none", "sum"):
            as_on_one_device(mesh, scores, [S1], placed, reduction=reduction)
    as_on_one_device(
        mesh,
        scores,
        [S1],
        distribute_tensor(target, mesh, [R]),
        label_smoothing=0.1,
        reduction="none",
    )
    nothing = scores.clone()
    nothing[3] = -inf
    as_on_one_device(
        mesh,
        nothing,
        [S1],
        distribute_tensor(target, mesh, [R]),
        nan=True,
        reduction="none",
    )


@on_ranks(4)
def test_a_target_that_is_no_class_is_refused_on_all_ranks():
    mesh = mesh_of(2, 2)
    scores = draw(4, 8)
    for wrong in (8, -1):
        target = torch.tensor([1, wrong, 2, 7])
        with pytest.raises(IndexError):  # one device does so too
            F.cross_entropy(scores, target)
        for placements in ([R, S1], [S1, R], [S1, S1]):
            with pytest.raises(
                IndexError,
                match=f"target {wrong} is out of bounds: there are 8 classes.*HP315",
            ):
                F.cross_entropy(
                    put(scores, mesh, placements),
                    distribute_tensor(target, mesh, [R, R]),
                )
    as_on_one_device(
        mesh,
        scores,
        [R, S1],
        distribute_tensor(torch.tensor([1, -100, 2, 7]), mesh, [R, R]),
    )


@on_ranks(4)
def test_a_target_that_is_no_class_is_a_nan_on_an_accelerator():
    """There the question would wait for all that runs, so nobody asks."""
    with mock.patch.object(sharded_cross_entropy, "_refuse_outside"):
        check_that_it_is_a_nan()


def check_that_it_is_a_nan():
    mesh = mesh_of(2, 2)
    weight = distribute_tensor(weights(8), mesh, [R, R])
    for wrong in (8, -1, -100):
        target = distribute_tensor(torch.tensor([1, wrong, 2, 7]), mesh, [S0, R])
        for more in (
            {},
            {"weight": weight},
            {"label_smoothing": 0.1},
            {"weight": weight, "label_smoothing": 0.1},
        ):
            scores = put(draw(4, 8), mesh, [S0, S1])
            losses = F.cross_entropy(
                scores, target, reduction="none", ignore_index=7, **more
            )
            assert losses.full_tensor().isnan().tolist() == [False, True, False, False]
            losses.sum().backward()
            assert scores.grad.full_tensor().isnan().all(1).tolist() == [
                False,
                True,
                False,
                False,
            ]
            assert (
                F.cross_entropy(scores, target, ignore_index=7, **more)
                .full_tensor()
                .isnan()
            )


@on_ranks(2)
def test_a_byte_is_not_taken_for_what_is_ignored():
    mesh = mesh_of(2)
    target = torch.tensor([156, 3], dtype=torch.uint8)  # -100 modulo 256
    as_on_one_device(
        mesh, draw(2, 200), [S1], distribute_tensor(target, mesh, [R]), reduction="none"
    )


@on_ranks(2)
def test_everything_ignored():
    mesh = mesh_of(2)
    target = distribute_tensor(torch.full((3,), -100), mesh, [R])
    as_on_one_device(mesh, draw(3, 4), [S1], target, nan=True)
    as_on_one_device(mesh, draw(3, 4), [S1], target, reduction="sum")


@on_ranks(2)
def test_reductions_of_older_code():
    mesh = mesh_of(2)
    target = distribute_tensor(classes(6, 4), mesh, [R])
    for old in (
        {"size_average": False},
        {"reduce": False},
        {"size_average": True},
        {"reduce": True},
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that they will go
            as_on_one_device(mesh, draw(4, 6), [S1], target, **old)


@on_ranks(2)
def test_what_one_device_refuses_is_refused_before_anything_is_sent():
    mesh = mesh_of(2)
    scores, target = (
        put(draw(4, 6), mesh, [S1]),
        distribute_tensor(classes(6, 4), mesh, [R]),
    )
    weight, shares = put(weights(6), mesh, [R]), put(draw(4, 6).softmax(1), mesh, [S1])
    short = distribute_tensor(classes(6, 3), mesh, [R])
    wrong = [
        (OperatorError, "no gradient for weight", (scores, target, weight), {}),
        (
            OperatorError,
            "no gradient for weight",
            (scores, target, weight),
            {"label_smoothing": 0.1},
        ),
        (OperatorError, "between 0 and 1", (scores, target), {"label_smoothing": 1.5}),
        (OperatorError, "shares of all classes", (scores, shares), {"ignore_index": 1}),
        (OperatorError, "as floating point", (scores, shares.detach().long()), {}),
        (OperatorError, "as integers", (scores, target.double()), {}),
        (
            ValueError,
            r"expected a target of shape \(4,\).* got \(3,\)",
            (scores, short),
            {},
        ),
        (
            ValueError,
            r"each of 6 classes, got \(4,\)",
            (scores, target, distribute_tensor(weights(4), mesh, [R])),
            {},
        ),
        (
            ValueError,
            "reduction must be one of none, sum, mean, got 'all'",
            (scores, target),
            {"reduction": "all"},
        ),
    ]
    with CommunicationLedger(mesh) as ledger, loss_parallel():
        for error, message, args, more in wrong:
            with pytest.raises(error, match=message):
                F.cross_entropy(*args, **more)
    assert not ledger.entries
    with torch.no_grad():
        close(
            F.cross_entropy(scores, target, weight),
            F.cross_entropy(draw(4, 6), classes(6, 4), weights(6)),
        )


@on_ranks(2)
def test_a_second_derivative_is_refused():
    mesh = mesh_of(2)
    scores = put(draw(4, 6), mesh, [S1])
    loss = F.cross_entropy(scores, distribute_tensor(classes(6, 4), mesh, [R]))
    (first,) = torch.autograd.grad(loss, [scores], create_graph=True)
    with pytest.raises(OperatorError, match="no second derivative"):
        first.square().sum().backward()


@on_ranks(4)
def test_explicit_mode_needs_no_help_where_all_lies_well():
    mesh = mesh_of(2, 2)
    scores, target = (
        put(draw(4, 6), mesh, [S0, S1]),
        distribute_tensor(classes(6, 4), mesh, [R, R]),
    )
    with explicit():
        F.cross_entropy(scores, target.redistribute(mesh, [S0, R])).backward()
        with pytest.raises(OperatorError, match="explicit mode: tensor 1"):
            F.cross_entropy(scores, target)
        with loss_parallel():
            F.cross_entropy(scores, classes(6, 4), weights(6))


# --- what it costs


@on_ranks(4)
def test_no_rank_ever_holds_the_gathered_scores():
    mesh = mesh_of(4)
    positions, count = 64, 4096
    target = distribute_tensor(classes(count, positions), mesh, [R])
    local = put(draw(positions, count, dtype=torch.float32), mesh, [S1])
    shard = local.to_local().nbytes
    F.cross_entropy(local, target).backward()
    local.grad = None
    saved = []
    with (
        CommunicationLedger(mesh) as ledger,
        LiveBytes() as live,
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.append(t) or t, lambda t: t
        ),
    ):
        F.cross_entropy(
            local, target, ignore_index=IGNORED, label_smoothing=0.1
        ).backward()
    assert (
        ledger.nbytes() <= 3 * 5 * 4 * positions
    )  # five numbers of four bytes from each of the others
    large = {t.data_ptr() for t in saved if t.nbytes >= shard}
    assert large == {local.to_local().data_ptr()}
    assert live.peak < 2.2 * shard  # the scores, and their gradient


@on_ranks(4)
def test_numbers_that_are_exchanged():
    mesh = mesh_of(4)
    scores, target = (
        put(draw(8, 400, dtype=torch.bfloat16), mesh, [S1]),
        distribute_tensor(classes(400, 8), mesh, [R]),
    )
    for call, numbers in (
        (F.cross_entropy, 4),
        (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), 5),
    ):
        with CommunicationLedger(mesh) as ledger:
            call(scores, target).backward()
        assert ledger.nbytes() == 3 * numbers * 8 * 4
        is_one_exchange(ledger)


# --- loss_parallel()


def part(tensor, mesh, axis=0):
    return tensor.chunk(mesh.mesh_shape[axis])[mesh.get_coordinate()[axis]]


@on_ranks(4)
def test_plain_targets_are_a_part_of_the_batch_or_all_of_it():
    mesh = mesh_of(2, 2)
    for shape in ((6, 9), (6, 9, 4)):
        scores, target, weight = draw(*shape), targets_of(shape), weights(9)
        for given, more in itertools.product(
            (part(target, mesh), target), ({}, {"weight": weight})
        ):
            with loss_parallel():
                mine, plain = (
                    put(scores, mesh, [S0, S1]),
                    scores.clone().requires_grad_(),
                )
                with CommunicationLedger(mesh) as ledger:
                    loss = F.cross_entropy(mine, given, label_smoothing=0.1, **more)
                    loss.backward()
                expected = F.cross_entropy(plain, target, label_smoothing=0.1, **more)
                expected.backward()
            is_one_exchange(ledger)
            assert ledger.counts() == {
                "all_gather_into_tensor": 1,
                "all_reduce": 1,
            }  # the weight of the whole batch
            close(loss, expected)
            close(mine.grad, plain.grad)


@on_ranks(4)
def test_plain_shares_of_classes():
    mesh = mesh_of(2, 2)
    scores, shares = draw(6, 9), draw(6, 9, seed=3).softmax(1)
    rows = part(shares, mesh)
    expected = F.cross_entropy(scores, shares)
    with loss_parallel():
        for given in (rows, shares, rows.chunk(2, 1)[mesh.get_coordinate()[1]]):
            close(F.cross_entropy(put(scores, mesh, [S0, S1]), given), expected)


@on_ranks(4)
def test_plain_targets_where_batch_and_classes_lie_in_other_ways():
    mesh = mesh_of(2, 2)
    scores, target = draw(5, 6), classes(6, 5)
    expected = F.cross_entropy(scores, target)
    with loss_parallel(), strict():
        for placements in ([R, S1], [S1, S1], [R, R]):
            close(F.cross_entropy(put(scores, mesh, placements), target), expected)
        for placements in ([S0, R], [S0, S0], [S1, S0]):
            mine = put(scores, mesh, placements)
            own = distribute_tensor(
                target, mesh, [p if p == S0 else R for p in placements]
            ).to_local()
            for given in (own, target):
                close(F.cross_entropy(mine, given), expected)
        close(
            F.cross_entropy(put(scores[0], mesh, [R, S0]), target[0]),
            F.cross_entropy(scores[0], target[0]),
        )


@on_ranks(4)
def test_a_plain_target_of_another_shape_tells_both():
    mesh = mesh_of(2, 2)
    scores = put(draw(6, 9), mesh, [S0, S1])
    with loss_parallel():
        with pytest.raises(
            ValueError, match=r"plain target of shape \(4,\).*of shape \(3,\) or \(6,\)"
        ):
            F.cross_entropy(scores, classes(9, 4))
        with pytest.raises(
            ValueError, match=r"\(3, 3\).*of shape \(3, \d\) or \(3, 9\) or \(6, 9\)"
        ):
            F.cross_entropy(scores, draw(3, 3))


@on_ranks(2)
def test_the_context_holds_for_its_thread_and_its_block():
    mesh = mesh_of(2)
    scores, target = put(draw(4, 6), mesh, [S1]), classes(6, 4)
    refused = pytest.raises(
        OperatorError, match="cross_entropy: tensor 1 among its arguments"
    )
    with refused:
        F.cross_entropy(scores, target)
    with loss_parallel():
        with loss_parallel():
            F.cross_entropy(scores, target)
        F.cross_entropy(scores, target)
        with pytest.raises(OperatorError, match="mul: tensor 1"):
            scores * draw(4, 6)
        found = []
        thread = threading.Thread(
            target=lambda: found.append(raised(F.cross_entropy, scores, target))
        )
        thread.start()
        thread.join()
        assert found == [OperatorError]
        assert (
            raised(F.cross_entropy, draw(4, 6), distribute_tensor(target, mesh, [R]))
            is OperatorError
        )
        close(F.cross_entropy(draw(4, 6), target), F.cross_entropy(draw(4, 6), target))
    with pytest.raises(KeyError), loss_parallel():
        raise KeyError
    with refused:
        F.cross_entropy(scores, target)


def raised(call, *args):
    try:
        call(*args)
    except Exception as error:
        return type(error)
    return None


@on_ranks(4)
def test_a_part_of_the_batch_is_not_taken_for_a_copy_within_implicit_replication():
    mesh = mesh_of(2, 2)
    scores, target = draw(6, 9), classes(9, 6)
    with loss_parallel(), implicit_replication():
        loss = F.cross_entropy(put(scores, mesh, [S0, S1]), part(target, mesh))
    close(loss, F.cross_entropy(scores, target))


@on_ranks(2)
def test_scores_that_would_have_to_move_are_refused():
    mesh = mesh_of(2)
    scores, target = draw(4, 8), classes(8, 4)
    mine = distribute_tensor(scores, mesh, [FusedShard(1, (6, 2))]).requires_grad_()
    refused = pytest.raises(OperatorError, match="loss_parallel.. does not move scores")
    with CommunicationLedger(mesh) as ledger, loss_parallel():
        for given in (target, distribute_tensor(target, mesh, [R])):
            with refused:
                F.cross_entropy(mine, given)
    assert not ledger.entries
    loss, plain = (
        F.cross_entropy(mine, distribute_tensor(target, mesh, [R])),
        scores.clone().requires_grad_(),
    )
    expected = F.cross_entropy(plain, target)
    close(loss, expected)
    loss.backward()
    expected.backward()
    close(mine.grad, plain.grad)


@on_ranks(4)
def test_a_model_learns_as_on_one_device():
    """The head's weight is cut by classes, the batch by dp; plain targets and weights in a module of torch's."""
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    plain = nn.Linear(5, 9).double()
    weight = nn.Parameter(distribute_tensor(plain.weight.detach(), mesh, [R, S0]))
    bias = nn.Parameter(distribute_tensor(plain.bias.detach(), mesh, [R, S0]))
    criterion = nn.CrossEntropyLoss(
        weights(9), ignore_index=IGNORED, label_smoothing=0.1
    )
    mine, one = (
        torch.optim.SGD([weight, bias], lr=0.1),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    )
    for step in range(3):
        x, target = draw(6, 2, 5, seed=step), classes(9, 6, 2, seed=step)
        with CommunicationLedger(mesh) as ledger, loss_parallel():
            logits = F.linear(distribute_tensor(x, mesh, [S0, R]), weight, bias)
            loss = criterion(logits.flatten(0, 1), part(target, mesh).flatten())
            loss.backward()
        is_one_exchange(ledger)
        expected = criterion(plain(x).flatten(0, 1), target.flatten())
        expected.backward()
        close(loss, expected)
        for optimizer in (mine, one):
            optimizer.step()
            optimizer.zero_grad()
    close(weight.detach(), plain.weight.detach())
    close(bias.detach(), plain.bias.detach())
