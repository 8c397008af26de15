# SPDX-License-Identifier: Apache-2.0
"""Functions of ours that MindSpore lacks on a CPU, or has wrong there: values and gradients are those of PyTorch."""

import itertools

import at_once  # noqa: F401 - for what it does
import numpy as np
import pytest
import torch
from mindspore import Tensor, mint
from torch.nn import functional as F  # noqa: N812 - everyone's name for it

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.mindspore import private

RNG = np.random.default_rng(0)
platform = get_platform()


def some(*shape):
    return RNG.uniform(0.2, 0.9, shape) * RNG.choice([-1.0, 1.0], shape)


def listed(found):
    return list(found) if isinstance(found, tuple) else [found]


def weight_of(shape):
    return np.cos(np.arange(np.prod(shape, dtype=int))).reshape(shape)


def in_pytorch(call, arrays):
    """The results, and the gradients of a weighted sum of their real and imaginary parts."""
    leaves = [torch.tensor(x, requires_grad=x.dtype.kind in "fc") for x in arrays]
    found = listed(call(*leaves))
    parts = [
        y.real + 2 * y.imag if y.is_complex() else y for y in found if y.requires_grad
    ]
    sum((y * torch.tensor(weight_of(y.shape))).sum() for y in parts).backward()
    grads = [x.grad.resolve_conj() for x in leaves if x.requires_grad]
    return [y.detach().resolve_conj().numpy() for y in found], [
        x.numpy() for x in grads
    ]


def in_mindspore(call, arrays):
    """The same by the function of the platform."""
    wanted, found = [i for i, x in enumerate(arrays) if x.dtype.kind in "fc"], []

    def total(*given):
        leaves = dict(zip(wanted, given, strict=True))
        found[:] = listed(
            call(*(leaves.get(i, Tensor(x)) for i, x in enumerate(arrays)))
        )
        parts = [
            mint.real(y) + 2 * mint.imag(y) if y.is_complex() else y for y in found
        ]
        return sum(
            (y * Tensor(weight_of(y.shape))).sum()
            for y in parts
            if y.is_floating_point()
        )

    grads = platform.gradients(total, [Tensor(arrays[i]) for i in wanted])
    return [y.asnumpy() for y in found], [x.asnumpy() for x in grads]


def compare(name, theirs, *arrays, **how):
    ours = platform.operator(name)
    true, true_gradients = in_pytorch(lambda *x: theirs(*x, **how), arrays)
    mine, gradients = in_mindspore(lambda *x: ours(*x, **how), arrays)
    for one, other in zip(mine + gradients, true + true_gradients, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, 1e-6, 1e-6)


BATCHES = [
    ((1,), ()),
    ((1, 1), ()),
    ((1,), (1,)),
    ((2,), (1,)),
    ((), (1,)),
    ((2, 1), (2,)),
    ((1,), (2, 2)),
]
SHAPES = [
    ((*left, high, among), (*right, among, wide))
    for left, right in BATCHES
    for high, among, wide in itertools.product((1, 3), (1, 4), (1, 5))
]


@pytest.mark.parametrize(
    ("left", "right"), [*SHAPES, ((1, 1, 4), (4,)), ((1,), (1, 1, 5))]
)
def test_products_of_batches_of_one(left, right):
    compare("matmul", torch.matmul, some(*left), some(*right))


@pytest.mark.parametrize("norm", [None, "forward", "ortho"])
@pytest.mark.parametrize(
    "name", ["hfft", "hfft2", "hfftn", "ihfft", "ihfft2", "ihfftn"]
)
def test_a_transform_gives_the_same_again(name, norm):
    given = (
        some(4, 3, 5) if name.startswith("i") else some(4, 3, 5) + 1j * some(4, 3, 5)
    )
    for _ in range(2):
        compare(f"fft_{name}", getattr(torch.fft, name), given, norm=norm)


