# SPDX-License-Identifier: Apache-2.0
"""What single tensors have in PyTorch alone: names of its functions, sparse and conjugated tensors, its profiler."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

from hyper_parallel import get_platform


@pytest.fixture
def platform():
    return get_platform()


@pytest.mark.parametrize(
    "function",
    [torch.add, torch.Tensor.add, torch.ops.aten.add.Tensor, torch.ops.aten.add],
)
def test_op_names_have_no_namespace_and_no_overload(platform, function):
    assert platform.get_op_name(function) == "add"


def test_other_op_names(platform):
    assert platform.get_op_name(torch.nn.functional.linear) == "linear"
    assert platform.get_op_name(torch.Tensor.__add__) == "__add__"
    assert platform.get_op_name(torch.Tensor.T.__get__) == "T"
    with pytest.raises(TypeError, match="expected an operator, got int"):
        platform.get_op_name(3)


def test_a_sparse_tensor_is_not_dense(platform):
    assert not platform.is_dense(torch.ones(1).to_sparse())


class Asked(torch.autograd.Function):
    """Asks in backward about the leaf that it was given."""

    @staticmethod
    def forward(ctx, x, told):
        ctx.leaf, ctx.told = x, told
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        platform = get_platform()
        ctx.told.append(
            (platform.can_defer_gradient(ctx.leaf), platform.backward_number())
        )
        platform.after_backward(lambda: ctx.told.append("after"))
        return grad, None


def test_what_backward_does_with_a_leaf(platform):
    x, told = torch.ones(2, requires_grad=True), []
    y = Asked.apply(x, told)
    y.sum().backward(retain_graph=True)
    torch.autograd.grad(y.sum(), [x], retain_graph=True)
    handle = x.register_hook(lambda grad: None)
    y.sum().backward(retain_graph=True)
    handle.remove()
    x.register_post_accumulate_grad_hook(lambda leaf: None)
    y.sum().backward()
    assert [entry[0] if entry != "after" else entry for entry in told] == [
        True, "after", False, "after", False, "after", False, "after",
    ]  # fmt: skip
    numbers = [entry[1] for entry in told if entry != "after"]
    assert len(set(numbers)) == 4, "every backward has a number of its own"
    assert platform.backward_number() not in numbers
    y = Asked.apply(x * 1, told)
    y.sum().backward()
    assert told[-2][0] is False, "it is no leaf"


def test_float8_by_name(platform):
    assert platform.str_to_dtype("float8_e4m3fn") is torch.float8_e4m3fn
    assert (
        platform.tensor_type_cast(torch.ones(1), "float8_e4m3fn").dtype
        is torch.float8_e4m3fn
    )


def test_a_conjugated_tensor_to_numpy(platform):
    x = torch.tensor([0, 1, 3]).to(torch.complex64)
    assert platform.tensor_to_numpy((x * 1j).conj()).tolist() == [0, -1j, -3j]


def test_sizes_are_torchs(platform):
    assert isinstance(platform.list_to_size([2, 3]), torch.Size)


def test_random_numbers_are_torchs(platform):
    platform.manual_seed(1)
    drawn = platform.rand((3,)), platform.randn((2, 2), dtype=torch.float64)
    platform.manual_seed(1)
    assert torch.equal(drawn[0], torch.rand(3))
    assert torch.equal(drawn[1], torch.randn(2, 2, dtype=torch.float64))
    state = platform.get_rng_state()
    first = torch.rand(3)
    platform.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_devices_are_torchs(platform):
    kind = platform.device_type()
    # A build for CUDA names its accelerator on a machine without one too.
    is_there = torch.accelerator.is_available()
    assert kind == (torch.accelerator.current_accelerator().type if is_there else "cpu")
    assert platform.device().type == kind
    assert platform.ones((1,), device=platform.device()).device.type == kind
    assert platform.meta_device == torch.device("meta")


def test_profiler_shows_the_name(platform):
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities) as profile,
        platform.profiler_record("a step of ours"),
    ):
        torch.ones(2) + 1
    assert "a step of ours" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [0, 1, 5, 6, 7, 8])
def test_chunk_is_torchs(platform, size, pieces):
    x = torch.arange(size * 2.0).view(2, size)
    expected = list(x.chunk(pieces, 1)) if size else []
    expected += [x.new_empty(2, 0)] * (pieces - len(expected))
    for index in range(pieces):
        assert torch.equal(platform.chunk(x, 1, pieces, index), expected[index])
        assert torch.equal(platform.chunk(x, -1, pieces, index), expected[index])


def test_what_is_replaced_as_a_whole_stays_in_the_graph(platform):
    """As on a rank that keeps something: backward reaches the same leaves on both."""
    x = torch.ones(2, 2, requires_grad=True)
    y = x * 2
    platform.assign(y, (slice(0, 2), slice(0, 2)), 3.0)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert first.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert first.requires_grad
    plain = x * 2
    plain[0:2] = 3.0  # the control
    (first,) = torch.autograd.grad(plain.square().sum(), x, create_graph=True)
    assert not first.requires_grad


def test_views_are_taken_again_as_they_were(platform):
    x = torch.ones(0, 2, requires_grad=True)
    base = x * 2
    with platform.replayed_views():
        view = base.view(-1)
    plain = base.view(-1)
    base.exp_()
    assert view.grad_fn.name() == "ViewBackward0"
    assert (
        plain.grad_fn.name() == "AsStridedBackward0"
    )  # the control: its gradient is cut off where it is empty


def test_attention_by_operators_has_second_derivatives(platform):
    def second_gradients(q):
        [first] = torch.autograd.grad(
            F.scaled_dot_product_attention(q, q, q).sum(), q, create_graph=True
        )
        return torch.autograd.grad(first.square().sum(), q)[0]

    def by_hand(q):
        attention = torch.softmax(q @ q.mT / q.shape[-1] ** 0.5, -1) @ q
        [first] = torch.autograd.grad(attention.sum(), q, create_graph=True)
        return torch.autograd.grad(first.square().sum(), q)[0]

    q = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    with platform.attention_by_operators():
        torch.testing.assert_close(second_gradients(q), by_hand(q))
    with pytest.raises(RuntimeError, match="derivative"):  # control
        second_gradients(q)


@pytest.mark.parametrize("new", [(6, 2), (2, 6), (12,), (3, 2, 2), (3, 4)])
def test_can_view_is_torchs(platform, new):
    for x in (
        torch.zeros(2, 3, 2),
        torch.zeros(3, 2, 2).transpose(0, 1),
        torch.zeros(2, 2, 3).mT,
    ):
        try:
            is_view = x.view(new) is not None
        except RuntimeError:
            is_view = False
        assert platform.can_view(x.shape, x.stride(), new) == is_view
