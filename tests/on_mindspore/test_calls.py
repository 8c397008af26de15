# SPDX-License-Identifier: Apache-2.0
"""Calls of mint, ops, nn and methods on real ranks, by a rule each, with the values and the gradients of one process.

Each is tried with its first operand cut along every dim, in uneven pieces, and with none cut.
"""

import at_once  # noqa: F401 - for what it does
import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.mint.nn import functional as F  # noqa: N812 - everyone's name for it

from hyper_parallel import (
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.core.dtensor.modes import strict
from hyper_parallel.testing import on_ranks

RNG = np.random.default_rng(0)


def some(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def below(bound, *shape, dtype=np.int64):
    return RNG.integers(0, bound, shape).astype(dtype)


X, Y, ROW, SQUARE = some(5, 6), some(5, 6), some(6), some(3, 4, 4)
POSITIVE = (np.abs(X) / 4 + 0.05).astype(np.float32)
IMAGE, VOLUME, SIGNAL = some(3, 4, 5, 7), some(3, 2, 4, 4, 4), some(3, 4, 9)
LABELS = below(6, 5)

REDUCTIONS = {
    "x.sum(1, dtype)": (lambda x: x.sum(1, mindspore.float64), X),
    "x.sum(1, None, True)": (lambda x: x.sum(1, None, True), X),
    "x.sum(axis, keepdims)": (lambda x: x.sum(axis=1, keepdims=True), X),
    "x.prod(1, keepdim=True)": (lambda x: x.prod(1, keepdim=True), X),
    "x.prod(1, True)": (lambda x: x.prod(1, True), X),
    "x.mean(axis, keep_dims)": (lambda x: x.mean(axis=0, keep_dims=True), X),
    "x.max(axis)": (lambda x: x.max(axis=1, keepdims=True), X),
    "x.min(axis)": (lambda x: x.min(axis=0), X),
    "x.all(())": (lambda x: x.all(()), X > 0),
    "x.all(1, True)": (lambda x: x.all(1, True), X > 0),
    "x.any(axis, keep_dims)": (lambda x: x.any(axis=1, keep_dims=True), X > 0),
    "x.var(axis, ddof)": (lambda x: x.var(axis=1, ddof=1, keepdims=True), X),
    "x.std(axis, ddof)": (lambda x: x.std(axis=0, ddof=1), X),
    "ops.std": (lambda x: ops.std(x, 1, 1), X),
    "ops.max": (lambda x: ops.max(x, 1), X),
    "ops.min": (lambda x: ops.min(x, axis=0, keepdims=True), X),
    "x.argmax": (lambda x: x.argmax(1), X),
    "x.argmin(axis)": (lambda x: x.argmin(axis=1, keepdims=True), X),
    "x.sort": (lambda x: x.sort(1, True), X),
    "x.sort(axis)": (lambda x: x.sort(axis=0), X),
    "ops.sort": (lambda x: ops.sort(x, 0, True), X),
    "ops.argsort": (lambda x: ops.argsort(x, 1), X),
    "x.topk": (lambda x: x.topk(2), X),
    "x.topk, smallest": (lambda x: x.topk(2, dim=0, largest=False), X),
    "ops.cumsum": (lambda x: ops.cumsum(x, 1), X),
    "x.cumsum(axis)": (lambda x: x.cumsum(axis=0), X),
    "x.trace": (lambda x: x.trace(), X),
    "ops.logcumsumexp": (lambda x: ops.logcumsumexp(x, 1), X),
}
MOVES = {
    "ops.split": (lambda x: ops.split(x, 2, 1), X),
    "ops.split by sizes": (lambda x: ops.split(x, [2, 4], 1), X),
    "ops.unbind": (lambda x: ops.unbind(x, 0), X),
    "x.tensor_split": (lambda x: x.tensor_split(3, 1), X),
    "x.repeat_interleave": (lambda x: x.repeat_interleave(2, 1), X),
    "ops.repeat_interleave": (lambda x: ops.repeat_interleave(x, 2, 1), X),
    "ops.pad": (lambda x: ops.pad(x, (1, 2)), X),
    "ops.pad by a value": (lambda x: ops.pad(x, (0, 0, 1, 0), value=2.5), X),
    "ops.pad, reflected": (lambda x: ops.pad(x, (1, 2), "reflect"), SIGNAL),
    "ops.tile": (lambda x: ops.tile(x, (2, 1)), X),
    "ops.flip": (lambda x: ops.flip(x, (1,)), X),
    "ops.diag": (ops.diag, ROW),
    "ops.gather_nd": (ops.gather_nd, X, below(5, 3, 1)),
    "ops.one_hot": (lambda i: ops.one_hot(i, 6), LABELS),
    "x.scatter": (
        lambda x, i, y: x.scatter(1, i, y),
        X,
        np.argsort(X, 1)[:, :2],
        X[:, :2].copy(),
    ),
    "x.scatter of a number": (
        lambda x, i: x.scatter(1, i, 2.5),
        X,
        np.argsort(X, 1)[:, :2],
    ),
    "ops.tensor_scatter_elements": (
        lambda x, i, y: ops.tensor_scatter_elements(x, i, y, 1, "add"),
        X,
        below(6, 5, 3),
        X[:, :3].copy(),
    ),
    "ops.index_fill": (
        lambda x, i: ops.index_fill(x, 1, i, 2.5),
        X,
        below(6, 2, dtype=np.int32),
    ),
    "mint.searchsorted": (lambda x, s: mint.searchsorted(s, x), X, np.sort(ROW)),
    "ops.cdist": (ops.cdist, some(3, 5, 2), some(3, 4, 2)),
    "ops.cross": (lambda x, y: ops.cross(x, y, 1), some(5, 3), some(5, 3)),
    "ops.renorm": (lambda x: ops.renorm(x, 2, 1, 0.9), X),
    "x.inverse": (lambda x: x.inverse(), SQUARE + 3 * np.eye(4, dtype=np.float32)),
    "ops.det": (ops.det, SQUARE),
}
LOSSES = {
    "F.smooth_l1_loss": (lambda x, y: F.smooth_l1_loss(x, y, "mean", 0.5), X, Y),
    "nn.SmoothL1Loss": (nn.SmoothL1Loss(), X, Y),
    "ops.kl_div": (lambda x, y: ops.kl_div(x, y, "mean"), X, POSITIVE),
    "F.binary_cross_entropy": (
        F.binary_cross_entropy,
        POSITIVE,
        (Y > 0).astype(np.float32),
    ),
    "F.binary_cross_entropy_with_logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="sum"),
        X,
        (Y > 0).astype(np.float32),
    ),
    "F.nll_loss": (F.nll_loss, X, LABELS),
    "F.nll_loss, none": (lambda x, y: F.nll_loss(x, y, reduction="none"), X, LABELS),
    "F.nll_loss by weights": (F.nll_loss, X, LABELS, POSITIVE[0].copy()),
    "ops.nll_loss": (ops.nll_loss, X, LABELS.astype(np.int32)),
    "ops.cross_entropy": (ops.cross_entropy, X, LABELS.astype(np.int32)),
    "nn.CrossEntropyLoss": (nn.CrossEntropyLoss(), X, LABELS.astype(np.int32)),
    "ops.multi_margin_loss": (ops.multi_margin_loss, X, LABELS),
}
WINDOWS = {
    "ops.conv1d": (
        lambda x, w, b: ops.conv1d(x, w, b, 2, "pad", 1),
        SIGNAL,
        some(6, 4, 3),
        some(6),
    ),
    "ops.conv2d": (
        lambda x, w, b: ops.conv2d(x, w, b, (2, 1), "pad", (1, 0)),
        IMAGE,
        some(6, 4, 3, 2),
        some(6),
    ),
    "ops.conv2d, same": (
        lambda x, w: ops.conv2d(x, w, None, 2, "same"),
        IMAGE,
        some(6, 4, 3, 2),
    ),
    "ops.conv2d in groups": (
        lambda x, w: ops.conv2d(x, w, groups=2),
        IMAGE,
        some(6, 2, 3, 2),
    ),
    "ops.conv3d": (ops.conv3d, VOLUME, some(5, 2, 2, 2, 2)),
    "ops.max_pool2d": (lambda x: ops.max_pool2d(x, 2, 2), IMAGE),
    "nn.MaxPool2d": (nn.MaxPool2d(2, 2), IMAGE),
    "nn.AvgPool2d": (nn.AvgPool2d(2, 2), IMAGE),
    "ops.adaptive_avg_pool2d": (lambda x: ops.adaptive_avg_pool2d(x, (2, 3)), IMAGE),
    "F.interpolate": (lambda x: F.interpolate(x, 11), SIGNAL),
    "F.interpolate, trilinear": (
        lambda x: F.interpolate(x, (3, 5, 2), mode="trilinear"),
        VOLUME,
    ),
    "F.pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), IMAGE),
    "F.grid_sample": (
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        IMAGE,
        np.tanh(some(3, 2, 3, 2)),
    ),
    "ops.affine_grid": (lambda t: ops.affine_grid(t, (3, 1, 4, 5)), some(3, 2, 3)),
    "F.group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), IMAGE, some(4), some(4)),
    "ops.batch_norm": (
        ops.batch_norm,
        IMAGE,
        some(4),
        some(4) ** 2,
        some(4),
        some(4),
    ),
}
# MindSpore's kernels have no gradients for targets, weights of classes and running statistics.
ONLY_FOR_THE_FIRST = ("ops.kl_div", "F.nll_loss by weights", "ops.batch_norm")
CALLS = {**REDUCTIONS, **MOVES, **LOSSES, **WINDOWS}


def tensors_of(found):
    return (
        [one for item in found for one in tensors_of(item)]
        if isinstance(found, (tuple, list))
        else [found]
    )


def weighted(found):
    """A sum in which every element counts by another number; of the results that have gradients."""
    total = 0
    for result in tensors_of(found):
        if result.is_floating_point():
            whole = result.full_tensor() if hasattr(result, "full_tensor") else result
            weights = np.random.default_rng(1).standard_normal(whole.shape)
            total = total + (whole * Tensor(weights.astype(np.float32))).sum()
    return total


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_a_call_gives_the_values_and_gradients_of_one_process(name):
    call, *operands = CALLS[name]
    plain = [Tensor(array) for array in operands]
    floats = tuple(i for i, array in enumerate(operands) if array.dtype == np.float32)
    floats = floats[:1] if name in ONLY_FOR_THE_FIRST else floats
    expected = [one.asnumpy() for one in tensors_of(call(*plain))]
    has_gradient = any(one.dtype.kind == "f" for one in expected)
    floats = floats if has_gradient else ()
    gradients = (
        mindspore.grad(lambda *given: weighted(call(*given)), floats)(*plain)
        if has_gradient
        else ()
    )
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Replicate(), *map(Shard, range(operands[0].ndim))):
        placements = [placement, *[Replicate()] * (len(operands) - 1)]
        given = [
            distribute_tensor(Tensor(a), mesh, [p])
            for a, p in zip(operands, placements, strict=True)
        ]
        with strict():
            found = [one.full_tensor().asnumpy() for one in tensors_of(call(*given))]
            mine = (
                mindspore.grad(lambda *given: weighted(call(*given)), floats)(*given)
                if has_gradient
                else ()
            )
        for one, true in zip(found, expected, strict=True):
            assert one.dtype == true.dtype
            np.testing.assert_allclose(
                one, true, 1e-4, 1e-5, err_msg=f"{name} with {placement}"
            )
        for i, one, true in zip(
            floats, tensors_of(mine), tensors_of(gradients), strict=True
        ):
            part = true.asnumpy()
            if i == 0 and placement.is_shard():
                part = np.split(
                    part, [-(-part.shape[placement.dim] // 2)], placement.dim
                )[mesh.rank]
            np.testing.assert_allclose(
                one.asnumpy(),
                part,
                1e-3,
                1e-4,
                err_msg=f"{name} with {placement}: operand {i}",
            )


def by_name(name):
    return get_platform().operator(name)


# Functions whose kernels a CPU lacks, and what the same is called in the rules, which plain tensors can do.
WITHOUT_KERNEL = {
    "F.conv1d": (F.conv1d, by_name("conv1d"), SIGNAL, some(6, 4, 3), some(6)),
    "F.conv2d": (
        lambda x, w: F.conv2d(x, w, None, 2, 1, 2),
        lambda x, w: by_name("conv2d")(x, w, None, 2, 1, 2),
        IMAGE,
        some(6, 4, 2, 2),
    ),
    "F.conv3d": (F.conv3d, by_name("conv3d"), VOLUME, some(5, 2, 2, 2, 2)),
    "F.avg_pool1d": (
        lambda x: F.avg_pool1d(x, 2),
        lambda x: by_name("avg_pool1d")(x, 2),
        SIGNAL,
    ),
    "F.avg_pool2d": (
        lambda x: F.avg_pool2d(x, 3, 2, 1),
        lambda x: by_name("avg_pool2d")(x, 3, 2, 1),
        IMAGE,
    ),
    "F.adaptive_avg_pool1d": (
        lambda x: F.adaptive_avg_pool1d(x, 2),
        lambda x: by_name("adaptive_avg_pool1d")(x, 2),
        SIGNAL,
    ),
    "F.adaptive_avg_pool2d": (
        lambda x: F.adaptive_avg_pool2d(x, 2),
        lambda x: by_name("adaptive_avg_pool2d")(x, 2),
        IMAGE,
    ),
    "F.unfold": (lambda x: F.unfold(x, 2), lambda x: by_name("im2col")(x, 2), IMAGE),
    "F.fold": (
        lambda x: F.fold(x, (3, 4), (1, 2)),
        lambda x: by_name("col2im")(x, (3, 4), (1, 2)),
        some(5, 6, 9),
    ),
    "F.pad": (lambda x: F.pad(x, (1, 2)), lambda x: by_name("pad")(x, (1, 2)), X),
    "F.interpolate, linear": (
        lambda x: F.interpolate(x, 5, mode="linear"),
        lambda x: by_name("interpolate")(x, 5, mode="linear"),
        SIGNAL,
    ),
    "F.mse_loss": (F.mse_loss, by_name("mse_loss"), X, Y),
    "F.mse_loss, none": (
        lambda x, y: F.mse_loss(x, y, "none"),
        lambda x, y: (x - y) ** 2,
        X,
        Y,
    ),
    "F.l1_loss, sum": (
        lambda x, y: F.l1_loss(x, y, "sum"),
        lambda x, y: (x - y).abs().sum(),
        X,
        Y,
    ),
    "F.kl_div, batchmean": (
        lambda x, y: F.kl_div(x, y, "batchmean"),
        lambda x, y: by_name("kl_div")(x, y, reduction="batchmean"),
        X,
        POSITIVE,
    ),
    "F.layer_norm": (
        lambda x, w, b: F.layer_norm(x, (6,), w, b),
        lambda x, w, b: by_name("layer_norm")(x, (6,), w, b),
        X,
        ROW,
        some(6),
    ),
    "F.batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        lambda x, w, b: by_name("batch_norm")(x, None, None, w, b, True),
        IMAGE,
        some(4),
        some(4),
    ),
    "mint.norm": (mint.norm, lambda x: (x * x).sum().sqrt(), X),
    "mint.trace": (mint.trace, lambda x: x.trace(), X),
    "mint.roll": (
        lambda x: mint.roll(x, 2, 1),
        lambda x: ops.concat((x[:, 4:], x[:, :4]), 1),
        X,
    ),
    "mint.diag": (mint.diag, ops.diag, ROW),
    "mint.repeat_interleave": (
        lambda x: mint.repeat_interleave(x, 2, 1),
        lambda x: ops.repeat_interleave(x, 2, 1),
        X,
    ),
    "mint.cumsum": (lambda x: mint.cumsum(x, 1), lambda x: ops.cumsum(x, 1), X),
    "mint.logsumexp": (
        lambda x: mint.logsumexp(x, 1),
        lambda x: ops.logsumexp(x, 1),
        X,
    ),
    "F.log_softmax": (
        lambda x: F.log_softmax(x, 1),
        lambda x: ops.log_softmax(x, 1),
        X,
    ),
    "F.cross_entropy": (F.cross_entropy, by_name("cross_entropy"), X, LABELS),
    "F.embedding": (F.embedding, lambda i, w: ops.gather(w, i, 0), LABELS, some(6, 4)),
}


@pytest.mark.parametrize("name", WITHOUT_KERNEL)
@on_ranks(2)
def test_a_call_without_a_kernel_is_done_by_what_there_is(name):
    call, true, *operands = WITHOUT_KERNEL[name]
    expected = true(*map(Tensor, operands)).asnumpy()
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Replicate(), *map(Shard, range(operands[0].ndim))):
        placements = [placement, *[Replicate()] * (len(operands) - 1)]
        given = [
            distribute_tensor(Tensor(a), mesh, [p])
            for a, p in zip(operands, placements, strict=True)
        ]
        with strict():
            found = call(*given).full_tensor().asnumpy()
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(
            found, expected, 1e-4, 1e-5, err_msg=f"{name} with {placement}"
        )


