# SPDX-License-Identifier: Apache-2.0
"""Attention block by block and merged, against the formula on whole tensors in float64."""

from dataclasses import replace

import frame
import numpy as np
import pytest
from attention_formula import formula, formula_gradients, visible

from hyper_parallel import Shard, ZigzagShard
from hyper_parallel.core.context_parallel import kernel
from hyper_parallel.core.context_parallel.blocks import (
    CAUSAL,
    FULL,
    Visibility,
    documents_of_ids,
)
from hyper_parallel.core.context_parallel.kernel import Gradients, Merged, Operands
from hyper_parallel.platform import get_platform

platform = get_platform()
SIZE, RANKS = 11, 3
IDS = [[0, 0, 0, 1, 2, 2, 2, 2, 2, -1, -1], [-1, 0, 0, 0, 0, 1, 1, 1, 3, 3, 3]]
SIGHTS = {
    "full": FULL,
    "causal": CAUSAL,
    "window": Visibility(2, 0),
    "both ways": Visibility(1, 2),
    "documents": Visibility(after=0, documents=documents_of_ids(IDS)),
}


def drawn(value_dim):
    sizes = [(4, 6), (2, 6), (2, value_dim), (4, value_dim)]
    return [frame.draw(2, h, SIZE, d, seed=i) for i, (h, d) in enumerate(sizes)]


def of_rank(array, spans):
    """A part of a tensor's sequence as the rank stores it."""
    parts = [array[:, :, start : start + size] for start, size in spans]
    return frame.tensor(np.concatenate(parts, 2))


def columns(mask, spans):
    return np.concatenate([mask[..., start : start + n] for start, n in spans], -1)


@pytest.mark.parametrize("value_dim", [6, 5], ids=["kernel", "operators"])
@pytest.mark.parametrize("name", [*SIGHTS, "given", "added"])
def test_blocks_give_attention_and_its_gradients(name, value_dim):
    """Queries of every rank, with keys of one rank after the other."""
    query, key, value, grad = drawn(value_dim)
    sight, mask, scale = SIGHTS.get(name, FULL), None, 0.3
    if name == "given":
        mask = frame.draw(2, 1, SIZE, SIZE, seed=9) > 0
        mask[:, :, 3] = False
    if name == "added":
        mask = frame.draw(1, 4, SIZE, SIZE, seed=9)
        mask[:, :, 5, 2:] = -np.inf
    shown = visible(sight, SIZE, ids=IDS) if mask is None else mask
    added = np.where(shown, 0.0, -np.inf) if shown.dtype == bool else shown
    expected, sums, _ = formula(query, key, value, scale, added)
    gradients = formula_gradients(grad, query, key, value, scale, added)
    for placement in (Shard(2), ZigzagShard(2)):
        spans_of = [placement.spans(SIZE, RANKS, rank) for rank in range(RANKS)]
        of_keys = [[0.0, 0.0] for _ in range(RANKS)]
        for spans in spans_of:
            mine, own_grad = of_rank(query, spans), of_rank(grad, spans)
            parts = []
            for theirs in spans_of:
                part = None
                if mask is not None:
                    rows = np.concatenate([mask[:, :, s : s + n] for s, n in spans], 2)
                    part = frame.tensor(columns(rows, theirs))
                operands = (mine, of_rank(key, theirs), of_rank(value, theirs))
                given = Operands(*operands, scale, part)
                parts.append((given, sight.blocks(spans, theirs)))
            merged = Merged(mine, parts[0][0].value)
            for given, blocks in parts:
                merged.add(given, blocks)
            output, logsumexp = merged.result()
            frame.equal(output, of_rank(expected, spans))
            frame.equal(logsumexp, of_rank(sums[..., None], spans)[..., 0])
            backward = Gradients(own_grad, output, logsumexp)
            for rank, (given, blocks) in enumerate(parts):
                for i, part in enumerate(backward.add(given, blocks)):
                    of_keys[rank][i] = of_keys[rank][i] + frame.array(part)
            frame.equal(backward.of_query(mine), of_rank(gradients[0], spans))
        for rank, spans in enumerate(spans_of):
            for i, found in enumerate(of_keys[rank]):
                frame.equal(found, frame.array(of_rank(gradients[1 + i], spans)))


def test_parts_in_low_precision_are_merged_in_float32():
    """Many parts, so that rounding after each of them would show."""
    arrays = [frame.draw(1, 2, 64, 8, seed=i) for i in range(4)]
    low = [frame.tensor(x, "float32").to(frame.dtype("float16")) for x in arrays[:3]]
    exact = [frame.array(x).astype(np.float64) for x in low]
    expected, _, _ = formula(*exact, 0.3, np.zeros((64, 64)))
    merged = Merged(low[0], low[2])
    for start in range(0, 64, 2):
        part = (
            low[0],
            low[1][:, :, start : start + 2],
            low[2][:, :, start : start + 2],
        )
        merged.add(Operands(*part, 0.3), FULL.blocks(((0, 64),), ((start, 2),)))
    output, _ = merged.result()
    assert output.dtype == low[0].dtype
    assert merged._output.dtype == frame.dtype("float32")
    assert np.abs(frame.array(output) - expected).max() < 1e-3


def _wrong_scale(of_block):
    return lambda given, block: of_block(given, block)._replace(scale=0.31)


def _wrong_rows(of_block):
    def shifted(given, block):
        start, size = block.queries
        late = replace(block, queries=(max(0, start - 1), size))
        return of_block(given, block)._replace(mask=kernel._mask_of_block(given, late))

    return shifted


@pytest.mark.parametrize(
    ("fault", "name"), [(_wrong_scale, "causal"), (_wrong_rows, "given")]
)
def test_control_a_wrong_block_is_found(fault, name, monkeypatch):
    monkeypatch.setattr(Operands, "of_block", fault(Operands.of_block))
    with pytest.raises(AssertionError):
        test_blocks_give_attention_and_its_gradients(name, 6)


def test_control_a_sum_without_weights_is_found(monkeypatch):
    def add(merged, where, output, logsumexp):
        merged._output[where] = merged._output[where] + output
        merged._logsumexp[where] = logsumexp

    monkeypatch.setattr(Merged, "_merge", add)
    with pytest.raises((AssertionError, TypeError)):
        test_blocks_give_attention_and_its_gradients("causal", 6)
