# SPDX-License-Identifier: Apache-2.0
"""A small Llama of transformers and a batch, for docs/planning.md."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hyper_parallel import ParallelPlan, auto_plan, init_device_mesh  # noqa: F401

config = LlamaConfig(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    pad_token_id=0,
)
torch.manual_seed(0)
model = LlamaForCausalLM(config)
input_ids, labels = torch.randint(1, 61, (2, 2, 8))
