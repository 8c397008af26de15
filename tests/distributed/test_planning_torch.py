# SPDX-License-Identifier: Apache-2.0
"""Models by the plans that are found for them, against one process; all architectures are in docs/architectures.md."""

import copy
import tempfile
from pathlib import Path

import pytest
import torch
from llama.model import Config, Llama

from hyper_parallel import (
    CommunicationLedger,
    ParallelPlan,
    auto_plan,
    init_device_mesh,
    local_batch,
)
from hyper_parallel.core.dtensor.modes import implicit_replication
from hyper_parallel.planning import plan as plans
from hyper_parallel.testing import on_ranks, run_ranks
from tools import architecture_steps as steps
from tools.architecture_models import make_batch, make_model

LONG = 300  # seconds: the first job on a rank imports transformers
# One of each kind: a plan of its own, fused layers, an encoder, both, pictures, speech, experts, fewer heads of keys.
QUICK = ("llama", "phi3", "bert", "bart", "vit", "wav2vec2", "mixtral", "falcon")


@pytest.mark.parametrize("name", QUICK)
def test_loss_and_every_gradient_are_those_of_one_process(name):
    outcome = steps.run(name, {"tp": 2})
    assert outcome.verdict == "right", outcome.text


@pytest.mark.parametrize(
    ("name", "axes", "what"),
    [
        ("llama", {"tp": 4}, "step"),  # of two heads of keys
        ("gpt2", {"dp": 2, "tp": 2}, "step"),
        ("llama", {"dp_shard": 2, "tp": 2}, "step"),
        ("llama", {"tp": 2}, "sequence parallel"),
        ("mixtral", {"ep": 2}, "step"),
        ("llama", {"pp": 2}, "step"),
        ("t5", {"tp": 2}, "training"),
    ],
)
def test_on_other_meshes(name, axes, what):
    outcome = steps.run(name, axes, what)
    assert outcome.verdict == "right", outcome.text


def compare_with_a_fault(where):
    if where == "loss":
        plain = steps.compute_loss
        losses = []

        def compute(model, batch):
            losses.append(plain(model, batch))
            return losses[-1] * (1.01 if len(losses) == 2 else 1)

        steps.compute_loss = compute
    else:
        apply = ParallelPlan.apply

        def apply_and_hook(self, model, mesh):
            apply(self, model, mesh)
            weight = model.model.layers[0].mlp.down_proj.weight
            weight.register_hook(lambda gradient: gradient * 1.01)

        ParallelPlan.apply = apply_and_hook
    try:
        return steps.compare("llama", {"tp": 2})
    finally:
        if where == "loss":
            steps.compute_loss = plain
        else:
            ParallelPlan.apply = apply


@pytest.mark.parametrize(
    ("where", "text"), [("loss", "loss: "), ("gradient", "down_proj.weight")]
)
def test_control_a_fault_is_found(where, text):
    outcome = run_ranks(compare_with_a_fault, 2, where, timeout=LONG)[0]
    assert outcome.verdict == "wrong"
    assert text in outcome.text


def count(name):
    model = make_model(name).eval()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = auto_plan(model, mesh)
    plan.apply(model, mesh)
    model.train()
    with CommunicationLedger(mesh, model) as ledger:
        loss = steps.compute_loss(model, make_batch(name, model))
        loss.backward()
    [cost] = plan.costs.values()
    return cost, ledger.counts(backward=False), ledger.counts(backward=True)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_block_costs_what_the_plan_says(name):
    """Beside the two blocks: the embedding and the loss; in backward the input of the output layer."""
    for cost, forward, backward in run_ranks(count, 2, name, timeout=LONG):
        assert forward["all_reduce"] == 2 * cost.forward["all_reduce"] + 1
        assert backward["all_reduce"] == 2 * cost.backward["all_reduce"] + 1
        assert cost.unasked == 0


