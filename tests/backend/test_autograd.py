# SPDX-License-Identifier: Apache-2.0
"""Running backward from several outputs, and what autograd saves for it."""

import frame
import numpy as np
import pytest
from frame import tensor

from hyper_parallel import (
    DTensor,
    Replicate,
    Shard,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.testing import on_ranks


@pytest.fixture
def platform():
    return get_platform()


def test_backward_from_several_outputs_accumulates_into_leaves(platform):
    x, y = frame.leaf([1.0, 2.0]), frame.leaf([3.0, 4.0])
    with platform.tape():
        product, total = x * y, (x * x).sum()
    platform.backward([product, total], [tensor([10.0, 100.0]), None])
    assert frame.grad(x).tolist() == [32.0, 404.0]
    assert frame.grad(y).tolist() == [10.0, 200.0]


def test_backward_adds_to_what_is_there(platform):
    x = frame.leaf([1.0, 2.0])
    for _ in range(2):
        with platform.tape():
            out = x * 3.0
        platform.backward([out], [tensor([1.0, 1.0])])
    assert frame.grad(x).tolist() == [6.0, 6.0]


def test_backward_adds_gradients_that_are_views(platform):
    """A linear layer's gradient may be the transpose of a product."""
    weight = frame.leaf(frame.draw(2, 3), "float32")
    total = np.zeros((2, 3))
    for step in range(3):
        x = frame.draw(4, 3, seed=step).astype("float32")
        seed = frame.draw(4, 2, seed=10 + step).astype("float32")
        with platform.tape():
            out = platform.operator("linear")(tensor(x), weight)
        platform.backward([out], [tensor(seed)])
        total += seed.T @ x
        np.testing.assert_allclose(frame.grad(weight), total, rtol=1e-5)


def test_a_kept_graph_can_be_used_again(platform):
    x = frame.leaf([1.0, 2.0])
    with platform.tape():
        out = x * x
    platform.backward([out], [tensor([1.0, 1.0])], keep_graph=True)
    platform.backward([out], [tensor([0.0, 1.0])])
    assert frame.grad(x).tolist() == [2.0, 8.0]
    with pytest.raises(RuntimeError):
        platform.backward([out], [tensor([1.0, 1.0])])


def test_the_stages_of_a_pipeline(platform):
    """The gradient of one stage's input is what backward of the stage before it starts from."""
    x = frame.leaf([1.0, 2.0])
    with platform.tape():
        sent = x * x
        received = frame.leaf(frame.array(platform.detach(sent)))
        loss = (received * received).sum()
    platform.backward([loss])
    platform.backward([sent], [frame.grad(received)])
    assert frame.grad(x).tolist() == [4.0, 32.0]


def test_backward_refuses_what_it_cannot_start_from(platform):
    x = frame.leaf([1.0, 2.0])
    with platform.tape():
        out = x * 2.0
    seed = tensor([1.0, 1.0])
    for outputs, gradients, message in [
        ([tensor([1.0])], None, "was not recorded"),
        ([out], None, "needs a gradient"),
        ([out], [tensor([1.0])], r"has shape \(1,\), not \(2,\)"),
        ([out], [seed, seed], "1 outputs need as many gradients, got 2"),
        ([], None, "0 outputs"),
    ]:
        with pytest.raises(ValueError, match=f"backward: .*{message}.*HP145"):
            platform.backward(outputs, gradients)
    assert frame.grad(x) is None


def test_no_grad_within_the_tape(platform):
    x = frame.leaf([1.0, 2.0])
    with platform.tape(), platform.no_grad():
        assert not platform.requires_grad(x * 2.0)
    with platform.no_grad():
        out = x * 2.0
    with pytest.raises(ValueError, match="was not recorded"):
        platform.backward([out], [tensor([1.0, 1.0])])


def test_saved_tensors_are_packed_and_unpacked(platform):
    x = frame.leaf(np.array([1.0, 2.0]))
    packed, unpacked = [], []

    def pack(saved):
        packed.append(tuple(saved.shape))
        return frame.array(platform.detach(saved)).copy()

    def unpack(values):
        unpacked.append(values.shape)
        return tensor(values)

    with platform.tape():
        with platform.saved_tensors(pack, unpack):
            out = x * x
        other = x * x  # outside of the context
    assert packed == [(2,), (2,)]
    assert unpacked == []
    platform.backward([out, other], [tensor([1.0, 1.0])] * 2)
    assert len(unpacked) == len(packed)
    assert frame.grad(x).tolist() == [4.0, 8.0]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bool", "bool"),
        ("int8", "int"),
        ("int64", "int"),
        ("uint8", "uint"),
        ("float16", "float"),
        ("bfloat16", "float"),
        ("float64", "float"),
        ("complex64", "complex"),
    ],
)
def test_the_kind_of_a_dtype(platform, name, kind):
    assert platform.dtype_kind(frame.dtype(name)) == kind


