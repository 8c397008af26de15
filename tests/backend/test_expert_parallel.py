# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts on every framework: parts by formulas, and on real ranks against one process."""

import frame
import numpy as np
import pytest

from hyper_parallel import (
    CommunicationLedger,
    DTensor,
    fully_shard,
    init_device_mesh,
    local_batch,
    replicate,
)
from hyper_parallel.core.activation_checkpoint import checkpoint_wrapper
from hyper_parallel.core.expert_parallel import (
    ExpertParallel,
    ExpertTensorParallel,
    FeedForward,
    MoE,
    TensorParallel,
    TokenChoiceTopKRouter,
    collect_aux_losses,
    grouped_linear,
    update_expert_bias,
    watch_experts,
)
from hyper_parallel.core.expert_parallel.order import count_tokens, sort_by_expert
from hyper_parallel.platform import get_platform
from hyper_parallel.testing import on_ranks

platform = get_platform()
DIM, HIDDEN, EXPERTS = 6, 4, 4


def fill(module, seed=0):
    """The module in float64, with weights that both frameworks draw alike."""
    for number, (_, parameter) in enumerate(
        sorted(platform.parameters_dict(module).items())
    ):
        values = frame.draw(*parameter.shape, seed=100 * seed + number)
        platform.update_param_data(parameter, frame.tensor(values))
    frame.recording()
    return module


def build(top_k=2, bias=(0.0,) * EXPERTS, **options):
    model = fill(MoE(DIM, HIDDEN, EXPERTS, top_k, **options))
    platform.copy_into(model.expert_bias, frame.tensor(bias, "float32"))
    return model


# --- parts


def check_groups(counts, beyond=0, is_biased=False):
    """Output and gradients; rows beyond the counts are numbers that are none."""
    total = sum(counts)
    rows = frame.draw(total + beyond, 4)
    rows[total:] = np.nan
    weight, bias = frame.draw(3, 5, 4, seed=1), frame.draw(3, 5, seed=2)
    grad = frame.draw(total + beyond, 5, seed=3)
    leaves = [frame.leaf(x) for x in (rows, weight, bias)]
    given = {"bias": leaves[2]} if is_biased else {}
    output = grouped_linear(leaves[0], leaves[1], counts, **given)
    expected = np.zeros((total + beyond, 5))
    owners = np.repeat(np.arange(3), counts)
    for row, owner in enumerate(owners):
        expected[row] = weight[owner] @ rows[row] + is_biased * bias[owner]
    frame.equal(output, expected)
    if not total + beyond:
        return
    frame.backward([output], [grad])
    of_rows, of_weight, of_bias = map(np.zeros_like, (rows, weight, bias))
    for row, owner in enumerate(owners):
        of_rows[row] = weight[owner].T @ grad[row]
        of_weight[owner] += np.outer(grad[row], rows[row])
        of_bias[owner] += grad[row]
    frame.equal(frame.grad(leaves[0]), of_rows)
    frame.equal(frame.grad(leaves[1]), of_weight)
    if is_biased:
        frame.equal(frame.grad(leaves[2]), of_bias)


