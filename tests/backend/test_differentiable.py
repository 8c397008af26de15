# SPDX-License-Identifier: Apache-2.0
"""Collectives in the graph against the same computation in one process, forward and gradient."""

import frame
import numpy as np
import pytest

from hyper_parallel import CommunicationError, get_platform
from hyper_parallel.testing import on_ranks


def same_shapes(count, *shape):
    return [frame.draw(*shape, seed=r) for r in range(count)]


@pytest.mark.parametrize("op", sorted(frame.REDUCTIONS))
@on_ranks(4)
def test_all_reduce(op):
    platform = get_platform()
    frame.check_on_this_rank(
        lambda x: platform.differentiable_all_reduce(x, op, None),
        lambda xs: [frame.reduce(op, xs)] * 4,
        same_shapes(4, 3, 2),
        platform.get_rank(),
    )


@pytest.mark.parametrize("op", ["max", "min"])
@on_ranks(2)
def test_ties_share_the_gradient(op):
    platform = get_platform()
    x = frame.leaf([1.0, 2.0 + platform.get_rank()])
    frame.backward([platform.differentiable_all_reduce(x, op, None)], [np.ones(2)])
    won = float((op == "max") == (platform.get_rank() == 1))
    frame.equal(frame.grad(x), [1.0, 2.0 * won])


@pytest.mark.parametrize("zeros", [0, 1, 2])
@on_ranks(4)
def test_gradient_of_a_product_with_zeros(zeros):
    platform = get_platform()
    inputs = same_shapes(4, 3)
    for rank in range(zeros):
        inputs[rank][0] = 0.0
    frame.check_on_this_rank(
        lambda x: platform.differentiable_all_reduce(x, "prod", None),
        lambda xs: [frame.reduce("prod", xs)] * 4,
        inputs,
        platform.get_rank(),
    )


@pytest.mark.parametrize("op", sorted(frame.REDUCTIONS))
@on_ranks(4)
def test_gradient_of_a_reduction_whose_result_everyone_has(op):
    platform = get_platform()
    rank = platform.get_rank()
    parts = [frame.leaf(x) for x in same_shapes(4, 3)]
    result = frame.reduce(op, parts)
    weight = frame.draw(3, seed=50)
    frame.backward([result], [weight])
    mine, whole = platform.detach(parts[rank]), platform.detach(result)
    own = platform.reduction_gradient(op, frame.tensor(weight), mine, whole, None)
    frame.equal(own, frame.grad(parts[rank]))


@pytest.mark.parametrize("dim", [0, 1, -1])
@on_ranks(4)
def test_all_gather_concat(dim):
    platform = get_platform()
    frame.check_on_this_rank(
        lambda x: platform.differentiable_all_gather_concat(x, None, 4, dim),
        lambda xs: [platform.cat(xs, dim)] * 4,
        same_shapes(4, 2, 3, 2),
        platform.get_rank(),
    )


