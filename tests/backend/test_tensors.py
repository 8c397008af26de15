# SPDX-License-Identifier: Apache-2.0
"""Single tensors, dtypes, devices, streams and randomness."""

import gc
import weakref

import frame
import numpy as np
import pytest
from frame import dtype, tensor

from hyper_parallel import get_platform
from hyper_parallel.platform.transform import chunk_span


@pytest.fixture
def platform():
    return get_platform()


def test_is_tensor(platform):
    assert platform.is_tensor(tensor([1.0]))
    assert platform.is_tensor(platform.Parameter(tensor([1.0])))
    assert not platform.is_tensor(np.ones(1))
    assert platform.is_floating_point(tensor([1.0]))
    assert not platform.is_floating_point(tensor([1], "int32"))
    assert platform.is_dense(tensor([1.0]))
    assert platform.is_meta(platform.ones((1,), device="meta"))
    assert not platform.is_meta(tensor([1.0]))


def test_assigning_to_some_places(platform):
    x = tensor([[1.0, 2.0], [3.0, 4.0]])
    changed = platform.assign(x, (slice(0, 1), slice(0, 2)), 5.0)
    assert changed.tolist() == [[5.0, 5.0], [3.0, 4.0]]
    changed = platform.assign(
        changed, (slice(0, 2), slice(1, 2)), tensor([[7.0], [8.0]])
    )
    assert changed.tolist() == [[5.0, 7.0], [3.0, 8.0]]


def test_adding_to_a_gradient(platform):
    x = frame.leaf([1.0, 1.0])
    platform.accumulate_gradient(x, tensor([1.0, 2.0]))
    platform.accumulate_gradient(x, tensor([1.0, 2.0]))
    assert frame.grad(x).tolist() == [2.0, 4.0]


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [0, 1, 5, 6, 7, 8])
def test_chunk_has_torch_chunk_sizes_and_empty_pieces(platform, size, pieces):
    x = np.arange(size * 2.0).reshape(2, size)
    rows = -(
        -size // pieces
    )  # torch.chunk: all of one size, the last less, those after it empty
    assert chunk_span(size, pieces, 0) == (0, rows)
    for index in range(pieces):
        expected = x[:, index * rows : (index + 1) * rows]
        for dim in (1, -1):
            found = platform.chunk(tensor(x), dim, pieces, index)
            assert tuple(found.shape) == expected.shape
            assert frame.array(found).tolist() == expected.tolist()
            together = platform.chunks(tensor(x), dim, pieces)
            assert len(together) == pieces
            assert frame.array(together[index]).tolist() == expected.tolist()


def test_an_empty_chunk_has_a_gradient_of_zeros(platform):
    x = frame.leaf(np.ones((2, 3)))
    frame.backward([platform.chunk(x, 1, 4, 3)], [np.ones((2, 0))])
    assert frame.array(frame.grad(x)).tolist() == np.zeros((2, 3)).tolist()


def test_chunk_refuses_what_is_no_piece(platform):
    for arguments in [(0, 2, 2), (0, 2, -1), (0, 0, 0), (2, 2, 0), (0, 1.5, 0)]:
        with pytest.raises(ValueError, match="chunk: "):
            platform.chunk(tensor(np.ones((4, 4))), *arguments)
    with pytest.raises(ValueError, match="chunk: "):
        platform.chunks(tensor(np.ones((4, 4))), 2, 2)


def test_clone(platform):
    x = frame.leaf(np.arange(6.0).reshape(2, 3)).T
    twin = platform.clone(x)
    assert frame.array(twin).tolist() == np.arange(6.0).reshape(2, 3).T.tolist()
    assert twin.is_contiguous()
    assert not platform.requires_grad(twin)
    assert platform.requires_grad(x)
    platform.tensor_memory(twin)[...] = b"\0" * 8
    assert frame.array(platform.detach(x)).any()


