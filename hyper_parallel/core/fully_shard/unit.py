# SPDX-License-Identifier: Apache-2.0
"""A unit: parameters that are gathered together before they are used and reduced together in backward.

Its parameters are in one of four states:

    state       what is in memory besides the shards          legal next states
    sharded     nothing                                       gathering
    gathering   whole tensors, which are being filled         whole, sharded
    whole       the tensors that modules compute with         sharded, regrouped
    regrouped   pieces of them, divided in a smaller group    gathering, sharded

Every other call finds the state that it asks for and does nothing. An error leads back to ``sharded`` from each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.core.fully_shard.memory import Gather, Gatherer, Memory
from hyper_parallel.core.fully_shard.packing import Packing
from hyper_parallel.core.fully_shard.plan import Entry, Plan
from hyper_parallel.core.fully_shard.reduction import Reduction, Scatter
from hyper_parallel.core.fully_shard.utils import MixedPrecisionPolicy
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


class State(Enum):
    """What is in memory."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    WHOLE = "whole"
    REGROUPED = "regrouped"


TRANSITIONS = {
    State.SHARDED: {State.GATHERING},
    State.GATHERING: {State.WHOLE, State.SHARDED},
    State.WHOLE: {State.SHARDED, State.REGROUPED},
    State.REGROUPED: {State.GATHERING, State.SHARDED},
}


@dataclass
class Managed:
    """A parameter of a unit: where modules read it, and what they compute with.

    ``shape`` is that of the plain tensor on this rank once it is gathered, and ``dim`` the one that data ranks divide,
    None if each has all of it; ``layout`` is that of the distributed tensor
    around it, if the parameter was one before, and ``global_shape`` its shape. ``joint_layout`` is that of the whole
    tensor on the data axes too, where it is replicated, and ``joint_gradient`` the placements of its gradient.
    """

    name: str
    places: list[tuple[Any, str]]
    shape: tuple[int, ...]
    dim: int | None
    layout: Layout | None
    global_shape: tuple[int, ...]
    joint_layout: Layout
    joint_gradient: list[Placement]

    @property
    def parameter(self) -> Any:
        """The sharded parameter, as modules and optimizers see it between passes."""
        owner, name = self.places[0]
        return getattr(owner, name)


@dataclass(frozen=True)
class Division:
    """A group between whose ranks parameters are divided, and this rank's place in it."""

    group: Any
    ranks: int
    index: int


@dataclass(frozen=True)
class DataMesh:
    """The groups of a unit: its shards are divided in one, and equal along the other, if there is one."""

    ranks: tuple[int, ...]
    shard: Division
    replicate_group: Any = None
    replicate_ranks: int = 1

    @property
    def size(self) -> int:
        """The number of data ranks."""
        return self.shard.ranks * self.replicate_ranks


@dataclass
class Settings:
    """What users switch while they train."""

    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    syncs_gradients: bool = True
    all_reduces: bool = True
    divide_factor: float | None = None
    reduces_unused: bool = False


@dataclass(frozen=True)
class Part:
    """The parameters of one dtype: their numbers, their whole tensors, and how these are gathered."""

    numbers: tuple[int, ...]
    memory: Memory
    from_shards: Gatherer
    from_pieces: Gatherer | None


