"""A training that does not know its framework: it begins or goes on from a checkpoint, and saves one."""

import os
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel import (
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.core.distributed_checkpoint import (
    ModelState,
    OptimizerState,
    load,
    save,
)
from plan import put_on_mesh

SIZES = {
    "dim": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 48,
    "context": 16,
    "vocab": 64,
}


def train(framework: Any) -> None:
    """Does what the command line says, in the framework that a module like ``in_pytorch`` speaks to."""
    options = read_options()
    mesh = join(options.mesh)
    model = framework.new_model(SIZES)
    if mesh is not None:
        put_on_mesh(model, mesh)
    optimizer = framework.new_optimizer(model)
    state = {
        "model": ModelState(model),  # float32
        "optimizer": OptimizerState(model, optimizer),  # by the names of the parameters
        # The initial weights, with which later ones can be compared.
        "reference": in_bfloat16(model),
        "losses": [],
    }
    if options.load:
        load(state, checkpoint_id=options.load)
    if options.copy:
        save(state, checkpoint_id=options.copy)
    step = framework.step_of(model, optimizer)
    while len(state["losses"]) < options.steps:
        ids, targets = (
            placed(framework.tensor(part), mesh) for part in batch(len(state["losses"]))
        )
        state["losses"].append(step(ids, targets))
    save(state, checkpoint_id=options.save)


def read_options() -> Any:
    """The command line."""
    parser = ArgumentParser()
    parser.add_argument(
        "--mesh", metavar="[DPx]TP", help="data-parallel times tensor-parallel ranks"
    )
    parser.add_argument(
        "--load",
        type=Path,
        metavar="FOLDER",
        help="go on from this checkpoint, whoever wrote it",
    )
    parser.add_argument(
        "--copy",
        type=Path,
        metavar="FOLDER",
        help="save what was loaded, before the first step",
    )
    parser.add_argument(
        "--steps", type=int, required=True, help="train until so many steps are done"
    )
    parser.add_argument("--save", type=Path, metavar="FOLDER", required=True)
    return parser.parse_args()


def join(shape: str | None) -> Any:
    """The mesh of the processes that a launcher started, or None for one process."""
    if shape is None:
        return None
    assert "RANK" in os.environ or "MS_WORKER_NUM" in os.environ, (
        "start this with torchrun or msrun"
    )
    get_platform().init_process_group()
    sizes = tuple(int(ranks) for ranks in shape.split("x"))
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])


def in_bfloat16(model: Any) -> dict[str, Any]:
    """A copy of the weights, each laid out as its parameter."""
    platform = get_platform()
    kind = platform.str_to_dtype("bfloat16")
    return {
        name: platform.detach(p).to(kind)
        for name, p in platform.parameters_dict(model).items()
    }


def placed(tensor: Any, mesh: Any) -> Any:
    """A batch that every rank has: cut along "dp", whole along "tp"."""
    return (
        tensor
        if mesh is None
        else distribute_tensor(tensor, mesh, [Shard(0), Replicate()][-mesh.ndim :])
    )


def batch(step: int) -> tuple[Any, Any]:
    """Tokens, and those that follow them, for a step: two batches in turn, each token follows from the last."""
    vocab, length = SIZES["vocab"], SIZES["context"] + 1
    first = np.random.default_rng(step % 2).integers(0, vocab, (8, 1))
    tokens = (first * 5 ** np.arange(length) + np.arange(length)) % vocab
    return tokens[:, :-1], tokens[:, 1:]
