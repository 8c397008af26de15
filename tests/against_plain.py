# SPDX-License-Identifier: Apache-2.0
"""Compares what a distributed module gives with what the plain one gives, and the gradients of both."""

import torch

from hyper_parallel import DTensor


def check_results(found, expected, weights):
    """Every result against its twin; returns a weighted sum of each side, for backward."""
    loss = truth = 0
    for one, true, weight in zip(found, expected, weights, strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.full_tensor(), true, rtol=1e-9, atol=1e-9)
        loss, truth = (
            loss + (one.full_tensor() * weight).sum(),
            truth + (true * weight).sum(),
        )
    return loss, truth


def check_gradients(losses, pairs):
    """Backward of both sides, and every gradient against its twin."""
    for loss in losses:
        loss.backward()
    for one, true in pairs:
        torch.testing.assert_close(
            one.grad.full_tensor(), true.grad, rtol=1e-9, atol=1e-9
        )