@pytest.mark.parametrize(
    ("name", "value"),
    [("int64", 2**62 + 1), ("uint8", 255), ("bool", True), ("float16", 0.1)],
)
def test_a_clone_has_the_same_bits(platform, name, value):
    x = platform.full((2, 3), value, dtype=dtype(name))
    assert (
        platform.tensor_memory(platform.clone(x)).tobytes()
        == platform.tensor_memory(x).tobytes()
    )


def test_a_clone_does_not_hold_on_to_what_it_was_cut_from(platform):
    whole = tensor(np.ones((6, 2)))
    for piece in (whole[:1], whole[6:], whole[:, :0]):
        twin = platform.clone(piece)
        assert tuple(twin.shape) == tuple(piece.shape)
        assert twin.untyped_storage().nbytes() == twin.nbytes


def test_cat(platform):
    x, y = np.ones((1, 2)), np.zeros((1, 2))
    assert frame.array(platform.cat([tensor(x), tensor(y)], 1)).tolist() == [
        [1, 1, 0, 0]
    ]
    assert frame.array(platform.cat([tensor(x[:, :0]), tensor(x)], 1)).tolist() == [
        [1, 1]
    ]


@pytest.mark.parametrize(
    "case",
    [(0, 5, 1), (1, 4, 2), (4, 0, -1), (-1, -6, -2), (0, 99, 3), (3, 3, 1), (2, 0, 1)],
)
def test_strided_slices_as_in_numpy(platform, case):
    begin, end, stride = case
    values = np.arange(30.0).reshape(5, 6)
    x = frame.leaf(values)
    expected = values[begin:end:stride, 5:0:-2]
    result = platform.construct_strided_slice(x, (begin, 5), (end, 0), (stride, -2))
    frame.equal(platform.detach(result), expected)
    frame.backward([result], [np.ones(expected.shape)])
    gradient = np.zeros((5, 6))
    gradient[begin:end:stride, 5:0:-2] = 1
    frame.equal(frame.grad(x), gradient)


@pytest.mark.parametrize("name", ["bfloat16", "bool", "float16", "int64", "complex64"])
def test_strided_slices_of_all_kinds(platform, name):
    values = np.arange(12).reshape(3, 4)
    x = tensor(values).to(dtype(name))
    found = platform.construct_strided_slice(x, (2, 0), (0, 4), (-1, 2))
    assert found.dtype == x.dtype
    assert frame.array(found).tolist() == frame.array(x)[2:0:-1, ::2].tolist()


def test_strided_slices_need_an_entry_a_dim(platform):
    x = tensor(np.ones((2, 2)))
    with pytest.raises(ValueError, match="one entry for each dim"):
        platform.construct_strided_slice(x, (0,), (1,), (1,))
    with pytest.raises(ValueError, match="the stride of dim 1 is 0"):
        platform.construct_strided_slice(x, (0, 0), (1, 1), (1, 0))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("float32", "float32"),
        ("torch.float32", "float32"),
        ("mindspore.bfloat16", "bfloat16"),
        ("BFloat16", "bfloat16"),
        ("half", "float16"),
        ("long", "int64"),
        ("bool", "bool"),
        ("Bool", "bool"),
    ],
)
def test_dtypes_by_name(platform, name, known):
    expected = getattr(platform.tensor_dtype, known)
    assert platform.str_to_dtype(name) is expected
    assert platform.str_to_dtype(str(expected)) is expected
    assert platform.tensor_type_cast(tensor([1.0]), name).dtype is expected


@pytest.mark.parametrize("name", ["float31", "", "torch.", None, 32])
def test_unknown_dtypes_list_the_known(platform, name):
    with pytest.raises(
        ValueError, match="str_to_dtype: unknown dtype .* known are .*bfloat16.*float32"
    ):
        platform.str_to_dtype(name)
    with pytest.raises(ValueError, match="tensor_type_cast: unknown dtype"):
        platform.tensor_type_cast(tensor([1.0]), name)


