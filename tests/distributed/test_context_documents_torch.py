# SPDX-License-Identifier: Apache-2.0
"""Documents and windows of a context around models, styles and contexts that have a method of their own."""

import threading

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from torch import nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from hyper_parallel import init_device_mesh
from hyper_parallel.core.activation_checkpoint import checkpoint
from hyper_parallel.core.context_parallel import (
    ContextParallel,
    attention_method,
    context_parallel,
    shard_buffers,
    shard_sequence,
    unshard_buffers,
)
from hyper_parallel.testing import on_ranks

IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0, 1, 1]])
CAUSAL = torch.ones(8, 8).tril().bool()
SEEN = ((IDS[:, :, None] == IDS[:, None]) & CAUSAL)[:, None]


class Core(nn.Module):
    def forward(self, q, k, v, mask=None):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None
        )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.core = nn.Linear(8, 24), Core()

    def forward(self, x, mask=None):
        q, k, v = (
            part.unflatten(-1, (2, 4)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        return x + self.core(q, k, v, mask).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.blocks, self.call = nn.ModuleList([Block(), Block()]), call

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = self.call(block, x, mask)
        return x


def directly(block, *values):
    return block(*values)


def build(call=directly):
    torch.manual_seed(0)
    return Model(call).double()


def draw():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 8, 8, generator=generator, dtype=torch.float64)


def alone():
    model = build()
    output = model(draw(), SEEN)
    output.square().sum().backward()
    return output.detach(), [p.grad for p in model.parameters()]


def by_torch(block, *values):
    return torch_checkpoint(block, *values, use_reentrant=False)


@on_ranks(2)
@pytest.mark.parametrize("call", [directly, checkpoint, by_torch])
def test_a_model_keeps_the_documents_of_a_context_around_it(call):
    """Also where it is recomputed when the context has ended: ours knows of it, and torch's fails and says so."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    expected, gradients = alone()
    for method in ("allgather", "ring", "ulysses"):
        many = shard_sequence(build(call), mesh["cp"], load_balance=True, method=method)
        with attention_method(document_ids=IDS):
            output = many(draw())
            torch.testing.assert_close(output.detach().full_tensor(), expected)
            if call is by_torch:
                output.square().sum().backward()
        if call is not by_torch:
            output.square().sum().backward()
        for parameter, gradient in zip(many.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), gradient)
    if call is by_torch:
        with attention_method(document_ids=IDS):
            output = many(draw())
        with pytest.raises(CheckpointError, match="different number of tensors"):
            output.square().sum().backward()


@on_ranks(2)
def test_styles_and_the_context_of_torch_keep_them():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]
    expected, _ = alone()
    parts = shard_buffers({"x": draw()}, mesh, load_balance=True)
    many = build()
    for block in many.blocks:
        style = ContextParallel(seq_dim=2, head_dim=1, load_balance=True)
        style.apply(block.core, mesh)
    with attention_method(document_ids=IDS):
        found = {"x": many(parts["x"])}
    whole = unshard_buffers(found, mesh, load_balance=True)["x"]
    torch.testing.assert_close(whole, expected)
    plain = build()
    with attention_method(document_ids=IDS), context_parallel(mesh):
        found = {"x": plain(parts["x"])}
    whole = unshard_buffers(found, mesh, load_balance=True)["x"]
    torch.testing.assert_close(whole, expected)


@on_ranks(2)
def test_control_without_the_context_documents_see_each_other():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    many = shard_sequence(build(), mesh["cp"])
    expected, _ = alone()
    assert not torch.allclose(many(draw()).detach().full_tensor(), expected)


@on_ranks(2)
def test_calls_of_two_threads_keep_to_themselves():
    """Each has its own documents, and both run before either goes backward."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    expected, gradients = alone()
    plain = build()
    wanted = plain(draw()).detach()
    many = [shard_sequence(build(), mesh["cp"], method="ring") for _ in range(2)]
    found, turn = {}, threading.Event()

    def run_second():
        with attention_method(document_ids=IDS):
            found[1] = many[1](draw())
        turn.set()

    class Pause(nn.Module):
        """Lets the other thread run all of its model in the middle of this one's."""

        def forward(self, *values):
            threading.Thread(target=run_second).start()
            assert turn.wait(60)
            return core(*values)

    core, many[0].blocks[1].core = many[0].blocks[1].core, Pause()
    found[0] = many[0](draw())
    torch.testing.assert_close(found[0].detach().full_tensor(), wanted)
    torch.testing.assert_close(found[1].detach().full_tensor(), expected)
    for number in (0, 1):
        found[number].square().sum().backward()
    for parameter, gradient in zip(many[1].parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient)


@on_ranks(2)
def test_two_calls_before_backward_with_and_without_documents():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    one, many = build(), shard_sequence(build(), mesh["cp"], method="ulysses")
    (one(draw(), SEEN).square().sum() + one(draw()).square().sum()).backward()
    with attention_method(document_ids=IDS):
        first = many(draw())
    (first.square().sum() + many(draw()).square().sum()).backward()
    for parameter, other in zip(many.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), other.grad)