@on_ranks(4)
def test_a_plan_that_was_saved_trains_a_model_on_all_axes():
    torch.manual_seed(0)
    one = Llama(Config(vocab=32, dim=16, layers=2, heads=4, kv_heads=2, hidden=24))
    one = one.double()
    many = copy.deepcopy(one)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        auto_plan(many, mesh).save(path)
        ParallelPlan.load(path).apply(many, mesh)
    ids, targets = torch.randint(
        32, (2, 4, 8), generator=torch.Generator().manual_seed(1)
    )
    row = mesh.get_local_rank("dp")

    def loss_of(model, x, y):
        return torch.nn.functional.cross_entropy(
            model(x).flatten(0, 1), y.flatten(0, 1)
        )

    expected = loss_of(one, ids, targets)
    expected.backward()
    own = local_batch(targets.chunk(2)[row], many)
    loss = loss_of(many, ids.chunk(2)[row], own)
    loss.backward()
    torch.testing.assert_close(loss.detach().full_tensor(), expected.detach())
    for (name, wanted), found in zip(
        one.named_parameters(), many.parameters(), strict=True
    ):
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad, msg=name)


def generate(name):
    one = make_model(name).eval()
    many = copy.deepcopy(one)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    auto_plan(many, mesh).apply(many, mesh)
    batch = make_batch(name, one)
    batch.pop("labels")
    few = {"max_new_tokens": 4, "do_sample": False}
    expected = one.generate(**batch, **few)
    with implicit_replication():
        found = many.generate(**batch, **few)
    return steps.whole(found).tolist(), expected.tolist()


@pytest.mark.parametrize("name", ["llama", "bart", "whisper"])
def test_generate_gives_the_tokens_of_one_process(name):
    """With caches; from text, from an encoder, and from speech."""
    for found, expected in run_ranks(generate, 2, name, timeout=LONG):
        assert found == expected


def train_adapters():
    """LoRA by hand: two small matrices beside each projection of queries, the rest frozen."""

    class Adapted(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down = torch.nn.Linear(base.in_features, 2, bias=False)
            self.up = torch.nn.Linear(2, base.out_features, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    one = make_model("llama")
    torch.manual_seed(1)
    one.requires_grad_(False)
    for layer in one.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj).double()
    many = copy.deepcopy(one)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    auto_plan(many, mesh).apply(many, mesh)
    batch = make_batch("llama", one)
    expected, found = (steps.compute_loss(model, batch) for model in (one, many))
    expected.backward()
    found.backward()
    steps._check("loss", found, expected)
    steps._check_gradients(many, one)
    return sum(one.grad is not None for one in many.parameters())


def test_adapters_are_planned_and_trained():
    assert run_ranks(train_adapters, 2, timeout=LONG) == [4, 4]


def recompute():
    one = make_model("llama")
    one.resize_token_embeddings(67)
    many = copy.deepcopy(one)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    auto_plan(many, mesh).apply(many, mesh)
    many.gradient_checkpointing_enable({"use_reentrant": False})
    batch = make_batch("llama", one)
    expected, found = (model(**batch, use_cache=False).loss for model in (one, many))
    expected.backward()
    found.backward()
    steps._check("loss", found, expected)
    steps._check_gradients(many, one)


def test_resized_embeddings_and_layers_that_are_recomputed():
    run_ranks(recompute, 2, timeout=LONG)


def mix_dtypes():
    """Weights in bfloat16, norms in float32."""
    one = make_model("gemma2").bfloat16()
    for name, module in one.named_modules():
        if "norm" in name:
            module.float()
    many = copy.deepcopy(one)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    auto_plan(many, mesh).apply(many, mesh)
    dtypes = {name: tensor.dtype for name, tensor in many.named_parameters()}
    assert dtypes == {name: tensor.dtype for name, tensor in one.named_parameters()}
    batch = make_batch("gemma2", one)
    expected, found = (steps.compute_loss(model, batch) for model in (one, many))
    expected.backward()
    found.backward()
    torch.testing.assert_close(steps.whole(found), expected.detach(), rtol=2e-2, atol=0)
    for name, parameter in one.named_parameters():
        gradient = steps.whole(dict(many.named_parameters())[name].grad).double()
        wanted = parameter.grad.double()
        assert (gradient - wanted).norm() < 0.1 * wanted.norm(), name


def test_weights_in_bfloat16_with_norms_in_float32():
    run_ranks(mix_dtypes, 2, timeout=LONG)


def test_the_text_of_costs_is_that_of_the_page():
    cost = plans.Cost({"all_reduce": 2}, {"all_reduce": 1})
    assert plans.format_cost(cost) == "2 all_reduce forward, 1 all_reduce backward"