def test_only_floating_point_tensors_are_cast(platform):
    half = dtype("float16")
    assert platform.cast_fp_tensor(half, tensor([1.0])).dtype is half
    integers = tensor([1], "int32")
    assert platform.cast_fp_tensor(half, integers) is integers
    assert platform.cast_fp_tensor(half, "text") == "text"


def test_sizes(platform):
    x = tensor(np.ones((3, 4)))
    assert platform.get_tensor_storage_size(x) == 96
    assert platform.get_tensor_storage_size(x[:, :2]) == 48
    assert platform.get_element_size(x) == 8
    assert platform.list_to_size([2, 3]) == (2, 3)
    assert type(platform.list_to_size([2, 3])) is type(x.shape)


@pytest.mark.parametrize("name", ["float32", "int16", "bool", "bfloat16", "complex64"])
def test_to_numpy(platform, name):
    x = tensor([0, 1, 3]).to(dtype(name))
    if platform.is_floating_point(x):
        x = platform.set_tensor_requires_grad(x)
    array = platform.tensor_to_numpy(x)
    assert (
        array.tolist()
        == np.array([0, 1, 3])
        .astype("float32" if name == "bfloat16" else name)
        .tolist()
    )
    assert array.dtype == ("float32" if name == "bfloat16" else name)


def values(made):
    return frame.array(made).tolist()


def test_creation(platform):
    assert values(platform.arange(3)) == [0, 1, 2]
    assert platform.arange(3).dtype is dtype("int64")
    assert values(platform.arange(1, 7, 2, dtype=dtype("float32"))) == [1.0, 3.0, 5.0]
    assert values(platform.zeros((2, 1), dtype=dtype("int64"))) == [[0], [0]]
    assert values(platform.zeros(())) == 0
    assert values(platform.ones((2,), device="cpu")) == [1, 1]
    assert platform.ones((2,)).dtype is dtype("float32")
    assert values(platform.full((2,), 7, dtype=dtype("float64"))) == [7.0, 7.0]
    assert values(platform.full((2,), -float("inf"))) == [-np.inf] * 2
    assert platform.full((), True).dtype is dtype("bool")
    assert platform.empty((2, 3), dtype=dtype("int8")).shape == (2, 3)
    like = platform.full_like(tensor([1.0, 1.0]), 3, dtype=dtype("int32"))
    assert (values(like), like.dtype) == ([3, 3], dtype("int32"))
    like = platform.empty_like(
        tensor(np.ones((2, 2))), dtype=dtype("float32"), pin_memory=True
    )
    assert (like.shape, like.dtype) == ((2, 2), dtype("float32"))
    assert platform.is_meta(platform.new_tensor((2,), dtype("bfloat16"), "meta"))
    parameter = platform.new_zero_parameter((2,), dtype("float32"), False, "cpu")
    assert isinstance(parameter, platform.Parameter)
    assert (values(platform.detach(parameter)), parameter.requires_grad) == (
        [0, 0],
        False,
    )


def test_recording_is_switched_on_and_off(platform):
    x = frame.leaf([1.0, 2.0])
    with platform.recording(on=False):
        assert not platform.is_recorded(x)
        assert not platform.requires_grad(x * 2)
    with platform.recording(on=True):
        assert platform.requires_grad(x * 2)


def test_gradients_are_switched_on_and_off(platform):
    x = frame.leaf([1.0, 1.0])
    assert platform.requires_grad(x)
    assert platform.requires_grad(x * 2)
    with platform.no_grad():
        assert not platform.requires_grad(x * 2)
    with pytest.raises(ValueError, match=r"detach\(\) it first"):
        platform.set_tensor_requires_grad(x * 2)
    assert not platform.requires_grad(platform.detach(x * 2))
    assert platform.set_requires_grad(x, False) is x
    assert not platform.requires_grad(x)


