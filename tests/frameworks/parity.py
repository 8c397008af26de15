# SPDX-License-Identifier: Apache-2.0
"""Trains the model of examples/llama in one framework on one mesh, from a checkpoint, and prints the losses as JSON.

python tests/frameworks/parity.py torch save FOLDER            writes the checkpoint that all begin with
python tests/frameworks/parity.py mindspore 2x2 FOLDER         trains on a mesh of 2x2 ("1": one process, no mesh)
"""

import json
import os
import sys
from pathlib import Path

STEPS = 20
SIZES = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48, "context": 16, "vocab": 64}
LEARNING_RATE = 3e-3


def batch():
    """Sequences in which a token follows from the one before it, as arrays of inputs and targets."""
    import numpy as np

    drawn = np.random.default_rng(0).integers(0, 64, (8, 1))
    tokens = (drawn * 5 ** np.arange(17) + np.arange(17)) % 64
    return tokens[:, :-1], tokens[:, 1:]


def on_this_rank(framework, shape, folder):
    """The losses of all steps."""
    from hyper_parallel import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from hyper_parallel.core.distributed_checkpoint import load

    run = {"torch": Torch, "mindspore": MindSpore}[framework]()
    mesh = None
    if shape != "1":
        sizes = tuple(map(int, shape.split("x")))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])
        from plan import put_on_mesh

        put_on_mesh(run.model, mesh)
    load({"model": run.state()}, checkpoint_id=folder)

    def placed(array):
        tensor = run.tensor(array)
        return tensor if mesh is None else distribute_tensor(tensor, mesh, [Shard(0), Replicate()][-mesh.ndim :])

    ids, targets = map(placed, batch())
    losses = []
    for _ in range(STEPS):
        loss = run.step(ids, targets)
        losses.append(float(loss.full_tensor() if isinstance(loss, DTensor) else loss))
    return losses


class Torch:
    """The model and one step of its training in PyTorch."""

    def __init__(self):
        import torch

        from model import Config, Llama

        torch.manual_seed(0)
        self.torch, self.model = torch, Llama(Config(**SIZES))
        self.optimizer = None

    def state(self):
        return dict(self.model.named_parameters())

    def tensor(self, array):
        return self.torch.tensor(array)

    def step(self, ids, targets):
        if self.optimizer is None:
            parameters = list(self.model.parameters())
            self.optimizer = self.torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01, foreach=False)
        self.optimizer.zero_grad()
        logits = self.model(ids)
        loss = self.torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class MindSpore:
    """The model and one step of its training in MindSpore."""

    def __init__(self):
        import mindspore

        from model_mindspore import Config, Llama

        self.mindspore, self.model = mindspore, Llama(Config(**SIZES))
        self.optimizer = None

    def state(self):
        return dict(self.model.parameters_and_names())

    def tensor(self, array):
        return self.mindspore.Tensor(array.astype("int32"))

    def step(self, ids, targets):
        if self.optimizer is None:
            from mindspore.experimental import optim

            parameters = self.model.trainable_params()
            self.optimizer = optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01)
            self.gradient = self.mindspore.value_and_grad(self.loss, None, weights=parameters)
        loss, gradients = self.gradient(ids, targets)
        self.optimizer(gradients)
        return loss

    def loss(self, ids, targets):
        logits = self.model(ids)
        found = self.mindspore.ops.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        return found.full_tensor() if hasattr(found, "full_tensor") else found


def main():
    framework, shape, folder = sys.argv[1:]
    os.environ["HYPER_PARALLEL_PLATFORM"] = framework
    from hyper_parallel.core.distributed_checkpoint import save
    from hyper_parallel.testing import close_ranks, run_ranks

    if shape == "save":
        save({"model": Torch().state()}, checkpoint_id=folder)
    else:
        count = 1
        for size in shape.split("x"):
            count *= int(size)
        print(json.dumps(run_ranks(on_this_rank, count, framework, shape, folder, timeout=300)[0]))
        close_ranks()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "llama"))
    main()
