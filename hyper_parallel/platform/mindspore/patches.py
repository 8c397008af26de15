# SPDX-License-Identifier: Apache-2.0
"""Every attribute of MindSpore that this package replaces, with the reason and the replacement.

``install`` replaces them when the platform is chosen. All replacements behave like the originals for plain tensors.
``tests/guards/test_patches.py`` compares the table with what is really replaced. ``init_on_device`` also replaces
``Parameter.__init__``, but only within its context.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mindspore import Tensor, nn, ops
from mindspore.experimental import optim

from hyper_parallel.platform.mindspore import (
    determinism,
    dtensor_base,
    module_hooks,
    optimizers,
    private,
    selective,
)
from hyper_parallel.platform.mindspore.cpu import op_adapters, randomness
from hyper_parallel.platform.patching import Patch

_REPLAYED = "its kernel draws numbers that cannot be drawn again; recompute must"
_DETERMINISM = (
    "a recompute that saves other tensors than forward would feed them to backward"
)
_STEPS = "some optimizers would update a copy while operators are recorded, or nothing on a CPU"
_NO_FALLBACK = (
    "it does not ask __fallback__, and would compute a plain tensor from shards"
)


def _patches() -> list[Patch]:
    return [
        Patch(
            Tensor,
            "__fallback__",
            "plain + distributed would fail before a rule is asked; selective recompute sees operators here",
            lambda _: selective.report_fallback(dtensor_base.plain_fallback),
        ),
        Patch(
            ops.Stack,
            "__call__",
            _NO_FALLBACK,
            lambda usual: _sees(op_adapters.stack_by_rule, usual),
        ),
        Patch(
            ops.AddN,
            "__call__",
            _NO_FALLBACK,
            lambda usual: _sees(op_adapters.add_n_by_rule, usual),
        ),
        Patch(
            private.backward_hooks(),
            "__call__",
            "MindSpore sets backward hooks on the wrapper of a DTensor; they belong on its shard",
            module_hooks.hook_shards,
        ),
        Patch(
            private.forward_hooks_of_recompute(),
            "__init__",
            _DETERMINISM,
            determinism.note_forward,
        ),
        Patch(
            private.hooks_of_recompute(),
            "__init__",
            _DETERMINISM,
            determinism.check_recompute,
        ),
        Patch(nn.Optimizer, "__call__", _STEPS, optimizers.unrecorded_step),
        Patch(optim.Optimizer, "__call__", _STEPS, optimizers.unrecorded_step),
        Patch(
            ops.Dropout,
            "__call__",
            _REPLAYED,
            partial(randomness.draw_again, randomness.drop),
        ),
        Patch(
            ops.Dropout2D,
            "__call__",
            _REPLAYED,
            partial(randomness.draw_again, randomness.drop_channels),
        ),
        Patch(
            ops.Dropout3D,
            "__call__",
            _REPLAYED,
            partial(randomness.draw_again, randomness.drop_channels),
        ),
    ]


def _sees(instead: Any, usual: Any) -> Any:
    """Dispatches a primitive on distributed tensors, and reports it to selective recompute."""
    return selective.report_call(op_adapters.dispatch_first(instead, usual))


def install() -> None:
    """Replaces every attribute of the table, once per process."""
    for patch in _patches():
        patch.install()