def test_copying_into_any_view_is_not_lost(platform):
    whole = tensor(np.zeros((3, 4)), "float32")
    platform.copy_into(whole[:, 1:3], tensor(np.ones((3, 2))))  # cast too
    platform.copy_into(whole.T[0], tensor([2.0, 2.0, 2.0], "float32"))
    assert values(whole) == [[2, 1, 1, 0]] * 3
    assert values(whole * 2) == [[4, 2, 2, 0]] * 3
    platform.copy_into(whole[:0], tensor(np.ones((0, 4)), "float32"))
    half = tensor(np.zeros(3), "bfloat16")
    platform.copy_into(half[1:], tensor([1.5, 2.5], "bfloat16"))
    assert values(half) == [0, 1.5, 2.5]


def test_what_is_remembered_about_a_tensor_goes_with_it(platform):
    x = frame.leaf([1.0, 2.0])
    y = x * 2
    platform.memory_of(y)["made"] = 3
    assert platform.memory_of(y)["made"] == 3
    assert not platform.memory_of(x * 2)
    assert not platform.memory_of(tensor([1.0, 2.0]))
    gone = weakref.ref(y)
    del y
    gc.collect()
    assert gone() is None


def test_random_numbers_follow_the_seed(platform):
    def draw():
        return values(platform.rand((3,))), values(
            platform.randn((2, 2), dtype=dtype("float64"))
        )

    platform.manual_seed(1)
    drawn = draw()
    assert draw() != drawn
    platform.manual_seed(1)
    assert draw() == drawn
    platform.manual_seed(2)
    assert draw() != drawn
    many = frame.array(platform.rand((10000,)))
    assert many.dtype == np.float32
    assert 0 <= many.min() < 0.01 < 0.99 < many.max() < 1
    assert abs(many.mean() - 0.5) < 0.02
    many = frame.array(platform.randn((10000,)))
    assert abs(many.mean()) < 0.05
    assert abs(many.std() - 1) < 0.05
    assert platform.is_meta(platform.rand((2,), device="meta"))


def test_many_seeds_leave_the_generator_as_it_was(platform):
    platform.manual_seed(3)
    platform.rand((3,))
    state = platform.get_rng_state()
    undisturbed = values(platform.rand((3,)))
    with platform.seeded(9):
        expected = values(platform.rand((3,)))
    platform.set_rng_state(state)
    with pytest.raises(ZeroDivisionError), platform.reseeding() as seeded:
        for seed in (9, 10, 9):
            with seeded(seed):
                drawn = values(platform.rand((3,)))
            assert (drawn == expected) == (seed == 9)
        raise ZeroDivisionError
    assert values(platform.rand((3,))) == undisturbed


def test_seeds_and_generator_states(platform):
    platform.manual_seed(5)
    state = platform.get_rng_state()
    first, second = values(platform.rand((3,))), values(platform.rand((3,)))
    seed = platform.draw_seed()
    assert 0 <= seed < 2**62
    platform.set_rng_state(state)
    assert values(platform.rand((3,))) == first
    assert values(platform.rand((3,))) == second
    assert platform.draw_seed() == seed
    platform.manual_seed(5)
    assert values(platform.rand((3,))) == first


@pytest.mark.parametrize("seed", [0, 7, 2**61 + 11])
def test_another_seed_for_a_while(platform, seed):
    platform.manual_seed(5)
    first, second = (values(frame.drawn_by_the_framework(3)) for _ in range(2))
    assert first != second
    platform.manual_seed(5)
    assert values(frame.drawn_by_the_framework(3)) == first
    inside = []
    for _ in range(2):
        with platform.seeded(seed):
            inside.append(
                (values(platform.rand((3,))), values(frame.drawn_by_the_framework(3)))
            )
    assert inside[0] == inside[1]
    assert inside[0][1] not in (first, second)
    assert values(frame.drawn_by_the_framework(3)) == second
    with platform.seeded(seed + 1):
        assert values(frame.drawn_by_the_framework(3)) != inside[0][1]