class Unit:
    """Parameters that are gathered and reduced together.

    ``number``: which unit of its mesh it is, in the order of the calls of fully_shard. ``subgroup``: where whole
    parameters are divided between forward and backward instead of being freed. ``keeps_on_host``: whether shards must
    be in host memory.
    """

    def __init__(
        self,
        name: str,
        number: int,
        managed: Sequence[Managed],
        mesh: DataMesh,
        policy: MixedPrecisionPolicy,
        subgroup: Division | None = None,
        keeps_on_host: bool = False,
    ) -> None:
        self.name, self.number = name, number
        self.keeps_on_host = keeps_on_host
        self.managed = list(managed)
        self.mesh, self.policy, self.subgroup = mesh, policy, subgroup
        self.settings = Settings()
        self.state = State.SHARDED
        self.sharded: list[Any] = []
        self.is_trained: list[bool] = []
        self._find_parameters()
        self.unreduced: dict[int, Any] = {}  # sums of whole gradients, not yet reduced
        self.unsummed: dict[int, Any] = {}  # sums of shards, not yet all-reduced
        self.is_installed = False
        self.whole_keys: dict[Any, int] = {}  # of whole tensors that may be saved
        self._parts: list[Part] | None = None
        self._pieces: list[list[Any]] = []  # in the state ``regrouped``, by part
        self._gathers: list[Gather] = []
        self._versions: tuple[Any, ...] | None = None
        self._packings: dict[Any, Packing] = {}

    def _find_parameters(self) -> None:
        self.sharded = [one.parameter for one in self.managed]
        self.is_trained = [platform.requires_grad(one._local) for one in self.sharded]

    def _move_to(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} to {state}"
        self.state = state

    # --- dtypes and memory

    def compute_dtype(self, number: int) -> Any:
        """The dtype that modules see."""
        local = self.sharded[number]._local
        wanted = self.policy.param_dtype
        if wanted is None or not platform.is_floating_point(local):
            return local.dtype
        return wanted

    def reduce_dtype(self, number: int) -> Any:
        """The dtype in which gradients are reduced."""
        return self.policy.reduce_dtype or self.compute_dtype(number)

    def _prepare(self) -> list[Part]:
        """The parts, made when they are needed first."""
        if self._parts is None:
            by_dtype: dict[Any, list[int]] = {}
            for number in range(len(self.managed)):
                dtype = self.compute_dtype(number)
                by_dtype.setdefault(dtype, []).append(number)
            self._parts = [
                self._make_part(tuple(numbers), dtype)
                for dtype, numbers in by_dtype.items()
            ]
        return self._parts

    def renew(self) -> None:
        """Makes the parts anew if the parameters have other dtypes than before."""
        self._find_parameters()
        parts = self._parts or []
        dtypes = [
            self.compute_dtype(number) for part in parts for number in part.numbers
        ]
        if dtypes != [part.memory.dtype for part in parts for _ in part.numbers]:
            self._parts = None

    def _make_part(self, numbers: tuple[int, ...], dtype: Any) -> Part:
        shard, subgroup = self.mesh.shard, self.subgroup
        packing = self._plan(numbers, dtype, shard)
        memory = Memory(packing.plan, dtype, platform.device())
        from_shards = Gatherer(memory, packing, shard.group, self)
        from_pieces = None
        if subgroup is not None:
            small = self._plan(numbers, dtype, subgroup)
            from_pieces = Gatherer(memory, small, subgroup.group, self)
        return Part(numbers, memory, from_shards, from_pieces)

    def _plan(
        self, numbers: tuple[int, ...], dtype: Any, division: Division
    ) -> Packing:
        key = (numbers, dtype, division)
        packing = self._packings.get(key)
        if packing is None:
            size = platform.get_element_size(platform.empty((0,), dtype))
            entries = tuple(
                Entry(self.managed[number].shape, self.managed[number].dim, size)
                for number in numbers
            )
            packing = Packing(Plan(entries, division.ranks, division.index))
            self._packings[key] = packing
        return packing

    # --- gathering

    def start_gather(self) -> None:
        """Starts to gather, unless that is done or under way."""
        if self.state is not State.SHARDED and self._versions != self._read_versions():
            self.release()
        if self.state in (State.GATHERING, State.WHOLE):
            return
        if not self.is_installed:
            self._find_parameters()
        versions = self._read_versions()
        if versions != self._versions:
            self._check_materialized()
        self._versions = versions
        pieces, self._pieces = self._pieces, []
        self._move_to(State.GATHERING)
        with platform.no_grad():
            for position, part in enumerate(self._prepare()):
                if pieces:
                    assert part.from_pieces is not None
                    gather = part.from_pieces.start(pieces[position])
                else:
                    shards = [self.sharded[number]._local for number in part.numbers]
                    gather = part.from_shards.start(shards)
                self._gathers.append(gather)

    def gather(self) -> None:
        """Gathers the parameters, unless they are whole."""
        self.start_gather()
        if self.state is not State.GATHERING:
            return
        gathers, self._gathers = self._gathers, []
        try:
            with platform.no_grad():
                for gather in gathers:
                    gather.finish()
        except BaseException:
            self.release()
            raise
        self._move_to(State.WHOLE)
        if not platform.releases_saved_tensors:
            self.whole_keys = self._find_keys()

    def _find_keys(self) -> dict[Any, int]:
        tensors = enumerate(self.whole_tensors())
        return {platform.memory_key(one): number for number, one in tensors}

    def release(self) -> None:
        """Frees everything but the shards; a gather under way is finished first, since its memory is written to."""
        self.uninstall()
        if self.state is State.SHARDED:
            return
        gathers, self._gathers = self._gathers, []
        self._pieces = []
        self.whole_keys = {}
        self._move_to(State.SHARDED)
        try:
            with platform.no_grad():
                for gather in gathers:
                    gather.finish()
        finally:
            for part in self._prepare():
                part.memory.release()

    def release_after_forward(self) -> None:
        """Frees whole parameters, or, with a subgroup, all but this rank's pieces in it."""
        if self.state is State.REGROUPED:
            return
        if self.subgroup is None or self.state is not State.WHOLE:
            self.release()
            return
        self.uninstall()
        with platform.no_grad():
            self._pieces = [self._own_pieces(part) for part in self._prepare()]
        self.whole_keys = {}
        self._move_to(State.REGROUPED)
        for part in self._prepare():
            part.memory.release()

    def _own_pieces(self, part: Part) -> list[Any]:
        assert part.from_pieces is not None
        return part.memory.own_pieces(part.from_pieces.plan)

    def _read_versions(self) -> tuple[Any, ...]:
        shards = [parameter._local for parameter in self.sharded]
        return tuple(map(id, shards)), platform.versions_of(shards)

    @property
    def may_have_changed(self) -> bool:
        """Whether the shards may be others than were gathered, unseen by a framework that does not count changes."""
        return not platform.counts_changes and self._versions is not None

    @property
    def versions(self) -> tuple[Any, ...] | None:
        """Which contents of the shards were gathered last."""
        return self._versions

    def check_unchanged(self, versions: Any) -> None:
        """Raises if the shards are no longer what forward has used."""
        if versions != self._read_versions():
            raise coded(
                RuntimeError,
                "HP424",
                f"fully_shard: the parameters of {self.name} were modified between forward and backward; call the "
                "optimizer, or load a state, after backward",
            )

    def _check_materialized(self) -> None:
        missing = [
            one.name
            for one, parameter in zip(self.managed, self.sharded, strict=True)
            if platform.is_meta(parameter._local)
        ]
        if missing:
            raise coded(
                RuntimeError,
                "HP421",
                f"fully_shard: {len(missing)} parameters of {self.name} have no data: {', '.join(missing[:5])}; "
                "materialize the model before its first forward, by init_parameters or by to_empty and its own "
                "initialization",
            )
        if self.keeps_on_host:
            self._check_on_host()

    def _check_on_host(self) -> None:
        away = [
            f"{one.name} on {parameter._local.device}"
            for one, parameter in zip(self.managed, self.sharded, strict=True)
            if not str(parameter._local.device).lower().startswith("cpu")
        ]
        if away:
            raise coded(
                RuntimeError,
                "HP434",
                f"fully_shard: CPUOffloadPolicy keeps shards in host memory, but {len(away)} parameters of {self.name} "
                f"are elsewhere: {', '.join(away[:5])}; move them with model.to('cpu') before the optimizer is created",
            )

    # --- what modules see

    def whole_tensors(self) -> list[Any]:
        """The gathered plain tensors outside the graph, in the order of the parameters."""
        tensors: list[Any] = [None] * len(self.managed)
        for part in self._prepare():
            for number, tensor in zip(part.numbers, part.memory.tensors, strict=True):
                tensors[number] = platform.alias(tensor)
        return tensors

    def install(self, tensors: Sequence[Any]) -> None:
        """Makes these plain tensors what the modules read as their parameters."""
        self.is_installed = True
        for one, tensor in zip(self.managed, tensors, strict=True):
            for owner, name in one.places:
                platform.put_tensor(owner, name, tensor)

    def uninstall(self) -> None:
        """Makes the sharded parameters what the modules have."""
        if not self.is_installed:
            return
        self.is_installed = False
        for one, parameter in zip(self.managed, self.sharded, strict=True):
            for owner, name in one.places:
                platform.put_tensor(owner, name, parameter)

    # --- reducing

    def take_gradients(self, gradients: Sequence[Any]) -> None:
        """Adds whole gradients to those that wait for a reduction."""
        for number, gradient in enumerate(gradients):
            if gradient is None:
                continue
            dtype = self.reduce_dtype(number)
            new = gradient if gradient.dtype is dtype else gradient.to(dtype)
            waiting = self.unreduced.get(number)
            if waiting is not None:
                new = waiting + new
            elif gradient.dtype == dtype and not self.settings.syncs_gradients:
                new = platform.clone(gradient)  # its memory is the caller's
            self.unreduced[number] = new

    @property
    def unreduced_bytes(self) -> int:
        """The bytes of whole gradients that wait for a reduction on this rank."""
        return sum(int(gradient.nbytes) for gradient in self.unreduced.values())

    @property
    def has_waiting_gradients(self) -> bool:
        """Whether gradients of earlier backwards wait for a collective that may run now."""
        settings = self.settings
        if not settings.syncs_gradients:
            return False
        return bool(self.unreduced) or (settings.all_reduces and bool(self.unsummed))

    def start_reduction(self, factor: float) -> list[Reduction]:
        """Starts to reduce the gradients that wait, with zeros for parameters that have none."""
        by_dtype: dict[Any, list[int]] = {}
        for number, is_trained in enumerate(self.is_trained):
            if is_trained:
                by_dtype.setdefault(self.reduce_dtype(number), []).append(number)
        gradients, self.unreduced = self.unreduced, {}
        reductions = []
        for dtype, numbers in by_dtype.items():
            own = [gradients.get(number) for number in numbers]
            packing = self._plan(tuple(numbers), dtype, self.mesh.shard)
            scatter = Scatter(packing, own, dtype, self)
            scatter.start(self.mesh.shard.group)
            reduction = Reduction(
                numbers,
                scatter,
                factor,
                self.mesh.replicate_group,
                self.unsummed,
                self.settings.all_reduces,
            )
            reductions.append(reduction)
        return reductions


def wrap_whole(one: Managed, tensor: Any) -> Any:
    """The plain tensor as the module expects it: distributed, if the parameter was."""
    if one.layout is None:
        return tensor
    return DTensor(tensor, one.layout, one.global_shape)
