# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts of the transformers library, unchanged, with their experts on several ranks."""

import copy
import os

import pytest
import torch

from examples.recipes import transformers_plans as plans
from hyper_parallel import (
    ColwiseParallel,
    CommunicationLedger,
    Replicated,
    RowwiseParallel,
    fully_shard,
    get_platform,
    init_device_mesh,
    local_batch,
    parallelize_module,
    replicate,
    shard_sequence,
    strict,
)
from hyper_parallel.core.expert_parallel import (
    ExpertParallel,
    TensorParallel,
)
from hyper_parallel.testing import run_ranks

VOCAB, BATCH, SIZE = 32, 4, 6
LONG = 300  # seconds: the first job on a rank imports transformers
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.4,
    "use_cache": False,
    "pad_token_id": 0,
}
QWEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 8}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
LATENT |= {"qk_nope_head_dim": 4, "v_head_dim": 4}
GROUPS = {"n_group": 4, "topk_group": 2, "n_routed_experts": 8, "n_shared_experts": 1}


def model_of(kind, how):
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    torch.manual_seed(0)
    if kind == "mixtral":
        more = {"num_local_experts": 4, "num_experts_per_tok": 2}
        config = transformers.MixtralConfig(**SIZES, **more)
        model = transformers.MixtralForCausalLM(config)
    elif kind == "qwen2":
        more = {"shared_expert_intermediate_size": 12, "decoder_sparse_step": 1}
        config = transformers.Qwen2MoeConfig(**SIZES, **QWEN, **more)
        model = transformers.Qwen2MoeForCausalLM(config)
    elif kind == "gpt_oss":  # with biases, and weights the other way round
        more = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}
        config = transformers.GptOssConfig(**SIZES, **more, sliding_window=4)
        model = transformers.GptOssForCausalLM(config)
    elif kind == "qwen3":
        config = transformers.Qwen3MoeConfig(**SIZES, **QWEN, head_dim=4)
        model = transformers.Qwen3MoeForCausalLM(config)
    else:
        more = {"first_k_dense_replace": 1, "moe_intermediate_size": 8}
        sizes = {**SIZES, "num_key_value_heads": 4, "num_experts_per_tok": 2}
        config = transformers.DeepseekV3Config(**sizes, **LATENT, **GROUPS, **more)
        model = transformers.DeepseekV3ForCausalLM(config)
        with torch.no_grad():  # it is zeros at first
            for module in model.modules():
                if hasattr(module, "e_score_correction_bias"):
                    torch.nn.init.normal_(module.weight)
    model.set_experts_implementation(how)
    return model if how == "grouped_mm" else model.double()  # it has no float64


def batch_of():
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(1, VOCAB, (2, BATCH, SIZE), generator=generator)
    return {"input_ids": ids, "labels": labels}


EXPERTS = "model.layers.*.mlp.experts"
ATTENTION = {
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "": Replicated(),
}


def check(kind, shape, names, how):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    start, batch = model_of(kind, how), batch_of()
    one, many = copy.deepcopy(start), copy.deepcopy(start)
    expected = one(**batch).loss
    expected.backward()
    ep = "ep" if "ep" in names else "dp"
    parallelize_module(many, mesh[ep], {EXPERTS: ExpertParallel()})
    if "tp" in names:
        columns = "[qkv]_proj" if kind != "deepseek" else "*_b_proj"
        columns = {f"model.layers.*.self_attn.{columns}": ColwiseParallel()}
        plan = {EXPERTS: TensorParallel(), **columns, **ATTENTION}
        parallelize_module(many, mesh["tp"], plan)
    row, rows = 0, 1
    for name in reversed(names):
        if name != "tp":
            replicate(many, mesh[name])
    for name in names:
        if name != "tp":
            row = row * mesh.size(mesh.axis_index(name)) + mesh.get_local_rank(name)
            rows *= mesh.size(mesh.axis_index(name))
    given = {name: x.chunk(rows)[row] for name, x in batch.items()}
    labels = local_batch(given["labels"], many)
    with strict(), CommunicationLedger(mesh) as ledger:
        loss = many(**{**given, "labels": labels}).loss
    loss.backward()
    # The library computes its norms and its loss in float32.
    close(loss.detach().full_tensor(), expected.detach(), "loss")
    check_gradients(one, many, kind)
    return ledger.counts()


def close(found, expected, what):
    torch.testing.assert_close(
        found, expected, rtol=1e-4, atol=1e-6, msg=lambda told: f"{what}: {told}"
    )


@pytest.mark.parametrize("kind", ["mixtral", "qwen2", "qwen3", "deepseek", "gpt_oss"])
def test_loss_and_every_gradient_are_those_of_one_device(kind):
    """By every way in which the library multiplies experts."""
    for how in ("eager", "batched_mm", "grouped_mm"):
        counts = run_ranks(check, 2, kind, (2,), ("dp",), how, timeout=LONG)[0]
        layers = 1 if kind == "deepseek" else 2  # of which its first is dense
        assert counts["all_to_all_single"] == 3 * layers


