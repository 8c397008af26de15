# SPDX-License-Identifier: Apache-2.0
"""Recompute and swap of distributed models: collectives are repeated, in the same order on all ranks."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from hyper_parallel import (
    ColwiseParallel,
    CommunicationLedger,
    Replicated,
    RowwiseParallel,
    checkpoint_wrapper,
    get_platform,
    init_device_mesh,
    parallelize_module,
    swap_wrapper,
)
from hyper_parallel.cli import verify as _adds_the_command  # noqa: F401 - to the application
from hyper_parallel.cli.checkpoints import application
from hyper_parallel.core.activation_checkpoint import groups
from hyper_parallel.recipe.activations import save_products
from hyper_parallel.testing import run_ranks

PLAN = {"*.0": ColwiseParallel(), "*.2": RowwiseParallel(), "": Replicated()}
WRAPS = {
    "plain": lambda module: module,
    "recompute": checkpoint_wrapper,
    "to the end": lambda module: checkpoint_wrapper(module, early_stop=False),
    "selective": lambda module: checkpoint_wrapper(module, policy_fn=save_products),
    "swap": swap_wrapper,
    "swap of recompute": lambda module: swap_wrapper(checkpoint_wrapper(module)),
    "inputs": lambda module: checkpoint_wrapper(module, swap_inputs=True),
}


def train(name):
    """(loss and gradients, the collectives of the step, in order)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        groups._warn_on_cpu()
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(2)
    ]
    model = nn.Sequential(*blocks).double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, PLAN)
    for index, block in enumerate(model):
        model[index] = WRAPS[name](block)
    x = torch.randn(4, 8, dtype=torch.float64)
    with CommunicationLedger(mesh) as ledger:
        loss = model(x).square().mean()
        loss.backward()
    values = [loss, *(parameter.grad for parameter in model.parameters())]
    arrays = [value.full_tensor().detach().numpy() for value in values]
    return arrays, [(entry.collective, entry.nbytes) for entry in ledger.entries]


@pytest.mark.parametrize("name", [name for name in WRAPS if name != "plain"])
def test_collectives_at_recompute_agree_on_all_ranks(name):
    plain, wrapped = (run_ranks(train, 2, which) for which in ("plain", name))
    for (true, usual), (found, collectives) in zip(plain, wrapped, strict=True):
        for mine, theirs in zip(found, true, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-13, atol=1e-13)
        assert collectives == wrapped[0][1]
        repeats = len(collectives) - len(usual)
        assert (repeats > 0) == (name == "to the end")


RECIPE = Path(__file__).resolve().parents[2] / "examples" / "recipes" / "demo.yaml"


def test_verify_compares_a_recomputed_model_with_the_plain_one():
    overrides = [
        "model.arguments={dim: 32, layers: 2, heads: 4, kv_heads: 2, hidden: 48, context: 16}",
        "data={corpus: python, batch: 2, length: 16}",
        "precision=float64",
        "recompute=full",
    ]
    arguments = ["verify", str(RECIPE), *overrides, "--mesh", "tp=2"]
    result = CliRunner().invoke(application, arguments)
    get_platform().destroy_process_group()
    assert result.exit_code == 0, result.output
