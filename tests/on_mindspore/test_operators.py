# SPDX-License-Identifier: Apache-2.0
"""Operators of MindSpore by their rules: every choice of every axis against the plain operator, ranks simulated."""

import at_once  # noqa: F401 - for what it does
import mindspore
import mindspore.mint.nn.functional as F  # noqa: N812 - everyone's name for it
import numpy as np
import pytest
from mindspore import mint, ops
from thorough import THOROUGH

from hyper_parallel.testing import check_rule

RNG = np.random.default_rng(0)
X, Y, Z = (
    RNG.standard_normal((5, 6)),
    RNG.standard_normal((5, 6)),
    RNG.standard_normal((3, 5, 6)),
)
W, POSITIVE, MASK = RNG.standard_normal((7, 6)), np.abs(X) + 0.3, X > 0
PLACES = RNG.integers(0, 6, (5, 2))
ROWS = RNG.integers(0, 5, (4, 3)).astype(np.int32)

# Uneven and empty shards are among the choices: 5 rows on 4 ranks.
CASES = {
    "mint.add": (mint.add, X, Y),
    "x + y": (lambda x, y: x + y, X, Y),
    "x + 2": (lambda x: x + 2.0, X),
    "1 - x": (lambda x: 1 - x, X),
    "1 / x": (lambda x: 1 / x, POSITIVE),
    "x * y": (lambda x, y: x * y, X, Y),
    "x / y": (lambda x, y: x / y, X, POSITIVE),
    "x ** 2": (lambda x: x**2, X),
    "-x": (lambda x: -x, X),
    "x > y": (lambda x, y: x > y, X, Y),
    "x == 1": (lambda x: x == 1, X),
    "abs": (mint.abs, X),
    "exp": (mint.exp, X),
    "square": (mint.square, X),
    "rsqrt": (mint.rsqrt, POSITIVE),
    "tanh": (mint.tanh, X),
    "sigmoid": (mint.sigmoid, X),
    "silu": (F.silu, X),
    "relu": (F.relu, X),
    "maximum": (mint.maximum, X, Y),
    "clamp": (lambda x: mint.clamp(x, -0.5, 0.5), X),
    "logical_and": (mint.logical_and, MASK, Y > 0),
    "isfinite": (mint.isfinite, X),
    "where": (mint.where, MASK, X, Y),
    "masked_fill": (lambda x, mask: x.masked_fill(mask, 0.5), X, MASK),
    "astype": (lambda x: x.astype(mindspore.float32), X),
    "linear": (F.linear, X, W),
    "linear with bias": (F.linear, Z, W, W[:, 0].copy()),
    "matmul": (mint.matmul, X, W.T.copy()),
    "matmul of batches": (mint.matmul, Z, W.T.copy()),
    "bmm": (mint.bmm, Z, np.ascontiguousarray(Z.transpose(0, 2, 1))),
    "sum": (lambda x: mint.sum(x, dim=1), X),
    "sum of all": (lambda x: x.sum(), X),
    "x.sum(axis)": (lambda x: x.sum(axis=1), X),
    "mean": (lambda x: mint.mean(x, dim=0, keepdim=True), X),
    "mean of all": (lambda x: x.mean(), X),
    "x.mean(axis)": (lambda x: x.mean(axis=0), X),
    "prod": (lambda x: mint.prod(x, 1), X),
    "max": (lambda x: mint.max(x, dim=1), X),
    "amax": (lambda x: mint.amax(x, 1), X),
    "all": (lambda mask: mask.all(), MASK),
    "softmax": (lambda x: F.softmax(x, dim=-1), X),
    "ops.softmax": (lambda x: ops.softmax(x, axis=-1), X),
    "log_softmax": (lambda x: ops.log_softmax(x, -1), X),
    "cumsum": (lambda x: ops.cumsum(x, 1), X),
    "sort": (lambda x: ops.sort(x, 1), X),
    "topk": (lambda x: ops.topk(x, 2), X),
    "reshape": (lambda x: x.reshape(6, 5), X),
    "view": (lambda x: x.view(6, 5), X),
    "transpose": (lambda x: mint.transpose(x, 0, 1), X),
    "swapaxes": (lambda x: x.swapaxes(0, 1), X),
    "x.T": (lambda x: x.T, X),
    "permute": (lambda x: mint.permute(x, (2, 0, 1)), Z),
    "unsqueeze": (lambda x: mint.unsqueeze(x, 1), X),
    "squeeze": (lambda x: mint.squeeze(x, 1), X[:, None]),
    "flatten": (lambda x: mint.flatten(x, 1), Z),
    "narrow": (lambda x: mint.narrow(x, 1, 1, 3), X),
    "split": (lambda x: mint.split(x, 2, 1), X),
    "chunk": (lambda x: mint.chunk(x, 2, 1), X),
    "tile": (lambda x: mint.tile(x, (2, 1)), X),
    "flip": (lambda x: mint.flip(x, (1,)), X),
    "cat": (lambda x, y: mint.cat((x, y), 1), X, Y),
    "ops.stack": (lambda x, y: ops.stack([x, y], 1), X, Y),
    "ops.addn": (lambda x, y: ops.addn([x, y]), X, Y),
    "x[:, 1:]": (lambda x: x[:, 1:], X),
    "x[:, None]": (lambda x: x[:, None], X),
    "gather": (lambda x, places: mint.gather(x, 1, places), X, PLACES),
    "ops.gather of rows": (lambda x, rows: ops.gather(x, rows, 0), X, ROWS),
    "triu": (mint.triu, X),
    "tril": (ops.tril, X),
    "layer_norm": (
        lambda x, g, b: ops.LayerNorm(1, 1, 1e-5)(x, g, b)[0],
        X,
        W[0].copy(),
        W[1].copy(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_choice_gives_the_plain_results_and_gradients(name):
    call, *operands = CASES[name]
    # The rule is the same on every mesh: here it is the local calls that are tried.
    assert (
        check_rule(call, *operands, **({} if THOROUGH else {"meshes": [(2,), (4,)]}))
        > 1
    )