@pytest.mark.parametrize("kind", ["mixtral", "deepseek"])
def test_on_four_ranks(kind):
    for shape, names in (
        ((4,), ("dp",)),
        ((2, 2), ("dp", "ep")),
        ((2, 2), ("ep", "tp")),
    ):
        run_ranks(check, 4, kind, shape, names, "eager", timeout=LONG)


def check_plan(kind):
    """The plan of the examples along one axis, whose ranks share heads and experts, and have the same tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    start, batch = model_of(kind, "eager"), batch_of()
    one, many = copy.deepcopy(start), copy.deepcopy(start)
    expected = one(**batch).loss
    expected.backward()
    parallelize_module(many, mesh["tp"], plans.mixtral(many.config))
    replicate(many, mesh["dp"])
    row = mesh.get_local_rank("dp")
    given = {name: x.chunk(2)[row] for name, x in batch.items()}
    given["labels"] = local_batch(given["labels"], many)
    loss = many(**given).loss
    loss.backward()
    close(loss.detach().full_tensor(), expected.detach(), "loss")
    check_gradients(one, many, kind)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_the_plan_of_the_examples(kind):
    run_ranks(check_plan, 4, kind, timeout=LONG)


def check_own_loss(kind):
    """The loss of balance that the library adds itself, from the logits of all layers."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    start, batch = model_of(kind, "eager"), batch_of()
    one, many = copy.deepcopy(start), copy.deepcopy(start)
    expected = one(**batch, output_router_logits=True)
    expected.loss.backward()
    parallelize_module(many, mesh["dp"], {EXPERTS: ExpertParallel()})
    replicate(many, mesh["dp"])
    given = {name: x.chunk(2)[mesh.get_local_rank()] for name, x in batch.items()}
    given["labels"] = local_batch(given["labels"], many)
    found = many(**given, output_router_logits=True)
    found.loss.backward()
    close(found.aux_loss.detach().full_tensor(), expected.aux_loss.detach(), "aux")
    close(found.loss.detach().full_tensor(), expected.loss.detach(), "loss")
    check_gradients(one, many, kind)


def test_the_librarys_own_loss_of_balance():
    run_ranks(check_own_loss, 2, "mixtral", timeout=LONG)


def check_sequences(kind):
    """Ranks that share each sequence share the experts too."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    start, batch = model_of(kind, "eager"), batch_of()
    one, many = copy.deepcopy(start), copy.deepcopy(start)
    expected = one(**batch).loss
    expected.backward()
    parallelize_module(many, mesh["cp"], {EXPERTS: ExpertParallel()})
    shard_sequence(many, mesh["cp"])
    labels = local_batch(batch["labels"], many)
    loss = many(**{**batch, "labels": labels}).loss
    loss.backward()
    close(loss.detach().full_tensor(), expected.detach(), "loss")
    check_gradients(one, many, kind)


def test_beside_context_parallel():
    run_ranks(check_sequences, 2, "mixtral", timeout=LONG)


def check_fully_shard(kind, is_whole_batch):
    """Dense parameters are sharded over all ranks, experts over the same ranks as seen by another mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    data = mesh["efsdp", "ep"].flatten("dp")
    start, batch = model_of(kind, "eager"), batch_of()
    one, many = copy.deepcopy(start), copy.deepcopy(start)
    expected = one(**batch).loss
    expected.backward()
    parallelize_module(many, mesh["ep"], {EXPERTS: ExpertParallel()})
    for layer in many.model.layers:
        if hasattr(layer.mlp, "experts"):
            fully_shard(layer.mlp.experts, mesh=mesh["efsdp"])
            if not is_whole_batch:
                layer.mlp.experts.set_gradient_divide_factor(data.size())
        fully_shard(layer, mesh=data)
    fully_shard(many, mesh=data, **({"batch_dim": 0} if is_whole_batch else {}))
    given = {name: x.chunk(4)[data.get_local_rank()] for name, x in batch.items()}
    if is_whole_batch:
        given["labels"] = local_batch(given["labels"], many)
    optimizer = torch.optim.SGD(many.parameters(), 0.1)
    optimizer_of_one = torch.optim.SGD(one.parameters(), 0.1)
    loss = many(**given).loss
    loss.backward()
    if is_whole_batch:
        close(loss.detach().full_tensor(), expected.detach(), "loss")
    check_gradients(one, many, kind)
    norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
    close(get_platform().clip_grad_norm_(many, 0.1), norm, "norm")
    check_gradients(one, many, kind)
    optimizer.step(), optimizer_of_one.step()
    for name, parameter in one.named_parameters():
        close(many.get_parameter(name).detach().full_tensor(), parameter.detach(), name)


def check_gradients(one, many, kind):
    found = dict(many.named_parameters())
    for name, parameter in one.named_parameters():
        close(found[name].grad.full_tensor(), parameter.grad, f"{kind}: {name}")


@pytest.mark.parametrize("is_whole_batch", [False, True])
def test_experts_within_fully_shard(is_whole_batch):
    run_ranks(check_fully_shard, 4, "mixtral", is_whole_batch, timeout=LONG)
