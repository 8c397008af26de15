# SPDX-License-Identifier: Apache-2.0
"""Experts that ranks share, against one device that has the tokens of all of them."""

import copy
import itertools

import pytest
import torch
from expert_models import (
    DIM,
    EXPERTS,
    HIDDEN,
    SIZES,
    alone,
    batches,
    build,
    close,
    compare,
    shard,
    weights_of,
)
from torch import nn

from hyper_parallel import CommunicationLedger, init_device_mesh
from hyper_parallel.core.expert_parallel import (
    AllToAllTokenDispatcher,
    ExpertParallel,
    ExpertTensorParallel,
    GroupedExperts,
    TensorParallel,
)
from hyper_parallel.testing import on_ranks


@on_ranks(4)
@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_output_and_all_gradients_are_those_of_one_device(top_k):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    for before, sizes in itertools.product((True, False), (None, SIZES)):
        start = build(top_k, score_before_experts=before)
        ledger = compare(
            start, batches(4, sizes), mesh["ep"], lambda many: shard(many, mesh["ep"])
        )
        assert ledger.counts(backward=False) == {"all_to_all_single": 3}
        assert ledger.counts(backward=True) == {"all_to_all_single": 2}


@on_ranks(4)
def test_ep_tp_equals_ep__and_tokens_are_exchanged_once():
    """Tokens are the same along tp and travel once; gradients of what is not an expert are whole on each tp rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))

    def both(many):
        ExpertTensorParallel().apply(many.experts, mesh)

    def one_after_the_other(many):
        ExpertParallel().apply(many.experts, mesh["ep"])
        TensorParallel().apply(many.experts, mesh["tp"])

    def ep_alone(many):
        ExpertParallel().apply(many.experts, mesh["ep"])

    sent = {}
    for apply, sizes, top_k in itertools.product(
        (both, one_after_the_other, ep_alone), (None, [5, 0], [1, 2]), (1, 3)
    ):
        start = build(top_k, score_before_experts=top_k == 1)
        ledger = compare(start, batches(2, sizes), mesh["ep"], apply)
        token_bytes = sum(
            entry.nbytes
            for entry in ledger.entries
            if entry.collective == "all_to_all_single" and not entry.backward
        )
        sent.setdefault(apply.__name__, []).append(token_bytes)
    # Of five tokens each, the ranks of tp send together what one of them would.
    total = torch.tensor([sent["both"][1], sent["ep_alone"][1]])
    torch.distributed.all_reduce(total, group=mesh.get_group("tp"))
    assert total[0] < 0.75 * total[1]


@on_ranks(2)
def test_tensor_parallel_experts_reduce_their_output():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for before, top_k in ((True, 2), (False, 3)):
        start = build(top_k, score_before_experts=before)
        [part] = batches(1)
        expected, of_inputs, gradients = alone(copy.deepcopy(start), [part])
        many = copy.deepcopy(start)
        TensorParallel().apply(many.experts, mesh["tp"])
        leaf = part.clone().requires_grad_()
        output = many(leaf)
        (output * weights_of([part])).sum().backward()
        close(output, expected[0])
        close(leaf.grad, of_inputs[0])
        for name, parameter in many.named_parameters():
            found = parameter.grad
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            close(found, gradients[name], name)


def sorted_rows(ranks):
    """Rows sorted by expert, and how many each expert has, for every rank."""
    draw = torch.Generator().manual_seed(3)
    counts = [torch.randint(0, 4, (EXPERTS,), generator=draw) for _ in range(ranks)]
    counts[0][:] = 0
    rows = [
        torch.randn(int(count.sum()), DIM, generator=draw, dtype=torch.float64)
        for count in counts
    ]
    return rows, counts


@on_ranks(2)
def test_the_dispatcher_by_itself():
    """Within an expert rows lie by the rank that they come from, then as they lay there."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    rank, (rows, counts) = mesh.get_rank(), sorted_rows(2)
    counts[0][0], rows[0] = 2, torch.arange(2.0 * DIM).double().reshape(2, DIM)
    dispatcher, module = AllToAllTokenDispatcher(), nn.Identity()
    tokens, own, context = dispatcher.dispatch(
        module, (rows[rank], counts[rank]), mesh["ep"]
    )
    size = EXPERTS // 2
    experts = range(rank * size, rank * size + size)
    chunks = [
        part.split(count.tolist()) for part, count in zip(rows, counts, strict=True)
    ]
    expected = [chunk[expert] for expert in experts for chunk in chunks]
    assert tokens.equal(torch.cat(expected))
    assert own.tolist() == [int(sum(c[expert] for c in counts)) for expert in experts]
    back = dispatcher.combine(module, tokens, mesh["ep"], context)
    assert back.equal(rows[rank])
    with pytest.raises(RuntimeError, match="needs the context"):
        dispatcher.combine(module, tokens, mesh["ep"], None)


