"""How the model lies on a mesh: a dict from the names of its parts to styles, and one line for data parallel."""

from typing import Any

from hyper_parallel import (
    ColwiseParallel,
    Replicate,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    parallelize_module,
    replicate,
)


def put_on_mesh(model: Any, mesh: Any, *, sequence_parallel: bool = False) -> Any:
    """Cuts the model along "tp" and copies it along "dp"; tensors keep their shapes, so its code stays as it is.

    It is the same for both frameworks: the parts of the model have the same names.
    """
    heads, kv_heads = model.config.heads, model.config.kv_heads
    # The placement of activations between the layers.
    stream = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel() if sequence_parallel else Replicated()
    plan = {
        "embed": RowwiseParallel(output_layouts=stream),  # the vocabulary is sharded
        "blocks.*.*_norm": norm,
        "blocks.*.attention.wq": ColwiseParallel(heads=heads),
        "blocks.*.attention.w[kv]": ColwiseParallel(heads=kv_heads),
        "blocks.*.attention.wo": RowwiseParallel(output_layouts=stream),
        "blocks.*.mlp.gate": ColwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=stream),
        "norm": norm,
        "head": ColwiseParallel(),  # the logits are sharded as the vocabulary is
        "": Replicated(),  # what is left is the same on all ranks
    }
    parallelize_module(model, mesh["tp"], plan)
    return replicate(model, mesh["dp"]) if "dp" in mesh.mesh_dim_names else model
