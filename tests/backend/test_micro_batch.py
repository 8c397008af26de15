# SPDX-License-Identifier: Apache-2.0
"""Splitting arguments into micro batches."""

from types import SimpleNamespace

import frame
import numpy as np
import pytest

from hyper_parallel import get_platform


def test_the_pieces_put_together_are_the_batch():
    platform = get_platform()
    x, y = np.arange(12.0).reshape(6, 2), np.arange(12).reshape(2, 6)
    mask = frame.tensor(np.ones(3))
    args, kwargs = platform.micro_batch(
        3, (None, 1, "whole"), {"z": SimpleNamespace(batch_dim=-1)}
    )(
        (frame.tensor(x), frame.tensor(y), mask),
        {"z": frame.tensor(y), "flag": True, "scale": frame.tensor(2.0)},
    )
    assert len(args) == len(kwargs) == 3
    frame.equal(platform.cat([a[0] for a in args]), x)
    frame.equal(platform.cat([a[1] for a in args], 1), y)
    assert all(a[2] is mask for a in args)
    frame.equal(platform.cat([k["z"] for k in kwargs], 1), y)
    assert [k["flag"] for k in kwargs] == [True] * 3
    assert [k["scale"].item() for k in kwargs] == [2.0] * 3


def test_defaults_split_dim_0_and_gradients_flow():
    platform = get_platform()
    x = frame.leaf(np.arange(4.0))
    args, kwargs = platform.micro_batch(2)([x])
    assert kwargs == [{}, {}]
    frame.backward([a[0] for a in args], [np.full(2, i + 1.0) for i in range(2)])
    frame.equal(frame.grad(x), [1, 1, 2, 2])


@pytest.mark.parametrize("count", [0, -1, 1.5, True, None])
def test_bad_counts(count):
    with pytest.raises(ValueError, match="micro_batch_num must be a positive int"):
        get_platform().micro_batch(count)


def test_bad_batches():
    platform = get_platform()
    x = frame.tensor(np.ones((5, 2)))
    with pytest.raises(
        ValueError,
        match=r"args\[0\] has 5 rows in its batch dim 0, which 2 does not divide",
    ):
        platform.micro_batch(2)([x])
    with pytest.raises(ValueError, match="labels has 5 rows"):
        platform.micro_batch(2)([], {"labels": x})
    with pytest.raises(
        ValueError, match="args_batch_dim has 2 entries for 1 positional"
    ):
        platform.micro_batch(5, (0, 1))([x])
    with pytest.raises(ValueError, match="its batch dim must be an int from -2 to 1"):
        platform.micro_batch(5, (2,))([x])
    with pytest.raises(
        ValueError, match=r"kwargs_batch_dim names \['typo'\], but the call has \['x'\]"
    ):
        platform.micro_batch(5, None, {"typo": 0})([], {"x": x})
