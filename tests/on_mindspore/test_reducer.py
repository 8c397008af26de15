# SPDX-License-Identifier: Apache-2.0
"""Gradients that are reduced in buckets under value_and_grad: values, how often, and uses that cannot wait."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint

from hyper_parallel import DTensor, Layout, Replicate, Shard, init_device_mesh
from hyper_parallel.core.dtensor import reducer
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.platform import get_platform
from hyper_parallel.testing import run_ranks

RANKS, ROWS, WIDTH = 2, 6, 4


def values(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weights(names="abc"):
    return [
        Parameter(Tensor(values(i, WIDTH, WIDTH)), name=name)
        for i, name in enumerate(names)
    ]


def loss_of(parameters, x, wrap):
    for parameter in parameters:
        x = mint.tanh(mint.matmul(x, wrap(parameter)))
    return mint.sum(x * x)


def spread(parameters):
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    platform = get_platform()
    layout = Layout.from_device_mesh(mesh)([Replicate()])
    return mesh, [platform.set_layout_into_parameter(p, layout) for p in parameters]


def own_rows(mesh, x):
    rows = ROWS // RANKS
    start = rows * mesh.get_local_rank("dp")
    local = Tensor(x[start : start + rows])
    return DTensor.from_local(local, mesh, [Shard(0)], shape=x.shape)


def reduce_in_buckets(nbytes):
    usual, reducer.BUCKET_BYTES = reducer.BUCKET_BYTES, nbytes
    try:
        return gradients_and_counts()
    finally:
        reducer.BUCKET_BYTES = usual


def gradients_and_counts():
    mesh, parameters = spread(weights())
    x = own_rows(mesh, values(9, ROWS, WIDTH))

    def loss():
        return loss_of(parameters, x, lambda p: p).full_tensor()

    with CommunicationLedger(mesh) as ledger:
        found = ms.value_and_grad(loss, None, weights=parameters)()
    counts = ledger.counts(backward=True)
    return float(found[0]), [one.asnumpy() for one in found[1]], counts


def truth():
    parameters, x = weights(), Tensor(values(9, ROWS, WIDTH))

    def loss():
        return loss_of(parameters, x, lambda p: p)

    found = ms.value_and_grad(loss, None, weights=parameters)()
    return float(found[0]), [one.asnumpy() for one in found[1]]


@pytest.mark.parametrize(("nbytes", "count"), [(1 << 22, 1), (1, 3)])
def test_gradients_are_those_of_one_process(nbytes, count):
    loss, gradients = truth()
    for found, mine, counts in run_ranks(reduce_in_buckets, RANKS, nbytes):
        assert found == pytest.approx(loss, rel=1e-5)
        for one, true in zip(mine, gradients, strict=True):
            np.testing.assert_allclose(one, true, rtol=1e-4, atol=1e-5)
        assert counts == {"all_reduce": count}


def used_twice(hook):
    """A parameter that is used on its rows and, as a whole, on every rank; with a hook of the user."""
    mesh, (parameter,) = spread(weights("a"))
    x = own_rows(mesh, values(9, ROWS, WIDTH))
    seen = []
    if hook:
        parameter.to_local().register_hook(lambda g: seen.append(g.asnumpy().copy()))

    def loss():
        rows = mint.sum(mint.matmul(x, parameter))
        return (rows + mint.sum(parameter * parameter)).full_tensor()

    _, (gradient,) = ms.value_and_grad(loss, None, weights=[parameter])()
    return gradient.asnumpy(), seen


@pytest.mark.parametrize("hook", [False, True])
def test_a_gradient_that_is_added_to_another_is_whole(hook):
    x, w = values(9, ROWS, WIDTH), values(0, WIDTH, WIDTH)
    true = x.sum(0)[:, None] + np.zeros((1, WIDTH)) + 2 * w
    for found, seen in run_ranks(used_twice, RANKS, hook):
        np.testing.assert_allclose(found, true, rtol=1e-4, atol=1e-5)
        for one in seen:
            np.testing.assert_allclose(one, true, rtol=1e-4, atol=1e-5)
        assert len(seen) == hook
