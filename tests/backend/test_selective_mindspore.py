# SPDX-License-Identifier: Apache-2.0
"""Recompute by operator on MindSpore: what is kept is not computed again, what is not is, and gradients hold."""

import functools
import gc
import weakref
from collections import Counter

import frame
import mindspore
import numpy as np
import pytest
from mindspore import mint, nn, ops

from hyper_parallel import (
    CheckpointPolicy,
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.platform.mindspore import selective
from hyper_parallel.testing import on_ranks

platform = get_platform()
X = frame.draw(3, 4).astype(np.float32)


class Block(nn.Cell):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Dense(4, 6), nn.Dense(6, 4)
        self.factor = mindspore.Parameter(
            mindspore.Tensor(frame.draw(6).astype(np.float32))
        )

    def construct(self, x):
        left, right = mint.chunk(mint.exp(self.enter(x)) * self.factor, 2, -1)
        stacked = ops.stack([left, right, left * right])
        hidden = mint.cat([mint.softmax(stacked[0], -1), mint.sin(stacked[2])], -1)
        values, _ = mint.max(hidden, -1, keepdim=True)
        return mint.tanh(x[:, :1] * self.leave(hidden) + values)


def contexts(policy, **options):
    return functools.partial(
        platform.create_selective_checkpoint_contexts, policy, **options
    )


def gradients(module, parameters, values=X):
    leaf = frame.leaf(values, "float32")
    for parameter in parameters:
        parameter._grad = None
    out = module(leaf)
    assert type(out) is mindspore.Tensor
    frame.backward([out], [np.ones(out.shape)])
    return [
        frame.array(t)
        for t in (platform.detach(out), leaf._grad, *(p._grad for p in parameters))
    ]


def assert_same(left, right):
    assert [np.array_equal(a, b) for a, b in zip(left, right, strict=True)] == [
        True
    ] * len(left)


@pytest.fixture
def counted(monkeypatch):
    """Counts what really runs, of what is told of."""
    counts = Counter()
    run = selective.plain_fallback

    def counting(self, func, args, kwargs):
        counts[args[1] if isinstance(args[0], ops.Primitive) else func.name] += 1
        return run(self, func, args, kwargs)

    monkeypatch.setattr(selective, "plain_fallback", counting)
    return counts


EVERYTHING = {
    "MatMul": 2,
    "Exp": 1,
    "Mul": 3,
    "Softmax": 1,
    "Sin": 1,
    "MaxDim": 1,
    "Tanh": 1,
}
POLICIES = {
    "none": ([], {}),
    "a name": (["Exp"], {"Exp": 0}),
    "the name of a family": (["matmul"], {"MatMul": 0}),
    "functions": (
        [mint.exp, mint.softmax, mint.max],
        {"Exp": 0, "Softmax": 0, "MaxDim": 0},
    ),
    "a primitive": ([ops.MatMul()], {"MatMul": 0}),
    "a policy": (
        lambda ctx, op, *args, **kwargs: platform.get_op_name(op) == "sin",
        {"Sin": 0},
    ),
    "everything": (
        lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE,
        dict.fromkeys(EVERYTHING, 0),
    ),
    "everything to the host": (
        lambda *args, **kwargs: CheckpointPolicy.MUST_SWAP,
        dict.fromkeys(EVERYTHING, 0),
    ),
}


@pytest.mark.parametrize(("policy", "again"), POLICIES.values(), ids=POLICIES.keys())
def test_what_runs_again(counted, policy, again):
    block = Block()
    parameters = list(block.get_parameters())
    plain = gradients(block, parameters)
    wrapped = platform.ckpt_wrapper(
        block, context_fn=contexts(policy), early_stop=False
    )
    leaf = frame.leaf(X, "float32")
    out = wrapped(leaf)
    assert {name: counted[name] for name in EVERYTHING} == EVERYTHING
    counted.clear()
    frame.backward([out], [np.ones(out.shape)])
    assert {name: counted[name] for name in EVERYTHING} == EVERYTHING | again
    assert_same(gradients(wrapped, parameters), plain)


def test_under_value_and_grad_and_with_the_frameworks_own_recompute():
    block = Block()
    parameters = block.trainable_params()

    def inner(x):
        return mindspore.recompute(
            block, x, use_reentrant=False
        )  # of which the watching knows nothing

    every = contexts(lambda ctx, op, *args, **kwargs: True)
    runs = [
        block,
        lambda x: platform.checkpoint(block, x, context_fn=every),
        lambda x: platform.checkpoint(inner, x, context_fn=every),
        lambda x: platform.checkpoint(inner, x, context_fn=contexts(["matmul", "exp"])),
        lambda x: mindspore.recompute(block, x, use_reentrant=False, context_fn=every),
    ]
    found = []
    for run in runs:
        value, (dx, dp) = mindspore.value_and_grad(
            lambda x, run=run: run(x).sum(), 0, parameters
        )(frame.tensor(X))
        found.append([value.asnumpy(), dx.asnumpy(), *(g.asnumpy() for g in dp)])
    for other in found[1:]:
        assert_same(other, found[0])


def test_kept_results_are_used_and_others_are_computed_anew():
    """A weight that changes between forward and backward shows in what is computed again and nowhere else."""
    found = {}
    for name, policy in {"kept": ["matmul"], "again": []}.items():
        weight = frame.tensor(np.full((4, 4), 0.1), "float32")
        leaf = frame.leaf(X, "float32")
        run = functools.partial(platform.checkpoint, context_fn=contexts(policy))
        out = run(lambda x, w=weight: mint.sin(mint.matmul(x, w)), leaf)
        platform.copy_into(weight, frame.tensor(np.zeros((4, 4)), "float32"))
        frame.backward([out], [np.ones(out.shape)])
        found[name] = frame.array(leaf._grad)
    # The derivative of sin is taken where the product was; the product's own by the weight as it is now.
    assert not np.any(found["kept"])
    assert not np.any(found["again"])
    weight = frame.tensor(np.full((4, 4), 0.1), "float32")
    shift = frame.tensor(np.zeros((3, 4)), "float32")
    leaf = frame.leaf(X, "float32")
    out = platform.checkpoint(
        lambda x: mint.sin(mint.matmul(x, weight) + shift),
        leaf,
        context_fn=contexts(["add"]),
    )
    platform.copy_into(shift, frame.tensor(np.full((3, 4), 9.0), "float32"))
    frame.backward([out], [np.ones(out.shape)])
    frame.equal(
        leaf._grad,
        np.cos(X @ np.full((4, 4), 0.1)) @ np.full((4, 4), 0.1),
        accuracy=1e-6,
    )


def changing(x):
    """Changes a result in place after it was kept."""
    kept = mint.exp(x)
    out = mint.sin(kept)
    ops.assign(kept, mint.zeros((3, 4), dtype=kept.dtype))
    return out


def test_a_kept_result_that_is_changed_is_refused():
    leaf = frame.leaf(X, "float32")
    out = platform.checkpoint(changing, leaf, context_fn=contexts(["Exp"]))
    with pytest.raises(
        RuntimeError,
        match="the output of Exp that a selective checkpoint keeps was modified by an in",
    ):
        frame.backward([out], [np.ones(out.shape)])


def test_a_kept_result_that_may_be_changed():
    leaf = frame.leaf(X, "float32")
    out = platform.checkpoint(
        changing, leaf, context_fn=contexts(["Exp"], allow_cache_entry_mutation=True)
    )
    frame.backward([out], [np.ones(out.shape)])
    frame.equal(leaf._grad, np.zeros((3, 4)))  # cos(0) * 0: what was kept, as it is now


@pytest.mark.parametrize(
    "policy",
    [
        [],
        ["Exp"],
        lambda *args, **kwargs: True,
        lambda *a, **k: CheckpointPolicy.MUST_SWAP,
    ],
)
def test_items_that_are_set(policy):
    def forward(x):
        made = mint.exp(x)
        made[0] = 3.0
        made[1] = mint.sin(x)[2]
        return mint.sin(made) * made

    plain = gradients(forward, [])
    truth = [np.zeros(4), np.zeros(4), np.zeros(4)]
    one, two = np.sin(X[2]), np.exp(X[2])
    truth[2] += (np.cos(one) * one + np.sin(one)) * np.cos(X[2]) + (
        np.cos(two) * two + np.sin(two)
    ) * two
    frame.equal(plain[1], truth, accuracy=1e-4)  # as good as float32's exp is
    found = gradients(
        lambda x: platform.checkpoint(forward, x, context_fn=contexts(policy)), []
    )
    assert_same(found, plain)


@pytest.mark.parametrize(
    "verdict", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP]
)
def test_operators_in_place_and_views_run_again(verdict):
    def forward(x):
        made = mint.exp(x)
        flat = made.view(-1)
        buffer = mint.zeros((12,), dtype=x.dtype)
        buffer.copy_(flat)
        buffer[2:4] = 7.0
        return mint.sin(flat) * buffer

    policy = contexts(
        lambda ctx, op, *args, **kwargs: False if op.name == "InplaceCopy" else verdict
    )
    plain = gradients(forward, [])
    assert_same(
        gradients(lambda x: platform.checkpoint(forward, x, context_fn=policy), []),
        plain,
    )


