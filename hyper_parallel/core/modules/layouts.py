# SPDX-License-Identifier: Apache-2.0
"""The layouts that a style decides for a module, as values, and the one function that executes them.

Example::

    layouts = ModuleLayouts(
        parameters=(("weight", Shard(0)),),
        first_input=Crossing(plain=Replicate(), wanted=Replicate()),
        output=Crossing(wanted=Shard(-1), to_local=True),
    )
    apply_layouts(module, mesh["tp"], layouts, source="my style")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import (
    DTensor,
    distribute_tensor,
    layout_of,
    replicate_rest,
)
from hyper_parallel.core.dtensor.modes import MODES
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.core.modules.axis import MeshAxis, is_even
from hyper_parallel.core.modules.boundary import Enter, Leave, attach
from hyper_parallel.core.modules.plain import (
    keeps_distributed,
    mark_inside_replicated,
    treat_plain_as_replicated,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


@dataclass(frozen=True)
class Crossing:
    """What happens to one tensor that goes into a module or comes out of it.

    ``plain``: the placement of a plain tensor; without it a plain tensor stays plain. ``wanted``: the placement that a
    distributed tensor is given; without it it keeps its own. ``to_local``: whether the plain shard goes on; None: it
    does, unless the module is inside a model in which plain tensors count as the same on every rank.
    ``size``: (dim, global size) of what may be sharded unevenly. ``may_be_uneven``: what follows knows the global size.
    """

    plain: Placement | None = None
    wanted: Placement | None = None
    to_local: bool | None = False
    size: tuple[int, int] | None = None
    may_be_uneven: bool = False


@dataclass(frozen=True)
class ModuleLayouts:
    """What a style decides for one module, along one axis.

    ``parameters``: placements by name. ``first_input``, ``output``: of modules with one input and one output that
    matter; other arguments are left alone. ``inputs``, ``outputs``: one for every positional argument and every output,
    None to leave one alone. ``keyword_inputs``: by name, of those that are passed. ``replicates_rest``: everything else
    in the module is the same on every rank.
    """

    parameters: tuple[tuple[str, Placement], ...] = ()
    first_input: Crossing | None = None
    output: Crossing | None = None
    inputs: tuple[Crossing | None, ...] | None = None
    keyword_inputs: tuple[tuple[str, Crossing], ...] = ()
    outputs: tuple[Crossing | None, ...] | None = None
    replicates_rest: bool = False

    @property
    def wraps(self) -> set[int | str]:
        """The arguments, by position or name, that are wrapped as distributed tensors."""
        if self.first_input is not None:
            return {0}
        positions = enumerate(self.inputs or ())
        names = {name for name, _ in self.keyword_inputs}
        return names | {index for index, crossing in positions if crossing is not None}


def apply_layouts(
    module: Any,
    mesh: DeviceMesh,
    layouts: ModuleLayouts,
    *,
    source: Any,
    src_data_rank: int | None = 0,
) -> Any:
    """Distributes a module's parameters along a mesh of one axis and attaches its layouts; returns the module.

    ``source``: what the layouts come from, for messages and for ``attachments``.
    """
    axis = MeshAxis(mesh)
    for name, placement in layouts.parameters:
        _distribute(module, name, mesh, placement, source, src_data_rank)
    if layouts.replicates_rest:
        replicate_rest(module, mesh, src_data_rank)
        mark_inside_replicated(module)
        leave = _leave_all(layouts.output) if layouts.output is not None else None
        treat_plain_as_replicated(module, axis, "style", source=source, leave=leave)
        return module
    enter, leave = _enter_fn(layouts, axis), _leave_fn(layouts, axis)
    if enter is not None or leave is not None:
        attach(
            module,
            "style",
            enter=enter,
            leave=leave,
            source=source,
            wraps=layouts.wraps,
        )
    return module


def _distribute(
    module: Any,
    name: str,
    mesh: DeviceMesh,
    placement: Placement,
    source: Any,
    src_data_rank: int | None,
) -> None:
    """Distributes one of the module's own parameters, if it has it."""
    tensor = dict(platform.own_tensors(module)).get(name)
    if tensor is None:
        return
    if isinstance(tensor, DTensor):
        if tensor.layout is not layout_of(mesh, [placement], len(tensor.shape)):
            raise coded(
                ValueError,
                "HP405",
                f"{type(source).__name__}: {name} of {type(module).__name__} already lies in {tensor.layout} and "
                f"cannot lie as {placement} on {mesh}; a module takes one style, and where two share a "
                "parameter their styles must agree, as RowwiseParallel for an embedding and ColwiseParallel "
                "for a Linear do",
            )
        return
    is_equal_everywhere = src_data_rank is None or platform.is_meta(tensor)
    rank = None if is_equal_everywhere else mesh.rank_list[src_data_rank or 0]
    distributed = distribute_tensor(tensor, mesh, [placement], src_data_rank=rank)
    platform.set_own_tensor(module, name, distributed)


# --- entering and leaving

# Of a module, the name of a value for messages, and the value.
Cross = Callable[[Any, str, Any], Any]


