# SPDX-License-Identifier: Apache-2.0
"""Trains the model of examples/llama in one framework on several meshes, from one checkpoint, and prints the losses.

python tests/frameworks/parity.py torch FOLDER save             writes the checkpoint that all begin with
python tests/frameworks/parity.py mindspore FOLDER 1 2 2x2      a line of JSON: the losses on each mesh ("1": on none)
"fsdp2": parameters sharded along two ranks. "1F1B", or another schedule: two stages.
"""

import json
import math
import os
import sys
from pathlib import Path

import numpy as np

STEPS = 20
SCHEDULES = ("GPipe", "1F1B", "ZB-H1")


def on_this_rank(framework, shape, folder):
    """The losses of all steps."""
    from hyper_parallel import init_device_mesh
    from hyper_parallel.core.distributed_checkpoint import ModelState, load

    own = module_of(framework)
    from plan import put_on_mesh
    from training import SIZES, batch, placed

    model, mesh = own.new_model(SIZES), None
    if shape.startswith("fsdp"):
        return sharded(own, model, ranks_of(shape), folder)
    if shape in SCHEDULES:
        return staged(own, model, shape, folder)
    if shape != "1":
        sizes = tuple(map(int, shape.split("x")))
        mesh = init_device_mesh(
            "cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :]
        )
        put_on_mesh(model, mesh)
    load({"model": ModelState(model)}, checkpoint_id=folder)
    step = own.step_of(model, own.new_optimizer(model))
    ids, targets = (placed(own.tensor(part), mesh) for part in batch(0))
    return [step(ids, targets) for _ in range(STEPS)]


def sharded(own, model, ranks, folder):
    """The same with parameters that are sharded between ranks, each of which has its rows of the batch."""
    from hyper_parallel import get_platform, init_device_mesh
    from hyper_parallel.core.distributed_checkpoint import ModelState, load
    from hyper_parallel.core.fully_shard import fully_shard
    from training import batch

    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    load({"model": ModelState(model)}, checkpoint_id=folder)
    step = own.step_of(model, own.new_optimizer(model))
    rank, parts = get_platform().get_rank(), batch(0)
    ids, targets = (own.tensor(np.array_split(part, ranks)[rank]) for part in parts)
    return [step(ids, targets) for _ in range(STEPS)]


def staged(own, model, schedule, folder):
    """The same in two stages, with four micro batches."""
    from hyper_parallel import get_platform
    from hyper_parallel.core.distributed_checkpoint import ModelState, load
    from hyper_parallel.core.pipeline_parallel import (
        build_stages,
        get_schedule_class,
        plan_stages,
    )
    from hyper_parallel.core.training import pipeline_step
    from training import batch

    rank, plan = get_platform().get_rank(), plan_stages(model, 2)
    plan.keep(model, [rank])
    load({"model": ModelState(model)}, checkpoint_id=folder)
    stages = build_stages(model, plan, [rank])
    runtime = get_schedule_class(schedule)(stages, 4, loss_fn=own.loss_of)
    optimizer = own.new_optimizer(model)
    ids, targets = map(own.tensor, batch(0))
    return [
        pipeline_step(runtime, model, optimizer, (ids,), targets).loss
        for _ in range(STEPS)
    ]


def ranks_of(shape):
    """The number of processes."""
    if shape in SCHEDULES:
        return 2
    return math.prod(map(int, shape.removeprefix("fsdp").split("x")))


def module_of(framework):
    """What the training asks of a framework."""
    if framework == "torch":
        import in_pytorch

        return in_pytorch
    import in_mindspore

    return in_mindspore


def main():
    framework, folder, *shapes = sys.argv[1:]
    os.environ["HYPER_PARALLEL_PLATFORM"] = framework
    from hyper_parallel.core.distributed_checkpoint import ModelState, save
    from hyper_parallel.testing import close_ranks, run_ranks

    if shapes == ["save"]:
        from training import SIZES

        save(
            {"model": ModelState(module_of(framework).new_model(SIZES))},
            checkpoint_id=folder,
        )
        return
    losses = {}
    for shape in shapes:
        found = run_ranks(
            on_this_rank, ranks_of(shape), framework, shape, folder, timeout=300
        )
        losses[shape] = np.mean(found, 0).tolist()  # most are equal on all ranks
        close_ranks()  # ranks that wait for a job would take part of the cores
    print(json.dumps(losses))


if __name__ == "__main__":
    sys.path[:0] = [
        str(Path(__file__).parents[2] / "examples" / name)
        for name in ("llama", "shared_checkpoint")
    ]
    main()
