# SPDX-License-Identifier: Apache-2.0
"""Attention and its gradients by their formulas on whole arrays, and what is visible pair by pair."""

import numpy as np


def visible(sight, queries, keys=None, ids=None):
    """(rows of the batch, 1, queries, keys), pair by pair; ``ids``: each position's document, by rows of the batch."""
    keys = queries if keys is None else keys
    distance = np.arange(keys)[None] - np.arange(queries)[:, None]
    mask = np.ones((2, queries, keys), dtype=bool)
    if sight.before is not None:
        mask &= distance >= -sight.before
    if sight.after is not None:
        mask &= distance <= sight.after
    if sight.documents is not None:
        ids = np.array(ids)
        mask &= (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, None]
    return mask[:, None]


def formula(query, key, value, scale, added):
    """Output and logarithm of the sum by the formula; zeros where nothing is visible."""
    groups = query.shape[1] // key.shape[1]
    key, value = (np.repeat(x, groups, 1) for x in (key, value))
    scores = query @ key.swapaxes(-1, -2) * scale + added
    with np.errstate(divide="ignore"):
        total = np.log(np.exp(scores).sum(-1))
    weights = np.exp(scores - np.where(np.isinf(total), np.inf, total)[..., None])
    return weights @ value, total, weights


def formula_gradients(grad, query, key, value, scale, added):
    output, _, weights = formula(query, key, value, scale, added)
    groups = query.shape[1] // key.shape[1]
    keys, values = (np.repeat(x, groups, 1) for x in (key, value))
    of_weights = grad @ values.swapaxes(-1, -2)
    of_scores = weights * (of_weights - (grad * output).sum(-1, keepdims=True)) * scale

    def of_heads(gradient):
        shape = (key.shape[0], key.shape[1], groups, *gradient.shape[2:])
        return gradient.reshape(shape).sum(2)

    of_key = of_scores.swapaxes(-1, -2) @ query
    return of_scores @ keys, of_heads(of_key), of_heads(weights.swapaxes(-1, -2) @ grad)
