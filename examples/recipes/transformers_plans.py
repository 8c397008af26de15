# SPDX-License-Identifier: Apache-2.0
"""Plans for models of the transformers library, which run unchanged: one function a model, from its config to a plan.

model = LlamaForCausalLM(config)
parallelize_module(model, mesh["tp"], llama(config, sequence_parallel=True))
replicate(model, mesh["dp"])                                        where there is a data axis
loss = model(input_ids, attention_mask=mask, labels=labels).loss
"""

from hyper_parallel import (
    ColwiseParallel,
    ExpertParallel,
    FusedColwiseParallel,
    PrepareModuleInput,
    Replicate,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
    Shard,
)


def llama(config, sequence_parallel=False):
    """LlamaForCausalLM; also with its output layer tied to the embedding."""
    # The placement of activations between the blocks.
    between = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel() if sequence_parallel else Replicated()
    columns = ColwiseParallel()
    rows = RowwiseParallel(output_layouts=between)
    return {
        "model.embed_tokens": rows,
        "model.layers.*.*layernorm": norm,
        "model.layers.*.self_attn.q_proj": ColwiseParallel(
            heads=config.num_attention_heads
        ),
        "model.layers.*.self_attn.[kv]_proj": ColwiseParallel(
            heads=config.num_key_value_heads
        ),
        "model.layers.*.self_attn.o_proj": rows,
        "model.layers.*.mlp.gate_proj": columns,
        "model.layers.*.mlp.up_proj": columns,
        "model.layers.*.mlp.down_proj": rows,
        "model.norm": norm,
        "lm_head": columns,
        "": Replicated(),
    }


def mixtral(config):
    """MixtralForCausalLM and Qwen3MoeForCausalLM; in recipes the axis `ep`, where there is one, shares the experts."""
    columns = ColwiseParallel(heads=config.num_attention_heads)
    return {
        "model.embed_tokens": RowwiseParallel(),
        "model.layers.*.self_attn.q_proj": columns,
        "model.layers.*.self_attn.[kv]_proj": ColwiseParallel(
            heads=config.num_key_value_heads
        ),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.experts": ExpertParallel(),
        "lm_head": ColwiseParallel(),
        "": Replicated(),
    }


def gpt2(config, sequence_parallel=False):
    """GPT2LMHeadModel: q, k and v are one projection, the output layer is the token embedding."""
    between = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel() if sequence_parallel else Replicated()
    columns = ColwiseParallel()
    rows = RowwiseParallel(output_layouts=between)
    qkv = FusedColwiseParallel(sections=3, heads=3 * config.num_attention_heads)
    return {
        "transformer.wte": rows,
        "transformer.h.*.ln_?": norm,
        "transformer.h.*.attn.c_attn": qkv,
        "transformer.h.*.attn.c_proj": rows,
        "transformer.h.*.mlp.c_fc": columns,
        "transformer.h.*.mlp.c_proj": rows,
        "transformer.ln_f": norm,
        "lm_head": columns,
        "": Replicated(),
    }


def bert(config, sequence_parallel=False):
    """BertForMaskedLM, whose output layer is the word embedding."""
    between = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel() if sequence_parallel else Replicated()
    numbers = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=between
    )  # of positions and types
    columns = ColwiseParallel()
    rows = RowwiseParallel(output_layouts=between)
    heads = ColwiseParallel(heads=config.num_attention_heads)
    return {
        "bert.embeddings.word_embeddings": rows,
        "bert.embeddings.position_embeddings": numbers,
        "bert.embeddings.token_type_embeddings": numbers,
        "bert.embeddings.LayerNorm": norm,
        "bert.encoder.layer.*.attention.self.query": heads,
        "bert.encoder.layer.*.attention.self.key": heads,
        "bert.encoder.layer.*.attention.self.value": heads,
        "bert.encoder.layer.*.attention.output.dense": rows,
        "bert.encoder.layer.*.attention.output.LayerNorm": norm,
        "bert.encoder.layer.*.intermediate.dense": columns,
        "bert.encoder.layer.*.output.dense": rows,
        "bert.encoder.layer.*.output.LayerNorm": norm,
        "cls.predictions.transform.*": norm,
        "cls.predictions.decoder": columns,
        "": Replicated(),
    }
