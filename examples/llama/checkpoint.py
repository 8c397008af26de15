"""Whole tensors in one safetensors file and all else in a JSON file: written on any mesh, read on any other.

A checkpoint is a folder that appears complete or not at all. Nothing is pickled. On several machines the folder must
be one that all of them see.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from hyper_parallel import DTensor, get_platform

MOMENTS = ("exp_avg", "exp_avg_sq")
platform = get_platform()


def save(folder: Path, model: nn.Module, optimizer: Optimizer, facts: dict[str, Any]) -> Path:
    """Writes ``facts["step"]`` as a folder of its own; called on all ranks, since each has a part of the tensors."""
    target = folder / f"step-{facts['step']:06d}"
    tensors = {name: _whole(tensor) for name, tensor in _tensors(model, optimizer)}
    if platform.get_rank() == 0:
        growing = target.with_suffix(".tmp")
        shutil.rmtree(growing, ignore_errors=True)
        growing.mkdir(parents=True)
        save_file({**tensors, "random": platform.get_rng_state()}, growing / "tensors.safetensors")
        (growing / "facts.json").write_text(json.dumps({**facts, "device": platform.device_type()}, indent=1))
        for path in (*growing.iterdir(), growing):
            _sync(path)
        shutil.rmtree(target, ignore_errors=True)  # of an earlier run that went the same way
        growing.rename(target)
        _sync(folder)
    if platform.get_world_size() > 1:
        platform.barrier()  # nobody looks for it before it is there
    return target


def read_facts(folder: Path) -> dict[str, Any]:
    """What stands beside the tensors: the step, the sizes of the model, the options of the run."""
    return json.loads((folder / "facts.json").read_text())


def load(folder: Path, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Fills the model, and the optimizer if there is one; each parameter takes its part of the whole."""
    facts, saved = read_facts(folder), load_file(folder / "tensors.safetensors")
    if optimizer is not None:
        for parameter in model.parameters():
            moments = {moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(facts["step"])), **moments}
        if facts["device"] == platform.device_type():  # other devices have other generators
            platform.set_rng_state(saved["random"])
    for name, tensor in _tensors(model, optimizer):
        platform.load_into_param(tensor, saved[name])


def latest(folder: Path) -> Path:
    """The newest checkpoint in a run's folder; a checkpoint itself is its own."""
    found = [folder] if (folder / "facts.json").exists() else sorted(folder.glob("step-*[0-9]"))
    if not found:
        raise FileNotFoundError(f"there is no checkpoint in {folder}")
    return found[-1]


def _tensors(model: nn.Module, optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield f"model.{name}", parameter
        if optimizer is not None:
            yield from ((f"{moment}.{name}", optimizer.state[parameter][moment]) for moment in MOMENTS)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().contiguous()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
