# SPDX-License-Identifier: Apache-2.0
"""Every attribute of torch that this package replaces, with the reason and the replacement.

``install`` replaces them when the platform is chosen, ``install_functional`` when the process joins a job. All
replacements behave like the originals for plain tensors.
``tests/guards/test_patches.py`` compares the table with what is really replaced.
"""

from __future__ import annotations

import sys
from functools import partial

import torch.masked
import torch.nn.modules.module
import torch.testing._comparison

from hyper_parallel.platform.patching import Patch
from hyper_parallel.platform.torch import layout_readers, module_hooks


def _patches() -> list[Patch]:
    masked = layout_readers.masked_functions()
    return [
        Patch(
            torch.nn.modules.module,
            "BackwardHook",
            "torch sets a module's backward hooks on the wrapper of a DTensor; they belong on its shard",
            lambda _: module_hooks.ShardBackwardHook,
        ),
        Patch(
            torch.testing._comparison,
            "TensorLikePair",
            "assert_close reads tensor.layout; it compares whole tensors instead",
            lambda _: layout_readers.WholePair,
        ),
        *(
            Patch(
                torch.masked,
                name,
                "torch.masked reads tensor.layout; it is dispatched instead",
                partial(layout_readers.dispatch_masked, name),
            )
            for name in masked
        ),
    ]


def install() -> None:
    """Replaces every attribute of the table, once per process."""
    for patch in _patches():
        patch.install()


def install_functional(*, loads: bool) -> None:
    """Replaces the resolution of groups in torch's functional collectives, which few programs load.

    ``loads``: also if nobody has imported them yet, which takes a while.
    """
    if not loads and "torch.distributed._functional_collectives" not in sys.modules:
        return
    from torch.distributed import _functional_collectives

    from hyper_parallel.platform.torch.functional_groups import resolve_meshes

    why = "the functional collectives accept meshes of this package as groups"
    Patch(_functional_collectives, "_resolve_group", why, resolve_meshes).install()
