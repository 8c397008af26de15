# SPDX-License-Identifier: Apache-2.0
"""Models of the transformers library, unchanged, on meshes by the plans in examples/recipes, against one device."""

import copy
import inspect
import os
from pathlib import Path

import pytest
import torch

from examples.recipes import transformers_plans as plans
from hyper_parallel import (
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.dtensor.modes import implicit_replication, strict
from hyper_parallel.core.shard.arguments import OperatorError
from hyper_parallel.core.tensor_parallel import replicate
from hyper_parallel.platform import get_platform
from hyper_parallel.testing import RankError, run_ranks

KINDS = ("llama", "gpt2", "bert")
LAYERS, VOCAB, BATCH = 2, 61, 4  # no mesh divides the vocabulary
LONG = 300  # seconds: the first job on a rank imports transformers

# Llama and GPT-2 compute their loss, and Llama its norms, in float32 whatever the model's dtype is.
CLOSE = {"llama": (1e-4, 2e-7), "gpt2": (1e-4, 2e-7), "bert": (1e-9, 1e-12)}


def model_of(kind, dtype=torch.float64, dropout=0.0, **settings):
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.manual_seed(0)
    common = {
        "vocab_size": VOCAB,
        "pad_token_id": 0,
        "initializer_range": 0.3,
        **settings,
    }
    if kind == "llama":
        from transformers.models.llama import modeling_llama as home

        sizes = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 8,
        }
        common = {"num_key_value_heads": 4, "attention_dropout": dropout, **common}
        model = home.LlamaForCausalLM(home.LlamaConfig(**sizes, **common))
    elif kind == "gpt2":
        from transformers.models.gpt2 import modeling_gpt2 as home

        sizes = {
            "n_embd": 32,
            "n_layer": LAYERS,
            "n_head": 4,
            "n_positions": 32,
            "bos_token_id": 1,
            "eos_token_id": 1,
        }
        drops = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), dropout)
        model = home.GPT2LMHeadModel(home.GPT2Config(**sizes, **drops, **common))
    else:
        from transformers.models.bert import modeling_bert as home

        sizes = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
        }
        drops = dict.fromkeys(
            ("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout
        )
        model = home.BertForMaskedLM(
            home.BertConfig(**sizes, max_position_embeddings=32, **drops, **common)
        )
    for (
        name,
        parameter,
    ) in (
        model.named_parameters()
    ):  # norms and biases start alike; a mix-up would not show
        if parameter.ndim == 1:
            torch.nn.init.normal_(
                parameter, mean=float("norm" in name.lower() or "ln_" in name), std=0.1
            )
    return model.to(dtype)


def batch_of(seq, padded):
    """Arguments of a model: rows of different lengths, and labels for what is not padding."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(1, VOCAB, (2, BATCH, seq), generator=generator)
    if not padded:
        return {"input_ids": ids, "labels": labels}
    mask = torch.arange(seq) < seq - torch.tensor(
        [[0], [3], [1], [4]]
    )  # more on the second data rank
    return {
        "input_ids": ids.where(mask, 0),
        "labels": labels.where(mask, -100),
        "attention_mask": mask.long(),
    }


def distributed(model, kind, tp, data, sequence_parallel):
    """The model on a mesh of four ranks; without a data axis, all lines of ``tp`` ranks do the same."""
    mesh = init_device_mesh("cpu", (4 // tp, tp), mesh_dim_names=("dp", "tp"))
    parallelize_module(
        model,
        mesh["tp"],
        getattr(plans, kind)(model.config, sequence_parallel=sequence_parallel),
    )
    if data:
        replicate(model, mesh["dp"])
    return mesh


def own_rows(batch, mesh, data):
    """What this rank's data loader would give."""
    if not data:
        return batch
    rows = BATCH // mesh["dp"].size()
    start = rows * mesh.get_local_rank("dp")
    return {name: value[start : start + rows] for name, value in batch.items()}


def whole(tensor):
    assert isinstance(tensor, DTensor)
    return tensor.detach().full_tensor()


def check(found, expected, close, what):
    rtol, atol = close
    torch.testing.assert_close(
        found, expected, rtol=rtol, atol=atol, msg=lambda told: f"{what}: {told}"
    )


def check_run(many, one, output, expected, close, what):
    """Logits, loss and every gradient."""
    check(whole(output.logits), expected.logits.detach(), close, f"{what}: logits")
    check(whole(output.loss), expected.loss.detach(), close, f"{what}: loss")
    found = dict(many.named_parameters())
    assert found.keys() == dict(one.named_parameters()).keys()
    for name, parameter in one.named_parameters():
        assert found[name].grad.layout is found[name].layout
        assert parameter.grad.abs().max() > 1e-3 or name.endswith("key.bias"), (
            name
        )  # which softmax takes no notice of
        check(
            whole(found[name].grad),
            parameter.grad,
            close,
            f"{what}: gradient of {name}",
        )


def compare(kind, tp, data, dtype, close, variants, **settings):
    for attention, seq, padded in variants:
        start = model_of(kind, dtype, attn_implementation=attention, **settings)
        batch = batch_of(seq, padded)
        one = copy.deepcopy(start)
        expected = one(**batch)
        expected.loss.backward()
        for sequence_parallel in (False, True):
            many = copy.deepcopy(start)
            mesh = distributed(many, kind, tp, data, sequence_parallel)
            with strict():
                output = many(**own_rows(batch, mesh, data))
            output.loss.backward()
            check_run(
                many,
                one,
                output,
                expected,
                close,
                f"{attention} {seq} {padded} {sequence_parallel}",
            )


@pytest.mark.parametrize(
    ("tp", "data"), [(2, False), (4, False), (2, True)], ids=["2", "4", "2x2"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_and_every_gradient_are_those_of_one_device(kind, tp, data):
    variants = [("sdpa", 8, True), ("eager", 7, True), ("sdpa", 8, False)][
        : None if tp == 2 and not data else 2
    ]
    run_ranks(
        compare, 4, kind, tp, data, torch.float64, CLOSE[kind], variants, timeout=LONG
    )


def test_llama_in_float32_with_tied_weights():
    close, variants = (1e-3, 2e-5), [("sdpa", 8, True)]
    run_ranks(
        compare,
        4,
        "llama",
        4,
        False,
        torch.float32,
        close,
        variants,
        tie_word_embeddings=True,
        timeout=LONG,
    )


def train():
    one = model_of("bert")
    many = copy.deepcopy(one)
    mesh = distributed(many, "bert", 2, True, True)
    batch = batch_of(8, True)
    mine, losses = own_rows(batch, mesh, True), []
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (one, many)
    ]
    for _ in range(5):
        for model, optimizer, given in zip(
            (one, many), optimizers, (batch, mine), strict=True
        ):
            loss = model(**given).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    check(torch.tensor(losses[1::2]), torch.tensor(losses[::2]), (1e-7, 1e-7), "losses")
    assert (
        many.cls.predictions.decoder.weight
        is many.bert.embeddings.word_embeddings.weight
    )
    for (name, parameter), found in zip(
        one.named_parameters(), many.parameters(), strict=True
    ):
        check(whole(found), parameter.detach(), (1e-6, 1e-7), name)


def test_steps_of_adamw_with_tied_weights():
    run_ranks(train, 4, timeout=LONG)


def count(kind, sequence_parallel):
    model = model_of(kind)
    mesh = distributed(model, kind, 4, False, sequence_parallel)
    with CommunicationLedger(mesh) as ledger:
        model(**batch_of(8, True)).loss.backward()
    return ledger.counts(backward=False), ledger.counts(backward=True), ledger.table()


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_costs_two_all_reduces_each_way(kind):
    """Beside the layers: the embedding and, in backward, the input of the output layer; the loss gathers numbers."""
    for forward, backward, table in run_ranks(count, 4, kind, False, timeout=LONG):
        assert forward == {"all_reduce": 2 * LAYERS + 1, "all_gather_into_tensor": 1}, (
            table
        )
        assert backward == {"all_reduce": 2 * LAYERS + 1}, table


@pytest.mark.parametrize("kind", KINDS)
def test_with_sequence_parallel_a_layer_costs_two_gathers_and_two_scatters_each_way(
    kind,
):
    """Beside the layers: the embedding, the output layer and the loss; the norms' gradients are summed at once."""
    for forward, backward, table in run_ranks(count, 4, kind, True, timeout=LONG):
        assert forward == {
            "reduce_scatter_tensor": 2 * LAYERS + 1,
            "all_gather_into_tensor": 2 * LAYERS + 2,
        }, table
        gathers = (
            2 * LAYERS + 1 + (kind == "gpt2")
        )  # of the gradient of its positions, which all rows share
        found = {
            "reduce_scatter_tensor": 2 * LAYERS + 1,
            "all_gather_into_tensor": gathers,
            "all_reduce": 1,
        }
        assert backward == found, table


def generate(kind, sequence_parallel):
    one = model_of(kind).eval()
    many = copy.deepcopy(one)
    distributed(many, kind, 4, False, sequence_parallel)
    batch = batch_of(8, True)
    prompt = {
        "input_ids": batch["input_ids"].flip(1),
        "attention_mask": batch["attention_mask"].flip(1),
    }
    few = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": VOCAB - 1}
    with implicit_replication():
        for way in (
            {},
            {"use_cache": False} if sequence_parallel else {"num_beams": 2},
        ):
            found, expected = (
                many.generate(**prompt, **few, **way),
                one.generate(**prompt, **few, **way),
            )
            assert whole(found).tolist() == expected.tolist(), way
        torch.manual_seed(1)
        drawn = whole(many.generate(**prompt, **{**few, "do_sample": True}))
    with pytest.raises(OperatorError, match="implicit_replication"):
        many.generate(**prompt, **few)
    return drawn.tolist()


@pytest.mark.parametrize(
    ("kind", "sequence_parallel"), [("llama", True), ("gpt2", False)]
)
def test_generate_gives_the_tokens_of_one_device(kind, sequence_parallel):
    drawn = run_ranks(generate, 4, kind, sequence_parallel, timeout=LONG)
    assert all(tokens == drawn[0] for tokens in drawn)


def generate_along_a_data_axis():
    one = model_of("llama").eval()
    many = copy.deepcopy(one)
    mesh = distributed(many, "llama", 2, True, False)
    ids = batch_of(8, False)["input_ids"]
    few = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": VOCAB - 1}
    with implicit_replication():
        found = many.generate(
            distribute_tensor(ids, mesh, [Shard(0), Replicate()]), **few
        )
        with pytest.raises(ValueError, match="has size 8 in operand 0 .* but 4"):
            many.generate(ids, **few)
    assert whole(found).tolist() == one.generate(ids, **few).tolist()


def test_generate_along_a_data_axis_takes_a_distributed_prompt():
    run_ranks(generate_along_a_data_axis, 4, timeout=LONG)


def drop(kind):
    platform = get_platform()
    for sequence_parallel in (False, True):
        model = model_of(kind, dropout=0.3)
        mesh = distributed(model, kind, 4, False, sequence_parallel)
        logits = []
        for training in (True, False):
            torch.manual_seed(2)
            output = model.train(training)(**batch_of(8, True))
            logits.append(whole(output.logits))
        everyone = [None] * 4
        platform.all_gather_object(everyone, logits[0].tolist(), mesh["tp"].get_group())
        assert all(found == everyone[0] for found in everyone)
        assert (logits[0] - logits[1]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_keeps_the_ranks_in_step(kind):
    run_ranks(drop, 4, kind, timeout=LONG)


def recompute():
    one = model_of("llama").train()
    many = copy.deepcopy(one)
    distributed(many, "llama", 4, False, True)
    many.gradient_checkpointing_enable({"use_reentrant": False})
    expected, output = (
        model(**batch_of(8, True), use_cache=False) for model in (one, many)
    )
    expected.loss.backward()
    output.loss.backward()
    check_run(many, one, output, expected, CLOSE["llama"], "recomputed")


def test_layers_that_are_recomputed_in_backward():
    run_ranks(recompute, 4, timeout=LONG)


def too_few_heads():
    distributed(model_of("llama", num_key_value_heads=2), "llama", 4, False, False)


def test_heads_that_the_ranks_cannot_share_are_refused():
    with pytest.raises(
        RankError,
        match=r"k_proj: ColwiseParallel: 2 heads cannot be shared evenly by the 4 ranks",
    ):
        run_ranks(too_few_heads, 4, timeout=LONG)


def test_the_page_shows_the_plan():
    page = Path(__file__).resolve().parents[2] / "docs/recipes.md"
    assert inspect.getsource(plans.llama) in page.read_text()