def test_backward_can_come_again():
    leaf = frame.leaf(X, "float32")
    out = platform.checkpoint(
        lambda x: mint.sin(mint.exp(x)) * x, leaf, context_fn=contexts(["Exp"])
    )
    ones = [frame.tensor(np.ones((3, 4)), "float32")]
    frame.run_backward([out], ones, keep=True)
    first = frame.array(leaf._grad).copy()
    frame.run_backward([out], ones)
    assert np.array_equal(frame.array(leaf._grad), 2 * first)


def test_what_is_not_kept_goes():
    made = []

    def forward(x):
        hidden = mint.exp(x)
        made.append(weakref.ref(selective.unwatched(hidden)))
        return mint.sin(hidden) * 2

    leaf = frame.leaf(X)
    plain = forward(leaf)
    again = platform.checkpoint(forward, leaf, context_fn=contexts(["Sin"]))
    gc.collect()
    assert made[-1]() is None
    assert_same(
        [frame.array(platform.detach(again))], [frame.array(platform.detach(plain))]
    )


def test_what_goes_out_is_plain_and_containers_come_through():
    def forward(pair, named):
        return {"product": pair[0] * named["b"], "list": [mint.exp(pair[1])]}

    first, second, third = (frame.leaf(X + i, "float32") for i in range(3))
    out = platform.checkpoint(
        forward, (first, second), {"b": third}, context_fn=contexts(["exp"])
    )
    assert [type(out["product"]), type(out["list"][0])] == [mindspore.Tensor] * 2
    frame.backward([out["product"], out["list"][0]], [np.ones((3, 4)), np.ones((3, 4))])
    frame.equal(first._grad, X + 2)
    frame.equal(third._grad, X)
    frame.equal(
        second._grad, np.exp(X + 1), accuracy=1e-5
    )  # as good as float32's exp is


