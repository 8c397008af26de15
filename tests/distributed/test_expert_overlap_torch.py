# SPDX-License-Identifier: Apache-2.0
"""Rows that travel to their experts while a shared expert computes, in forward and in backward."""

import copy

import pytest
import torch
from expert_models import DIM, batches, build, close, compare, shard, whole
from torch.utils.checkpoint import checkpoint

from hyper_parallel import get_platform, init_device_mesh
from hyper_parallel.core.expert_parallel import FeedForward
from hyper_parallel.testing import on_ranks


def line(ranks):
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))["ep"]


class Told(FeedForward):
    """A shared expert that says when its forward and its backward run."""

    def __init__(self, events):
        super().__init__(DIM, 4)
        self.events, self.fails = events, False

    def forward(self, x):
        self.events.append("shared")
        if self.fails:
            raise RuntimeError("the shared expert failed")
        output = super().forward(x * 1)
        if output.requires_grad:
            output.register_hook(lambda _: self.events.append("shared, backward"))
        return output


def tell_of_exchanges(monkeypatch, events):
    """Notes when an exchange of rows begins and when it is waited for."""
    platform = get_platform()
    right = platform.exchange

    def exchange(*arguments):
        output, handle = right(*arguments)
        events.append("begin")

        class Handle:
            def wait(self):
                events.append("end")
                handle.wait()

        return output, Handle()

    monkeypatch.setattr(platform, "exchange", exchange)


@on_ranks(2)
@pytest.mark.parametrize("sizes", [[5, 3], [0, 4]])
def test_rows_travel_while_the_shared_expert_computes(sizes):
    """Forward and backward, with the numbers of one device and not one exchange more."""
    mesh, events = line(2), []
    start = build(2, shared_expert=Told(events)).double()
    ledger = compare(start, batches(2, sizes), mesh, lambda many: shard(many, mesh))
    assert ledger.counts(backward=False) == {"all_to_all_single": 3}
    assert ledger.counts(backward=True) == {"all_to_all_single": 2}
    shard(start, mesh)
    leaf = batches(2, sizes)[mesh.get_local_rank()].requires_grad_()
    events.clear()
    with pytest.MonkeyPatch.context() as monkeypatch:
        tell_of_exchanges(monkeypatch, events)
        start(leaf).sum().backward()
    exchange = ["begin", "end"]
    assert events == [
        *("begin", "shared", "end"),  # dispatch
        *exchange,
        *exchange,  # backward of combine
        *("begin", "shared, backward", "end"),  # backward of dispatch
    ]


@on_ranks(2)
def test_gradients_of_gradients_beside_a_shared_expert():
    mesh, start = line(2), build(2)
    parts, rank = batches(2), mesh.get_local_rank()
    many = copy.deepcopy(start)
    shard(many, mesh)
    found = []
    for model, tokens in ((many, parts[rank]), (start, torch.cat(parts))):
        leaf = tokens.clone().requires_grad_()
        [first] = torch.autograd.grad(
            model(leaf).square().sum(), leaf, create_graph=True
        )
        [second] = torch.autograd.grad(first.square().sum(), leaf)
        found.append((first.detach(), second))
    for one, other in zip(*found, strict=True):
        close(one, other.chunk(2)[rank])


@on_ranks(2)
def test_an_error_of_the_shared_expert_leaves_no_exchange_under_way():
    """In forward or in backward; the next step is as if nothing had been."""
    mesh, events = line(2), []
    start = build(2, shared_expert=Told(events)).double()
    shard(start, mesh)
    leaf = batches(2)[mesh.get_local_rank()]
    expected = start(leaf)
    with pytest.MonkeyPatch.context() as monkeypatch:
        tell_of_exchanges(monkeypatch, events)
        start.shared_expert.fails = True
        events.clear()
        with pytest.raises(RuntimeError, match="the shared expert failed"):
            start(leaf)
        assert events == ["begin", "shared", "end"]
        start.shared_expert.fails = False
    again = start(leaf)
    assert again.equal(expected)
    again.sum().backward()
    wanted = [p.grad for p in start.parameters()]
    for one in start.parameters():
        one.grad = None

    def fail(_):
        raise RuntimeError("its backward failed")

    hook = start.shared_expert.w2.register_forward_hook(
        lambda _, __, output: output.register_hook(fail) and None
    )
    with pytest.raises(RuntimeError, match="its backward failed"):
        start(leaf).sum().backward()
    hook.remove()
    for one in start.parameters():
        one.grad = None
    start(leaf).sum().backward()
    for one, gradient in zip(start.parameters(), wanted, strict=True):
        assert whole(one.grad, mesh).equal(whole(gradient, mesh))


@on_ranks(2)
def test_recomputing_experts_alone_keeps_the_gradients_of_the_shared_one():
    """Also where the framework's first forward records nothing."""
    mesh, start = line(2), build(2)
    shard(start, mesh)
    leaf, results = batches(2)[mesh.get_local_rank()], []
    for reentrant in (None, False, True):
        many, x = copy.deepcopy(start), leaf.clone().requires_grad_()
        if reentrant is not None:
            call = many.experts.forward
            many.experts.forward = lambda tokens, call=call, how=reentrant, **more: (
                checkpoint(lambda y: call(y, **more), tokens, use_reentrant=how)
            )
        many(x).square().sum().backward()
        named = {name: p.grad for name, p in many.named_parameters()}
        results.append((x.grad, named))
    for x, named in results[1:]:
        for name, gradient in results[0][1].items():
            if not name.startswith("router"):  # reentrant ones have x alone
                close(
                    getattr(named[name], "_local", named[name]),
                    getattr(gradient, "_local", gradient),
                    name,
                )
        close(x.shape, results[0][0].shape)