def test_what_is_no_dtype_has_no_kind(platform):
    with pytest.raises(ValueError, match="dtype_kind: .*HP138"):
        platform.dtype_kind("string")


def test_the_gradient_of_a_leaf(platform):
    x = frame.leaf([1.0, 2.0])
    assert platform.gradient_of(x) is None
    with platform.tape():
        out = x * 3.0
    platform.backward([out], [tensor([1.0, 2.0])])
    assert platform.gradient_of(x).tolist() == [3.0, 6.0]


def test_two_leaves_of_one_gradient(platform):
    x, y = frame.leaf([1.0, 2.0], "float32"), frame.leaf([3.0, 4.0], "float32")
    with platform.tape():
        out = (platform.use_leaf(x) + platform.use_leaf(y)) * 2
    platform.backward([out], [tensor([1.0, 3.0]).to(out.dtype)])
    assert frame.grad(x).tolist() == frame.grad(y).tolist() == [2.0, 6.0]
    plain = tensor([1.0])
    assert platform.use_leaf(plain) is plain


@on_ranks(2)
def test_backward_from_distributed_outputs():
    platform = get_platform()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    shard, seed = frame.leaf([1.0, 2.0]), frame.tensor([1.0, 10.0])
    with platform.tape():
        x = DTensor.from_local(shard, mesh, [Shard(0)])
        square, total = x * x, x.sum()  # the sum is pending
    gradient = DTensor.from_local(seed, mesh, [Shard(0)])
    platform.backward([square, total], [gradient, None])
    assert frame.grad(shard).tolist() == [3.0, 41.0]
    with platform.tape():
        again = x * 2.0
    with pytest.raises(TypeError, match="HP227"):
        platform.backward([again], [frame.tensor(np.ones(4))])
    whole = DTensor.from_local(frame.tensor(np.ones(4)), mesh, [Replicate()])
    platform.backward([again], [whole])
    assert frame.grad(shard).tolist() == [5.0, 43.0]


def test_backward_to_inputs_leaves_the_rest_for_later(platform):
    """Gradients of inputs at once; those of other leaves when the function is called, or before."""
    x, weight, bias = (frame.leaf([1.0, 2.0]) for _ in range(3))
    with platform.tape():
        y = (x * weight) * (x * bias)
    finish = platform.backward_inputs([y], [tensor([1.0, 10.0])], [x])
    assert frame.grad(x).tolist() == [2.0, 160.0]  # 2 x weight bias
    if frame.IS_TORCH:
        assert frame.grad(weight) is None
    finish()
    assert frame.grad(weight).tolist() == [1.0, 80.0]
    assert frame.grad(bias).tolist() == [1.0, 80.0]
    assert frame.grad(x).tolist() == [2.0, 160.0]


def test_backward_to_inputs_checks_what_it_is_given(platform):
    with pytest.raises(ValueError, match="was not recorded"):
        platform.backward_inputs([tensor([1.0])], None, [])


def test_whether_recording_is_disabled(platform):
    assert not platform.is_recording_disabled()
    with platform.no_grad():
        assert platform.is_recording_disabled()
    assert not platform.is_recording_disabled()


@pytest.mark.parametrize("hooked", [False, True])
def test_whether_gradients_of_several_leaves_can_be_deferred(platform, hooked):
    leaves, answers = [frame.leaf([1.0, 2.0]) for _ in range(2)], []

    class Asking(platform.Function):
        @staticmethod
        def forward(ctx, first, second):
            return platform.detach(first) * 2

        @staticmethod
        def backward(ctx, gradient):
            answers.append(platform.can_defer_gradients(leaves, ctx))
            return gradient, gradient

    if hooked:
        leaves[1].register_hook(lambda gradient: None)
    with platform.tape():
        y = Asking.apply(*leaves)
    platform.backward([y], [tensor([1.0, 1.0])])
    assert answers == [not hooked]