def test_contexts_serve_one_call():
    made = platform.create_selective_checkpoint_contexts([])
    platform.checkpoint(lambda x: x.exp(), frame.leaf(X), context_fn=lambda: made)
    with pytest.raises(RuntimeError, match="serve one call of the recompute"):
        platform.checkpoint(lambda x: x.exp(), frame.leaf(X), context_fn=lambda: made)


def test_one_operator_is_no_list():
    for op in ("matmul", ops.MatMul()):
        with pytest.raises(ValueError, match="put it in a list"):
            platform.create_selective_checkpoint_contexts(op)


# --- distributed tensors


def distributed(x, weight, other):
    """A product whose operands must move, then what must be reduced first, then a product with what came in."""
    hidden = mint.exp(mint.matmul(x, weight) * 0.1)
    hidden = mint.softmax(hidden, -1) * hidden[:, :1]
    return mint.sin(mint.matmul(hidden, other))


@on_ranks(4)
def test_distributed_tensors():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    arrays = [
        frame.draw(6, 4, seed=1),
        frame.draw(4, 5, seed=2),
        frame.draw(5, 3, seed=3),
    ]
    placements = [
        [Shard(0), Replicate()],
        [Replicate(), Shard(1)],
        [Replicate(), Shard(0)],
    ]
    leaves = [frame.leaf(array) for array in arrays]
    truth = distributed(*leaves)
    frame.backward([truth], [np.ones(truth.shape)])
    expected = [frame.array(leaf._grad) for leaf in leaves]
    seen = []

    def some(ctx, op, *args, **kwargs):
        seen.append(op.name)
        return len(seen) % 2 == 0

    policies = {
        "none": [],
        "products": ["matmul"],
        "all": lambda ctx, op, *args, **kwargs: True,
        "all to the host": lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_SWAP,
        "some": some,
    }
    for policy in policies.values():
        tensors = []
        for array, where in zip(arrays, placements, strict=True):
            tensor = distribute_tensor(frame.tensor(array), mesh, where)
            tensors.append(platform.set_tensor_requires_grad(tensor))
        out = platform.checkpoint(distributed, *tensors, context_fn=contexts(policy))
        frame.equal(
            platform.detach(out).full_tensor(), platform.detach(truth), accuracy=1e-10
        )
        local = out.to_local()
        layout = out.layout
        weight = layout.part_of(frame.tensor(np.ones(truth.shape)))
        frame.run_backward([local], [weight.contiguous()])
        for tensor, true in zip(tensors, expected, strict=True):
            gradient = tensor.layout.tensor(
                tensor.to_local()._grad, tuple(tensor.shape)
            )
            frame.equal(gradient.full_tensor(), true, accuracy=1e-10)
    assert seen[:1] == ["MatMulExt"]
