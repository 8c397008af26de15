# SPDX-License-Identifier: Apache-2.0
"""A grid of ranks with named axes.

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    group = mesh.get_group("tp")        # the ranks that differ from this one only along tp
    rows = mesh["dp"]                   # the ranks along dp through this one, as a mesh

A mesh is a value: nothing is communicated before a group is requested, and each set of ranks has one group.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.axes import name_axis
from hyper_parallel.platform.error_codes import coded

if TYPE_CHECKING:
    from numpy.typing import NDArray  # costs as much as three of our own modules

_meshes: dict[tuple[Any, ...], DeviceMesh] = {}
_current = threading.local()


class DeviceMesh:
    """``mesh``: global ranks as a tensor, array or nested sequence, one dimension per axis."""

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(device_type, str):
            raise coded(
                TypeError,
                "HP201",
                f"DeviceMesh: device_type must be a str, got {device_type!r}",
            )
        self._ranks = _as_ranks(mesh)
        self._names = _checked_names(mesh_dim_names, self._ranks.ndim)
        self.device_type = device_type
        self._key = (device_type, self.mesh_shape, self.rank_list, self._names)
        self._hash = hash(self._key)
        self._root: DeviceMesh | None = None
        self._coordinates: dict[
            int, tuple[int, ...] | None
        ] = {}  # of ranks that were asked for
        self._parts: dict[str, DeviceMesh] = {}  # flattened axes, by name
        self._lines: dict[
            tuple[int, int], tuple[int, ...]
        ] = {}  # (axis, rank) -> the ranks of that line

    # --- what it is

    @property
    def mesh(self) -> Any:
        """The ranks as a tensor of the framework."""
        return get_platform().tensor(self._ranks.tolist())

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The number of ranks along each axis."""
        return tuple(self._ranks.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each axis."""
        return self.mesh_shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._ranks.ndim

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The names of the axes."""
        return self._names

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return get_platform().get_rank()

    @property
    def rank_list(self) -> tuple[int, ...]:
        """All ranks, the last axis fastest."""
        return tuple(self._ranks.reshape(-1).tolist())

    @property
    def root_mesh(self) -> DeviceMesh:
        """The mesh that this one was sliced from, or itself."""
        return self._root if self._root is not None else self

    def size(self, mesh_dim: int | str | None = None) -> int:
        """The number of ranks along an axis, or of all."""
        return (
            int(self._ranks.size)
            if mesh_dim is None
            else self.mesh_shape[self._axis(mesh_dim)]
        )

    def to_hash(self) -> tuple[Any, ...]:
        """What makes two meshes equal."""
        return self._key

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, DeviceMesh) and self._key == other._key
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        names = f", mesh_dim_names={self._names}" if self._names else ""
        return f"DeviceMesh({self.device_type!r}, {self._ranks.tolist()}{names})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.device_type, self._ranks.tolist(), self._names))

    # --- where this rank is

    def get_rank(self) -> int:
        """This process's global rank."""
        return self.rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """This rank's coordinate along each axis; None if it is not in the mesh."""
        return self.coordinate_of(self.rank)

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """A rank's coordinate along each axis; None if it is not in the mesh."""
        if rank not in self._coordinates:
            found = np.argwhere(self._ranks == rank)
            self._coordinates[rank] = tuple(found[0].tolist()) if len(found) else None
        return self._coordinates[rank]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's coordinate along an axis; the only axis by default."""
        axis = (
            self._axis(mesh_dim)
            if mesh_dim is not None
            else self._only_axis("get_local_rank")
        )
        return self.own_coordinate("get_local_rank")[axis]

    def axis_index(self, name: str) -> int:
        """The axis of that name, counted from the left."""
        if not isinstance(name, str):
            raise coded(
                TypeError, "HP202", f"axis_index: name must be a str, got {name!r}"
            )
        return self._axis(name)

    def axis_id(self, name: str) -> int:
        """The axis of that name, counted from the right, the last being 0."""
        return self.ndim - 1 - self.axis_index(name)

    # --- its groups

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """The group of the ranks that differ from this one only along an axis; created on first use."""
        axis = (
            self._axis(mesh_dim)
            if mesh_dim is not None
            else self._only_axis("get_group")
        )
        ranks, platform = self.get_rank_list_along_axis(axis), get_platform()
        name_axis(ranks, self._names[axis] if self._names else str(axis))
        return platform.get_created_group(ranks) or platform.create_group(ranks)

    def get_all_groups(self) -> list[Any]:
        """The group of every axis."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    def get_rank_list_along_axis(self, mesh_dim: int | str) -> list[int]:
        """The ranks that differ from this one only along an axis."""
        return self.get_devices_for_axis(mesh_dim, self.rank)

    def get_devices_for_axis(self, mesh_dim: int | str, rank: int) -> list[int]:
        """The ranks that differ from ``rank`` only along an axis."""
        axis = self._axis(mesh_dim)
        if (axis, rank) not in self._lines:
            coordinate = self.coordinate_of(rank)
            if coordinate is None:
                raise coded(
                    ValueError,
                    "HP205",
                    f"get_devices_for_axis: rank {rank} is not in {self}",
                )
            index = tuple(
                slice(None) if a == axis else place
                for a, place in enumerate(coordinate)
            )
            self._lines[axis, rank] = tuple(self._ranks[index].tolist())
        return list(self._lines[axis, rank])

    def ranks_along(self, axes: Iterable[int]) -> list[int]:
        """The ranks that differ from this one only along these axes, sorted."""
        own, wanted = self.own_coordinate("ranks_along"), set(axes)
        index = tuple(
            slice(None) if axis in wanted else place for axis, place in enumerate(own)
        )
        ranks: list[int] = self._ranks[index].reshape(-1).tolist()
        return sorted(ranks)

    @functools.cached_property
    def descending_axis(self) -> int | None:
        """The first axis along which the ranks do not ascend, if there is one."""
        return next(
            (
                axis
                for axis in range(self.ndim)
                if (np.diff(self._ranks, axis=axis) < 0).any()
            ),
            None,
        )

    def get_device_num_along_axis(self, mesh_dim: int | str) -> int:
        """The number of ranks along an axis."""
        return self.size(mesh_dim)

    # --- meshes from meshes

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The axes of these names through this rank, as a mesh."""
        if self._names is None:
            raise coded(
                RuntimeError,
                "HP202",
                f"{self} has no names for its axes; give it mesh_dim_names to cut it by name",
            )
        wanted = (names,) if isinstance(names, str) else tuple(names)
        root = self.root_mesh
        if (
            len(wanted) == 1
            and wanted[0] not in self._names
            and wanted[0] in root._parts
        ):
            return root._parts[wanted[0]]
        unknown = [name for name in wanted if name not in self._names]
        if unknown and all(name in root._parts for name in unknown):
            return self._with_flattened(wanted)
        if unknown:
            raise coded(KeyError, "HP203", f"no axis {unknown[0]!r} in {self._names}")
        return self._slice(wanted, [self._names.index(name) for name in wanted])

    def _slice(self, names: tuple[str, ...], axes: list[int]) -> DeviceMesh:
        """The part of the mesh along these axes through this rank."""
        if axes != sorted(set(axes)):
            raise coded(
                ValueError,
                "HP203",
                f"axes must be named once and in the order of the mesh, {self._names}; got {names}",
            )
        if axes == list(range(self.ndim)):
            return self
        own = self.own_coordinate("cutting the mesh")
        index = tuple(
            slice(None) if axis in axes else own[axis] for axis in range(self.ndim)
        )
        return self._derive(self._ranks[index], names)

    def _with_flattened(self, wanted: tuple[str, ...]) -> DeviceMesh:
        """The mesh of these axes through this rank, some of which are flattened ones."""
        root = self.root_mesh
        ranks = root._ranks
        spans: list[tuple[int, ...]] = [root._axes_of(name) for name in wanted]
        used = [axis for span in spans for axis in span]
        if used != sorted(set(used)):
            raise coded(
                ValueError,
                "HP203",
                f"axes must be named once and in the order of the mesh, {root._names}; {wanted} are the axes "
                f"{spans} of it",
            )
        own = root.own_coordinate("cutting the mesh")
        index = tuple(
            slice(None) if axis in used else own[axis] for axis in range(root.ndim)
        )
        sizes = [math.prod(root.mesh_shape[axis] for axis in span) for span in spans]
        return self._derive(ranks[index].reshape(sizes), wanted)

    def _axes_of(self, name: str) -> tuple[int, ...]:
        """The axes of this root mesh that a name stands for: one, or those that were flattened."""
        if self._names and name in self._names:
            return (self._names.index(name),)
        flat = self._parts[name].rank_list if name in self._parts else ()
        places = np.asarray([self.coordinate_of(rank) for rank in flat])
        axes = tuple(
            axis
            for axis in range(self.ndim)
            if len(flat) and len(set(places[:, axis].tolist())) > 1
        )
        if len(flat) != math.prod(self.mesh_shape[axis] for axis in axes) or list(
            map(tuple, places)
        ) != sorted(map(tuple, places)):
            raise coded(
                KeyError, "HP203", f"{name!r} does not name whole axes of {self}"
            )
        return axes

    def flatten(self, name: str | None = None) -> DeviceMesh:
        """All ranks along one axis; ``mesh[name]`` finds it afterwards."""
        name = name or "_".join(self._names or ("flat",))
        known = self.root_mesh._parts.get(name)
        flat = self._derive(self._ranks.reshape(-1), (name,))
        if known is not None and known != flat:
            raise coded(ValueError, "HP206", f"flatten: {name!r} already names {known}")
        if self.root_mesh._names and name in self.root_mesh._names and self.ndim > 1:
            raise coded(
                ValueError,
                "HP206",
                f"flatten: {name!r} already names an axis of {self.root_mesh}",
            )
        return self.root_mesh._parts.setdefault(name, flat)

    def unflatten(
        self, dim: int | str, sizes: Sequence[int], names: Sequence[str] | None = None
    ) -> DeviceMesh:
        """The mesh with one axis split into several, the first of them outermost."""
        axis = self._axis(dim)
        if math.prod(sizes) != self.mesh_shape[axis]:
            have = self.mesh_shape[axis]
            raise coded(
                ValueError,
                "HP206",
                f"unflatten: sizes {tuple(sizes)} do not multiply to {have}, the size of axis {dim!r}",
            )
        if (names is None) != (self._names is None) or (
            names is not None and len(names) != len(sizes)
        ):
            raise coded(
                ValueError,
                "HP202",
                f"unflatten: {len(sizes)} axes need as many names, as the mesh has names; got {names!r}",
            )
        shape = (*self.mesh_shape[:axis], *sizes, *self.mesh_shape[axis + 1 :])
        all_names = None
        if self._names is not None and names is not None:
            all_names = (*self._names[:axis], *names, *self._names[axis + 1 :])
        return self._derive(self._ranks.reshape(shape), all_names)

    @staticmethod
    def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
        """One mesh of all axes of several meshes, which were sliced from one mesh through the same rank."""
        roots = {id(mesh.root_mesh): mesh.root_mesh for mesh in meshes}
        if len(roots) != 1:
            raise coded(
                ValueError,
                "HP206",
                f"concatenate: expected meshes that were cut from one mesh, got {list(meshes)}",
            )
        [root] = roots.values()
        names = [name for mesh in meshes for name in mesh.mesh_dim_names or ()]
        return root[tuple(names)]

    @staticmethod
    def from_group(
        group: Any,
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """A mesh with existing groups: one group for one axis, or a list with one group per axis and ``mesh``."""
        platform = get_platform()
        groups = list(group) if isinstance(group, (list, tuple)) else [group]
        if mesh is None:
            if len(groups) != 1:
                raise coded(
                    ValueError,
                    "HP206",
                    f"from_group: {len(groups)} groups need mesh=, the ranks in a grid",
                )
            mesh = platform.get_process_group_ranks(groups[0])
        made = DeviceMesh(device_type, mesh, mesh_dim_names=mesh_dim_names)
        if len(groups) != made.ndim:
            raise coded(
                ValueError,
                "HP206",
                f"from_group: a mesh of {made.ndim} axes needs as many groups, got {len(groups)}",
            )
        for axis, held in enumerate(groups):
            ranks = sorted(platform.get_process_group_ranks(held))
            if ranks != sorted(made.get_rank_list_along_axis(axis)):
                raise coded(
                    ValueError,
                    "HP206",
                    f"from_group: the group of axis {axis} has ranks {ranks}, but {made} wants others",
                )
        platform.mark_created_groups(groups)
        return made

    def _derive(
        self, ranks: NDArray[np.int64], names: Sequence[str] | None
    ) -> DeviceMesh:
        made = DeviceMesh(self.device_type, ranks, mesh_dim_names=names)
        made._root = self.root_mesh
        return made

    # --- the current mesh

    def __enter__(self) -> DeviceMesh:
        _stack().append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _stack().pop()

    # --- checks

    def _axis(self, mesh_dim: int | str) -> int:
        if isinstance(mesh_dim, str):
            if self._names is None or mesh_dim not in self._names:
                raise coded(
                    KeyError,
                    "HP203",
                    f"no axis {mesh_dim!r} in {self._names or 'a mesh without names'}",
                )
            return self._names.index(mesh_dim)
        if not isinstance(mesh_dim, int) or isinstance(mesh_dim, bool):
            raise coded(
                TypeError,
                "HP203",
                f"an axis is named by an int or a str, got {mesh_dim!r}",
            )
        if not -self.ndim <= mesh_dim < self.ndim:
            raise coded(
                ValueError,
                "HP203",
                f"axis {mesh_dim} is not one of the {self.ndim} axes of {self}",
            )
        return mesh_dim % self.ndim

    def _only_axis(self, call: str) -> int:
        if self.ndim != 1:
            raise coded(
                ValueError,
                "HP203",
                f"{call}: the mesh has {self.ndim} axes {self._names or ''}; say which one",
            )
        return 0

    def own_coordinate(self, call: str) -> tuple[int, ...]:
        """This rank's coordinate along each axis; raises an error that names ``call`` if it is not in the mesh."""
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise coded(
                RuntimeError, "HP205", f"{call}: rank {self.rank} is not in {self}"
            )
        return coordinate


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    rank_list: Sequence[int] | None = None,
    init_backend: bool = True,
    backend_override: dict[int | str, Any] | None = None,
) -> DeviceMesh:
    """The mesh of that shape over ``rank_list``, or over the block of consecutive ranks that contains this one.

    The same arguments return the same object. ``init_backend`` joins the job if necessary.
    ``backend_override``, by axis, may only name the backend of the job: all meshes share the groups.
    """
    if backend_override:
        _check_backends(backend_override)
    if isinstance(mesh_shape, (str, int)) or not isinstance(mesh_shape, Iterable):
        raise coded(
            TypeError,
            "HP201",
            f"init_device_mesh: mesh_shape must be a sequence of ints, got {mesh_shape!r}",
        )
    shape = tuple(mesh_shape)
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in shape):
        raise coded(
            TypeError,
            "HP201",
            f"init_device_mesh: mesh_shape must hold ints, got {shape}",
        )
    if not shape or min(shape) < 1:
        raise coded(
            ValueError,
            "HP201",
            f"init_device_mesh: every axis needs at least one rank, got {shape}",
        )
    count = math.prod(shape)
    ranks = (
        _block(count, init_backend, device_type)
        if rank_list is None
        else tuple(rank_list)
    )
    if len(ranks) != count:
        raise coded(
            ValueError,
            "HP201",
            f"init_device_mesh: a mesh of shape {shape} needs {count} ranks, rank_list has {len(ranks)}",
        )
    grid = np.asarray(ranks, dtype=np.int64).reshape(shape)
    made = DeviceMesh(device_type, grid, mesh_dim_names=mesh_dim_names)
    return _meshes.setdefault(made.to_hash(), made)


