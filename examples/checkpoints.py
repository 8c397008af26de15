"""A training state saved on a 2x2 mesh and loaded on four ranks in a row, beside the training, bit by bit."""

import tempfile
from pathlib import Path

import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    get_platform,
    init_device_mesh,
    load,
    parallelize_module,
    replicate,
)
from hyper_parallel.core.distributed_checkpoint import (
    CheckpointManager,
    OptimizerState,
    RandomState,
    read_objects,
)

platform = get_platform()
platform.init_process_group()
rank = platform.get_rank()


def trained_state(mesh, steps):
    """A model on a mesh, and its optimizer after some steps, as what is saved and what is filled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 30), nn.GELU(), nn.Linear(30, 5))
    plan = {
        "0": ColwiseParallel(),
        "2": RowwiseParallel(),
    }
    model = replicate(parallelize_module(model, mesh["tp"], plan), mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(2, 16)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "model": model,
        "optimizer": OptimizerState(model, optimizer),
        "random": RandomState(),
    }


names = ("dp", "tp")
before = trained_state(init_device_mesh("cpu", (2, 2), mesh_dim_names=names), steps=3)
after = trained_state(init_device_mesh("cpu", (1, 4), mesh_dim_names=names), steps=0)

# One folder for all ranks; a real job has one that all machines see.
folders = [tempfile.mkdtemp() if rank == 0 else ""] * platform.get_world_size()
platform.all_gather_object(folders, folders[0])
checkpoints = CheckpointManager(Path(folders[0]), keep_last=2, asynchronous=True)
checkpoints.save(3, before, metrics={"loss": 0.5})
checkpoints.wait()  # training would have gone on until here

newest = checkpoints.latest()  # on all ranks: the first one looks, and tells the others
report = load(after, checkpoint_id=newest)
for name, parameter in before["model"].named_parameters():
    assert torch.equal(
        parameter.full_tensor(), after["model"].get_parameter(name).full_tensor()
    ), name
if rank == 0:
    print(read_objects(newest)["checkpoint"])
print(f"rank {rank}: {report}")
platform.destroy_process_group()
