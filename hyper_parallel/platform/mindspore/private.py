# SPDX-License-Identifier: Apache-2.0
"""The private names of MindSpore that the platform uses, each of them here and nowhere else.

They are what 2.10 has and no public name offers. A version that lacks one says so when it is first asked for.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import mindspore

from hyper_parallel.platform.error_codes import coded


@functools.cache
def _name(module: str, *path: str) -> Any:
    try:
        found = importlib.import_module(module)
        for step in path:
            found = getattr(found, step)
    except (ImportError, AttributeError) as error:
        raise coded(
            ImportError,
            "HP101",
            f"MindSpore {mindspore.__version__} has no {'.'.join((module, *path))}, which hyper_parallel needs; it "
            "is written for mindspore 2.10",
        ) from error
    return found


# --- communication


def init_with_store() -> Any:
    """Joins a job through a store: the public twin takes hccl alone."""
    return _name("mindspore.communication.management", "_init_with_store")


def group_caches() -> tuple[dict[str, int], dict[str, int]]:
    """(ranks, sizes) by the name of a group, where some functions look up the default group under hccl's name."""
    module = "mindspore.mint.distributed.distributed"
    return _name(module, "_GROUP_RANK_CACHE"), _name(module, "_GROUP_SIZE_CACHE")


# --- the tape


def run_backward() -> Any:
    """Backward from some tensors: (tensors, gradients, keep_graph, create_graph, inputs, allow_unreachable)."""
    return _name("mindspore._c_expression", "run_backward")


def executor() -> Any:
    """What runs operators one by one: ``set_grad_flag``, ``queue_backward_final_callback``.

    ``get_current_autodiff_engine_id`` gives the number of the backward that runs, the innermost one; -1 outside.
    """
    return _name("mindspore.graph.api", "_pynative_executor")


def function() -> Any:
    """The base of autograd functions."""
    return _name("mindspore", "_Function")


def node(tensor: Any) -> Any:
    """What computes the gradients of a tensor's operands; for a function of ours its context."""
    _name("mindspore._c_expression", "TensorPy", "_grad_node")
    return tensor._grad_node


def no_grad() -> Any:
    """A context in which nothing is recorded."""
    return _name("mindspore", "_no_grad")


# --- tensors that derive from the framework's


def no_fallback() -> Any:
    """A context in which operators run on what they get, without asking ``__fallback__``."""
    return _name("mindspore._c_expression", "NoFallbackGuard")


def base_tensor() -> Any:
    """What the class Tensor derives from."""
    return _name("mindspore._c_expression", "TensorPy")


def requires_grad(tensor: Any) -> bool:
    """Whether a gradient flows to a tensor; only a Parameter says so in public."""
    _name("mindspore._c_expression", "TensorPy", "_requires_grad")
    return bool(tensor._requires_grad)


def is_leaf(tensor: Any) -> bool:
    """Whether a tensor was not computed from others, as far as backward is concerned."""
    _name("mindspore._c_expression", "TensorPy", "_is_leaf")
    return bool(tensor._is_leaf)


# --- randomness and devices


def seeds() -> Any:
    """The module that has the global seed of random operators and the counters of their kernels."""
    for name in ("_GLOBAL_SEED", "_KERNEL_SEED"):
        _name("mindspore.common.seed", name)
    return _name("mindspore.common.seed")


def dtype_of(given: Any) -> Any:
    """The dtype that an operator is told, some of them by its number."""
    return (
        _name("mindspore._c_expression.typing", "type_id_to_type")(given)
        if isinstance(given, int)
        else given
    )


def device_context() -> Any:
    """A context in which tensors are made on a device; "meta" is one without storage."""
    return _name("mindspore.common.device", "DeviceCtx")


# --- recompute


def forward_hooks_of_recompute() -> Any:
    """The class of the hooks that keep places for what a recomputed function saves."""
    return _name("mindspore.common.recompute", "_CreatePlaceholderHook")


def hooks_of_recompute() -> Any:
    """The class of the hooks that fill these places when the function runs again."""
    return _name("mindspore.common.recompute", "_RecomputationHook")


# --- modules


def own_parameters(cell: Any) -> Any:
    """The parameters that a Cell has itself, by the names of its attributes, tied ones too."""
    return cell._params


def own_cells(cell: Any) -> Any:
    """The cells that a Cell has itself, by name."""
    return cell._cells


def own_buffers(cell: Any) -> Any:
    """The buffers that a Cell has itself; it does not let its own attributes be set anew."""
    return cell._buffers


def backward_hooks() -> Any:
    """The class that sets the backward hooks of a Cell on what it is called with."""
    return _name("mindspore.ops.operations._inner_ops", "CellBackwardHook")


def cell_on(kind: Any, attributes: dict[str, Any]) -> Any:
    """A Cell of a class on top of the attributes of another one, which both have from now on."""
    cell = kind.__new__(kind)
    _name("mindspore._c_expression", "Cell_").__init__(cell, kind.__name__)
    object.__setattr__(cell, "__dict__", attributes)
    return cell
