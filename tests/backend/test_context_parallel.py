# SPDX-License-Identifier: Apache-2.0
"""Attention on a sequence that real ranks share, in every mode, against the formula on whole arrays."""

import itertools

import frame
import numpy as np
import pytest
from attention_formula import formula, formula_gradients, visible

from hyper_parallel import (
    CommunicationLedger,
    DTensor,
    Layout,
    RaggedShard,
    Shard,
    ZigzagShard,
    init_device_mesh,
)
from hyper_parallel.core.context_parallel import attention_method, engine
from hyper_parallel.core.context_parallel.blocks import (
    CAUSAL,
    FULL,
    Visibility,
    documents_of_ids,
)
from hyper_parallel.core.context_parallel.division import Division
from hyper_parallel.core.context_parallel.engine import Task, attend
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.pending import Pending
from hyper_parallel.testing import RankError, on_ranks, run_ranks

platform = get_platform()
MODES = {"gather": (1, False), "ring": (1, True), "heads": (4, False)}
HYBRIDS = {"heads and gather": (2, False), "heads and ring": (2, True)}
SCALE = 0.3
# MindSpore's operators take so long to start that every case would be seen in the time of the whole suite.
FEW = slice(None) if frame.IS_TORCH else slice(-1, None)
PLACEMENTS = (Shard(2), ZigzagShard(2))


def spans_of(placement, size, ranks):
    return tuple(placement.spans(size, ranks, rank) for rank in range(ranks))


def part(array, spans):
    pieces = [array[:, :, start : start + size] for start, size in spans]
    return np.concatenate(pieces, 2)


def rows_of(mask, division):
    """The rows of a mask that a rank needs, with its heads."""
    mask = part(mask, division.joined_queries().spans)
    if mask.shape[1] == 1:
        return frame.tensor(mask)
    share = mask.shape[1] // division.degree
    start = share * division.inner_index
    return frame.tensor(mask[:, start : start + share])


def drawn(queries, keys, heads, of_keys, value_dim):
    shapes = [(heads, queries, 4), (of_keys, keys, 4), (of_keys, keys, value_dim)]
    shapes.append((heads, queries, value_dim))
    return [frame.draw(2, *shape, seed=i) for i, shape in enumerate(shapes)]


def check(mode, placement, sight, arrays, *, ids=None, mask=None, of_keys=None):
    """Output and gradients of this rank's part."""
    rank, ranks = platform.get_rank(), 4
    query, key, value, grad = arrays
    places = [
        spans_of(placement, query.shape[2], ranks),
        spans_of(of_keys or placement, key.shape[2], ranks),
    ]
    division = Division(tuple(range(ranks)), rank, *places, *mode)
    added = visible(sight, query.shape[2], key.shape[2], ids)
    if mask is not None:
        added = added & mask if mask.dtype == bool else np.where(added, mask, -np.inf)
    added = np.where(added, 0.0, -np.inf) if added.dtype == bool else added
    expected, _, _ = formula(query, key, value, SCALE, added)
    gradients = formula_gradients(grad, query, key, value, SCALE, added)
    own = (places[0][rank], places[1][rank], places[1][rank])
    pairs = zip((query, key, value), own, strict=True)
    leaves = [frame.leaf(part(whole, spans)) for whole, spans in pairs]
    given = None if mask is None else rows_of(mask, division)
    output = attend(*leaves, Task(division, sight, SCALE, given))
    frame.equal(output, part(expected, own[0]))
    frame.backward([output], [part(grad, own[0])])
    for leaf, whole, spans in zip(leaves, gradients, own, strict=True):
        frame.equal(frame.grad(leaf), part(whole, spans))


@on_ranks(4)
@pytest.mark.parametrize("name", [*MODES, *HYBRIDS])
def test_every_mode_gives_attention_and_its_gradients(name):
    mode = {**MODES, **HYBRIDS}[name]
    sights = (FULL, Visibility(3, 0), CAUSAL)[FEW]
    for placement, sight in itertools.product(PLACEMENTS[FEW], sights):
        check(mode, placement, sight, drawn(16, 16, 4, 4, 4))


@on_ranks(4)
@pytest.mark.parametrize("name", [*MODES, *HYBRIDS])
def test_sequences_that_do_not_divide(name):
    mode = {**MODES, **HYBRIDS}[name]
    for size, placement in itertools.product((1, 13, 5)[FEW], PLACEMENTS[FEW]):
        check(mode, placement, CAUSAL, drawn(size, size, 4, 4, 5))
    check(mode, RaggedShard(2, (3, 0, 5, 1)), CAUSAL, drawn(9, 9, 4, 2, 4))


@on_ranks(4)
@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (8, 2), (12, 3), (12, 6)])
def test_fewer_heads_of_keys_than_ranks(heads):
    for mode in (*HYBRIDS.values(), *MODES.values())[FEW]:
        check(mode, ZigzagShard(2), CAUSAL, drawn(9, 9, *heads, 4))


@on_ranks(4)
def test_cross_attention():
    """Keys of another length, which lie in another way."""
    modes = (*HYBRIDS.values(), *MODES.values())
    for mode, sight in itertools.product(modes[FEW], (FULL, CAUSAL)[FEW]):
        arrays = drawn(9, 14, 4, 2, 4)
        check(mode, ZigzagShard(2), sight, arrays, of_keys=Shard(2))
        check(mode, Shard(2), sight, drawn(9, 3, 4, 2, 4))


