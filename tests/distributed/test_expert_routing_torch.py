# SPDX-License-Identifier: Apache-2.0
"""Routing of all kinds on real ranks: extreme, repeated, recomputed, limited, counted, and its losses."""

import contextlib
import copy
import threading

import pytest
import torch
from expert_models import (
    DIM,
    EXPERTS,
    HIDDEN,
    batches,
    build,
    close,
    compare,
    shard,
)
from torch import nn

from hyper_parallel import (
    CommunicationLedger,
    MixedPrecisionPolicy,
    Replicate,
    Replicated,
    Shard,
    distribute_tensor,
    fully_shard,
    get_platform,
    init_device_mesh,
    init_empty_weights,
    parallelize_module,
    replicate,
)
from hyper_parallel.core.activation_checkpoint import checkpoint_wrapper
from hyper_parallel.core.dtensor.initialisation import init_parameters
from hyper_parallel.core.expert_parallel import (
    Capacity,
    ExpertParallel,
    ExpertTensorParallel,
    GroupedExperts,
    MoE,
    TensorParallel,
    collect_aux_losses,
    load_balance_loss,
    update_expert_bias,
    watch_experts,
    z_loss,
)
from hyper_parallel.core.pipeline_parallel import PipelineStage, Schedule1F1B
from hyper_parallel.core.pipeline_parallel.comm_compute_overlap import (
    CommComputeOverlap,
)
from hyper_parallel.testing import on_ranks

R, S = Replicate(), Shard(0)


def line(ranks, name="ep"):
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=(name,))[name]


def routed_to(experts, **options):
    """A model whose tokens all go to these experts."""
    model = build(len(experts), **options)
    model.expert_bias[experts] = 100.0
    return model


@on_ranks(4)
@pytest.mark.parametrize("experts", [[0], [7], [2, 3]])
def test_all_tokens_to_one_expert(experts):
    """Of four ranks three have no tokens to compute, and none has tokens for all of its experts."""
    mesh, start = line(4), routed_to(experts)
    ledger = compare(start, batches(4), mesh, lambda many: shard(many, mesh))
    assert ledger.counts(backward=True) == {"all_to_all_single": 2}
    many = copy.deepcopy(start)
    shard(many, mesh)
    many(batches(4)[mesh.get_local_rank()]).sum().backward()
    for parameter in many.experts.parameters():
        for number, gradient in enumerate(parameter.grad.full_tensor()):
            assert bool(gradient.any()) == (number in experts)


@on_ranks(4)
def test_rank_with_zero_tokens__forward_backward():
    mesh, start = line(4), build(1)
    for sizes in ([0, 4, 0, 0], [0, 0, 0, 0]):
        for before in (True, False):
            start.score_before_experts = before
            compare(start, batches(4, sizes), mesh, lambda many: shard(many, mesh))


@on_ranks(2)
def test_expert_gradients_not_scaled_by_ep():
    """A mean over all ranks' tokens, as data parallel takes it, gives the same gradients with ep and without."""
    mesh, start = line(2), build(2)
    parts = batches(2)
    one = copy.deepcopy(start)
    one(torch.cat(parts)).square().mean().backward()
    for shares in (False, True):
        many = copy.deepcopy(start)
        if shares:
            shard(many, mesh)
        many(parts[mesh.get_local_rank()]).square().mean().backward()
        for name, parameter in many.experts.named_parameters():
            found = parameter.grad
            if shares:
                found = found.full_tensor()
            else:
                torch.distributed.all_reduce(found)
            close(found / 2, one.experts.get_parameter(name).grad, name)


@on_ranks(2)
def test_one_rank_or_no_style_communicates_nothing():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
    many = build(2)
    shard(many, mesh["ep"])
    with CommunicationLedger(mesh) as ledger:
        many(batches(1)[0]).sum().backward()
    assert not ledger.entries