@pytest.mark.parametrize("sizes", [[3, 3, 1, 0], [0, 2, 0, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize("dim", [0, 1])
@on_ranks(4)
def test_all_gather_of_uneven_pieces(dim, sizes):
    platform = get_platform()
    inputs = [
        frame.draw(*((n, 2) if dim == 0 else (2, n)), seed=r)
        for r, n in enumerate(sizes)
    ]
    frame.check_on_this_rank(
        lambda x: platform.differentiable_all_gather_concat(x, None, 4, dim, sizes),
        lambda xs: [platform.cat(xs, dim)] * 4,
        inputs,
        platform.get_rank(),
    )


@pytest.mark.parametrize("dim", [0, 1])
@on_ranks(4)
def test_reduce_scatter_of_nothing(dim):
    shape = (0, 2) if dim == 0 else (2, 0)
    x = frame.leaf(np.ones(shape))
    found = get_platform().differentiable_reduce_scatter(x, 4, dim, "sum", None)
    frame.equal(found, np.ones(shape))
    frame.backward([found], [np.ones(shape)])
    frame.equal(frame.grad(x), np.ones(shape))


@pytest.mark.parametrize("op", sorted(frame.REDUCTIONS))
@pytest.mark.parametrize("rows", [8, 7, 3])
@pytest.mark.parametrize("dim", [0, 1])
@on_ranks(4)
def test_reduce_scatter_even_uneven_and_with_empty_pieces(dim, rows, op):
    platform = get_platform()

    def simulate(xs):
        whole = frame.reduce(op, xs)
        return [platform.chunk(whole, dim, 4, r) for r in range(4)]

    frame.check_on_this_rank(
        lambda x: platform.differentiable_reduce_scatter(x, 4, dim, op, None),
        simulate,
        same_shapes(4, *((rows, 2) if dim == 0 else (2, rows))),
        platform.get_rank(),
    )


@on_ranks(4)
def test_all_to_all():
    platform = get_platform()
    frame.check_on_this_rank(
        lambda x: platform.differentiable_all_to_all(x, (4, 6), None),
        lambda xs: [
            platform.cat([platform.chunk(x, 0, 4, r).reshape(1, 6) for x in xs])
            for r in range(4)
        ],
        same_shapes(4, 8, 3),
        platform.get_rank(),
    )


# SPLITS[i][j] rows go from rank i to rank j; rank 2 sends nothing and rank 3 gets nothing.
SPLITS = [[1, 2, 0, 0], [3, 0, 1, 0], [0, 0, 0, 0], [2, 1, 5, 0]]


def rows(x, splits, number):
    start = sum(splits[:number])
    return get_platform().construct_strided_slice(
        x, [start, 0], [start + splits[number], 2], [1, 1]
    )


@pytest.mark.parametrize(
    "name",
    ["differentiable_all_to_all_single", "differentiable_all_to_all_single_async"],
)
@on_ranks(4)
def test_uneven_all_to_all(name):
    platform = get_platform()
    rank = platform.get_rank()
    call = {
        "differentiable_all_to_all_single": platform.differentiable_all_to_all_single,
        "differentiable_all_to_all_single_async": platform.differentiable_all_to_all_single_async,
    }[name]
    frame.check_on_this_rank(
        lambda x: call(x, SPLITS[rank], [SPLITS[i][rank] for i in range(4)], None),
        lambda xs: [
            platform.cat([rows(x, SPLITS[i], r) for i, x in enumerate(xs)])
            for r in range(4)
        ],
        [frame.draw(sum(SPLITS[r]), 2, seed=r) for r in range(4)],
        rank,
    )


@on_ranks(4)
def test_uneven_all_to_all_in_two_halves():
    """What is computed between the halves has its backward between those of the backward."""
    platform = get_platform()
    rank = platform.get_rank()
    others = [SPLITS[i][rank] for i in range(4)]

    def exchange(x):
        finish = platform.start_differentiable_all_to_all_single(
            x, SPLITS[rank], others, None
        )
        doubled = x * 2
        return platform.cat([finish(), doubled])

    frame.check_on_this_rank(
        exchange,
        lambda xs: [
            platform.cat(
                [*(rows(x, SPLITS[i], r) for i, x in enumerate(xs)), xs[r] * 2]
            )
            for r in range(4)
        ],
        [frame.draw(sum(SPLITS[r]), 2, seed=r) for r in range(4)],
        rank,
    )


@on_ranks(2)
def test_all_to_all_without_splits_is_even():
    platform = get_platform()
    frame.check_on_this_rank(
        lambda x: platform.differentiable_all_to_all_single(x, None, None, None),
        lambda xs: [
            platform.cat([platform.chunk(x, 0, 2, r) for x in xs]) for r in range(2)
        ],
        same_shapes(2, 4, 3),
        platform.get_rank(),
    )


@on_ranks(4)
def test_in_a_subgroup():
    platform = get_platform()
    rank = platform.get_rank()
    pair = [rank % 2, rank % 2 + 2]
    group = platform.create_group(pair)
    inputs = same_shapes(4, 2, 2)
    frame.check_on_this_rank(
        lambda x: platform.differentiable_all_reduce(x, "sum", group),
        lambda xs: [xs[r % 2] + xs[r % 2 + 2] for r in range(4)],
        inputs,
        rank,
    )
    frame.check_on_this_rank(
        lambda x: platform.differentiable_reduce_scatter(x, 2, 0, "sum", group),
        lambda xs: [
            platform.chunk(xs[r % 2] + xs[r % 2 + 2], 0, 2, r // 2) for r in range(4)
        ],
        inputs,
        rank,
    )


def exchange(xs, concat_dim, split_dim):
    platform, count = get_platform(), len(xs)
    return [
        platform.cat([platform.chunk(x, split_dim, count, r) for x in xs], concat_dim)
        for r in range(count)
    ]


@pytest.mark.parametrize("boxed", [False, True])
@pytest.mark.parametrize(("concat_dim", "split_dim"), [(0, 1), (1, 2), (2, 0), (-1, 0)])
@on_ranks(4)
def test_async_exchange_launched_early_and_waited_for_late(
    concat_dim, split_dim, boxed
):
    platform = get_platform()
    box = [] if boxed else None

    def collective(x):
        x, work, buffer = platform.differentiable_async_a2a_launch(
            x * 2, None, 4, concat_dim, split_dim, box
        )
        return platform.differentiable_async_a2a_wait(
            x, work, buffer, None, 4, concat_dim, split_dim, box
        )

    frame.check_on_this_rank(
        collective,
        lambda xs: exchange([2 * x for x in xs], concat_dim, split_dim),
        same_shapes(4, 4, 4, 8),
        platform.get_rank(),
    )
    assert not box


@on_ranks(4)
def test_async_exchange_launched_by_the_caller_leaves_its_gradient_in_the_box():
    platform = get_platform()
    rank = platform.get_rank()
    inputs = same_shapes(4, 4, 8)
    x = frame.leaf(inputs[rank])
    pieces = frame.tensor(np.stack(np.split(inputs[rank], 4, 1)))
    buffer, work = platform.all_to_all_single(pieces, pieces.shape, None, async_op=True)
    box = []
    y = platform.differentiable_async_a2a_wait(x, work, buffer, None, 4, 0, 1, box)
    everyone = [frame.leaf(values) for values in inputs]
    expected = exchange(everyone, 0, 1)
    frame.equal(y, expected[rank])
    weights = [frame.draw(*e.shape, seed=r) for r, e in enumerate(expected)]
    frame.backward([y], [weights[rank]])
    frame.backward(expected, weights)
    frame.equal(frame.grad(x), np.zeros((4, 8)))  # it comes through the box
    [(work, gradient)] = box
    work.wait()
    frame.equal(
        np.concatenate(list(frame.array(gradient)), 1), frame.grad(everyone[rank])
    )


@on_ranks(2)
def test_box_with_another_use_of_the_input():
    platform = get_platform()
    box = []

    def collective(x):
        x, work, buffer = platform.differentiable_async_a2a_launch(
            x, None, 2, 0, 1, box
        )
        other = x.exp().sum()
        return (
            platform.differentiable_async_a2a_wait(x, work, buffer, None, 2, 0, 1, box)
            + other
        )

    frame.check_on_this_rank(
        collective,
        lambda xs: [
            y + x.exp().sum() for y, x in zip(exchange(xs, 0, 1), xs, strict=True)
        ],
        same_shapes(2, 2, 4),
        platform.get_rank(),
    )


@on_ranks(4)
def test_p2p_exchange():
    platform = get_platform()
    rank = platform.get_rank()
    frame.check_on_this_rank(
        lambda x: platform.p2p_exchange(x, rank ^ 1),
        lambda xs: [xs[r ^ 1] for r in range(4)],
        same_shapes(4, 3),
        rank,
    )
    x = frame.leaf([1.0])
    assert platform.p2p_exchange(x, rank) is not x


@on_ranks(2)
def test_gradients_of_gradients():
    platform = get_platform()
    x = frame.leaf([1.0 + platform.get_rank(), 3.0])
    y = platform.differentiable_all_reduce(x * x, "sum", None)
    first = frame.gradient_in_graph((y * y).sum(), x)
    # y is the same on both ranks, and so are their losses: dL/dx = 2 ranks * 2y * 2x.
    mine, total = frame.array(platform.detach(x)), frame.array(platform.detach(y))
    frame.equal(platform.detach(first), 8 * total * mine)
    frame.run_backward([first.sum()])
    # d/dx of sum over both ranks of 8 y x: 8 y + 8 * 2x * (x_0 + x_1).
    frame.equal(frame.grad(x), 8 * total + 16 * mine * np.array([3.0, 6.0]))


@on_ranks(2)
def test_gradients_of_gradients_of_an_exchange():
    platform = get_platform()
    x = frame.leaf(frame.draw(2, 4, seed=platform.get_rank()))
    squares, work, buffer = platform.differentiable_async_a2a_launch(
        x * x, None, 2, 0, 1
    )
    y = platform.differentiable_async_a2a_wait(squares, work, buffer, None, 2, 0, 1)
    first = frame.gradient_in_graph((y * y).sum(), x)
    # An exchange only moves elements: the loss is the sum of x ** 4.
    values = frame.array(platform.detach(x))
    frame.equal(platform.detach(first), 4 * values**3)
    frame.run_backward([first.sum()])
    frame.equal(frame.grad(x), 12 * values**2)


@on_ranks(2)
def test_traffic_of_backward_is_told_apart():
    platform = get_platform()
    traffic = []
    x = frame.leaf([1.0, 2.0])
    with platform.listen_to_collectives(traffic.append):
        y = platform.differentiable_all_reduce(x, "sum", None)
        frame.run_backward([y.sum()])
    assert [entry.backward for entry in traffic] == [False, True]


@on_ranks(4)
def test_transform_steps_along_any_dim_with_uneven_pieces():
    platform = get_platform()
    rank = platform.get_rank()
    transform = platform.get_tensor_transform()
    whole = frame.tensor(frame.draw(6, 5, seed=9))
    rows, columns = (
        [platform.chunk(whole, dim, 4, r) for r in range(4)] for dim in (0, 1)
    )
    frame.check_on_this_rank(
        lambda x: transform.all_to_all(x, 0, 1, None, [r.shape[0] for r in rows]),
        lambda xs: [platform.chunk(platform.cat(xs), 1, 4, r) for r in range(4)],
        [frame.array(r) for r in rows],
        rank,
    )
    frame.equal(
        transform.all_to_all(rows[rank], 0, 1, None, [r.shape[0] for r in rows]),
        columns[rank],
    )
    frame.equal(
        transform.all_gather(columns[rank], 1, None, [c.shape[1] for c in columns]),
        whole,
    )
    frame.equal(transform.slice(whole, 1, 4, rank), columns[rank])
    frame.equal(
        transform.reduce_scatter(whole, 1, "sum", None), 4 * frame.array(columns[rank])
    )
    frame.equal(transform.all_reduce(whole, "max", None), whole)
    with pytest.raises(ValueError, match="both 1"):
        transform.all_to_all(whole, 1, -1, None)
    with pytest.raises(ValueError, match="2 gather_sizes for a group of 4"):
        transform.all_to_all(whole, 0, 1, None, [1, 2])


@on_ranks(2)
def test_bad_input_names_what_is_wrong():
    platform = get_platform()
    x = frame.tensor(np.ones((4, 2)))
    with pytest.raises(
        ValueError, match="op must be one of sum, avg, max, min, prod, got 'mean'"
    ):
        platform.differentiable_all_reduce(x, "mean", None)
    with pytest.raises(
        ValueError, match="concat_size must be the group's size, 2, got 3"
    ):
        platform.differentiable_all_gather_concat(x, None, 3, 0)
    with pytest.raises(
        ValueError,
        match=r"concat_dim must be a dim of a tensor of shape \(4, 2\), got 2",
    ):
        platform.differentiable_all_gather_concat(x, None, 2, 2)
    with pytest.raises(ValueError, match="sizes must give one size a rank"):
        platform.differentiable_all_gather_concat(x, None, 2, 0, [1, 1])
    with pytest.raises(ValueError, match="dev_num must be the group's size"):
        platform.differentiable_reduce_scatter(x, 4, 0, "sum", None)
    with pytest.raises(
        ValueError, match=r"output_shape \(2, 3\) does not hold the input's 8 elements"
    ):
        platform.differentiable_all_to_all(x, (2, 3), None)
    with pytest.raises(
        ValueError, match=r"input_splits \[1, 2\] add up to 3, but dim 0 has 4"
    ):
        platform.differentiable_all_to_all_single(x, [1, 2], [2, 2], None)
    with pytest.raises(
        ValueError,
        match=r"output_splits must be 2 sizes, one a rank, none negative, got \[5, -1\]",
    ):
        platform.differentiable_all_to_all_single(x, [2, 2], [5, -1], None)
    with pytest.raises(ValueError, match="must be divisible by 2 ranks"):
        platform.differentiable_all_to_all_single(x[:3], None, None, None)
    with pytest.raises(ValueError, match="at least one dim"):
        platform.differentiable_all_to_all_single(frame.tensor(1.0), None, None, None)
    with pytest.raises(ValueError, match="split_dim 1 of"):
        platform.differentiable_async_a2a_launch(x[:, :1], None, 2, 0, 1)
    with pytest.raises(ValueError, match="both 1; they must differ"):
        platform.differentiable_async_a2a_launch(x, None, 2, 1, -1)
    with pytest.raises(ValueError, match="out_perm must hold one piece a rank"):
        platform.differentiable_async_a2a_wait(x, None, x, None, 2, 0, 1)
    with pytest.raises(
        ValueError, match=r"peer_rank must be one of the group's ranks \[0, 1\], got 7"
    ):
        platform.p2p_exchange(x, 7)
    with pytest.raises(
        TypeError, match="expected a process group, an object with a group, or None"
    ):
        platform.differentiable_all_reduce(x, "sum", "tp")
    with pytest.raises(TypeError, match="expected a tensor, got list"):
        platform.differentiable_all_reduce([1.0], "sum", None)


@on_ranks(2, timeout=20)
def test_backward_whose_peer_never_comes_is_an_error():
    platform = get_platform()
    group = platform.split_group(None, [[0, 1]], timeout=1)
    x = frame.leaf([1.0])
    y = platform.differentiable_all_reduce(x, "sum", group)
    if platform.get_rank() == 0:
        with pytest.raises(
            CommunicationError, match=r"all_reduce on .* ranks that never came: \[1\]"
        ) as raised:
            frame.run_backward([y.sum()])
        assert raised.value.missing == (1,)
    platform.barrier()


def test_what_is_recorded_can_be_said():
    platform = get_platform()
    leaf = frame.leaf([1.0, 2.0])
    with platform.recording(False):
        assert not platform.is_recorded(leaf * 2)
    with platform.recording(True):
        assert platform.is_recorded(leaf * 2)


def test_second_gradients_of_a_function():
    """Those of x ** 3 in a direction are 6 * x times it; on MindSpore, whose own are wrong, there are none."""
    platform = get_platform()
    x, direction = frame.tensor([1.0, 2.0]), frame.tensor([3.0, 5.0])

    def cubes(x):
        return (x * x * x).sum()

    if frame.IS_TORCH:
        [found] = platform.second_gradients(cubes, [x], [direction])
        frame.equal(found, [18.0, 60.0])
    else:
        with pytest.raises(NotImplementedError, match="HP142"):
            platform.second_gradients(cubes, [x], [direction])
