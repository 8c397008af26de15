# SPDX-License-Identifier: Apache-2.0
"""Does to a model's activations what the recipe's keys ``recompute`` and ``swap`` say.

recompute: selective                             the repeated blocks, without their matrix products
recompute: {mode: full, modules: [blocks.*]}
swap: [blocks.*.attention]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any

from hyper_parallel.core.activation_checkpoint import (
    CheckpointPolicy,
    checkpoint_wrapper,
    swap_wrapper,
)
from hyper_parallel.core.modules.blocks import find_blocks
from hyper_parallel.core.shard.sharding_plan import no_match
from hyper_parallel.platform import get_platform
from hyper_parallel.recipe.errors import Problem, RecipeError
from hyper_parallel.recipe.schema import Recipe, Recompute

platform = get_platform()

# The operators that take most of the time, by the names that the frameworks have for them.
_PRODUCTS = {
    "addmm", "baddbmm", "batchmatmul", "batchmatmulext", "bmm", "convolution", "dense", "linear", "matmul",
    "matmulext", "mm",
}  # fmt: skip


def apply_to_activations(recipe: Recipe, model: Any) -> None:
    """Wraps the modules that the recipe names, in place; swapping goes around recomputing."""
    recompute = recipe.recompute
    if recompute.mode != "none":
        policy = save_products if recompute.mode == "selective" else None
        wrap = functools.partial(checkpoint_wrapper, policy_fn=policy)
        chosen = choose_modules(recipe, model, "recompute.modules", recompute.modules)
        _wrap(model, chosen, wrap)
    if recipe.swap:
        _wrap(model, choose_modules(recipe, model, "swap", recipe.swap), swap_wrapper)


def keep_all_activations(recipe: Recipe) -> Recipe:
    """The recipe of a plain step, which keeps all activations: what others are compared with."""
    plain = recipe.model_copy(update={"recompute": Recompute(), "swap": ()})
    plain._path = recipe.path
    return plain


def save_products(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001 - a policy gets them
    """Keeps the outputs of matrix products and attention; the rest is cheap to compute again."""
    name = platform.get_op_name(operator).lower()
    if name in _PRODUCTS or "attention" in name:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def choose_modules(
    recipe: Recipe, model: Any, key: str, patterns: Iterable[str] | None
) -> Collection[str]:
    """The names of modules that the patterns match, or of the repeated blocks."""
    names = [name for name, _ in platform.get_cells_and_names(model) if name]
    if patterns is None:
        blocks = find_blocks(model)
        if blocks:
            return blocks
        message = "the model has no list of modules; name the modules"
        raise RecipeError(recipe.path, [Problem(key, message)])
    patterns = tuple(patterns)
    lost = [
        one for one in patterns if not any(fnmatchcase(name, one) for name in names)
    ]
    if lost:
        problems = [Problem(key, no_match("module", one, names)) for one in lost]
        raise RecipeError(recipe.path, problems)
    matches = {name for name in names for one in patterns if fnmatchcase(name, one)}
    return _without_inner(matches)


def _without_inner(names: Collection[str]) -> set[str]:
    """Those that are not inside another one: a wrapped module includes what is in it."""
    return {
        name
        for name in names
        if not any(name.startswith(f"{other}.") for other in names)
    }


def _wrap(model: Any, names: Collection[str], wrap: Callable[[Any], Any]) -> None:
    parents = dict(platform.get_cells_and_names(model))
    for name in names:
        above, _, own = name.rpartition(".")
        parent = parents[above]
        child = dict(platform.own_modules(parent))[own]
        platform.replace_submodule(parent, own, wrap(child))