class TheirExperts(nn.Module):
    """Experts as in torchtitan, which know nothing of this library."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN))

    def forward(self, x, num_tokens_per_expert):
        parts = x.split(num_tokens_per_expert.tolist())
        pairs = zip(parts, self.w1, self.w2, strict=True)
        return torch.cat([(part @ w1.T).relu() @ w2.T for part, w1, w2 in pairs])


@on_ranks(4)
def test_modules_that_take_sorted_rows():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    rank = mesh.get_local_rank("ep")
    rows, counts = sorted_rows(2)
    torch.manual_seed(0)
    ours = GroupedExperts(DIM, HIDDEN, EXPERTS).double()
    for start, style, where in (
        (TheirExperts().double(), ExpertParallel(), mesh["ep"]),
        (TheirExperts().double(), ExpertTensorParallel(), mesh["ep", "tp"]),
        (ours, ExpertParallel(), mesh["ep"]),
        (ours, ExpertTensorParallel(), mesh["ep", "tp"]),
    ):
        expected, gradients = [], []
        one = copy.deepcopy(start)
        for part, count in zip(rows, counts, strict=True):
            leaf = part.clone().requires_grad_()
            expected.append(one(leaf, count))
            expected[-1].square().sum().backward()
            gradients.append(leaf.grad)
        many = copy.deepcopy(start)
        style.apply(many, where)
        leaf = rows[rank].clone().requires_grad_()
        output = many(leaf, counts[rank])
        output.square().sum().backward()
        close(output, expected[rank])
        close(leaf.grad, gradients[rank])
        for name, parameter in many.named_parameters():
            close(parameter.grad.full_tensor(), one.get_parameter(name).grad, name)


class TheirTokens(TheirExperts):
    """Experts as in transformers."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        output = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, choice = (top_k_index == expert).nonzero(as_tuple=True)
            hidden = (hidden_states[token] @ self.w1[expert].T).relu()
            y = hidden @ self.w2[expert].T * top_k_weights[token, choice, None]
            output = output.index_add(0, token, y)
        return output


@on_ranks(2)
def test_expert_without_tokens_has_zero_gradient_not_none():
    """Also in modules that know nothing of ranks whose experts nobody has chosen."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    x = batches(2)[mesh.get_rank()]
    for chosen in (0, EXPERTS - 1):
        index, weights = torch.full((len(x), 1), chosen), torch.ones(len(x), 1)
        of_tokens, of_rows = TheirTokens().double(), TheirExperts().double()
        counts = torch.bincount(index[:, 0], minlength=EXPERTS)
        for module, given in (
            (of_tokens, (index, weights.double())),
            (of_rows, (counts,)),
        ):
            ExpertParallel().apply(module, mesh["ep"])
            leaf = x.clone().requires_grad_()
            module(leaf, *given).square().sum().backward()
            assert leaf.grad.any()
            for parameter in module.parameters():
                gradient = parameter.grad.full_tensor()
                used = gradient.flatten(1).any(1).nonzero().flatten().tolist()
                assert used == [chosen]


@on_ranks(4)
def test_communication_with_parts_of_experts_is_counted():
    """Along tp: how many rows there are, the rows and their results at the experts, and what was divided before."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    many = build(2, shared_expert=None)
    ExpertTensorParallel().apply(many.experts, mesh)
    leaf = batches(2)[mesh.get_local_rank("ep")].requires_grad_()
    with CommunicationLedger(mesh) as ledger:
        many(leaf).sum().backward()
    forward = [(e.collective, e.axis) for e in ledger.entries if not e.backward]
    backward = [(e.collective, e.axis) for e in ledger.entries if e.backward]
    exchange, gather = ("all_to_all_single", "ep"), ("all_gather_into_tensor", "tp")
    scatter = ("reduce_scatter", "tp")
    assert forward == [
        exchange, exchange, gather, gather, scatter, exchange, gather,
    ]  # fmt: skip
    assert sorted(backward) == sorted(
        [exchange, gather, scatter, exchange, gather, gather]
    )
