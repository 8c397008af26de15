# SPDX-License-Identifier: Apache-2.0
"""A small Llama of transformers and a batch, for docs/recipes.md."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: F401

from examples.recipes.transformers_plans import llama  # noqa: F401
from hyper_parallel import (  # noqa: F401
    ColwiseParallel,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.dtensor.modes import implicit_replication  # noqa: F401
from hyper_parallel.core.tensor_parallel import Replicated, replicate  # noqa: F401

mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
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
tokens = torch.randint(1, 61, (4, 6))
prompt = distribute_tensor(tokens, mesh, [Shard(0), Replicate()])
input_ids = labels = tokens  # of the one data rank
mask = torch.ones_like(input_ids)
