# SPDX-License-Identifier: Apache-2.0
"""Divides the parameters of modules along a data mesh: which parameters a unit manages, and their layouts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from weakref import ref

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from hyper_parallel.core.fully_shard.plan import Entry, Plan
from hyper_parallel.core.fully_shard.running import runner_of, runners_below
from hyper_parallel.core.fully_shard.unit import DataMesh, Division, Managed
from hyper_parallel.core.fully_shard.utils import CPUOffloadPolicy, OffloadPolicy
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()
PlacementFn = Callable[[Any], Shard | None]
# (name, parameter, the modules that have it)
Located = tuple[str, Any, list[tuple[Any, str]]]

# Axes along which ranks do not hold other parts of the batch for the same parameters.
_OTHER_ROLES = ("tp", "cp", "ep", "pp", "sp")


def data_mesh(mesh: DeviceMesh) -> DataMesh:
    """The groups of a mesh of one or two axes."""
    _check_mesh(mesh)
    mesh.own_coordinate("fully_shard")
    shard_axis = mesh.ndim - 1
    is_hybrid = mesh.ndim == 2
    return DataMesh(
        ranks=tuple(mesh.rank_list),
        shard=Division(
            mesh.get_group(shard_axis),
            mesh.size(shard_axis),
            mesh.get_local_rank(shard_axis),
        ),
        replicate_group=mesh.get_group(0) if is_hybrid else None,
        replicate_ranks=mesh.size(0) if is_hybrid else 1,
    )


def _check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh) or mesh.ndim not in (1, 2):
        raise coded(
            ValueError,
            "HP420",
            f"fully_shard: expected a mesh of one axis, or of two (replicate, shard), got {mesh}; slice it by name or "
            "flatten its data axes",
        )
    names = mesh.mesh_dim_names
    if mesh.ndim == 2 and names is None:
        raise coded(
            ValueError,
            "HP420",
            f"fully_shard: a mesh of two axes needs names, (replicate, shard), got {mesh}",
        )
    foreign = [name for name in names or () if name in _OTHER_ROLES]
    if mesh.ndim == 2 and foreign:
        raise coded(
            ValueError,
            "HP420",
            f"fully_shard: {foreign} of {mesh} would be taken for data axes (replicate, shard); flatten the axes over "
            "which parameters are sharded into one",
        )
    if foreign and foreign != ["cp"]:  # whose ranks have other tokens of the batch
        raise coded(
            ValueError,
            "HP420",
            f"fully_shard: {foreign[0]!r} of {mesh} is no data axis; pass the axis along which ranks have other parts "
            "of the batch, such as mesh['dp']",
        )


def split_shard_group(mesh: DeviceMesh, size: int) -> Division:
    """The smaller group of ``size`` neighbours along the shard axis that this rank is in."""
    shard_axis = mesh.ndim - 1
    ranks = list(mesh.get_rank_list_along_axis(shard_axis))
    position = mesh.get_local_rank(shard_axis)
    start = position - position % size
    group = platform.create_group(ranks[start : start + size])
    return Division(group, size, position - start)


def shard_parameters(
    modules: Sequence[Any],
    mesh: DeviceMesh,
    placement_of: PlacementFn | None,
    ignored: Collection[Any],
    offload: OffloadPolicy,
) -> list[Managed]:
    """Shards every parameter below the modules that no unit manages yet; returns what the unit manages."""
    places = _find_places(modules, {id(parameter) for parameter in ignored})
    _check_untied([parameter for _, parameter, _ in places.values()], modules)
    if len(modules) > 1:
        _warn_of_untied_tables(list(places.values()))
    managed = []
    for name, parameter, owners in places.values():
        dim = _choose_dim(name, parameter, placement_of)
        managed.append(_shard(name, parameter, owners, mesh, dim, offload))
    return managed


def _find_places(modules: Sequence[Any], ignored: set[int]) -> dict[int, Located]:
    """The parameters to shard by id: (name, parameter, where modules have it)."""
    inner = {runner for module in modules for runner in runners_below(module)}
    taken = {id(parameter) for one in inner for parameter in one.unit.sharded}
    places: dict[int, Located] = {}
    for owner, name, full, parameter in _walk_parameters(modules):
        _check_not_both(full, id(parameter), taken, ignored)
        if id(parameter) not in taken and id(parameter) not in ignored:
            entry = places.setdefault(id(parameter), (full, parameter, []))
            entry[2].append((owner, name))
    return places


def _walk_parameters(
    modules: Sequence[Any],
) -> Iterator[tuple[Any, str, str, Any]]:
    """(module, name in it, full name, parameter) of all parameters, as often as modules have them."""
    seen: set[int] = set()
    for module in modules:
        own = {id(one) for one in platform.parameters_dict(module).values()}
        for path, owner in platform.get_cells_and_names(module):
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            for name, tensor in platform.own_tensors(owner):
                if id(tensor) in own:  # else a buffer
                    yield owner, name, f"{path}.{name}" if path else name, tensor


def _check_not_both(name: str, key: int, taken: set[int], ignored: set[int]) -> None:
    if key in taken and key in ignored:
        raise coded(
            ValueError,
            "HP425",
            f"fully_shard: ignored_params has {name!r}, which a unit below shards already",
        )


# What units have replaced: a parameter that is still found elsewhere is tied across units.
_REPLACED: list[tuple[Any, str]] = []


def _check_untied(parameters: Sequence[Any], modules: Sequence[Any]) -> None:
    _REPLACED[:] = [entry for entry in _REPLACED if entry[0]() is not None]
    for parameter in parameters:
        for replaced, name in _REPLACED:
            if replaced() is parameter:
                kinds = " and ".join(type(module).__name__ for module in modules)
                raise coded(
                    ValueError,
                    "HP425",
                    f"fully_shard: a parameter of {kinds} is tied to {name!r}, which another unit shards; give both "
                    "modules to one call, as fully_shard([first, second])",
                )


def _warn_of_untied_tables(places: Sequence[Located]) -> None:
    """Warns of a list with an embedding and a head that only look tied: they are a model's largest tensors."""
    others: list[Located] = []
    shapes = set()
    for entry in places:
        _, parameter, owners = entry
        if any(platform.is_embedding_module(owner) for owner, _ in owners):
            shapes.add(tuple(parameter.shape))
        else:
            others.append(entry)
    for name, parameter, owners in others:
        if tuple(parameter.shape) in shapes:
            size = math.prod(parameter.shape) * platform.get_element_size(parameter)
            warnings.warn(
                f"fully_shard: {name} of {type(owners[0][0]).__name__} is not tied to the embedding of the same shape, "
                f"but one unit gathers both, in a buffer of {2 * size} bytes; make them units of their own",
                stacklevel=4,
            )