@on_ranks(2)
def test_combine_is_bitwise_deterministic():
    """Twice, and on one rank: experts multiply the same rows in the same order."""
    mesh, start = line(2), build(4)
    parts = batches(2)
    rank = mesh.get_local_rank()
    found = []
    with torch.no_grad():
        weights, index, _ = start.router(torch.cat(parts))
    chosen = {"top_k_index": index, "top_k_weights": weights}
    of_experts = start.experts(torch.cat(parts), **chosen).chunk(2)[rank]
    for _ in range(2):
        many = copy.deepcopy(start)
        shard(many, mesh)
        own = {name: value.chunk(2)[rank] for name, value in chosen.items()}
        assert many.experts(parts[rank], **own).equal(of_experts)
        leaf = parts[rank].clone().requires_grad_()
        output = many(leaf)
        output.square().sum().backward()
        found.append([output.detach(), leaf.grad, many.router.gate.weight.grad])
    for one, other in zip(*found, strict=True):
        assert one.equal(other)


@on_ranks(2)
def test_one_style_on_many_layers_and_two_micro_batches():
    """Two calls of each module before a backward, in the order of a pipeline; and calls in two threads."""
    mesh = line(2)
    torch.manual_seed(0)
    start = nn.Sequential(build(2), build(3))
    micro = [batches(2), [part * 2 + 1 for part in batches(2)]]
    one = copy.deepcopy(start)
    expected = [one(torch.cat(parts)) for parts in micro]
    for output in expected:
        output.square().sum().backward()
    many, style = copy.deepcopy(start), ExpertParallel()
    for layer in many:
        style.apply(layer.experts, mesh)
    before = {name: id(value) for name, value in vars(many[0].experts).items()}
    rank = mesh.get_local_rank()
    outputs = [many(parts[rank]) for parts in micro]
    for output in reversed(outputs):
        output.square().sum().backward()
    for output, whole in zip(outputs, expected, strict=True):
        close(output, whole.chunk(2)[rank])
    for name, parameter in many.named_parameters():
        if "experts" in name and "shared" not in name:
            close(parameter.grad.full_tensor(), one.get_parameter(name).grad, name)
    assert before == {name: id(value) for name, value in vars(many[0].experts).items()}
    run_in_threads(many, micro, rank, expected)


def run_in_threads(many, micro, rank, expected):
    """Forward of one micro batch waits within its layer until the other has gone through it."""
    entered, go_on, found = threading.Event(), threading.Event(), {}

    class Waiting(ExpertParallel):
        def _token_combine(self, module, routed_output, device_mesh, ctx):
            if threading.current_thread().name == "first" and not entered.is_set():
                entered.set()
                go_on.wait(60)
            return super()._token_combine(module, routed_output, device_mesh, ctx)

    mesh = line(2)
    layer = build(2)
    Waiting().apply(layer.experts, mesh)
    one = build(2)

    def first():
        found[0] = layer(micro[0][rank])

    thread = threading.Thread(target=first, name="first")
    thread.start()
    assert entered.wait(60)
    found[1] = layer(micro[1][rank])
    go_on.set()
    thread.join(60)
    for number, parts in enumerate(micro):
        close(found[number], one(torch.cat(parts)).chunk(2)[rank])


@on_ranks(2)
def test_router_decision_equal_at_recompute():
    """Recomputation makes the same exchanges, and neither counts tokens nor collects losses again."""
    mesh = line(2)
    start = build(2, load_balance_coeff=0.1)
    parts, rank = batches(2), mesh.get_local_rank()
    results = []
    for wraps in (False, True):
        many = copy.deepcopy(start)
        shard(many, mesh)
        run = checkpoint_wrapper(many) if wraps else many
        leaf = parts[rank].clone().requires_grad_()
        with collect_aux_losses() as aux, watch_experts() as load:
            loss = run(leaf).square().sum() + aux.total()
            with CommunicationLedger(mesh) as ledger:
                loss.backward()
        assert (len(aux.losses), len(load.calls)) == (1, 1)
        assert many.tokens_per_expert.sum() == 5 * 2
        # Recomputation ends when all is there that backward needs, perhaps before the last exchange.
        assert ledger.counts()["all_to_all_single"] in ((4, 5) if wraps else (2,))
        results.append([leaf.grad, many.experts.w2.grad.to_local()])
    for one, other in zip(*results, strict=True):
        assert one.equal(other)


