# SPDX-License-Identifier: Apache-2.0
"""Single tensors, dtypes, devices, streams and randomness."""

import numpy as np
import pytest
import torch

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


def test_is_tensor(platform):
    assert platform.is_tensor(torch.ones(1))
    assert platform.is_tensor(torch.nn.Parameter(torch.ones(1)))
    assert not platform.is_tensor(np.ones(1))
    assert platform.is_floating_point(torch.ones(1))
    assert not platform.is_floating_point(torch.ones(1, dtype=torch.int32))
    assert platform.is_dense(torch.ones(1))
    assert not platform.is_dense(torch.ones(1).to_sparse())
    assert platform.is_meta(torch.ones(1, device="meta"))
    assert not platform.is_meta(torch.ones(1))


class Asked(torch.autograd.Function):
    """Asks in backward about the leaf that it was given."""

    @staticmethod
    def forward(ctx, x, told):
        ctx.leaf, ctx.told = x, told
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        platform = get_platform()
        ctx.told.append((platform.accumulates_gradient(ctx.leaf), platform.backward_number()))
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


def test_adding_to_a_gradient(platform):
    x = torch.ones(2, requires_grad=True)
    platform.accumulate_gradient(x, torch.tensor([1.0, 2.0]))
    platform.accumulate_gradient(x, torch.tensor([1.0, 2.0]))
    assert x.grad.tolist() == [2.0, 4.0]


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [0, 1, 5, 6, 7, 8])
def test_chunk_has_torch_chunk_sizes_and_empty_pieces(platform, size, pieces):
    x = torch.arange(size * 2.0).view(2, size)
    expected = list(x.chunk(pieces, 1)) if size else []
    expected += [x.new_empty(2, 0)] * (pieces - len(expected))
    for index in range(pieces):
        assert torch.equal(platform.chunk(x, 1, pieces, index), expected[index])
        assert torch.equal(platform.chunk(x, -1, pieces, index), expected[index])


def test_chunk_refuses_what_is_no_piece(platform):
    for arguments in [(0, 2, 2), (0, 2, -1), (0, 0, 0), (2, 2, 0), (0, 1.5, 0)]:
        with pytest.raises(ValueError, match="chunk: "):
            platform.chunk(torch.ones(4, 4), *arguments)


def test_clone(platform):
    x = torch.arange(6.0, requires_grad=True).view(2, 3)
    twin = platform.clone(x.t())
    assert twin.tolist() == x.t().tolist()
    assert twin.is_contiguous()
    assert not twin.requires_grad
    assert twin.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_cat(platform):
    assert platform.cat([torch.ones(1, 2), torch.zeros(1, 2)], 1).tolist() == [[1, 1, 0, 0]]


@pytest.mark.parametrize("case", [(0, 5, 1), (1, 4, 2), (4, 0, -1), (-1, -6, -2), (0, 99, 3), (3, 3, 1), (2, 0, 1)])
def test_strided_slices_as_in_numpy(platform, case):
    begin, end, stride = case
    x = torch.arange(30.0).view(5, 6).requires_grad_()
    expected = x.detach().numpy()[begin:end:stride, 5:0:-2]
    result = platform.construct_strided_slice(x, (begin, 5), (end, 0), (stride, -2))
    np.testing.assert_array_equal(result.detach().numpy(), expected)
    result.sum().backward()
    gradient = np.zeros((5, 6))
    gradient[begin:end:stride, 5:0:-2] = 1
    np.testing.assert_array_equal(x.grad.numpy(), gradient)


def test_strided_slices_need_an_entry_a_dim(platform):
    with pytest.raises(ValueError, match="one entry for each dim"):
        platform.construct_strided_slice(torch.ones(2, 2), (0,), (1,), (1,))
    with pytest.raises(ValueError, match="the stride of dim 1 is 0"):
        platform.construct_strided_slice(torch.ones(2, 2), (0, 0), (1, 1), (1, 0))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", torch.float32),
        ("torch.float32", torch.float32),
        ("mindspore.bfloat16", torch.bfloat16),
        ("BFloat16", torch.bfloat16),
        ("half", torch.float16),
        ("long", torch.int64),
        ("bool", torch.bool),
        ("float8_e4m3fn", torch.float8_e4m3fn),
    ],
)
def test_dtypes_by_name(platform, name, dtype):
    assert platform.str_to_dtype(name) is dtype
    assert platform.tensor_type_cast(torch.ones(1), name).dtype is dtype