def _choose_dim(
    name: str, parameter: Any, placement_of: PlacementFn | None
) -> int | None:
    ndim = len(parameter.shape)
    placement = None if placement_of is None else placement_of(parameter)
    if placement is None:
        return _default_dim(name, parameter)
    if type(placement) is not Shard or not -ndim <= placement.dim < ndim:
        raise coded(
            ValueError,
            "HP426",
            f"fully_shard: shard_placement_fn returned {placement!r} for {name} of shape {tuple(parameter.shape)}; "
            "expected None or Shard(dim)",
        )
    return placement.dim % ndim


def _default_dim(name: str, parameter: Any) -> int | None:
    """The first dim that is not sharded by a rule of its own, such as section by section; None if there is none."""
    if len(parameter.shape) == 0:
        warnings.warn(
            f"fully_shard: {name} has no dim to shard; it is replicated, and its gradient is reduced with the others",
            stacklevel=4,
        )
        return None
    if not isinstance(parameter, DTensor):
        return 0
    irregular = {
        one.dim
        for one in parameter.placements
        if isinstance(one, Shard) and not one.is_chunked
    }
    dims = [dim for dim in range(len(parameter.shape)) if dim not in irregular]
    return dims[0] if dims else None


def _shard(
    name: str,
    parameter: Any,
    owners: list[tuple[Any, str]],
    mesh: DeviceMesh,
    dim: int | None,
    offload: OffloadPolicy,
) -> Managed:
    is_distributed = isinstance(parameter, DTensor)
    local = platform.detach(parameter.to_local() if is_distributed else parameter)
    shape = tuple(int(size) for size in local.shape)
    shard_axis = mesh.ndim - 1
    ranks, index = mesh.size(shard_axis), mesh.get_local_rank(shard_axis)
    plan = Plan((Entry(shape, dim, 1),), ranks, index)
    shard = platform.copy_part(local, plan.slices(0, index), plan.shard_shape(0))
    if isinstance(offload, CPUOffloadPolicy) and platform.device_type() != "cpu":
        shard = _copy_to_host(shard, offload.pin_memory)
    joint, placements, whole = _join(parameter, mesh, dim)
    layout = Layout.from_device_mesh(joint)(placements).bind(len(shape))
    global_shape = tuple(int(size) for size in parameter.shape)
    shard = platform.set_requires_grad(shard, platform.requires_grad(parameter))
    _REPLACED.append((ref(parameter), name))
    owner, own_name = owners[0]
    platform.set_own_tensor(owner, own_name, DTensor(shard, layout, global_shape))
    new = dict(platform.own_tensors(owner))[own_name]
    for other, other_name in owners[1:]:
        platform.set_own_tensor(other, other_name, new)
    gradient: list[Placement] = [
        Partial() if joint_name in _names(mesh) else placement
        for joint_name, placement in zip(_names(joint), whole, strict=True)
    ]
    return Managed(
        name=name,
        places=owners,
        shape=shape,
        dim=dim,
        layout=parameter.layout if is_distributed else None,
        global_shape=global_shape,
        joint_layout=Layout.from_device_mesh(joint)(whole).bind(len(shape)),
        joint_gradient=gradient,
    )