GROUPS = [[2, 0, 3], [0, 0, 0], [7, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("counts", GROUPS, ids=str)
def test_group_sizes_of_any_length(counts):
    check_groups(counts)


@pytest.mark.parametrize("counts", GROUPS, ids=str)
def test_unwritten_rows_give_no_nan(counts):
    check_groups(counts, beyond=2)


@pytest.mark.parametrize("counts", GROUPS[:3], ids=str)
def test_bias_of_grouped_experts_broadcasts_by_token(counts):
    check_groups(counts, is_biased=True)
    check_groups(counts, beyond=1, is_biased=True)


def test_rows_are_sorted_by_expert_and_then_by_token():
    index = np.array([[2, 0], [0, 1], [2, 1], [0, 2]])
    order = sort_by_expert(frame.tensor(index))
    tokens = frame.draw(4, 3)
    leaf = frame.leaf(tokens)
    rows = order.spread(leaf)
    frame.equal(rows, tokens[[0, 1, 3, 1, 2, 0, 2, 3]])
    frame.equal(order.gather(rows), 2 * tokens)
    frame.backward([rows], [np.ones((8, 3))])
    frame.equal(frame.grad(leaf), np.full((4, 3), 2.0))
    assert count_tokens(frame.tensor(index), 5).tolist() == [3, 2, 3, 0, 0]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


ROUTERS = [
    {},
    {"score_func": "softmax", "route_norm": True, "route_scale": 2.5},
    {"score_func": "softmax", "softmax_after_top_k": True},
    {"num_expert_groups": 4, "num_limited_groups": 2, "route_norm": True},
    {"num_expert_groups": 4, "num_limited_groups": 2, "group_score": "max"},
]


@pytest.mark.parametrize("options", ROUTERS, ids=str)
def test_router_by_its_formula(options):
    router = fill(TokenChoiceTopKRouter(DIM, 8, 3, **options))
    x, bias = frame.draw(20, DIM, seed=5), frame.draw(8, seed=6)
    logits = x @ frame.array(platform.detach(router.gate.weight)).T
    is_softmax = options.get("score_func") == "softmax"
    is_after = options.get("softmax_after_top_k", False)
    scores = sigmoid(logits) if not is_softmax else softmax(logits)
    scores = logits if is_after else scores
    choice = scores + bias
    groups = options.get("num_expert_groups")
    if groups:
        by_group = np.sort(choice.reshape(20, groups, -1), -1)
        best = by_group[:, :, -1 if "group_score" in options else -2 :].sum(-1)
        out = np.argsort(-best, -1)[:, options["num_limited_groups"] :]
        for row, left_out in zip(choice.reshape(20, groups, -1), out, strict=True):
            row[left_out] = -np.inf
    index = np.argsort(-choice, -1, kind="stable")[:, :3]
    weights = np.take_along_axis(scores, index, 1)
    weights = softmax(weights) if is_after else weights
    if options.get("route_norm"):
        weights = weights / weights.sum(-1, keepdims=True)
    weights = weights * options.get("route_scale", 1.0)
    found, chosen, counts = router(frame.tensor(x), frame.tensor(bias))
    assert frame.array(chosen).tolist() == index.tolist()
    frame.equal(platform.detach(found), weights)
    assert counts.tolist() == np.bincount(index.reshape(-1), minlength=8).tolist()


def test_equal_scores_go_to_the_first_experts():
    router = fill(TokenChoiceTopKRouter(DIM, 8, 3))
    platform.update_param_data(router.gate.weight, frame.tensor(np.zeros((8, DIM))))
    _, chosen, _ = router(frame.tensor(frame.draw(4, DIM)))
    assert frame.array(chosen).tolist() == [[0, 1, 2]] * 4


def test_scores_have_float32_whatever_the_parameters_have():
    router = TokenChoiceTopKRouter(DIM, 8, 3)
    weight = frame.tensor(frame.draw(8, DIM), "bfloat16")
    platform.update_param_data(router.gate.weight, weight)
    for own, wanted in (
        ("bfloat16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ):
        weights, _, _ = router(frame.tensor(frame.draw(4, DIM), own))
        assert weights.dtype == frame.dtype(wanted)


def test_operators_without_autocast_keep_the_dtype_of_their_operands():
    x = frame.tensor(frame.draw(4, DIM), "float32")
    with platform.without_autocast(x):
        product = platform.operator("linear")(x, x)
    assert product.dtype == frame.dtype("float32")


def test_impossible_routers():
    for options, message in (
        ({"top_k": 9}, "top_k must be from 1 to 8"),
        ({"score_func": "relu"}, "score_func must be"),
        ({"group_score": "mean"}, "group_score must be"),
        ({"num_expert_groups": 3}, "8 experts cannot be chosen"),
        ({"top_k": 3, "num_expert_groups": 4, "num_limited_groups": 1}, "fewer than"),
    ):
        with pytest.raises(ValueError, match=message):
            TokenChoiceTopKRouter(DIM, 8, **options)


def test_score_before_and_after_are_two_functions():
    x = frame.tensor(frame.draw(5, DIM))
    outputs = []
    for before in (True, False):
        model = build(2, score_before_experts=before)
        weights, index, _ = model.router(x)
        weights, index = (frame.array(platform.detach(v)) for v in (weights, index))
        w1, w2, w3 = (
            frame.array(platform.detach(getattr(model.experts, f"w{n}")))
            for n in (1, 2, 3)
        )
        expected = np.zeros((5, DIM))
        for token, choice in np.ndindex(5, 2):
            expert, weight = index[token, choice], weights[token, choice]
            given = frame.array(x)[token] * (weight if before else 1)
            gate = w1[expert] @ given
            y = w2[expert] @ (gate * sigmoid(gate) * (w3[expert] @ given))
            expected[token] += y * (1 if before else weight)
        frame.equal(platform.detach(model(x)), expected)
        outputs.append(expected)
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3


# --- on ranks


def whole(gradient, parameter):
    """All of a gradient, which MindSpore has as plain shards."""
    if isinstance(parameter, DTensor) and not isinstance(gradient, DTensor):
        gradient = DTensor(gradient, parameter.layout, parameter.shape)
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def gradients(model):
    found = {}
    for name, parameter in platform.parameters_dict(model).items():
        gradient = platform.gradient_of(parameter)
        assert gradient is not None, name
        found[name] = frame.array(platform.detach(whole(gradient, parameter)))
    return found


def check(apply, parts, part, sums, **options):
    """One step of a rank that has these tokens of the parts, against one process with all of them."""
    shared = fill(FeedForward(DIM, HIDDEN), seed=9)
    one = build(shared_expert=shared, **options)
    leaf = frame.leaf(np.concatenate(parts))
    weights = frame.draw(*leaf.shape, seed=7)
    expected = one(leaf)
    frame.backward([expected], [weights])
    starts = np.cumsum([0, *(len(x) for x in parts)])
    here = slice(starts[part], starts[part + 1])
    many = build(shared_expert=fill(FeedForward(DIM, HIDDEN), seed=9), **options)
    apply(many.experts)
    own = frame.leaf(parts[part])
    with CommunicationLedger() as ledger, watch_experts() as load:
        output = many(own)
        frame.equal(
            platform.detach(output), frame.array(platform.detach(expected))[here]
        )
        if len(parts[part]):
            frame.backward([output], [weights[here]])
        else:
            platform.backward([output], [platform.full_like(output, 0)])
    assert sum(load.tokens_per_expert) <= len(parts[part]) * 2
    if len(parts[part]):
        frame.equal(frame.grad(own), frame.array(frame.grad(leaf))[here])
    wanted = gradients(one)
    for name, own in gradients(many).items():
        total = frame.tensor(own)
        is_expert = name.startswith("experts.")
        if not (is_expert or frame.IS_TORCH or all(map(len, parts))):
            continue  # linear layers of MindSpore's CPU have no gradient of empty tensors
        if not is_expert:
            total = platform.all_reduce(total, sums)
        frame.equal(total, wanted[name], 1e-10)
    return ledger


@on_ranks(2)
def test_expert_parallel():
    mesh = init_device_mesh(platform.device_type(), (2,), mesh_dim_names=("ep",))
    rank = platform.get_rank()
    parts = [frame.draw(5, DIM, seed=11), frame.draw(3, DIM, seed=12)]
    for before in (True, False):
        ledger = check(
            lambda experts: ExpertParallel().apply(experts, mesh["ep"]),
            parts,
            rank,
            mesh.get_group(),
            score_before_experts=before,
        )
        assert ledger.counts(backward=False) == {"all_to_all_single": 3}
        assert ledger.counts(backward=True) == {"all_to_all_single": 2}


@on_ranks(2)
def test_all_tokens_to_one_rank():
    """The other one has no rows to compute, and takes part in every exchange."""
    mesh = init_device_mesh(platform.device_type(), (2,), mesh_dim_names=("ep",))
    rank = platform.get_rank()
    parts = [frame.draw(5, DIM, seed=11), frame.draw(3, DIM, seed=12)]

    def apply(experts):
        ExpertParallel().apply(experts, mesh["ep"])

    check(apply, parts, rank, mesh.get_group(), bias=(9.0, 9.0, 0.0, 0.0))


@on_ranks(2)
def test_a_rank_without_tokens():
    mesh = init_device_mesh(platform.device_type(), (2,), mesh_dim_names=("ep",))
    parts = [frame.draw(0, DIM), frame.draw(3, DIM, seed=12)]

    def apply(experts):
        ExpertParallel().apply(experts, mesh["ep"])

    check(apply, parts, platform.get_rank(), mesh.get_group())


@on_ranks(2)
def test_tensor_parallel():
    mesh = init_device_mesh(platform.device_type(), (2,), mesh_dim_names=("tp",))
    alone = init_device_mesh(
        platform.device_type(), (2, 1), mesh_dim_names=("tp", "one")
    )

    def apply(experts):
        TensorParallel().apply(experts, mesh["tp"])

    check(apply, [frame.draw(5, DIM, seed=11)], 0, alone.get_group("one"))


@on_ranks(4)
def test_expert_tensor_parallel():
    mesh = init_device_mesh(platform.device_type(), (2, 2), mesh_dim_names=("ep", "tp"))
    parts = [frame.draw(5, DIM, seed=11), frame.draw(3, DIM, seed=12)]

    def apply(experts):
        ExpertTensorParallel().apply(experts, mesh)

    check(apply, parts, mesh.get_local_rank("ep"), mesh.get_group("ep"))


class TheirExperts(platform.Module):
    """Experts that know nothing of this library."""

    def __init__(self):
        super().__init__()
        shapes = {"w1": (EXPERTS, HIDDEN, DIM), "w2": (EXPERTS, DIM, HIDDEN)}
        for seed, (name, shape) in enumerate(shapes.items()):
            values = frame.tensor(frame.draw(*shape, seed=seed))
            setattr(self, name, platform.Parameter(values))

    def forward(self, rows, counts):
        parts, start = [], 0
        for expert, count in enumerate(counts.tolist()):
            if expert == self.w1.shape[0]:
                break
            part = rows[start : start + count]
            start += count
            if count:
                linear = platform.operator("linear")
                hidden = frame.tanh(linear(part, self.w1[expert]))
                parts.append(linear(hidden, self.w2[expert]))
        return platform.cat(parts, 0)

    construct = forward


@on_ranks(2)
def test_modules_that_take_sorted_rows():
    mesh = init_device_mesh(platform.device_type(), (2,), mesh_dim_names=("ep",))
    frame.recording()
    counts = [[1, 0, 2, 1], [2, 3, 0, 1]]
    rows = [frame.draw(sum(count), DIM, seed=20 + sum(count)) for count in counts]
    rank = platform.get_rank()
    one, many = TheirExperts(), TheirExperts()
    ExpertParallel().apply(many, mesh["ep"])
    expected = []
    for part, count in zip(rows, counts, strict=True):
        leaf = frame.leaf(part)
        output = one(leaf, frame.tensor(count))
        frame.backward([output], [np.ones(output.shape)])
        expected.append((frame.array(platform.detach(output)), frame.grad(leaf)))
    leaf = frame.leaf(rows[rank])
    output = many(leaf, frame.tensor(counts[rank]))
    frame.backward([output], [np.ones(output.shape)])
    frame.equal(platform.detach(output), expected[rank][0])
    frame.equal(frame.grad(leaf), frame.array(expected[rank][1]))
    wanted = gradients(one)
    for name, gradient in gradients(many).items():
        frame.equal(gradient, wanted[name], 1e-10)


@on_ranks(2)
def test_the_bias_and_the_losses():
    mesh = init_device_mesh(platform.device_type(), (2,), mesh_dim_names=("ep",))
    model = build(2, load_balance_coeff=0.5)
    ExpertParallel().apply(model.experts, mesh["ep"])
    x = frame.draw(6, DIM, seed=20)[platform.get_rank() :: 2]
    for is_training in (False, True):
        (model.train if frame.IS_TORCH else model.set_train)(is_training)
        with collect_aux_losses() as aux:
            model(frame.tensor(x))
        assert model.tokens_per_expert.sum().item() == 6 * is_training
    assert 0.4 < aux.total().item() < 2
    counts = platform.all_reduce(
        platform.clone(model.tokens_per_expert), mesh.get_group()
    )
    update_expert_bias(model, 0.25)
    expected = np.sign(3 - frame.array(counts)) * 0.25
    frame.equal(model.expert_bias, expected)


@on_ranks(2)
def test_whole_batches_of_a_replicated_model():
    """Tokens are distributed tensors: the router, losses and counts are about the batch of all ranks."""
    mesh = init_device_mesh(platform.device_type(), (2,), mesh_dim_names=("dp",))
    x, weights = frame.draw(6, DIM, seed=11), frame.draw(6, DIM, seed=7)
    rank = platform.get_rank()
    part = slice(3 * rank, 3 * rank + 3)
    options = {"load_balance_coeff": 0.5, "bias": (0.0, 3.0, 0.0, -3.0)}
    one, many = build(**options), build(**options)
    ExpertParallel().apply(many.experts, mesh["dp"])
    replicate(many, mesh["dp"])
    results = []
    for model, rows in ((one, slice(None)), (many, part)):
        (model.train if frame.IS_TORCH else model.set_train)(True)
        with collect_aux_losses() as aux:
            output = model(frame.leaf(x[rows]))
        weight = frame.tensor(weights[rows])
        if model is many:
            weight = local_batch(weight, many)
        loss = (output * weight).sum() + aux.total()
        platform.backward([loss])
        update_expert_bias(model, 0.25)
        bias = platform.detach(whole(model.expert_bias, model.expert_bias))
        results.append((platform.detach(whole(loss, loss)), bias, gradients(model)))
    (loss, bias, wanted), (found_loss, found_bias, found) = results
    frame.equal(found_loss, frame.array(loss), 1e-7)  # the losses are of float32 scores
    frame.equal(found_bias, frame.array(bias))
    for name, gradient in found.items():
        frame.equal(gradient, wanted[name], 1e-6)


@on_ranks(4)
def test_experts_within_fully_shard():
    """Dense parameters are sharded over all ranks, experts over those that have the same ones."""
    mesh = init_device_mesh(
        platform.device_type(), (2, 2), mesh_dim_names=("efsdp", "ep")
    )
    data = mesh["efsdp", "ep"].flatten("dp")
    x, weights = frame.draw(8, DIM, seed=11), frame.draw(8, DIM, seed=7)
    rank = platform.get_rank()
    part = slice(2 * rank, 2 * rank + 2)
    one, many = build(), build()
    output = one(frame.leaf(x))
    frame.backward([output], [weights / 8])
    ExpertParallel().apply(many.experts, mesh["ep"])
    fully_shard(many.experts, mesh=mesh["efsdp"])
    many.experts.set_gradient_divide_factor(4)
    fully_shard(many, mesh=data)
    with platform.tape():
        own = many(frame.leaf(x[part]))
    frame.backward([own], [weights[part] / 2])
    wanted = gradients(one)
    for name, gradient in gradients(many).items():
        frame.equal(gradient, wanted[name], 1e-10)


@on_ranks(2)
def test_recomputation_repeats_the_exchange_and_counts_once():
    mesh = init_device_mesh(platform.device_type(), (2,), mesh_dim_names=("ep",))
    x = frame.draw(4, DIM, seed=platform.get_rank())
    found = []
    for wraps in (False, True):
        model = build()
        (model.train if frame.IS_TORCH else model.set_train)(True)
        ExpertParallel().apply(model.experts, mesh["ep"])
        run = checkpoint_wrapper(model) if wraps else model
        leaf = frame.leaf(x)
        with watch_experts() as load:
            frame.backward([run(leaf)], [np.ones((4, DIM))])
        assert len(load.calls) == 1
        assert model.tokens_per_expert.sum().item() == 4 * 2
        found.append((frame.array(frame.grad(leaf)), gradients(model)))
    frame.equal(found[0][0], found[1][0])
    for name, gradient in found[0][1].items():
        frame.equal(gradient, found[1][1][name])