@on_ranks(2)
def test_running_statistics_follow_the_whole_batch():
    plain = nn.BatchNorm2d(4).set_train()
    expected = plain(Tensor(IMAGE)).asnumpy()
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
        one = nn.BatchNorm2d(4).set_train()
        for name in ("gamma", "beta", "moving_mean", "moving_variance"):
            held = getattr(one, name)
            held = Parameter(
                distribute_tensor(held.value(), mesh, [Replicate()]),
                held.name,
                held.requires_grad,
            )
            setattr(one, name, held)
        with strict():
            found = one(
                distribute_tensor(Tensor(IMAGE), mesh, [placement])
            ).full_tensor()
        np.testing.assert_allclose(found.asnumpy(), expected, 1e-4, 1e-5)
        for name in ("moving_mean", "moving_variance"):
            true = getattr(plain, name).asnumpy()
            np.testing.assert_allclose(
                getattr(one, name).full_tensor().asnumpy(), true, 1e-5, 1e-6
            )


@on_ranks(2)
def test_dropout_draws_alike_on_copies_and_differently_on_pieces():
    mesh, ones = init_device_mesh("cpu", (2,)), Tensor(np.ones((64, 64), np.float32))
    drop = nn.Dropout(p=0.25).set_train()
    with strict():
        copied = drop(distribute_tensor(ones, mesh, [Replicate()])).to_local()
        cut = drop(distribute_tensor(ones, mesh, [Shard(0)])).full_tensor().asnumpy()
    other = [None, None]
    get_platform().all_gather_object(other, copied.asnumpy())
    np.testing.assert_array_equal(*other)
    assert not np.array_equal(cut[:32], cut[32:])
    for found in (copied.asnumpy(), cut):
        assert set(np.unique(found)) == {0.0, np.float32(1 / 0.75)}
        assert abs(np.mean(found == 0) - 0.25) < 0.05
