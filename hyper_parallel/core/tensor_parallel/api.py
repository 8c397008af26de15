# SPDX-License-Identifier: Apache-2.0
"""Puts the modules of a model on an axis of devices by a plan, and tells what it did.

parallelize_module(model, mesh["tp"], {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})
print(parallel_table(model))
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, get_current_mesh
from hyper_parallel.core.dtensor.dtensor import DTensor
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
    """Applies a style to the module, or to those in it whose names the plan's patterns mean, and returns the module.

    Patterns go segment by segment ("layers.*.up"); "" is the module itself. Inner modules come before outer ones.
    ``src_data_rank``: the place along the mesh of the rank whose parameters all others get; None where they are equal.
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
    for name, style in sorted(
        _styles(plan, modules), key=lambda found: -len(_segments(found[0]))
    ):
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
    """Raises if a pattern means a module that is compiled, or one within it."""
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
        found = matching(pattern, modules)
        if not found:
            told = no_match("module", pattern, modules)
            warnings.warn(
                f"parallelize_module: {told}; nothing was done for it",
                stacklevel=users_level(),
            )
        for name in found:
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
    """Those who have one tensor together, tensor by tensor."""
    owners: dict[int, list[Owner]] = {}
    for module in modules:
        for name, tensor in platform.own_tensors(module):
            owners.setdefault(id(tensor), []).append((module, name))
    return [found for found in owners.values() if len(found) > 1]


def _tie(owners: list[Owner]) -> None:
    """Makes what was one tensor one again, after a style has put it on the mesh for one of its owners."""
    tensors = [dict(platform.own_tensors(module))[name] for module, name in owners]
    placed = next((tensor for tensor in tensors if isinstance(tensor, DTensor)), None)
    for (module, name), tensor in zip(owners, tensors, strict=True):
        if placed is not None and tensor is not placed:
            platform.set_own_tensor(module, name, placed)


def _warn_of_unstyled_tables(
    modules: Mapping[str, Any], shared: list[list[Owner]]
) -> None:
    """Says which embeddings have rows of a table, through another module, and no style that sums what they look up."""
    names = {id(module): name for name, module in modules.items()}
    for owners in shared:
        for module, own in owners:
            table = dict(platform.own_tensors(module))[own]
            is_styled = bool(vars(module).get(_STYLES))
            if (
                is_styled
                or not platform.is_embedding_module(module)
                or not _has_cut_rows(table)
            ):
                continue
            name = names[id(module)]
            others = [names[id(other)] for other, _ in owners if other is not module]
            warnings.warn(
                f"parallelize_module: the embedding {name!r} shares its table with {', '.join(map(repr, others))}, "
                f"which the plan cuts by rows, and has no style itself: its results stay pending sums, which cost "
                f'more all-reduces; add "{name}": RowwiseParallel(...) to the plan, with the arguments of the other',
                stacklevel=users_level(),
            )


def _has_cut_rows(table: Any) -> bool:
    return isinstance(table, DTensor) and any(
        placement.is_shard(0) for placement in table.placements
    )


# --- what was done


def parallel_table(module: Any) -> str:
    """A table for people: each module with its styles, parameters and how they lie; equal layers are one line."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for name, one in platform.get_cells_and_names(module):
        styles = " + ".join(vars(one).get(_STYLES, ()))
        tensors = platform.own_tensors(one)
        if styles or tensors:
            lies = ", ".join(
                f"{own} {_place(tensor)} {list(tensor.shape)}"
                for own, tensor in tensors
            )
            layer = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
            lines.setdefault((layer, styles or "-", lies or "-"), []).append(
                name or "(the module itself)"
            )
    rows = [("module", "style", "tensors", "count")]
    rows += [
        (key[0] if len(names) > 1 else names[0], *key[1:], str(len(names)))
        for key, names in lines.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    told = [
        "  ".join(
            cell.ljust(size) for cell, size in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    plain = [
        name
        for name, tensor in platform.parameters_dict(module).items()
        if not isinstance(tensor, DTensor)
    ]
    return "\n".join(
        [*told, *([f"plain on every rank: {', '.join(plain)}"] if plain else [])]
    )


def _place(tensor: Any) -> str:
    return (
        f"[{', '.join(map(str, tensor.placements))}]"
        if isinstance(tensor, DTensor)
        else "plain"
    )