def test_states_of_all_generators(platform):
    states = platform.get_rng_states()
    assert states.keys() == {"cpu", platform.device_type()}
    assert all(
        state.dtype == dtype("uint8") and platform.tensor_memory(state).ndim == 1
        for state in states.values()
    )
    sizes = [len(state) for state in states.values()]
    first = values(platform.rand((3,))), values(frame.drawn_by_the_framework(3))
    after = values(platform.get_rng_state())
    platform.set_rng_states({})
    assert values(platform.get_rng_state()) == after
    assert after != values(states["cpu"]), (
        "a draw of the framework is seen in the state"
    )
    assert [len(state) for state in platform.get_rng_states().values()] == sizes
    platform.set_rng_states(states)
    assert (
        values(platform.rand((3,))),
        values(frame.drawn_by_the_framework(3)),
    ) == first


def test_devices(platform):
    assert (
        platform.device_type() == "cpu"
        or platform.device_type() in str(platform.device()).lower()
    )
    made = platform.ones((1,), device=platform.device())
    assert made.device == platform.ones((1,)).device
    assert platform.is_meta(platform.empty((1,), device=platform.meta_device))


def test_streams_and_events_exist_and_do_what_is_right(platform):
    stream, other, event = (
        platform.new_stream(),
        platform.new_stream(),
        platform.new_event(),
    )
    before = platform.get_current_stream()
    with platform.get_stream_context()(stream):
        assert platform.get_current_stream() is stream
        x = platform.ones((2,)) + 1
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
    assert values(x) == [2, 2]
    with stream, event, platform.get_current_stream():
        pass


def test_the_profiler_takes_a_name(platform):
    with platform.profiler_record("a step of ours"):
        x = platform.ones((2,))
    with pytest.raises(KeyError), platform.profiler_record("it does not hide errors"):
        raise KeyError
    assert frame.array(x).tolist() == [1, 1]


# --- memory

ALL_DTYPES = [
    "bfloat16",
    "bool",
    "complex128",
    "complex64",
    "float16",
    "float32",
    "float64",
    "int8",
    "uint64",
    *(
        ["float8_e4m3fn"] if frame.IS_TORCH else []
    ),  # MindSpore has no operator that makes one
]


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_the_memory_of_a_tensor_is_seen_and_written_by_numpy(platform, name):
    tensor = platform.zeros((3, 4), dtype=platform.str_to_dtype(name))
    items = platform.tensor_memory(tensor)
    assert (items.shape, items.dtype.itemsize) == (
        (3, 4),
        platform.get_element_size(tensor),
    )
    columns = platform.tensor_memory(
        tensor[:, 1:3]
    )  # a view has the gaps of its memory
    ones = np.full(items.dtype.itemsize, 1, np.uint8).view(columns.dtype)
    columns[...] = ones
    assert (items[:, 1:3] == ones).all()
    assert (items[:, 0] != ones).all()
    again = platform.tensor_from_bytes(
        np.frombuffer(items.tobytes(), np.uint8).copy(), name, (3, 4)
    )
    assert platform.tensor_memory(again).tobytes() == items.tobytes()
    assert again.dtype == tensor.dtype
    number = platform.tensor_memory(platform.zeros((), dtype=tensor.dtype))
    number[...] = ones[0]
    assert number.tobytes() == ones.tobytes()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "bool"])
def test_operators_see_what_numpy_wrote(platform, name):
    """Before the first operator, after it, in a parameter, and after an operator that may still be running."""

    def parameter(x):
        return platform.Parameter(x, requires_grad=False)

    for make in (
        lambda x: x,
        lambda x: x * 1 if name != "bool" else x.reshape(2),
        parameter,
    ):
        made = make(platform.zeros((2,), dtype=dtype(name)))
        for _ in range(2):
            platform.tensor_memory(made)[...] = platform.tensor_memory(
                platform.ones((2,), dtype=dtype(name))
            )
            assert values(platform.detach(made).reshape(2, 1)) == [[1], [1]]
            assert values(platform.cat([platform.detach(made)] * 2)) == [1] * 4
            platform.copy_into(
                platform.detach(made), platform.zeros((2,), dtype=dtype(name))
            )
            assert values(platform.cat([platform.detach(made)] * 2)) == [0] * 4