@pytest.mark.parametrize("name", ["float31", "", "torch.", None, 32])
def test_unknown_dtypes_list_the_known(platform, name):
    with pytest.raises(ValueError, match="str_to_dtype: unknown dtype .* known are .*bfloat16.*float32"):
        platform.str_to_dtype(name)
    with pytest.raises(ValueError, match="tensor_type_cast: unknown dtype"):
        platform.tensor_type_cast(torch.ones(1), name)


def test_only_floating_point_tensors_are_cast(platform):
    assert platform.cast_fp_tensor(torch.float16, torch.ones(1)).dtype is torch.float16
    integers = torch.ones(1, dtype=torch.int32)
    assert platform.cast_fp_tensor(torch.float16, integers) is integers
    assert platform.cast_fp_tensor(torch.float16, "text") == "text"


def test_sizes(platform):
    x = torch.ones(3, 4, dtype=torch.float64)
    assert platform.get_tensor_storage_size(x) == 96
    assert platform.get_tensor_storage_size(x[:, :2]) == 48
    assert platform.get_element_size(x) == 8
    assert platform.list_to_size([2, 3]) == torch.Size([2, 3])
    assert isinstance(platform.list_to_size([2, 3]), torch.Size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool, torch.bfloat16, torch.complex64])
def test_to_numpy(platform, dtype):
    x = torch.tensor([0, 1, 3]).to(dtype).requires_grad_(dtype.is_floating_point)
    array = platform.tensor_to_numpy(x)
    assert array.tolist() == x.tolist()
    assert array.dtype == (np.float32 if dtype is torch.bfloat16 else str(dtype).removeprefix("torch."))
    if dtype.is_complex:
        assert platform.tensor_to_numpy((x * 1j).conj()).tolist() == [0, -1j, -3j]


def test_creation(platform):
    assert platform.arange(3).tolist() == [0, 1, 2]
    assert platform.arange(1, 7, 2, dtype=torch.float32).tolist() == [1.0, 3.0, 5.0]
    assert platform.zeros((2, 1), dtype=torch.int64).tolist() == [[0], [0]]
    assert platform.ones((2,), device="cpu").tolist() == [1, 1]
    assert platform.full((2,), 7, dtype=torch.float64).tolist() == [7.0, 7.0]
    assert platform.empty((2, 3), dtype=torch.int8).shape == (2, 3)
    like = platform.full_like(torch.ones(2), 3, dtype=torch.int32)
    assert (like.tolist(), like.dtype) == ([3, 3], torch.int32)
    like = platform.empty_like(torch.ones(2, 2), dtype=torch.float64, pin_memory=True)
    assert (like.shape, like.dtype) == ((2, 2), torch.float64)
    assert platform.new_tensor((2,), torch.bfloat16, "meta").is_meta
    parameter = platform.new_zero_parameter((2,), torch.float32, False, "cpu")
    assert isinstance(parameter, torch.nn.Parameter)
    assert (parameter.tolist(), parameter.requires_grad) == ([0, 0], False)


def test_gradients_are_switched_on_and_off(platform):
    x = platform.set_tensor_requires_grad(torch.ones(2))
    assert x.requires_grad
    with platform.no_grad():
        assert not (x * 2).requires_grad
    with pytest.raises(ValueError, match=r"detach\(\) it first"):
        platform.set_tensor_requires_grad(x * 2)


def test_random_numbers_follow_the_seed(platform):
    platform.manual_seed(1)
    drawn = platform.rand((3,)), platform.randn((2, 2), dtype=torch.float64)
    platform.manual_seed(1)
    assert torch.equal(drawn[0], torch.rand(3))
    assert torch.equal(drawn[1], torch.randn(2, 2, dtype=torch.float64))