def _enter_fn(layouts: ModuleLayouts, axis: MeshAxis) -> Enter | None:
    if layouts.first_input is not None:
        return _enter_first(layouts.first_input, axis)
    if layouts.inputs is None and not layouts.keyword_inputs:
        return None
    has_positions = layouts.inputs is not None
    by_position = [_cross_fn(one, axis) for one in layouts.inputs or ()]
    by_name = {name: _cross_fn(one, axis) for name, one in layouts.keyword_inputs}

    def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if has_positions:
            args = _cross_all(module, "input", args, by_position)
        changed = {
            name: cross(module, f"argument {name}", kwargs[name])
            for name, cross in by_name.items()
            if name in kwargs
        }
        return args, {**kwargs, **changed}

    return enter


def _enter_first(crossing: Crossing, axis: MeshAxis) -> Enter:
    """Wraps and redistributes the first argument: the path that most layers take, without further choices."""
    assert crossing.wanted is not None
    sizes = dict([crossing.size]) if crossing.size is not None else None
    wrap = axis.wrap_fn(crossing.plain, sizes)
    redistribute = axis.redistribute_fn(crossing.wanted)

    def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = redistribute(wrap(module, first_tensor(module, args)))
        return (value, *args[1:]), kwargs

    return enter


def _leave_fn(layouts: ModuleLayouts, axis: MeshAxis) -> Leave | None:
    if layouts.output is not None:
        return _leave_single(layouts.output, axis)
    if layouts.outputs is None:
        return None
    crossings = [_cross_fn(one, axis) for one in layouts.outputs]

    def leave(module: Any, output: Any) -> Any:
        several = isinstance(output, (list, tuple))
        values = tuple(output) if several else (output,)
        crossed = _cross_all(module, "output", values, crossings)
        if not several:
            return crossed[0]
        is_named_tuple = hasattr(output, "_fields")
        return type(output)(*crossed) if is_named_tuple else type(output)(crossed)

    return leave


def _leave_single(crossing: Crossing, axis: MeshAxis) -> Leave | None:
    if crossing.wanted is None and crossing.to_local is False:
        return None
    wanted = crossing.wanted
    redistribute = None if wanted is None else axis.redistribute_fn(wanted)

    def leave(module: Any, output: Any) -> Any:
        if not isinstance(output, DTensor):
            return output
        if redistribute is not None:
            output = redistribute(output)
        return _hand_out(module, output, crossing)

    return leave


def _leave_all(crossing: Crossing) -> Leave:
    def leave(module: Any, output: Any) -> Any:
        return platform.apply_to_tensors(
            lambda value: _hand_out(module, value, crossing), output
        )

    return leave


def _cross_fn(crossing: Crossing | None, axis: MeshAxis) -> Cross:
    if crossing is None:
        return lambda module, what, value: value  # noqa: ARG005 - called like the other
    wrap = axis.wrap_fn(crossing.plain)
    wanted = crossing.wanted
    redistribute = None if wanted is None else axis.redistribute_fn(wanted)

    def cross(module: Any, what: str, value: Any) -> Any:
        if not platform.is_tensor(value):
            raise coded(
                ValueError,
                "HP407",
                f"{type(module).__name__}: {what} has the layout {crossing.plain}, but it is {type(value).__name__}",
            )
        value = wrap(module, value)
        if redistribute is not None:
            value = redistribute(value)
        return _hand_out(module, value, crossing)

    return cross


def _cross_all(
    module: Any, what: str, values: tuple[Any, ...], crossings: Sequence[Cross]
) -> tuple[Any, ...]:
    if len(values) != len(crossings):
        raise coded(
            ValueError,
            "HP407",
            f"{type(module).__name__}: {len(crossings)} {what} layouts were given, but it has {len(values)} {what}s",
        )
    pairs = enumerate(zip(crossings, values, strict=True))
    return tuple(
        cross(module, f"{what} {index}", value) for index, (cross, value) in pairs
    )


def first_tensor(module: Any, args: tuple[Any, ...]) -> Any:
    """The first argument of a module, which must be a tensor."""
    if not args or not platform.is_tensor(args[0]):
        raise coded(
            ValueError,
            "HP407",
            f"{type(module).__name__}: expected a tensor as its first positional argument",
        )
    return args[0]


def _hand_out(module: Any, value: Any, crossing: Crossing) -> Any:
    """The plain shard of a distributed tensor if the crossing says so, provided that the global shape follows."""
    to_local = crossing.to_local
    if to_local is None:
        to_local = not keeps_distributed(module)
    if not to_local or not isinstance(value, DTensor):
        return value
    if MODES.replicate_plain and not all(
        placement.is_replicate() for placement in value.placements
    ):
        raise coded(
            ValueError,
            "HP406",
            f"{type(module).__name__}: its output in {value.layout} would be handed out as a plain shard, but in "
            "this model plain tensors are taken for copies; say use_local_output=False for the styles in it",
        )
    if not crossing.may_be_uneven and not is_even(value._layout, tuple(value.shape)):
        raise coded(
            ValueError,
            "HP406",
            f"{type(module).__name__}: its output of shape {tuple(value.shape)} in {value.layout} has shards of "
            "different sizes, from which the next module could not tell the whole; say use_local_output=False",
        )
    return value.to_local()
