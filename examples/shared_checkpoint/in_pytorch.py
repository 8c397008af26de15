"""The part of the training that is PyTorch's own.

export PYTHONPATH=examples/llama
torchrun --nproc-per-node 4 examples/shared_checkpoint/in_pytorch.py --mesh 2x2 --steps 5 --save build/five
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from model import Config, Llama
from training import train


def new_model(sizes: dict[str, int]) -> Llama:
    """The model, drawn from a seed."""
    torch.manual_seed(0)
    return Llama(Config(**sizes))


def new_optimizer(model: Llama) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)


def tensor(array: Any) -> torch.Tensor:
    """Tokens as the model takes them."""
    return torch.from_numpy(array)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The cross entropy of all tokens."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def step_of(
    model: Llama, optimizer: torch.optim.Optimizer
) -> Callable[[Any, Any], float]:
    """One step of training: the loss."""

    def step(ids: torch.Tensor, targets: torch.Tensor) -> float:
        loss = loss_of(model(ids), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


if __name__ == "__main__":
    train(sys.modules[__name__])