def get_current_mesh() -> DeviceMesh:
    """The mesh of the innermost ``with mesh:``."""
    if not _stack():
        raise coded(
            RuntimeError,
            "HP207",
            "there is no current mesh; use `with mesh:` or pass device_mesh=",
        )
    return _stack()[-1]


def _block(count: int, init_backend: bool, device_type: str) -> tuple[int, ...]:
    platform = get_platform()
    if init_backend and device_type not in ("cpu", platform.device_type()):
        raise coded(
            ValueError,
            "HP201",
            f"init_device_mesh: there is no device of type {device_type!r} in this process, which has "
            f"{platform.device_type()!r}; init_backend=False makes a mesh to plan with",
        )
    if init_backend and count > 1:
        platform.init_process_group()
    world = platform.get_world_size()
    if init_backend and world % count:
        raise coded(
            ValueError,
            "HP201",
            f"init_device_mesh: blocks of {count} ranks do not fill the job's {world}; pass rank_list=",
        )
    first = platform.get_rank() // count * count
    return tuple(range(first, first + count))


def _check_backends(override: dict[int | str, Any]) -> None:
    """Raises if an axis requests another backend than the job's: all meshes share its groups."""
    platform = get_platform()
    platform.init_process_group()
    own = platform.get_backend()
    for axis, wanted in override.items():
        backend = wanted[0] if isinstance(wanted, tuple) else wanted
        options = wanted[1] if isinstance(wanted, tuple) else None
        if backend not in (None, own) or options is not None:
            raise coded(
                NotImplementedError,
                "HP234",
                f"init_device_mesh: backend_override: axis {axis!r} is to have {wanted!r}, but the job runs "
                f"{own!r} and a group is shared by all meshes with its ranks. Make the groups by "
                "torch.distributed.new_group and the mesh by DeviceMesh.from_group",
            )


