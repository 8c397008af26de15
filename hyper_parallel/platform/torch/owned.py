# SPDX-License-Identifier: Apache-2.0
"""What happens to a module whose tensors were put on a mesh: how it loads plain state, and who still has the old ones.

model.load_state_dict(plain)            each rank takes its part of every tensor
optimizer.step()                        refused where the optimizer has parameters that the model no longer has
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.torch.dtensor_base import DTensorBase

_REPLACED = "_hyper_parallel_replaced"  # on a parameter: what it was


# --- loading


def load_onto_mesh(module: nn.Module) -> None:
    """Has a module's ``load_state_dict`` take plain tensors for its distributed ones."""
    hooks = module._load_state_dict_pre_hooks.values()
    if not any(getattr(hook, "hook", None) is _distribute_entries for hook in hooks):
        module._register_load_state_dict_pre_hook(_distribute_entries, with_module=True)


def _distribute_entries(
    module: nn.Module, state_dict: Any, prefix: str, *_: Any
) -> None:
    """Puts this module's entries into the layouts of its own tensors; other shapes are left for torch to refuse."""
    for name, own in (*module._parameters.items(), *module._buffers.items()):
        given = state_dict.get(prefix + name)
        if (
            isinstance(own, DTensorBase)
            and isinstance(given, torch.Tensor)
            and given.shape == own.shape
        ):
            state_dict[prefix + name] = _lying_as(own, given)


def _lying_as(own: DTensorBase, given: torch.Tensor) -> torch.Tensor:
    if not isinstance(given, DTensorBase):
        shard = own._layout.part_of(given.detach()).clone()
        return own._layout.tensor(shard, tuple(own._shape))
    if given._layout is own._layout or given._layout.mesh != own._layout.mesh:
        return given
    with torch.no_grad():
        return given.redistribute(None, own._layout)


# --- optimizers that were made too early


class _Replacements:
    """How many parameters were replaced, and how many of them each optimizer was compared with."""

    def __init__(self) -> None:
        self.count = 0
        self.seen: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


_REPLACEMENTS = _Replacements()


def note_replaced(module: nn.Module, name: str, old: Any, new: Any) -> None:
    """Remembers that a module has another parameter now; an optimizer that has the old one would change nothing."""
    if old is None or old is new:
        return
    if not _REPLACEMENTS.count:
        register_optimizer_step_pre_hook(_refuse_replaced)
    _REPLACEMENTS.count += 1
    setattr(old, _REPLACED, f"{name} {tuple(old.shape)} of {type(module).__name__}")
    vars(new).pop(_REPLACED, None)


def _refuse_replaced(optimizer: Any, *_: Any) -> None:
    if _REPLACEMENTS.seen.get(optimizer) == _REPLACEMENTS.count:
        return
    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]
    replaced = [
        vars(parameter)[_REPLACED]
        for parameter in parameters
        if _REPLACED in vars(parameter)
    ]
    if replaced:
        more = f" and {len(replaced) - 3} more" if len(replaced) > 3 else ""
        raise coded(
            RuntimeError,
            "HP231",
            f"{type(optimizer).__name__}.step: {len(replaced)} of its {len(parameters)} parameters are no longer "
            f"those of the model, which lie on a mesh now: {', '.join(replaced[:3])}{more}. The step would change "
            "nothing; construct the optimizer after parallelize_module, replicate and distribute_module",
        )
    _REPLACEMENTS.seen[optimizer] = _REPLACEMENTS.count