@on_ranks(4)
def test_documents_of_all_kinds():
    """Of length one, over several ranks, in several places, different in each row; padding inside and at the end."""
    ids = [[0, 1, 1, 1, 1, 1, 1, 2, 2, 5, 5, -1, -1], [-1, 3, 3, -1, 4, 4, 3, *[6] * 6]]
    documents = documents_of_ids(ids)
    modes = (*MODES.values(), (2, True))
    for mode, placement, after in itertools.product(
        modes[FEW], PLACEMENTS[FEW], (None, 0)[FEW]
    ):
        sight = Visibility(after=after, documents=documents)
        check(mode, placement, sight, drawn(13, 13, 4, 2, 4), ids=ids)


@on_ranks(4)
def test_given_masks():
    """Rows that hide everything give zeros."""
    shown = frame.draw(2, 1, 13, 13, seed=7) > 0
    shown[:, :, 3] = False
    of_heads = frame.draw(1, 4, 13, 13, seed=8)
    of_heads[:, 1, :, 5:] = -np.inf
    hidden = np.zeros((1, 1, 13, 13), dtype=bool)
    modes = (*MODES.values(), (2, False), (2, True))
    for mode, mask in itertools.product(modes[FEW], (hidden, shown, of_heads)[FEW]):
        check(mode, ZigzagShard(2), FULL, drawn(13, 13, 4, 2, 4), mask=mask)


@on_ranks(4)
def test_attention_of_distributed_tensors():
    """By the operator of the framework, within a context that says how."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    attention = platform.operator("scaled_dot_product_attention")
    query, key, value, grad = drawn(9, 9, 4, 4, 4)
    added = np.where(visible(CAUSAL, 9), 0.0, -np.inf)
    expected, _, _ = formula(query, key, value, 0.5, added)
    gradients = formula_gradients(grad, query, key, value, 0.5, added)
    for placement, method in itertools.product(
        PLACEMENTS[FEW], ("allgather", "ulysses", "ring")
    ):
        layout = Layout.from_device_mesh(mesh)([placement]).bind(4)
        wholes = (query, key, value)
        leaves = [
            frame.leaf(frame.array(layout.part_of(frame.tensor(x)))) for x in wholes
        ]
        shards = [
            DTensor.from_local(x, None, layout, shape=query.shape) for x in leaves
        ]
        with attention_method(method), CommunicationLedger(mesh) as ledger:
            output = attention(*shards, is_causal=True)
        assert ("isend" in ledger.counts()) == (method == "ring")
        frame.equal(output.to_local(), layout.part_of(frame.tensor(expected)))
        frame.backward(
            [output.to_local()], [frame.array(layout.part_of(frame.tensor(grad)))]
        )
        for leaf, whole in zip(leaves, gradients, strict=True):
            frame.equal(frame.grad(leaf), layout.part_of(frame.tensor(whole)))


def faulty(fault):
    original = vars(engine)[fault.__name__]
    setattr(engine, fault.__name__, fault(original))
    engine._functions.cache_clear()
    try:
        for mode in ((1, False), (1, True)):
            check(mode, ZigzagShard(2), CAUSAL, drawn(16, 16, 4, 4, 4))
    finally:
        setattr(engine, fault.__name__, original)
        engine._functions.cache_clear()


def _run_ring_back(original):
    """The gradients of a rank's keys do not travel: only its own queries count."""

    def without_sum(gradients, query, key, value, task):
        original(gradients, query, key, value, task)
        own = task.keys_of(task.division.outer_index)
        operands = task.operands(query, key, value, own)
        return gradients.add(operands, task.sight.blocks(task.queries, own))

    return without_sum


def start_reduce_scatter(original):
    """Everybody's gradients are scaled."""

    def scaled(platform, x, *how):
        return original(platform, x * 4, *how)

    return scaled


def start_all_gather(original):
    """The keys of the ranks are taken in the wrong order."""

    def turned(platform, x, dim, sizes, group):
        whole = original(platform, x, dim, sizes, group).finish()
        size = sizes[0]
        parts = [whole[:, :, size:], whole[:, :, :size]]
        return Pending.done(platform.cat(parts, dim))

    return turned


@pytest.mark.parametrize(
    "fault", [_run_ring_back, start_reduce_scatter, start_all_gather]
)
def test_control_a_fault_in_communication_is_found(fault):
    with pytest.raises(RankError, match="Not equal"):
        run_ranks(faulty, 4, fault)


@on_ranks(4)
def test_heads_that_do_not_divide():
    for mode, heads in (((4, False), 6), ((2, True), 3)):
        places = spans_of(Shard(2), 8, 4)
        division = Division((0, 1, 2, 3), platform.get_rank(), places, places, *mode)
        tensor = frame.tensor(frame.draw(1, heads, 2, 4))
        with pytest.raises(ValueError, match=rf"{heads} heads .* {mode[0]} ranks"):
            attend(tensor, tensor, tensor, Task(division, CAUSAL, 1.0))
    with pytest.raises(ValueError, match="4 ranks .* groups of 3"):
        Division((0, 1, 2, 3), 0, places, places, 3)
