# SPDX-License-Identifier: Apache-2.0
"""Modules that are called by themselves, tables that modules share, and models that are changed on a mesh."""

import warnings

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.shard import OperatorError
from hyper_parallel.core.tensor_parallel import Replicated, replicate
from hyper_parallel.testing import on_ranks


class Encoder(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 8)
        self.embed_tokens.weight = table.weight
        self.positions = nn.Embedding(6, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids):
        x = self.embed_tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for _ in range(3):
            x = x + self.down(torch.relu(self.up(x)))
        return x


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(11, 8)
        self.encoder = Encoder(self.shared)
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, ids):
        return self.head(torch.tanh(self.encoder(ids)) + self.shared(ids))


def model_of():
    torch.manual_seed(0)
    return Seq2Seq().double()


def plan(**more):
    rows = RowwiseParallel(use_local_output=False)
    return {
        "shared": rows,
        "encoder.embed_tokens": rows,
        "encoder.up": ColwiseParallel(use_local_output=False),
        "encoder.down": rows,
        "": Replicated(),
        **more,
    }


def compare_encoder(model, ids, whole):
    plain = model_of()
    for mine, true in (
        (model.encoder(ids), plain.encoder(whole)),
        (model(ids), plain(whole)),
    ):
        torch.testing.assert_close(mine.full_tensor(), true)
        mine.square().sum().backward()
        true.square().sum().backward()
    for (name, one), true in zip(
        model.named_parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(
            one.grad.full_tensor(),
            true.grad,
            msg=lambda m: f"{name}: {m}",  # noqa: B023
        )


@on_ranks(4)
def test_a_module_with_a_style_of_its_own_is_called_by_itself():
    whole = torch.arange(24).reshape(4, 6) % 11
    for sizes in ((1, 4), (2, 2)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
        model = parallelize_module(model_of(), mesh["tp"], plan(encoder=Replicated()))
        replicate(model, mesh["dp"])
        compare_encoder(model, whole.chunk(sizes[0])[mesh.get_local_rank("dp")], whole)


@on_ranks(2)
def test_one_without_is_refused_with_what_to_do():
    model = parallelize_module(
        model_of(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan()
    )
    with pytest.raises(
        OperatorError,
        match=r"called by itself needs the style Replicated\(\).*resize_token.*HP304",
    ):
        model.encoder(torch.arange(6)[None])


@on_ranks(2)
def test_a_table_that_is_named_once_is_warned_of():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ids = torch.arange(6)[None]
    once = {
        name: style for name, style in plan().items() if name != "encoder.embed_tokens"
    }
    with pytest.warns(
        UserWarning,
        match=r"'encoder.embed_tokens' shares its table with 'shared'.*RowwiseParallel",
    ) as told:
        forgotten = parallelize_module(model_of(), mesh, once)
    assert len(told) == 1
    counts = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = parallelize_module(model_of(), mesh, plan())
        parallelize_module(
            model_of(),
            mesh,
            {"head": ColwiseParallel(use_local_output=False), "": Replicated()},
        )
    for model in (forgotten, named):
        with CommunicationLedger(mesh) as ledger:
            found = model(ids)
        torch.testing.assert_close(found.full_tensor(), model_of()(ids))
        counts.append(ledger.counts()["all_reduce"])
    assert counts[0] > counts[1]  # what the warning is about
