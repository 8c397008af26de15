"""The part of the training that is MindSpore's own.

export PYTHONPATH=examples/llama
msrun --worker_num 2 --local_worker_num 2 --join True examples/shared_checkpoint/in_mindspore.py --mesh 2 --steps 10 \\
    --load build/five --save build/ten
"""

import sys
from collections.abc import Callable
from typing import Any

import mindspore
from mindspore import Tensor, ops
from mindspore.experimental import optim

from hyper_parallel import DTensor
from model_mindspore import Config, Llama
from training import train

# On a CPU the threads that prepare operators ahead wait by spinning, which takes most of the time of small ones.
mindspore.set_context(pynative_synchronize=True)


def new_model(sizes: dict[str, int]) -> Llama:
    """The model."""
    return Llama(Config(**sizes))


def new_optimizer(model: Llama) -> optim.Optimizer:
    """AdamW."""
    return optim.AdamW(model.trainable_params(), lr=3e-3, weight_decay=0.01)


def tensor(array: Any) -> Tensor:
    """Tokens as the model takes them."""
    return Tensor(array.astype("int32"))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of all tokens."""
    return ops.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def step_of(model: Llama, optimizer: optim.Optimizer) -> Callable[[Any, Any], float]:
    """One step of training: the loss."""

    def run(ids: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(model(ids), targets)
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    with_gradients = mindspore.value_and_grad(
        run, None, weights=model.trainable_params()
    )

    def step(ids: Tensor, targets: Tensor) -> float:
        loss, gradients = with_gradients(ids, targets)
        optimizer(gradients)
        return float(loss)

    return step


if __name__ == "__main__":
    train(sys.modules[__name__])
