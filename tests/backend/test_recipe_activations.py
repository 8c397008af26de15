# SPDX-License-Identifier: Apache-2.0
"""The keys ``recompute`` and ``swap`` of a recipe: the same loss and gradients, other activations."""

import warnings
from pathlib import Path

import frame
import numpy as np
import pytest

from hyper_parallel.core.activation_checkpoint import groups, is_recomputing
from hyper_parallel.core.modules import attach
from hyper_parallel.platform import get_platform
from hyper_parallel.recipe import RecipeError, read_recipe
from hyper_parallel.recipe.build import build

platform = get_platform()
RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"
RECIPE = RECIPES / ("demo.yaml" if frame.IS_TORCH else "mindspore.yaml")
SMALL = [
    "model.arguments={dim: 32, layers: 3, heads: 4, kv_heads: 2, hidden: 48, context: 16}",
    "data={corpus: python, batch: 2, length: 16}",
    "folder=null",
    "checkpoints.every=0",
]


@pytest.fixture(autouse=True)
def _one_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        groups._warn_on_cpu()


def step(*overrides):
    """(loss and gradients of one step, how often the products of the blocks ran again)."""
    job = build(read_recipe(RECIPE, [*SMALL, *overrides]), None)
    again = []
    for name, module in platform.get_cells_and_names(job.model):
        if name.endswith("mlp.gate"):

            def note(*_, name=name):
                again.extend([name] * is_recomputing())

            attach(module, "user", enter=note)
    parameters = list(platform.parameters_dict(job.model).values())
    loss, gradients = platform.compute_gradients(
        lambda: job.loss(job.model, *job.batch(0)), parameters
    )
    if frame.IS_TORCH:
        gradients = [parameter.grad for parameter in parameters]
    else:
        gradients = [gradient for _, gradient in gradients]
    arrays = [frame.array(platform.detach(one)) for one in (loss, *gradients)]
    return arrays, again


@pytest.fixture(scope="module")
def plain():
    return step()


BLOCKS = [f"blocks.{n}.mlp.gate" for n in (2, 1, 0)]


@pytest.mark.parametrize(
    ("overrides", "again"),
    [
        (["recompute=full"], BLOCKS),
        (["recompute=selective"], BLOCKS),
        (["recompute={mode: full, modules: [blocks.1]}"], BLOCKS[1:2]),
        (["recompute={mode: full, modules: ['blocks.*.mlp']}"], BLOCKS),
        (["recompute=none", "swap=['blocks.*']"], []),
        (["recompute=full", "swap=['blocks.*']"], BLOCKS),
        # What is swapped is not computed again: the recompute ends before it.
        (["swap=['blocks.*.mlp', head]", "recompute=selective"], []),
    ],
    ids=" ".join,
)
def test_loss_and_gradients_are_bit_equal(plain, overrides, again):
    found, ran = step(*overrides)
    assert ran == again
    assert len(found) == len(plain[0]) > 10
    assert np.any(plain[0][1])
    for mine, true in zip(found, plain[0], strict=True):
        assert np.array_equal(mine, true)
    assert plain[1] == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("recompute=some", "recompute.mode: expected 'none', 'full' or 'selective'"),
        ("recompute={mode: full, modules: [block.*]}", "'block.*' matches no module"),
        ("swap=[layers.*]", "'layers.*' matches no module"),
        ("recompute.modes=full", "did you mean recompute.mode"),
    ],
)
def test_wrong_values_are_named(override, message):
    with pytest.raises(RecipeError) as error:
        build(read_recipe(RECIPE, [*SMALL, override]), None)
    assert message in str(error.value)
