# SPDX-License-Identifier: Apache-2.0
"""Models of the transformers library, unchanged, with their sequences sharded, against one device."""

import copy
import os

import pytest
import torch

from examples.recipes import transformers_plans as plans
from hyper_parallel import (
    CommunicationLedger,
    init_device_mesh,
    local_batch,
    parallelize_module,
    replicate,
    strict,
)
from hyper_parallel.core.context_parallel.model import shard_sequence
from hyper_parallel.testing import run_ranks

VOCAB, BATCH, SIZE = 32, 2, 10
LONG = 300  # seconds: the first job on a rank imports transformers
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.4,
    "use_cache": False,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
OFF = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
GPT2 |= {"initializer_range": 0.4, "use_cache": False, **OFF}


def model_of(kind):
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(**GPT2, bos_token_id=1, eos_token_id=1)
        model = transformers.GPT2LMHeadModel(config)
    elif kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    elif kind == "qwen2":  # with windows in its second layer
        more = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
        config = transformers.Qwen2Config(**SIZES, **more)
        model = transformers.Qwen2ForCausalLM(config)
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))
    return model.double()


def batch_of(padded):
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(1, VOCAB, (2, BATCH, SIZE), generator=generator)
    batch = {"input_ids": ids, "labels": labels}
    if padded:
        mask = torch.arange(SIZE) < torch.tensor([[SIZE], [SIZE - 4]])
        batch["attention_mask"] = mask.long()
        batch["labels"] = labels.where(mask, -100)
    return batch


def compare(kind, shape, names, hows, padded):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    start, batch = model_of(kind), batch_of(padded)
    one = copy.deepcopy(start)
    expected = one(**batch).loss
    expected.backward()
    counts = []
    for how in hows:
        many, given = copy.deepcopy(start), batch
        if "tp" in names:
            plan = plans.llama if kind != "gpt2" else plans.gpt2
            parallelize_module(many, mesh["tp"], plan(many.config))
        shard_sequence(many, mesh["cp"], **how)
        if "dp" in names:
            replicate(many, mesh["dp"])
            row = mesh.get_local_rank("dp")
            given = {name: x[row : row + 1] for name, x in batch.items()}
        labels = local_batch(given["labels"], many)
        with strict(), CommunicationLedger(mesh) as ledger:
            loss = many(**{**given, "labels": labels}).loss
        loss.backward()
        counts.append(ledger.counts())
        # Llama computes its norms, and all of them their loss, in float32.
        close(loss.detach().full_tensor(), expected.detach(), "loss")
        found = dict(many.named_parameters())
        for name, parameter in one.named_parameters():
            assert found[name].grad.placements == found[name].placements
            close(found[name].grad.full_tensor(), parameter.grad, f"{how}: {name}")
    return counts


def close(found, expected, what):
    torch.testing.assert_close(
        found, expected, rtol=1e-4, atol=2e-7, msg=lambda told: f"{what}: {told}"
    )


RING = {"method": "ring"}
BALANCED = {"method": "ring", "load_balance": True}
HEADS = {"method": "ulysses", "load_balance": True}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_loss_and_every_gradient_are_those_of_one_device(kind):
    hows = [RING, BALANCED, HEADS, {}]
    for padded in (False, True):
        counts = run_ranks(compare, 2, kind, (2,), ("cp",), hows, padded, timeout=LONG)[
            0
        ]
        if kind in ("llama", "qwen3"):
            assert [one.get("isend", 0) for one in counts] == [2, 2, 0, 0]


@pytest.mark.parametrize(
    ("shape", "names"), [((2, 2), ("cp", "tp")), ((2, 2), ("dp", "cp"))]
)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_beside_tensor_and_data_parallel(kind, shape, names):
    run_ranks(compare, 4, kind, shape, names, [RING, BALANCED], True, timeout=LONG)
