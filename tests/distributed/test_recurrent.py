# SPDX-License-Identifier: Apache-2.0
"""nn.LSTM, GRU, RNN and their cells on meshes: results and all gradients against one process."""

import warnings

import pytest
import torch
from against_plain import check_gradients, check_results
from torch import nn

from hyper_parallel import (
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.dtensor.modes import strict
from hyper_parallel.core.shard import OperatorError
from hyper_parallel.testing import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
STEPS, INPUTS, HIDDEN = 4, 3, 5


def drawn(*shape, seed=1):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def leaves(results):
    return (
        [results]
        if isinstance(results, torch.Tensor)
        else [x for one in results for x in leaves(one)]
    )


def rows_cut(name, module, mesh):
    """Parameters in pieces, as after fully_shard without its hooks."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        setattr(
            module,
            key,
            nn.Parameter(distribute_tensor(parameter, mesh, [S0] * mesh.ndim)),
        )


def compare(mesh, make, inputs, placements, partition=None):
    torch.manual_seed(0)
    plain = make().double()
    torch.manual_seed(0)
    mine = distribute_module(make().double(), mesh, partition)
    sources = [x.clone().requires_grad_() for x in inputs]
    tensors = [
        distribute_tensor(x.clone(), mesh, p).requires_grad_()
        for x, p in zip(inputs, placements, strict=True)
    ]
    with warnings.catch_warnings(), strict():
        warnings.simplefilter("error")
        found = leaves(mine(*packed(plain, tensors)))
    expected = leaves(plain(*packed(plain, sources)))
    weights = [
        drawn(*true.shape, seed=20 + number) for number, true in enumerate(expected)
    ]
    losses = check_results(found, expected, weights)
    pairs = [
        *zip(mine.parameters(), plain.parameters(), strict=True),
        *zip(tensors, sources, strict=True),
    ]
    check_gradients(losses, pairs)
    return found


def packed(module, tensors):
    """The state of an LSTM is a pair."""
    return (tensors[0], tuple(tensors[1:])) if len(tensors) == 3 else tensors


KINDS = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "rnn": (nn.RNN, {}),
    "rnn, relu": (nn.RNN, {"nonlinearity": "relu"}),
}
VARIANTS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "two layers, both ways": {"num_layers": 2, "bidirectional": True},
    "no bias": {"bias": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_layers(kind, variant):
    of, arguments = KINDS[kind]
    arguments = arguments | VARIANTS[variant]
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    first = bool(arguments.get("batch_first"))
    states = arguments.get("num_layers", 1) * (
        2 if arguments.get("bidirectional") else 1
    )

    def make():
        return of(INPUTS, HIDDEN, **arguments)

    for batch in (8, 6, 3):  # even, uneven, and a rank without any
        x = drawn(batch, STEPS, INPUTS) if first else drawn(STEPS, batch, INPUTS)
        found = compare(mesh, make, [x], [[S0 if first else S1]])
        assert found[1].placements == (S1,)
        hidden = [
            drawn(states, batch, HIDDEN, seed=i)
            for i in range(2 if of is nn.LSTM else 1)
        ]
        compare(mesh, make, [x, *hidden], [[R]] + [[S1]] * len(hidden), rows_cut)
    compare(mesh, make, [x], [[Shard(2)]], rows_cut)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    compare(square, make, [x], [[S0, S1]])


@on_ranks(4)
def test_what_is_less_usual():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    compare(
        mesh,
        lambda: nn.LSTM(INPUTS, HIDDEN, proj_size=2, num_layers=2),
        [drawn(STEPS, 6, INPUTS)],
        [[S1]],
    )
    compare(
        mesh, lambda: nn.GRU(INPUTS, HIDDEN), [drawn(STEPS, INPUTS)], [[R]]
    )  # no batch


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
@on_ranks(4)
def test_cells(kind):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))

    def make():
        return kind(INPUTS, HIDDEN)

    for batch in (8, 6, 3):
        x = drawn(batch, INPUTS)
        assert compare(mesh, make, [x], [[S0]])[0].placements == (S0,)
        hidden = [
            drawn(batch, HIDDEN, seed=i) for i in range(2 if kind is nn.LSTMCell else 1)
        ]
        compare(mesh, make, [x, *hidden], [[R]] + [[S0]] * len(hidden), rows_cut)
    compare(mesh, make, [drawn(INPUTS)], [[R]], rows_cut)


@on_ranks(4)
def test_the_rows_of_a_cell_may_be_cut():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    (found,) = compare(
        mesh, lambda: nn.RNNCell(INPUTS, 8), [drawn(6, INPUTS)], [[R]], rows_cut
    )
    assert found.placements == (S1,)


@on_ranks(4)
def test_nothing_is_communicated_for_a_cut_batch():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    module = distribute_module(nn.LSTM(INPUTS, HIDDEN).double(), mesh)
    x = distribute_tensor(drawn(STEPS, 8, INPUTS), mesh, [S1])
    with CommunicationLedger() as ledger:
        module(x)
    assert not ledger.entries


@on_ranks(4)
def test_dropout_between_layers_is_the_same_on_copies_and_other_on_pieces():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    torch.manual_seed(5)
    module = distribute_module(nn.GRU(INPUTS, 16, 2, dropout=0.5).double(), mesh)
    x = distribute_tensor(
        torch.ones(STEPS, 8, INPUTS, dtype=torch.float64), mesh, [S1, R]
    )
    everyone = [None] * 4
    torch.distributed.all_gather_object(everyone, module(x)[0].to_local().detach())
    assert torch.equal(everyone[0], everyone[1])
    assert torch.equal(everyone[2], everyone[3])
    assert not torch.equal(everyone[0], everyone[2])
    module.eval()
    torch.distributed.all_gather_object(everyone, module(x)[0].to_local().detach())
    assert torch.equal(everyone[0], everyone[2])


@on_ranks(2)
def test_only_zeros_are_taken_as_they_are():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    module = distribute_module(nn.GRU(INPUTS, HIDDEN).double(), mesh)
    x = distribute_tensor(drawn(STEPS, 4, INPUTS), mesh, [S1])
    with pytest.raises(OperatorError, match="plain tensor"):
        module(x, drawn(1, 4, HIDDEN))
