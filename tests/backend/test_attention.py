# SPDX-License-Identifier: Apache-2.0
"""Kernels of attention that return what merging needs, calls that are caught, and tensors that change their size."""

import frame
import numpy as np
import pytest
from attention_formula import formula, formula_gradients

from hyper_parallel.platform import get_platform

platform = get_platform()
SCALE = 0.4


def drawn():
    shapes = [(4, 5), (2, 7), (2, 7), (4, 5)]
    return [frame.draw(2, h, n, 6, seed=i) for i, (h, n) in enumerate(shapes)]


@pytest.mark.parametrize("kind", ["full", "causal", "mask"])
def test_a_kernel_gives_output_sums_and_gradients(kind):
    arrays = drawn()
    query, key, value, grad = map(frame.tensor, arrays)
    added = np.zeros((5, 7))
    if kind == "causal":
        added[np.arange(7)[None] > np.arange(5)[:, None]] = -np.inf
    if kind == "mask":
        added = frame.draw(5, 7, seed=9)
    mask = frame.tensor(added[None, None]) if kind == "mask" else None
    how = mask, kind == "causal", SCALE
    found = platform.fused_attention(query, key, value, *how)
    if found is None:  # the core computes it by operators
        assert not frame.IS_TORCH
        saved = query, key, value, query, query
        assert platform.fused_attention_gradients(grad, *saved, *how) is None
        return
    expected, sums, _ = formula(*arrays[:3], SCALE, added)
    output, logsumexp = found
    frame.equal(output, expected)
    frame.equal(logsumexp, sums)
    saved = query, key, value, output, logsumexp
    gradients = platform.fused_attention_gradients(grad, *saved, *how)
    truth = formula_gradients(arrays[3], *arrays[:3], SCALE, added)
    for one, other in zip(gradients, truth, strict=True):
        frame.equal(one, other)


def test_there_is_no_kernel_for_several_head_dims_or_no_elements():
    query, key, value, _ = map(frame.tensor, drawn())
    how = None, False, SCALE
    assert platform.fused_attention(query, key, value[..., :3], *how) is None
    assert platform.fused_attention(query[:, :, :0], key, value, *how) is None


def test_attention_on_plain_tensors_is_caught():
    caught = []

    def instead(*args, **kwargs):
        caught.append((len(args), sorted(kwargs)))
        return args[0]

    if not frame.IS_TORCH:
        with pytest.raises(NotImplementedError, match="shard_sequence"):
            platform.intercept_attention(instead)
        return
    from torch.nn import functional

    attention = functional.scaled_dot_product_attention  # as modules import it
    query = frame.tensor(drawn()[0])
    with platform.intercept_attention(instead):
        assert attention(query, query, query, is_causal=True) is query
        assert functional.relu(query) is not query
    assert attention(query, query, query) is not query
    assert caught == [(3, ["is_causal"])]


def test_a_tensor_changes_its_size_in_place():
    tensor = frame.tensor(np.arange(6.0))
    if not frame.IS_TORCH:
        assert not platform.owns_memory(tensor)
        with pytest.raises(NotImplementedError, match="shape"):
            platform.replace_contents(tensor, tensor)
        return
    assert not platform.owns_memory(tensor[1:])
    assert not platform.owns_memory(tensor.reshape(2, 3).t())
    tensor = platform.zeros((6,), dtype=tensor.dtype)
    assert platform.owns_memory(tensor)
    platform.replace_contents(tensor, frame.tensor([5.0, 7.0]))
    frame.equal(tensor, [5, 7])
    platform.replace_contents(tensor, frame.tensor(np.ones((2, 3))))
    frame.equal(tensor, np.ones((2, 3)))