def test_seeds_and_generator_states(platform):
    platform.manual_seed(5)
    state = platform.get_rng_state()
    first = torch.rand(3)
    second = torch.rand(3)
    platform.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.rand(3), second)
    platform.manual_seed(5)
    assert torch.equal(torch.rand(3), first)


def test_states_of_all_generators(platform):
    states = platform.get_rng_states()
    assert states.keys() == {"cpu", platform.device_type()}
    assert all(state.dtype == torch.uint8 and state.device.type == "cpu" for state in states.values())
    first = torch.rand(3)
    after = torch.get_rng_state()
    platform.set_rng_states({})
    assert torch.equal(torch.get_rng_state(), after)
    platform.set_rng_states(states)
    assert torch.equal(torch.rand(3), first)


def test_devices(platform):
    kind = platform.device_type()
    assert kind == (torch.accelerator.current_accelerator() or torch.device("cpu")).type
    assert platform.device().type == kind
    assert platform.ones((1,), device=platform.device()).device.type == kind
    assert platform.meta_device == torch.device("meta")


def test_streams_and_events_exist_and_do_what_is_right(platform):
    stream, other, event = platform.new_stream(), platform.new_stream(), platform.new_event()
    before = platform.get_current_stream()
    with platform.get_stream_context()(stream):
        assert platform.get_current_stream() is stream
        x = torch.ones(2) + 1
        event.record(stream)
    assert platform.get_current_stream() is before
    other.wait_stream(stream)
    other.wait_event(event)
    event.wait(other)
    event.synchronize()
    stream.synchronize()
    assert event.query()
    assert stream.query()
    assert stream.record_event().query()
    assert x.tolist() == [2, 2]
    with stream, event, platform.get_current_stream():
        pass


def test_profiler_shows_the_name(platform):
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile, platform.profiler_record("a step of ours"):
        torch.ones(2) + 1
    assert "a step of ours" in {event.key for event in profile.key_averages()}


# --- memory

ALL_DTYPES = [
    "bfloat16",
    "bool",
    "complex128",
    "complex64",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "int8",
    "uint64",
]


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_the_memory_of_a_tensor_is_seen_and_written_by_numpy(platform, name):
    tensor = platform.zeros((3, 4), dtype=platform.str_to_dtype(name))
    items = platform.tensor_memory(tensor)
    assert (items.shape, items.dtype.itemsize) == ((3, 4), platform.get_element_size(tensor))
    columns = platform.tensor_memory(tensor[:, 1:3])  # a view has the gaps of its memory
    ones = np.full(items.dtype.itemsize, 1, np.uint8).view(columns.dtype)
    columns[...] = ones
    assert (items[:, 1:3] == ones).all()
    assert (items[:, 0] != ones).all()
    again = platform.tensor_from_bytes(np.frombuffer(items.tobytes(), np.uint8).copy(), name, (3, 4))
    assert platform.tensor_memory(again).tobytes() == items.tobytes()
    assert again.dtype == tensor.dtype


def test_an_empty_tensor_from_no_bytes(platform):
    made = platform.tensor_from_bytes(np.empty(0, np.uint8), "bfloat16", (0, 3))
    assert tuple(made.shape) == (0, 3)
    assert platform.tensor_memory(made).shape == (0, 3)


def test_a_host_tensor_is_contiguous_and_of_the_same_memory_where_it_can_be(platform):
    tensor = platform.arange(12).reshape(3, 4)
    assert platform.memory_key(platform.host_tensor(tensor)) == platform.memory_key(tensor)
    turned = platform.host_tensor(tensor.T)
    assert platform.tensor_memory(turned).flags.c_contiguous
    assert turned.tolist() == tensor.T.tolist()


def test_a_memory_key_is_equal_for_the_same_elements_alone(platform):
    tensor = platform.arange(12).reshape(3, 4)
    assert platform.memory_key(tensor) == platform.memory_key(tensor.detach())
    others = [tensor.clone(), tensor[1:], tensor.T, tensor.reshape(4, 3), tensor.reshape(12)]
    assert platform.memory_key(tensor) not in map(platform.memory_key, others)
    assert platform.memory_key(platform.empty((0,))) != platform.memory_key(platform.empty((0,)))
