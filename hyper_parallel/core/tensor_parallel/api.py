# SPDX-License-Identifier: Apache-2.0
"""Parallelizes the modules of a model along an axis of devices by a plan, and prints what it did.

parallelize_module(model, mesh["tp"], {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})
print(parallel_table(model))
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, get_current_mesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.modules.absent import is_absent
from hyper_parallel.core.modules.boundary import attachments
from hyper_parallel.core.shard.sharding_plan import matching, no_match
from hyper_parallel.core.tensor_parallel.style import ParallelStyle
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.caller import users_level
from hyper_parallel.platform.error_codes import coded, prefixed

platform = get_platform()
logger = logging.getLogger(__name__)
_STYLES = "_hyper_parallel_styles"
_COMPILED = "_orig_mod"  # where torch.compile(module) keeps the module


def parallelize_module(
    module: Any,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Any:
    """Applies a style to the module, or to those in it whose names match the plan's patterns, and returns the module.

    Patterns match segment by segment ("layers.*.up"); "" is the module itself. Inner modules come before outer ones.
    ``src_data_rank``: the index along the mesh of the rank whose parameters the others get; None where they are equal.
    Parameters that two modules share stay one.
    """
    mesh = device_mesh if device_mesh is not None else get_current_mesh()
    if mesh.ndim != 1:
        axis = (mesh.mesh_dim_names or ("tp",))[-1]
        raise coded(
            ValueError,
            "HP401",
            f"parallelize_module: expected a mesh of one axis, got {mesh}; take one of its axes, mesh[{axis!r}]",
        )
    plan = _plan_of(parallelize_plan)
    if not plan:
        warnings.warn(
            "parallelize_module: there is no plan, so nothing was done",
            stacklevel=users_level(),
        )
    modules = dict(platform.get_cells_and_names(module))
    _refuse_compiled(plan, modules)
    shared = _shared_tensors(modules.values())
    styles = list(_styles(plan, modules))
    for name, style in sorted(styles, key=lambda pair: -len(_segments(pair[0]))):
        _apply(modules[name], name, style._with_source(src_data_rank), mesh)
        for owners in shared:
            _tie(owners)
    _warn_of_unstyled_tables(modules, shared)
    if logger.isEnabledFor(logging.INFO) and platform.get_rank() == 0:
        logger.info("parallelize_module on %s:\n%s", mesh, parallel_table(module))
    return module


def _plan_of(given: Any) -> Mapping[str, Any]:
    if isinstance(given, ParallelStyle):
        return {"": given}
    if given is not None and not isinstance(given, Mapping):
        raise coded(
            TypeError,
            "HP402",
            "parallelize_module: expected a style, or a dict from the names of modules to styles such as "
            f'{{"layers.*.up": ColwiseParallel()}}, got a {type(given).__name__}',
        )
    return given or {}


def _refuse_compiled(plan: Mapping[str, Any], modules: Mapping[str, Any]) -> None:
    """Raises if a pattern matches a module that is compiled, or one within it."""
    compiled = [
        name for name, module in modules.items() if platform.is_compiled_module(module)
    ]
    for outer in compiled:
        inside = [
            name
            for name in modules
            if not outer or name == outer or name.startswith(f"{outer}.")
        ]
        plain_names = {
            ".".join(part for part in _segments(name) if part != _COMPILED)
            for name in inside
        }
        for pattern in plan:
            if matching(pattern, plain_names):
                raise coded(
                    ValueError,
                    "HP414",
                    f"parallelize_module: {pattern!r} means {outer or 'the module itself'}, or a module in it, "
                    "whose calls torch.compile has compiled; distributed tensors cannot be traced: put the model "
                    "on the mesh without torch.compile, and compile functions of plain shards in it",
                )


def _styles(
    plan: Mapping[str, Any], modules: Mapping[str, Any]
) -> Iterator[tuple[str, ParallelStyle]]:
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise coded(
                TypeError,
                "HP402",
                f"parallelize_module: expected a style for {pattern!r}, got {style!r}",
            )
        names = matching(pattern, modules)
        if not names:
            reason = no_match("module", pattern, modules)
            warnings.warn(
                f"parallelize_module: {reason}; nothing was done for it",
                stacklevel=users_level(),
            )
        for name in names:
            if not is_absent(modules[name]):
                yield name, style


def _segments(name: str) -> list[str]:
    return name.split(".") if name else []


def _apply(module: Any, name: str, style: ParallelStyle, mesh: DeviceMesh) -> None:
    try:
        style.apply(module, mesh)
    except (TypeError, ValueError) as error:
        raise prefixed(name or "the module itself", error) from error
    setattr(module, _STYLES, (*vars(module).get(_STYLES, ()), str(style)))


# --- tensors that several modules share

Owner = tuple[Any, str]  # a module, and its own name for a tensor


def _shared_tensors(modules: Any) -> list[list[Owner]]:
    """For each tensor that several modules share, its owners."""
    owners: dict[int, list[Owner]] = {}
    for module in modules:
        for name, tensor in platform.own_tensors(module):
            owners.setdefault(id(tensor), []).append((module, name))
    return [sharing for sharing in owners.values() if len(sharing) > 1]


def _tie(owners: list[Owner]) -> None:
    """Makes what was one tensor one again, after a style has distributed it for one of its owners."""
    tensors = [_tensor_of(owner) for owner in owners]
    distributed = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if not distributed:
        return
    for (module, name), tensor in zip(owners, tensors, strict=True):
        if tensor is not distributed[0]:
            platform.set_own_tensor(module, name, distributed[0])


def _tensor_of(owner: Owner) -> Any:
    module, name = owner
    return dict(platform.own_tensors(module))[name]


def _warn_of_unstyled_tables(
    modules: Mapping[str, Any], shared: list[list[Owner]]
) -> None:
    """Warns of embeddings whose table another module's style has sharded by rows, and that have no style themselves."""
    names = {id(module): name for name, module in modules.items()}
    for owners in shared:
        for owner in owners:
            module, _ = owner
            if not _lacks_style(module, _tensor_of(owner)):
                continue
            name = names[id(module)]
            others = [names[id(other)] for other, _ in owners if other is not module]
            warnings.warn(
                f"parallelize_module: the embedding {name!r} shares its table with {', '.join(map(repr, others))}, "
                f"which the plan cuts by rows, and has no style itself: its results stay pending sums, which cost "
                f'more all-reduces; add "{name}": RowwiseParallel(...) to the plan, with the arguments of the other',
                stacklevel=users_level(),
            )


