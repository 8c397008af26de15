# SPDX-License-Identifier: Apache-2.0
"""A plan for a whole module: how its parameters, inputs and outputs lie, by name.

shard_module(model, mesh, ShardingPlan(
    plan={"layers.*.up.weight": [Shard(0)], "layers.*.down.weight": ("None", "tp")},
    input_plan={"": [Replicate()]},
    output_plan={"": [Replicate()]},
    return_local_tensor=[""],
))
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor, distribute_tensor, layout_of
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


@dataclass(frozen=True)
class ShardingPlan:
    """Names are patterns, segment by segment ("layers.*.up"); "" is the module itself.

    ``plan``: parameter -> placements. ``input_plan``, ``output_plan``: module -> placements of its first tensor, or a
    list with placements (or None) for each, or a dict from position or keyword to placements. A plain tensor counts as
    whole and equal on every rank. ``return_local_tensor``: modules that return their results as plain shards.
    """

    plan: Mapping[str, Any] = field(default_factory=dict)
    input_plan: Mapping[str, Any] | None = None
    output_plan: Mapping[str, Any] | None = None
    return_local_tensor: Sequence[str] | None = None


def shard_module(
    model: Any, device_mesh: DeviceMesh | None, sharding_plan: ShardingPlan
) -> Any:
    """Puts a module on a mesh; parameters that the plan does not name stay as they are."""
    if not isinstance(sharding_plan, ShardingPlan):
        raise coded(
            TypeError,
            "HP411",
            f"shard_module: expected a ShardingPlan, got {type(sharding_plan).__name__}",
        )
    parameters = platform.parameters_dict(model)
    for pattern, placements in sharding_plan.plan.items():
        for name in _matching("parameter", pattern, parameters):
            _shard_parameter(model, name, device_mesh, placements)
    modules = dict(platform.get_cells_and_names(model))
    for module, wanted in _match_boundary("input", sharding_plan.input_plan, modules):
        _prepare_inputs(module, device_mesh, wanted)
    for module, wanted in _match_boundary("output", sharding_plan.output_plan, modules):
        _prepare_outputs(module, device_mesh, wanted)
    for pattern in sharding_plan.return_local_tensor or ():
        for name in _matching("module", pattern, modules):
            platform.register_forward_hook(modules[name], _to_local)
    return model


def _match_boundary(
    side: str, plan: Mapping[str, Any] | None, modules: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """(module, placements) for each entry of a plan of inputs or outputs: "mlp.input", or "input" for the model."""
    for pattern, wanted in (plan or {}).items():
        path = "" if pattern == side else pattern.removesuffix(f".{side}")
        for name in _matching("module", path, modules):
            yield modules[name], wanted


def _matching(kind: str, pattern: str, names: Iterable[str]) -> list[str]:
    known = list(names)
    found = matching(pattern, known)
    if not found:
        raise coded(
            ValueError, "HP411", f"shard_module: {no_match(kind, pattern, known)}"
        )
    return found


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern means, segment by segment."""
    return [name for name in names if _matches(name, pattern)]


def _matches(name: str, pattern: str) -> bool:
    have, want = name.split("."), pattern.split(".")
    return len(have) == len(want) and all(
        fnmatch.fnmatchcase(h, w) for h, w in zip(have, want, strict=True)
    )


def no_match(kind: str, pattern: str, names: Iterable[str]) -> str:
    """That a pattern means nothing, and what it may have been meant to."""
    near = difflib.get_close_matches(pattern, list(names), n=3, cutoff=0.4)
    return f"{pattern!r} matches no {kind}" + (
        f"; did you mean {', '.join(near)}?" if near else ""
    )


def _shard_parameter(model: Any, name: str, mesh: Any, placements: Any) -> None:
    found = platform.search_parameter_by_name(model, name)
    assert found is not None
    parameter = found[2]
    if isinstance(parameter, DTensor):
        raise coded(
            ValueError,
            "HP411",
            f"shard_module: parameter {name} already lies in {parameter.layout}",
        )
    platform.update_parameter_by_name(
        model, found, distribute_tensor(parameter, mesh, placements)
    )


def _prepare_inputs(module: Any, mesh: Any, wanted: Any) -> None:
    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plan = _by_position(wanted)
        made = [_placed(value, mesh, plan.get(i)) for i, value in enumerate(args)]
        return tuple(made), {
            name: _placed(value, mesh, plan.get(name)) for name, value in kwargs.items()
        }

    platform.register_forward_pre_hook(module, hook, with_kwargs=True)


def _prepare_outputs(module: Any, mesh: Any, wanted: Any) -> None:
    def hook(_: Any, __: Any, output: Any) -> Any:
        plan = _by_position(wanted)
        if isinstance(output, dict):
            return {
                name: _placed(value, mesh, plan.get(name))
                for name, value in output.items()
            }
        if isinstance(output, (list, tuple)):
            return type(output)(
                _placed(value, mesh, plan.get(i)) for i, value in enumerate(output)
            )
        return _placed(output, mesh, plan.get(0))

    platform.register_forward_hook(module, hook)


def _to_local(_: Any, __: Any, output: Any) -> Any:
    return platform.apply_to_tensors(
        lambda t: t.to_local() if isinstance(t, DTensor) else t, output
    )


def _by_position(wanted: Any) -> dict[Any, Any]:
    """Placements for each position or keyword."""
    if isinstance(wanted, Mapping):
        return dict(wanted)
    if isinstance(wanted, (list, tuple)) and any(
        _is_placements(item) for item in wanted
    ):
        return dict(enumerate(wanted))
    return {0: wanted}


def _is_placements(item: Any) -> bool:
    is_list = isinstance(item, (list, tuple)) and any(
        isinstance(entry, Placement) for entry in item
    )
    return isinstance(item, Layout) or is_list


def _placed(value: Any, mesh: Any, placements: Any) -> Any:
    if placements is None or not platform.is_tensor(value):
        return value
    if not isinstance(value, DTensor):
        base = layout_of(mesh, placements, len(value.shape)).mesh
        value = DTensor.from_local(value, base, [Replicate()] * base.ndim)
    return value.redistribute(
        None, layout_of(value.device_mesh, placements, len(value.shape))
    )