def _as_ranks(mesh: Any) -> NDArray[np.int64]:
    if isinstance(mesh, (str, bytes, dict)) or mesh is None:
        raise coded(
            TypeError, "HP201", f"DeviceMesh: mesh must hold global ranks, got {mesh!r}"
        )
    is_plain = isinstance(mesh, (np.ndarray, list, tuple, range, int))
    if not is_plain and get_platform().is_tensor(mesh):
        mesh = get_platform().tensor_to_numpy(mesh)
    try:
        ranks = np.asarray(mesh)
    except ValueError as error:
        raise coded(
            ValueError,
            "HP201",
            f"DeviceMesh: the rows of mesh have different lengths: {mesh!r}",
        ) from error
    if ranks.dtype.kind not in "iu":
        raise coded(
            TypeError,
            "HP201",
            f"DeviceMesh: mesh must hold integer ranks, got {mesh!r}",
        )
    ranks = ranks.astype(np.int64) if ranks.ndim else ranks.astype(np.int64).reshape(1)
    if not ranks.size or ranks.min() < 0 or len(np.unique(ranks)) != ranks.size:
        raise coded(
            ValueError,
            "HP201",
            f"DeviceMesh: mesh must hold different ranks from 0 on, got {ranks.tolist()}",
        )
    return ranks


def _checked_names(names: Sequence[str] | None, ndim: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    found = (names,) if isinstance(names, str) else tuple(names)
    if not all(isinstance(name, str) for name in found):
        raise coded(TypeError, "HP202", f"mesh_dim_names must be strings, got {found}")
    if len(found) != ndim or len(set(found)) != ndim:
        raise coded(
            ValueError,
            "HP202",
            f"mesh_dim_names must be {ndim} different names, one an axis, got {found}",
        )
    return found


def _stack() -> list[DeviceMesh]:
    if not hasattr(_current, "stack"):
        _current.stack = []
    stack: list[DeviceMesh] = _current.stack
    return stack


def _rebuild(device_type: str, ranks: Any, names: tuple[str, ...] | None) -> DeviceMesh:
    made = DeviceMesh(device_type, ranks, mesh_dim_names=names)
    return _meshes.get(made.to_hash(), made)