def _lacks_style(module: Any, table: Any) -> bool:
    """Whether the module is an embedding without a style whose table is sharded by rows."""
    if vars(module).get(_STYLES) or not platform.is_embedding_module(module):
        return False
    return isinstance(table, DTensor) and any(
        placement.is_shard(0) for placement in table.placements
    )


# --- what was done


def parallel_table(module: Any) -> str:
    """A table for people: each module with its styles, parameters and placements; equal layers are one line."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for name, owner in platform.get_cells_and_names(module):
        units = [
            str(one.source)
            for one in attachments(owner)
            if one.phase == "gather parameters"
        ]
        styles = " + ".join([*vars(owner).get(_STYLES, ()), *units])
        tensors = ", ".join(
            f"{own} {_placements(tensor)} {list(tensor.shape)}"
            for own, tensor in platform.own_tensors(owner)
        )
        if styles or tensors:
            layer = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
            key = (layer, styles or "-", tensors or "-")
            lines.setdefault(key, []).append(name or "(the module itself)")
    rows = [("module", "style", "tensors", "count")]
    for (layer, styles, tensors), names in lines.items():
        name = layer if len(names) > 1 else names[0]
        rows.append((name, styles, tensors, str(len(names))))
    return "\n".join([*_align(rows), *_plain_parameters(module)])


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The rows as lines of text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(size) for cell, size in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _plain_parameters(module: Any) -> list[str]:
    """A line that names the parameters that are not distributed, if there are any."""
    parameters = platform.parameters_dict(module).items()
    plain = [name for name, value in parameters if not isinstance(value, DTensor)]
    return [f"plain on every rank: {', '.join(plain)}"] if plain else []


def _placements(tensor: Any) -> str:
    if not isinstance(tensor, DTensor):
        return "plain"
    return f"[{', '.join(map(str, tensor.placements))}]"