def _copy_to_host(shard: Any, pin_memory: bool) -> Any:
    """Untested on hardware."""
    host = platform.empty_like(shard, device="cpu", pin_memory=pin_memory)
    platform.copy_into(host, shard)
    return host


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or ("",) * mesh.ndim)


def _join(
    parameter: Any, mesh: DeviceMesh, dim: int | None
) -> tuple[DeviceMesh, list[Placement], list[Placement]]:
    """The mesh of all axes, the placements of the shards on it, and those of the whole tensor."""
    data: list[Placement] = [Replicate()] * (mesh.ndim - 1)
    own_shard: Placement = Replicate() if dim is None else Shard(dim)
    if not isinstance(parameter, DTensor):
        return mesh, [*data, own_shard], [Replicate()] * mesh.ndim
    own = dict(zip(_names(parameter.device_mesh), parameter.placements, strict=True))
    root = mesh.root_mesh
    wanted = {*own, *_names(mesh)}
    names = [name for name in _names(root) if name in wanted]
    if len(names) != len(wanted) or set(own) & set(_names(mesh)):
        raise coded(
            ValueError,
            "HP420",
            f"fully_shard: the parameter is on {parameter.device_mesh}, which must be other axes of the same mesh as "
            f"{mesh}, cut from it by name",
        )
    joint = root[tuple(names)]
    shard_name = _names(mesh)[-1]
    whole = [own.get(name, Replicate()) for name in names]
    placements = list(whole)
    position = names.index(shard_name)
    placements[position] = own_shard
    inner = range(position + 1, len(names))
    sizes = [joint.size(axis) for axis in inner if whole[axis].is_shard(dim)]
    if dim is not None and sizes:
        placements[position] = StridedShard(dim, math.prod(sizes))
    return joint, placements, whole


_CONTAINERS = ("ModuleList", "ModuleDict", "CellList", "CellDict")


def check_modules(modules: Sequence[Any]) -> None:
    """Raises for what cannot be a unit."""
    if not modules:
        raise coded(
            ValueError, "HP427", "fully_shard: expected a module, got no module"
        )
    for module in modules:
        if not isinstance(module, platform.Module):
            raise coded(
                ValueError,
                "HP427",
                f"fully_shard: expected a module or a list of modules, got {type(module).__name__}",
            )
        if runner_of(module) is not None:
            raise coded(
                ValueError,
                "HP427",
                f"fully_shard: {type(module).__name__} is a unit already; call fully_shard once per module, from the "
                "inside out",
            )
        if _is_container(type(module)):
            raise coded(
                ValueError,
                "HP427",
                f"fully_shard: {type(module).__name__} has no forward that could gather its parameters; call "
                "fully_shard for each of its modules",
            )
    if len(set(map(id, modules))) < len(modules):
        kinds = ", ".join(type(module).__name__ for module in modules)
        raise coded(
            ValueError,
            "HP427",
            f"fully_shard: the list ({kinds}) has the same module twice",
        )


def _is_container(kind: type[Any]) -> bool:
    """Whether modules of this class hold others without a forward of their own."""
    for base in kind.__mro__:
        if base.__name__ in _CONTAINERS:
            return True
        if "forward" in vars(base) or "construct" in vars(base):
            return False
    return False