@on_ranks(2)
def test_counts_once_under_activation_checkpoint():
    """Also where the framework recomputes with a forward that is not recorded first."""
    from torch.utils.checkpoint import checkpoint

    mesh, many = line(2), build(2)
    shard(many, mesh)
    leaf = batches(2)[mesh.get_local_rank()].requires_grad_()
    for reentrant in (False, True):
        checkpoint(many, leaf, use_reentrant=reentrant).sum().backward()
    assert many.tokens_per_expert.sum() == 2 * 5 * 2


@on_ranks(2)
def test_eval_does_not_move_the_bias():
    mesh, many = line(2), build(2)
    shard(many, mesh)
    many.eval()
    with torch.no_grad():
        many(batches(2)[mesh.get_local_rank()])
    assert not many.tokens_per_expert.any()
    many.train()
    many(batches(2)[mesh.get_local_rank()])
    assert many.tokens_per_expert.sum() == 10


def test_micro_batches_on_two_threads_are_all_counted(monkeypatch):
    """Even where both have read the counts before one of them writes."""
    model, tokens = build(2), batches(1, [3])[0]
    platform = get_platform()
    right, both = platform.copy_into, threading.Barrier(2)

    def copy_late(target, source):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        right(target, source)

    monkeypatch.setattr(platform, "copy_into", copy_late)
    threads = [threading.Thread(target=model, args=(tokens,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.tokens_per_expert.sum() == 2 * 3 * 2


def test_scores_have_float32_under_autocast():
    model = MoE(DIM, HIDDEN, EXPERTS, 2)
    tokens = batches(1)[0].float()
    weights, index, _ = model.router(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        found, chosen, _ = model.router(tokens)
        assert (tokens @ tokens.T).dtype is torch.bfloat16
    assert chosen.equal(index)
    assert found.equal(weights)


@on_ranks(4)
def test_counts_of_all_ranks_and_micro_batches_move_the_bias():
    mesh, start = line(4), build(2)
    sizes = [3, 2, 0, 4]
    one, many = copy.deepcopy(start), copy.deepcopy(start)
    shard(many, mesh)
    for _ in range(2):  # steps
        for scale in (1, -2):  # micro batches
            parts = [part * scale for part in batches(4, sizes)]
            one(torch.cat(parts))
            many(parts[mesh.get_local_rank()])
        counted = one.tokens_per_expert.float()
        step = (counted.mean() - counted).sign().double() * 0.01
        before = one.expert_bias.clone()
        for model in (one, many):
            update_expert_bias(model, lr=0.01)
        assert one.expert_bias.equal(before + step)
        assert many.expert_bias.equal(one.expert_bias)
        assert not many.tokens_per_expert.any()
    update_expert_bias(one, lr=0.5, centers=True, num_recomputations=2)
    assert one.expert_bias.mean().abs() < 1e-6
    assert "expert_bias" in one.state_dict()
    assert "tokens_per_expert" not in one.state_dict()


@on_ranks(2)
def test_replicas_of_the_router_stay_bitwise_equal_after_ten_steps():
    mesh, many = line(2), build(2)
    shard(many, mesh)
    optimizer = torch.optim.Adam(many.parameters(), 0.01)
    part = batches(2)[mesh.get_local_rank()]
    for _ in range(10):
        optimizer.zero_grad()
        many(part).square().mean().backward()
        for parameter in many.parameters():
            if not hasattr(parameter.grad, "full_tensor"):
                torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
    mine = many.router.gate.weight.detach()
    theirs = mine.clone()
    torch.distributed.broadcast(theirs, 0)
    assert mine.equal(theirs)
    assert mine.isfinite().all()


# --- losses


def probabilities_of(model, tokens):
    logits, _, index = model.router.choose(tokens, model.expert_bias)
    return logits, model.router.probabilities(logits), index


def test_losses_by_their_formulas():
    model, [tokens] = build(2, router_kwargs={"score_func": "softmax"}), batches(1, [6])
    logits, scores, index = probabilities_of(model, tokens)
    counts = torch.zeros(2, EXPERTS).double()
    for token, chosen in enumerate(index.tolist()):
        counts[token // 3, chosen] += 1
    share, mean = counts.sum(0) / 12, scores.mean(0)
    close(load_balance_loss(scores, index), EXPERTS * (share * mean).sum())
    close(
        load_balance_loss(scores, index, kind="global"), EXPERTS * (share * mean).sum()
    )
    of_runs = (counts / 6 * scores.reshape(2, 3, -1).mean(1)).sum(1) * EXPERTS
    found = load_balance_loss(scores, index, kind="sequence", sequences=2)
    close(found, of_runs.mean())
    close(z_loss(logits), logits.logsumexp(-1).square().mean())
    mask = torch.tensor([1, 1, 1, 0, 0, 1]).bool()
    kept = load_balance_loss(scores[mask], index[mask])
    close(load_balance_loss(scores, index, mask=mask), kept)
    close(z_loss(logits, mask), z_loss(logits[mask]))
    with pytest.raises(ValueError, match="kind must be"):
        load_balance_loss(scores, index, kind="sinkhorn")


@on_ranks(4)
def test_aux_loss_gradient__same_for_any_dp_and_micro_batch_size():
    """Sequences divided over ranks and micro batches; averaged as data parallel does."""
    mesh, start = line(4), build(2, router_kwargs={"score_func": "softmax"})
    parts = batches(4, [6] * 4)  # of two sequences each

    def loss_of(model, tokens, kind, sequences):
        logits, scores, index = probabilities_of(model, tokens)
        options = {"sequences": sequences} if kind == "sequence" else {"mesh": mesh}
        return load_balance_loss(scores, index, kind=kind, **options) + z_loss(logits)

    for kind, micro in (("sequence", 1), ("sequence", 2), ("global", 1)):
        one, many = copy.deepcopy(start), copy.deepcopy(start)
        alone_kind = "switch" if kind == "global" else kind
        expected = loss_of(one, torch.cat(parts), alone_kind, 8)
        expected.backward()
        total = 0
        for tokens in parts[mesh.get_local_rank()].chunk(micro):
            loss = loss_of(many, tokens, kind, 2 // micro) / micro
            loss.backward()
            total += loss.detach()
        torch.distributed.all_reduce(total)
        close(total / 4, expected.detach(), kind)
        found = many.router.gate.weight.grad
        torch.distributed.all_reduce(found)
        close(found / 4, one.router.gate.weight.grad, kind)


@on_ranks(2)
def test_the_global_loss_is_the_same_on_all_ranks():
    mesh, model = line(2), build(2, router_kwargs={"score_func": "softmax"})
    parts = batches(2, [7, 4])
    _, scores, index = probabilities_of(model, torch.cat(parts))
    expected = load_balance_loss(scores, index)
    _, scores, index = probabilities_of(model, parts[mesh.get_local_rank()])
    close(load_balance_loss(scores, index, kind="global", mesh=mesh), expected)


@on_ranks(2)
def test_losses_of_a_rank_without_tokens_are_zero():
    """Neither an error on one rank, for which the others would wait, nor a loss that is no number."""
    mesh = line(2)
    for coefficient, sizes in ((0.1, [0, 4]), (0.1, [0, 0])):
        many = build(2, load_balance_coeff=coefficient)
        shard(many, mesh)
        tokens = batches(2, sizes)[mesh.get_local_rank()]
        with collect_aux_losses() as aux:
            output = many(tokens)
        (output.sum() + aux.total()).backward()
        assert (aux.total() == 0) == (len(tokens) == 0)
        assert aux.total().isfinite()
        assert all(p.grad.isfinite().all() for p in many.parameters())
    model = build(2)
    logits, scores, index = probabilities_of(model, batches(1, [4])[0])
    nothing = torch.zeros(4, dtype=torch.bool)
    for kind in ("switch", "sequence"):
        found = load_balance_loss(scores, index, kind=kind, sequences=2, mask=nothing)
        assert found == 0
    half = torch.tensor([1, 1, 0, 0]).bool()
    found = load_balance_loss(scores, index, kind="sequence", sequences=2, mask=half)
    close(found, load_balance_loss(scores[:2], index[:2]) / 2)
    assert z_loss(logits, nothing) == z_loss(logits[:0]) == 0
    mesh_wide = load_balance_loss(
        *(x[: 4 * mesh.get_local_rank()] for x in (scores, index)),
        kind="global",
        mesh=mesh,
    )
    close(mesh_wide, load_balance_loss(scores, index))


@on_ranks(4)
def test_silent_composition_bugs():
    """Losses with padding, of tokens that ranks divide along any axes, as with sequence parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    start = build(2, router_kwargs={"score_func": "softmax"})
    [tokens] = batches(1, [12])
    mask = torch.arange(12) % 5 != 3

    def loss_of(model, tokens, mask):
        logits, scores, index = probabilities_of(model, tokens)
        loss = load_balance_loss(scores, index, mask=mask) + z_loss(logits, mask)
        return loss + load_balance_loss(scores, index, kind="sequence", sequences=2)

    one = copy.deepcopy(start)
    expected = loss_of(one, tokens, mask)
    expected.backward()
    for placements in ([S, S], [S, R], [R, S], [R, R]):
        many = copy.deepcopy(start)
        parallelize_module(many.router, mesh["tp"], Replicated())
        replicate(many.router, mesh["dp"])
        many.expert_bias = distribute_tensor(many.expert_bias, mesh, [R, R])
        given = [distribute_tensor(x, mesh, placements) for x in (tokens, mask)]
        loss = loss_of(many, *given)
        loss.backward()
        close(loss.detach().full_tensor(), expected.detach())
        found = many.router.gate.weight.grad.full_tensor()
        close(found, one.router.gate.weight.grad, str(placements))


def test_aux_loss_is_not_dropped():
    model, [tokens] = build(2, load_balance_coeff=0.5), batches(1)
    model(tokens)  # nobody asks: nothing is kept
    with collect_aux_losses() as outer:
        model(tokens)
        with collect_aux_losses() as inner:
            model(tokens)
            model(tokens)
    assert (len(outer.losses), len(inner.losses)) == (1, 2)
    _, scores, index = probabilities_of(model, tokens)
    close(outer.total(), 0.5 * load_balance_loss(scores, index))
    inner.total().backward()
    assert model.router.gate.weight.grad.abs().max() > 0
    assert collect_aux_losses().__enter__().total() == 0.0


# --- capacity


def by_hand(model, tokens, limit, policy):
    """Each token's outputs from the experts that still take it."""
    weights, index, _ = model.router(tokens, model.expert_bias)
    output = model.shared_expert(tokens)
    for expert in range(EXPERTS):
        taken = (index == expert).nonzero().tolist()
        if policy == "probs":
            taken.sort(key=lambda place: -weights[tuple(place)].item())
        for token, choice in taken[:limit]:
            weight, x = weights[token, choice], tokens[token]
            w1, w2, w3 = (getattr(model.experts, f"w{n}")[expert] for n in (1, 2, 3))
            if model.score_before_experts:
                x, weight = x * weight, 1
            y = (nn.functional.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
            row = torch.zeros_like(output)
            row[token] = y * weight
            output = output + row
    return output


@on_ranks(2)
def test_capacity_drops_what_exceeds_it():
    mesh = line(2)
    part = batches(2, [9, 7])[mesh.get_local_rank()]
    for policy, before in (("probs", False), ("position", True)):
        for pads in (False, True):
            capacity = Capacity(0.5, policy, pads)
            start = build(3, capacity=capacity, score_before_experts=before)
            start.expert_bias[1] = 3.0
            limit = capacity.limit(len(part), 3, EXPERTS)
            one = copy.deepcopy(start)
            leaf = part.clone().requires_grad_()
            expected = by_hand(one, leaf, limit, policy)
            expected.square().sum().backward()
            many = copy.deepcopy(start)
            shard(many, mesh)
            own = part.clone().requires_grad_()
            with watch_experts() as load:
                output = many(own)
            output.square().sum().backward()
            close(output, expected)
            close(own.grad, leaf.grad)
            grads = many.router.gate.weight.grad, one.router.gate.weight.grad
            close(*grads)
            assert load.dropped > 0
            assert max(load.tokens_per_expert) == limit
            if pads:
                assert load.tokens_per_expert == (limit,) * EXPERTS
    with pytest.raises(ValueError, match="policy must be"):
        Capacity(1.0, "luck")


@on_ranks(2)
def test_telemetry():
    mesh, many = line(2), routed_to([1, 6])
    shard(many, mesh)
    with watch_experts() as load:
        many(batches(2)[mesh.get_local_rank()])
        many(batches(2)[0])
    assert load.tokens_per_expert == (0, 10, 0, 0, 0, 0, 10, 0)
    assert load.tokens_per_rank == (10, 10)
    assert load.imbalance == 4
    assert load.dropped == 0
    assert load.nbytes == 2 * 10 * DIM * 8
    assert load.sum_over(mesh) == (0, 20, 0, 0, 0, 0, 20, 0)


# --- refusals and small things


@on_ranks(4)
def test_experts_that_ranks_cannot_share_evenly():
    mesh = line(4)
    with pytest.raises(
        ValueError, match="6 experts cannot be shared evenly by 4 ranks"
    ):
        ExpertParallel().apply(GroupedExperts(DIM, HIDDEN, 6), mesh)
    with pytest.raises(TypeError, match="has no weights of all experts"):
        ExpertParallel().apply(nn.Linear(2, 2), mesh)


@on_ranks(2)
def test_router_gradient__score_before_and_after():
    """With weights of zero outputs too, the router learns."""
    mesh = line(2)
    for before in (True, False):
        start = build(2, score_before_experts=before, shared_expert=None)
        if not before:
            nn.init.zeros_(start.experts.w2)
            nn.init.normal_(start.experts.w2[1:])
        compare(start, batches(2), mesh, lambda many: shard(many, mesh))


@on_ranks(2)
def test_micro_batches_of_a_pipeline():
    """Two stages of a mixture each, on their own ranks of the expert axis of one."""
    stage = get_platform().get_rank()
    parts = [build(2), build(3)]
    same = copy.deepcopy(nn.Sequential(*parts))
    x = torch.cat(batches(1, [8]))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "ep"))
    shard(parts[stage], mesh["ep"])

    def loss_of(output, target):
        return (output - target).square().mean()

    pipe = Schedule1F1B(PipelineStage(parts[stage], stage, 2), 4, loss_of)
    pipe.step(x, target=x)
    for part in x.chunk(4):
        (loss_of(same(part), part) / 4).backward()
    for name, parameter in parts[stage].named_parameters():
        found = parameter.grad
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        close(found, same[stage].get_parameter(name).grad, name)


@on_ranks(4)
def test_micro_batches_of_a_pipeline_with_shared_experts():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    stage, row = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    parts = [build(2), build(3)]
    same = copy.deepcopy(nn.Sequential(*parts))
    both = batches(2, [8, 8])
    shard(parts[stage], mesh["ep"])

    def loss_of(output, target):
        return (output - target).square().mean()

    group = mesh["pp"].get_group()
    pipe = Schedule1F1B(PipelineStage(parts[stage], stage, 2, group=group), 4, loss_of)
    pipe.step(both[row], target=both[row])
    for x in both:
        for part in x.chunk(4):
            (loss_of(same(part), part) / 4).backward()
    for name, parameter in parts[stage].experts.named_parameters():
        expected = same[stage].experts.get_parameter(name).grad
        close(parameter.grad.full_tensor(), expected, name)


@on_ranks(4)
def test_etp_without_ep_reduces_over_the_right_group():
    """On a mesh of two axes only the ranks that share an expert add their parts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    start, both = build(2), batches(2)
    row = mesh.get_local_rank("dp")
    one, many = copy.deepcopy(start), copy.deepcopy(start)
    TensorParallel().apply(many.experts, mesh["tp"])
    output = many(both[row])
    output.square().sum().backward()
    expected = one(both[row])
    expected.square().sum().backward()
    close(output, expected)
    for name, parameter in many.named_parameters():
        found = parameter.grad
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        close(found, one.get_parameter(name).grad, name)


@on_ranks(4)
@pytest.mark.parametrize("uses_grouped_mm", [False, True])
@pytest.mark.parametrize("name", ["ep", "tp"])
def test_router_gradient__ep__tp__every_experts_backend(name, uses_grouped_mm):
    """In float32, in which the framework multiplies all experts at once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", name))[name]
    start = MoE(8, 8, EXPERTS, 2, use_grouped_mm=uses_grouped_mm)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in start.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    both = torch.randn(2, 6, 8, generator=draw)
    one, many = copy.deepcopy(start).double(), copy.deepcopy(start)
    style = ExpertParallel() if name == "ep" else TensorParallel()
    style.apply(many.experts, mesh)
    rows = both[mesh.get_local_rank()] if name == "ep" else both.flatten(0, 1)
    for _ in range(3):  # what was not written might be read in a later step
        many.zero_grad()
        many(rows).square().sum().backward()
    one(both.flatten(0, 1).double()).square().sum().backward()
    for key, parameter in many.named_parameters():
        found = parameter.grad
        if hasattr(found, "full_tensor"):
            found = found.full_tensor()
        elif name == "ep":
            torch.distributed.all_reduce(found, group=mesh.get_group())
        wanted = one.get_parameter(key).grad.float()
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-3)


@on_ranks(4)
def test_grad_norm_counts_every_expert_once():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    start = build(2)
    one = copy.deepcopy(start)
    one(torch.cat(batches(2))).square().sum().backward()
    expected = torch.nn.utils.get_total_norm(p.grad for p in one.experts.parameters())
    both = batches(2)
    own = both[mesh.get_local_rank("ep")]
    for style, axes, rows in (
        (ExpertParallel(), mesh["ep"], own),
        (TensorParallel(), mesh["tp"], torch.cat(both)),
        (ExpertTensorParallel(), mesh, own),
    ):
        many = copy.deepcopy(start)
        style.apply(many.experts, axes)
        many(rows).square().sum().backward()
        norm = get_platform().clip_grad_norm_(many.experts, 1e9)
        close(norm, expected, str(style))


@on_ranks(2)
def test_experts_that_begin_without_data():
    mesh = line(2)
    torch.manual_seed(0)
    one = MoE(DIM, HIDDEN, EXPERTS)
    torch.manual_seed(0)
    with init_empty_weights():
        many = MoE(DIM, HIDDEN, EXPERTS)
    shard(many, mesh)
    init_parameters(many)
    for name, parameter in many.named_parameters():
        found = parameter.detach()
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        assert found.equal(one.get_parameter(name)), name


@on_ranks(2)
def test_the_bias_moves_in_models_of_bfloat16():
    many = build(2).bfloat16()
    shard(many, line(2))
    for _ in range(3):
        many(batches(2)[0].bfloat16())
        before = many.expert_bias.float().clone()
        update_expert_bias(many, lr=1e-4)
        assert (many.expert_bias - before).abs().max() > 0.9e-4
    assert many.expert_bias.dtype == torch.float32


@on_ranks(4)
def test_tokens_and_experts_that_do_not_fit_together():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    tokens = distribute_tensor(torch.ones(4, DIM).double(), mesh["dp"], [S])
    chosen = {
        "top_k_index": torch.zeros(4, 1).long(),
        "top_k_weights": torch.ones(4, 1),
    }
    with pytest.raises(ValueError, match="is plain on every rank, but tokens are"):
        build(2).experts(tokens, **chosen)
    both = build(2)
    ExpertParallel().apply(both.experts, mesh["ep"])
    rows = distribute_tensor(torch.ones(4, DIM).double(), line(4, "all"), [R])
    with pytest.raises(ValueError, match="the same on ranks that share the experts"):
        both.experts(rows, **chosen)
    with pytest.raises(ValueError, match="expected a mesh of one axis"):
        ExpertParallel().apply(build(2).experts, mesh)
    with pytest.raises(ValueError, match="expected a mesh of two axes"):
        ExpertTensorParallel().apply(build(2).experts, mesh["ep"])
    with pytest.raises(TypeError, match="takes"):
        ExpertParallel().apply(Three(), mesh["ep"])
    odd = GroupedExperts(DIM, HIDDEN, EXPERTS)
    odd.w4 = nn.Parameter(torch.ones(EXPERTS, DIM, HIDDEN))
    with pytest.raises(TypeError, match="w4 of GroupedExperts is not known"):
        TensorParallel().apply(odd, mesh["ep"])


class Three(nn.Module):
    """Has experts, and takes what no style knows."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.ones(4, 2, 2))

    def forward(self, x, y, z):
        raise AssertionError


@on_ranks(2)
def test_mixed_precision_within_fully_shard():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
    model = build(2).float()
    shard(model, mesh["ep"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model.experts, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    output = model(batches(2)[mesh.get_local_rank("dp")].float())
    assert output.dtype == torch.bfloat16
    output.float().square().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.full_tensor().isfinite().all()


@on_ranks(2)
def test_copies_of_a_model_run_by_themselves():
    mesh = line(2)
    many = build(2)
    shard(many, mesh)
    copied = copy.deepcopy(many)
    with torch.no_grad():
        many.experts.w1.zero_()
    part = batches(2)[mesh.get_local_rank()]
    expected = build(2)(torch.cat(batches(2))).chunk(2)[mesh.get_local_rank()]
    close(copied(part), expected)
    assert not torch.allclose(many(part), expected)


@on_ranks(4)
def test_two_data_axes_divide_the_batch():
    """Experts along one of them; along the other the model is replicated, or its state is sharded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    [batch] = batches(1, [8])
    one = build(2)
    one(batch).square().mean().backward()
    rows = batch.chunk(4)[get_platform().get_rank()]
    for shards in (False, True):
        many = build(2)
        shard(many, mesh["ep"])
        replicate(many, mesh["ep"])
        if shards:
            fully_shard(many.experts, mesh=mesh["dp"])
            fully_shard(many, mesh=mesh["dp"], batch_dim=0)
        else:
            replicate(many, mesh["dp"])
        output = many(rows)
        assert tuple(output.shape) == (8, DIM)
        output.square().mean().backward()
        for name, parameter in many.named_parameters():
            wanted = one.get_parameter(name).grad
            close(parameter.grad.full_tensor(), wanted, f"{shards}: {name}")


class Overlapped(ExpertParallel):
    """The exchange of one micro batch while the other one computes."""

    def __init__(self, overlap):
        self._token_dispatch = overlap.wrap_dispatch(super()._token_dispatch)
        self._token_combine = overlap.wrap_combine(super()._token_combine)


@on_ranks(2)
def test_forward_of_a_micro_batch_overlaps_backward_of_another():
    mesh, overlap = line(2), CommComputeOverlap()
    start = build(2)
    part = batches(2)[mesh.get_local_rank()]
    plain, many = copy.deepcopy(start), copy.deepcopy(start)
    shard(plain, mesh)
    Overlapped(overlap).apply(many.experts, mesh)
    for factor in (1, 2):
        plain(part * factor).square().sum().backward()
    first = many(part).square().sum()
    second, _ = overlap.run(lambda: many(part * 2).square().sum(), first.backward)
    second.backward()
    for name, parameter in many.named_parameters():
        found, wanted = parameter.grad, plain.get_parameter(name).grad
        if hasattr(found, "to_local"):
            found, wanted = found.to_local(), wanted.to_local()
        close(found, wanted, name)
    assert many.tokens_per_expert.equal(plain.tokens_per_expert)