def test_an_empty_tensor_from_no_bytes(platform):
    made = platform.tensor_from_bytes(np.empty(0, np.uint8), "bfloat16", (0, 3))
    assert tuple(made.shape) == (0, 3)
    assert platform.tensor_memory(made).shape == (0, 3)


def test_a_host_tensor_is_contiguous_and_of_the_same_memory_where_it_can_be(platform):
    tensor = platform.arange(12).reshape(3, 4)
    assert platform.memory_key(platform.host_tensor(tensor)) == platform.memory_key(
        tensor
    )
    turned = platform.host_tensor(tensor.T)
    assert platform.tensor_memory(turned).flags.c_contiguous
    assert values(turned) == np.arange(12).reshape(3, 4).T.tolist()


def test_a_memory_key_is_equal_for_the_same_elements_alone(platform):
    tensor = platform.arange(12).reshape(3, 4)
    assert platform.memory_key(tensor) == platform.memory_key(platform.detach(tensor))
    others = [
        platform.clone(tensor),
        tensor[1:],
        tensor.T,
        tensor.reshape(4, 3),
        tensor.reshape(12),
    ]
    assert platform.memory_key(tensor) not in map(platform.memory_key, others)
    empties = (
        platform.empty((0,)),
        platform.empty((0,)),
    )  # both alive: what is gone may leave its address to others
    assert platform.memory_key(empties[0]) != platform.memory_key(empties[1])


def test_a_tensor_takes_the_memory_format_of_another(platform):
    like, other = (
        tensor(np.arange(24.0).reshape(1, 2, 3, 4), "float32") for _ in range(2)
    )
    assert values(platform.in_memory_format_of(like, other)) == values(other)


@pytest.mark.parametrize("header", [b"", b"head", bytes(range(33))])
def test_packed_bytes_are_unpacked(header):
    platform = get_platform()
    specs = [("float32", (2, 3)), ("int64", (5,)), ("uint8", (3,)), ("float64", ())]
    specs += [("bool", (2, 2)), ("bfloat16", (3,)), ("float32", (0, 4))]
    tensors = [
        tensor(np.arange(int(np.prod(shape))).reshape(shape) % 2, name)
        for name, shape in specs
    ]
    packed = platform.pack_bytes(header, tensors)
    assert platform.tensor_to_numpy(packed)[: len(header)].tobytes() == header
    assert packed.shape[0] % 16 == 0
    unpacked = platform.unpack_bytes(packed, len(header), specs)
    for before, after, (name, shape) in zip(tensors, unpacked, specs, strict=True):
        assert after.dtype == dtype(name)
        assert tuple(after.shape) == shape
        frame.equal(after, before)


def test_packed_tensors_may_have_gaps_in_memory():
    platform = get_platform()
    whole = frame.tensor(np.arange(12.0).reshape(3, 4))
    packed = platform.pack_bytes(b"x", [whole[:, 1:3], whole[1]])
    specs = [("float64", (3, 2)), ("float64", (4,))]
    columns, row = platform.unpack_bytes(packed, 1, specs)
    frame.equal(columns, frame.array(whole)[:, 1:3])
    frame.equal(row, frame.array(whole)[1])


def test_versions_of_several_tensors():
    platform = get_platform()
    tensors = [frame.tensor(np.ones(2)) for _ in range(2)]
    before = platform.versions_of(tensors)
    assert before == tuple(map(platform.version_of, tensors))
    platform.copy_into(tensors[1], frame.tensor(np.zeros(2)))
    after = platform.versions_of(tensors)
    assert after[0] == before[0]
    assert after[1] is None or after[1] != before[1]  # None: it does not count
    if frame.IS_TORCH:
        assert after[1] is not None