@pytest.mark.parametrize("count", [2, 3])
def test_windows_at_samples(count):
    given, samples = (
        some(3, 2, *(7,) * count),
        torch.tensor(RNG.uniform(0, 1, (3, 2, count))),
    )
    theirs = getattr(F, f"fractional_max_pool{count}d")
    how = {"kernel_size": 2, "output_size": (3, 4, 5)[:count], "return_indices": True}
    true, (gradient,) = in_pytorch(
        lambda x: theirs(x, **how, _random_samples=samples), [given]
    )
    ours = platform.operator(f"fractional_max_pool{count}d")
    mine, (own,) = in_mindspore(
        lambda x: ours(x, **how, _random_samples=Tensor(samples.numpy())), [given]
    )
    for one, other in zip([*mine, own], [*true, gradient], strict=True):
        np.testing.assert_allclose(one, other)


POINTWISE = {
    "elu": (F.elu, {"alpha": 0.7}),
    "selu": (F.selu, {}),
    "leaky_relu": (F.leaky_relu, {"negative_slope": 0.2}),
    "mish": (F.mish, {}),
    "softplus": (F.softplus, {"beta": 2.0, "threshold": 1.0}),
    "logsigmoid": (F.logsigmoid, {}),
    "hardtanh": (F.hardtanh, {"min_val": -0.4, "max_val": 0.5}),
    "relu6": (F.relu6, {}),
    "threshold": (F.threshold, {"threshold": 0.3, "value": 2.0}),
    "rrelu": (F.rrelu, {}),
    "exp2": (torch.exp2, {}),
    "asinh": (torch.asinh, {}),
    "frac": (torch.frac, {}),
    "logit": (torch.logit, {"eps": 0.4}),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_element_by_element(name):
    theirs, how = POINTWISE[name]
    given = np.concatenate([some(30), some(10) * 30])
    compare(name, theirs, np.abs(given) % 1 if name == "logit" else given, **how)


LENGTHS = {"input_lengths": [4, 4, 3], "target_lengths": [2, 1, 1]}
FACTOR = np.tril(some(3, 4, 4)) + 2 * np.eye(4)
CALLS = {
    "cross": (torch.cross, [some(3, 4, 5), some(3, 1, 5)], {"dim": 0}),
    "cholesky_solve": (torch.cholesky_solve, [some(3, 4, 2), FACTOR], {}),
    "cholesky_inverse": (
        torch.cholesky_inverse,
        [FACTOR.transpose(0, 2, 1).copy()],
        {"upper": True},
    ),
    "layer_norm": (F.layer_norm, [some(3, 4, 5)], {"normalized_shape": (4, 5)}),
    "prelu": (F.prelu, [some(3, 4, 5), some(4)], {}),
    "masked_fill": (torch.masked_fill, [some(3, 4), some(4) > 0], {"value": 2}),
    "logaddexp2": (torch.logaddexp2, [some(3, 4), some(4)], {}),
    "atan2": (torch.atan2, [some(3, 4), some(3, 4)], {}),
    "take": (torch.take, [some(3, 4), RNG.integers(-12, 12, (2, 5))], {}),
    "linalg_vander": (torch.linalg.vander, [some(3, 4)], {"N": 3}),
    "dist": (torch.dist, [some(3, 4), some(4)], {"p": 3.0}),
    "ctc_loss": (
        F.ctc_loss,
        [some(4, 3, 6), RNG.integers(0, 5, (3, 3))],
        {**LENGTHS, "blank": 5},
    ),
    "cross_entropy": (
        F.cross_entropy,
        [some(4, 5), np.array([1, 2, 1, 4])],
        {"ignore_index": 1},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call(name):
    theirs, arrays, how = CALLS[name]
    compare(name, theirs, *arrays, **how)


def test_targets_in_a_row():
    more = {**LENGTHS, "blank": 5, "reduction": "none"}
    compare("ctc_loss", F.ctc_loss, some(4, 3, 6), RNG.integers(0, 5, 4), **more)


def test_a_loss_of_which_no_target_counts_has_no_gradient():
    ours, target = platform.operator("cross_entropy"), Tensor(np.zeros(4, np.int64))
    (gradient,) = platform.gradients(
        lambda x: ours(x, target, ignore_index=0), [Tensor(some(4, 5))]
    )
    assert np.isnan(ours(Tensor(some(4, 5)), target, ignore_index=0).asnumpy())
    np.testing.assert_array_equal(gradient.asnumpy(), 0)


def test_singular_values_and_vectors():
    given = some(3, 4, 2)
    left, values, right = (x.asnumpy() for x in platform.operator("svd")(Tensor(given)))
    np.testing.assert_allclose(
        (left * values[:, None]) @ right.transpose(0, 2, 1), given, 1e-9, 1e-9
    )
    (gradient,) = platform.gradients(
        lambda x: platform.operator("svd")(x)[1].sum(), [Tensor(given)]
    )
    np.testing.assert_allclose(
        gradient.asnumpy(), left @ right.transpose(0, 2, 1), 1e-9, 1e-9
    )


@pytest.mark.parametrize("is_on", [False, True])
def test_an_error_in_a_function_is_not_in_the_next_gradient(is_on):
    def failing(x):
        raise ValueError(f"of {(x * 2).shape}")

    executor, given = private.executor(), Tensor(some(3, 4))
    was_on = executor.grad_flag()
    executor.set_grad_flag(is_on)  # whether tapes record
    try:
        with pytest.raises(ValueError, match="of "):
            platform.gradients(failing, [given])
        assert executor.grad_flag() == is_on
    finally:
        executor.set_grad_flag(was_on)
    (gradient,) = platform.gradients(lambda x: x[1].sum(), [given])
    np.testing.assert_array_equal(
        gradient.asnumpy(), np.eye(3)[1][:, None] * np.ones(4)
    )


def test_numbers_drawn_again():
    logits = Tensor(some(50, 4))
    for name, more in {
        "gumbel_softmax": {"hard": True},
        "bernoulli": {"p": 0.5},
        "randn_like": {},
    }.items():
        drawn = []
        for seed in (1, 2, 1):
            platform.manual_seed(seed)
            drawn.append(platform.operator(name)(logits, **more).asnumpy())
        np.testing.assert_array_equal(drawn[0], drawn[2])
        assert not np.array_equal(drawn[0], drawn[1])


BETWEEN = ("linear", "lower", "higher", "midpoint", "nearest")
UNFIT = {
    "input_lengths": [0, 4, 1, 0, 3],
    "target_lengths": [0, 2, 2, 1, 3],
    "blank": 5,
    "zero_infinity": True,
}
GUESSED = np.array([[1, 2, 3], [2, 2, 0], [1, 1, 1], [0, 4, 2], [3, 3, 1]])
MORE = [  # the same name more than once
    *(
        ("quantile", torch.quantile, [some(4, 5)], {"q": 0.3, "interpolation": kind})
        for kind in BETWEEN
    ),
    (
        "quantile",
        torch.quantile,
        [some(4, 5, 3)],
        {"q": 0.7, "dim": 1, "keepdim": True},
    ),
    ("quantile", torch.quantile, [some(4, 5, 3)], {"q": 0.7, "dim": -1}),
    ("kthvalue", torch.kthvalue, [some(4, 5)], {"k": 2, "dim": 0}),
    ("kthvalue", torch.kthvalue, [some(4, 5)], {"k": 5, "keepdim": True}),
    ("round", torch.round, [some(9) * 300], {"decimals": 2}),
    ("round", torch.round, [some(9) * 3000], {"decimals": -2}),
    ("norm", torch.norm, [some(3, 4, 5)], {"p": "nuc", "dim": (1, 2)}),
    ("norm", torch.norm, [some(4, 5)], {"p": "nuc"}),
    (
        "matrix_norm",
        torch.linalg.matrix_norm,
        [some(4, 3, 5)],
        {"ord": 2, "dim": (0, 2), "keepdim": True},
    ),
    ("matrix_norm", torch.linalg.matrix_norm, [some(4, 3, 5)], {"ord": -2}),
    ("linalg_cond", torch.linalg.cond, [FACTOR], {}),
    ("linalg_cond", torch.linalg.cond, [FACTOR], {"p": -2}),
    ("logdet", torch.logdet, [FACTOR @ FACTOR.transpose(0, 2, 1)], {}),
    ("logdet", torch.logdet, [np.abs(some(3, 1, 1))], {}),
    *(
        ("linalg_matrix_power", torch.linalg.matrix_power, [FACTOR], {"n": n})
        for n in (3, 1, 0, -2)
    ),
    ("linalg_pinv", torch.linalg.pinv, [some(2, 4, 3)], {}),
    ("polar", torch.polar, [np.abs(some(3, 4)), some(4)], {}),
    (
        "unfold",
        torch.Tensor.unfold,
        [some(3, 9, 2)],
        {"dimension": 1, "size": 3, "step": 2},
    ),
    (
        "unfold",
        torch.Tensor.unfold,
        [some(3, 9)],
        {"dimension": -1, "size": 4, "step": 4},
    ),
    ("channel_shuffle", F.channel_shuffle, [some(2, 6, 3)], {"groups": 3}),
    ("fft_fftshift", torch.fft.fftshift, [some(3, 4, 5)], {}),
    ("fft_ifftshift", torch.fft.ifftshift, [some(3, 4, 5)], {"dim": (0, 2)}),
    *(
        ("ctc_loss", F.ctc_loss, [some(4, 5, 6), GUESSED], {**UNFIT, "reduction": r})
        for r in ("none", "sum", "mean")
    ),
]


@pytest.mark.parametrize(
    ("name", "theirs", "arrays", "how"),
    MORE,
    ids=[f"{row[0]} {i}" for i, row in enumerate(MORE)],
)
def test_other_arguments(name, theirs, arrays, how):
    compare(name, theirs, *arrays, **how)


def test_quantiles_and_what_is_no_number():
    given, shares = some(4, 5), np.array([[0.1, 0.5], [0.9, 1.0]])
    given[1, 2] = np.nan
    found = platform.operator("quantile")(
        Tensor(given), Tensor(shares.reshape(-1)), 1
    ).asnumpy()
    np.testing.assert_allclose(found, np.quantile(given, shares.reshape(-1), axis=1))
    assert np.isnan(found[:, 1]).all()


def test_values_of_which_pytorch_has_no_gradient():
    given, call = some(4), platform.operator
    np.testing.assert_allclose(
        call("linalg_cond")(Tensor(FACTOR), 1).asnumpy(), np.linalg.cond(FACTOR, 1)
    )
    np.testing.assert_allclose(
        call("vander")(Tensor(given), 3).asnumpy(), np.vander(given, 3)
    )
    np.testing.assert_allclose(
        call("vander")(Tensor(given), increasing=True).asnumpy(),
        np.vander(given, increasing=True),
    )


@pytest.mark.parametrize(
    ("name", "how", "match"),
    [
        ("matrix_norm", {"ord": 3}, "as ord, got 3"),
        (
            "quantile",
            {"q": 0.5, "interpolation": "cubic"},
            "as interpolation, got 'cubic'",
        ),
        (
            "scatter",
            {
                "dim": 0,
                "index": Tensor(np.array([[0]])),
                "value": 1.0,
                "reduce": "multiply",
            },
            "not 'multiply'",
        ),
    ],
)
def test_what_is_not_known_is_refused(name, how, match):
    with pytest.raises((ValueError, NotImplementedError), match=match):
        platform.operator(name)(Tensor(some(3, 4)), **how)


def test_writes_by_index():
    given, places, call = some(3, 4), np.array([[2, 0, 1, 1]]), platform.operator
    written, added = given.copy(), given.copy()
    np.put_along_axis(written, places, 2.5, 0)
    np.add.at(added, (places, np.arange(4)), 2.5)
    for value in (2.5, Tensor(np.full((1, 4), 2.5))):
        np.testing.assert_array_equal(
            call("scatter")(Tensor(given), 0, Tensor(places), value).asnumpy(), written
        )
        found = call("scatter")(Tensor(given), 0, Tensor(places), value, reduce="add")
        np.testing.assert_array_equal(found.asnumpy(), added)
    mask = np.array([True, False, True])
    for accumulate, base in ((False, 0), (True, given)):
        found = call("index_put")(
            Tensor(given), (Tensor(mask),), Tensor(np.array(2.5)), accumulate
        )
        np.testing.assert_array_equal(
            found.asnumpy(), np.where(mask[:, None], base + 2.5, given)
        )
    one, other, zero = Tensor(np.array(3.0)), Tensor(np.array(4.0)), Tensor(np.array(0))
    assert call("index_copy")(one, 0, zero, other).asnumpy() == 4
    assert call("index_add")(one, 0, zero, other, alpha=2).asnumpy() == 11


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_stable_sort_leaves_equals_in_their_order(dim, descending):
    tied = RNG.integers(0, 3, (50, 40)).astype(float)
    tied[RNG.random(tied.shape) < 0.1] = np.nan
    tied[RNG.random(tied.shape) < 0.1] = np.inf
    values, order = platform.operator("sort")(
        Tensor(tied), dim, descending, stable=True
    )
    expected, places = torch.tensor(tied).sort(
        dim=dim, descending=descending, stable=True
    )
    np.testing.assert_array_equal(order.asnumpy(), places.numpy())
    np.testing.assert_array_equal(values.asnumpy(), expected.numpy())


def test_a_sort_tells_apart_what_is_close():
    given = 1 + RNG.standard_normal((3, 200)) * 1e-9
    values, order = platform.operator("sort")(Tensor(given))
    np.testing.assert_array_equal(values.asnumpy(), np.sort(given))
    np.testing.assert_array_equal(order.asnumpy(), np.argsort(given))


@pytest.mark.parametrize("n", [1, 2])
def test_derivatives_of_digamma(n):
    given = np.abs(some(9)) + 0.5
    ours = platform.operator("polygamma")
    (true,), (gradient,) = in_pytorch(lambda x: torch.polygamma(n, x), [given])
    for call in (
        lambda x: ours(n, x),
        lambda x: ours(x, n),
    ):  # as a method it has the tensor first
        (mine,), (own,) = in_mindspore(call, [given])
        np.testing.assert_allclose(mine, true, 1e-6)
        np.testing.assert_allclose(own, gradient, 1e-6)


PARTS = {"return_complex": False}  # the real and the imaginary ones


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"hop_length": 3, "win_length": 4, "center": False, "onesided": False},
        {"hop_length": 2, "win_length": 5, "pad_mode": "constant", "normalized": True},
    ],
)
def test_transforms_of_short_times(how):
    how = {"return_complex": True, **how}
    arrays = [some(2, 19), some(how.get("win_length", 6))]
    mine, own = in_mindspore(
        lambda x, w: platform.operator("stft")(x, 6, window=w, **how), arrays
    )
    true, gradients = in_pytorch(lambda x, w: torch.stft(x, 6, window=w, **how), arrays)
    for one, other in zip(mine + own, true + gradients, strict=True):
        np.testing.assert_allclose(one, other, 1e-6, 1e-6)
    pair = platform.operator("stft")(
        Tensor(arrays[0]), 6, window=Tensor(arrays[1]), **how | PARTS
    ).asnumpy()
    np.testing.assert_allclose(pair[..., 0] + 1j * pair[..., 1], true[0], 1e-6, 1e-6)


def test_the_least_of_booleans():
    given = some(3, 4) > 0
    np.testing.assert_array_equal(
        platform.operator("amin")(Tensor(given), 1).asnumpy(), given.min(1)
    )
    np.testing.assert_array_equal(
        platform.operator("amax")(Tensor(given), (0, 1)).asnumpy(), given.max()
    )
