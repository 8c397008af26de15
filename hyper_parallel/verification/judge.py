# SPDX-License-Identifier: Apache-2.0
"""Judges a step on a mesh by the one on one process: what differs, and where they part first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.dtensor.placement_types import Shard
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.caller import raising_line
from hyper_parallel.verification.compare import TOLERANCES, Comparison, largest
from hyper_parallel.verification.coverage import find_gaps
from hyper_parallel.verification.report import Difference, Parting, Report
from hyper_parallel.verification.stages import is_consequence
from hyper_parallel.verification.step import Step
from hyper_parallel.verification.trace import Event, Value

platform = get_platform()


# Of the largest element: by as much the sums of a float32 differ; a fault is seldom so small.
FLOAT32_SIZE = 1e-5


def judge(
    truth: Step,
    mine: Step,
    mesh: DeviceMesh,
    ledger: CommunicationLedger,
    tolerance: float | None,
    gap: str = "",
) -> Report:
    """The report of this rank and, unless the step raised an error, of all others.

    After an error nothing is communicated: other ranks may not have got so far, or may be waiting elsewhere. ``gap``:
    why the plan is not tested by this, where that is known before.
    """
    judged = _Judged(truth, mine, mesh, tolerance)
    if mine.error is not None:
        return judged.report_of_error(mine.error, ledger)
    return judged.report(ledger, (gap,) if gap else ())


class _Judged:
    def __init__(
        self, truth: Step, mine: Step, mesh: DeviceMesh, tolerance: float | None
    ) -> None:
        self.truth, self.mine, self.mesh, self.tolerance = truth, mine, mesh, tolerance
        placements = (
            p
            for v in mine.parameters.values()
            if v.layout is not None
            for p in v.layout.placements
        )
        irregular = dict.fromkeys(
            p for p in placements if isinstance(p, Shard) and not p.is_chunked
        )
        self.compare = Comparison(mesh, tolerance, tuple(irregular))

    # --- the reports

    def report(
        self, ledger: CommunicationLedger, known_gaps: tuple[str, ...]
    ) -> Report:
        own_gaps = find_gaps(self.truth, self.mine, self.mesh, ledger)
        facts = tuple(self._differences()), (*known_gaps, *own_gaps)
        everyone = self._everyones((*facts, tuple(self.mine.parameters)))
        found = _worst([differences for differences, _, _ in everyone])
        told = [gap for _, of_rank, _ in everyone for gap in of_rank]
        if self.mine.part is not None:
            held = {name for _, _, names in everyone for name in names}
            lost = [name for name in self.truth.parameters if name not in held]
            told += [f"no stage has the parameter {name!r}" for name in lost]
        gaps = tuple(dict.fromkeys(told))
        notes: list[str] = []
        first = None
        # What is nan hides what went wrong before it.
        if gaps or not all(difference.is_rounding for difference in found):
            first = self._find_first(found, notes)
            notes += self._about_random_numbers()
            notes += self._about_float32(found)
        losses = self._loss(), self._true_loss()
        return Report(
            self._mesh_text(),
            *losses,
            found,
            first,
            gaps=gaps,
            notes=tuple(notes),
            ledger=ledger,
        )

    def _find_first(
        self, found: Sequence[Difference], notes: list[str]
    ) -> Parting | None:
        """Where the runs differ first on any rank; adds to the notes what was not compared."""
        modules = tuple(event.key for event in self.mine.trace.events)
        everyones_modules = self._everyones(modules)
        alike = self._are_alike(everyones_modules)
        if not alike:
            notes.append(
                "the ranks ran different modules; what was pending a reduction is not compared"
            )
        everyones = self._everyones(self._first_event(reduce_pending=alike))
        numbered = [event for event in everyones if event is not None]
        earliest = min(numbered, key=lambda event: event[0])[1] if numbered else None
        return _before_the_step(found) or earliest or self._without_event(found)

    def _are_alike(self, everyones: Sequence[Any]) -> bool:
        """Whether ranks that compute together have found the same: all, or those of each stage."""
        groups: dict[Any, Any] = {}
        for index, found in enumerate(everyones):
            key = self._stages_of(index) if self.mine.part is not None else None
            if groups.setdefault(key, found) != found:
                return False
        return True

    def _stages_of(self, index: int) -> int:
        """The coordinate along ``pp``, the outermost axis, of a rank by its place in the mesh."""
        return index * self.mesh.mesh_shape[0] // len(self.mesh.rank_list)

    def report_of_error(self, error: Exception, ledger: CommunicationLedger) -> Report:
        told = f"rank {self.mesh.rank}: {type(error).__name__}: {error}"
        parted = self._first_event(reduce_pending=False)
        module, call = (
            self.mine.trace.running[-1] if self.mine.trace.running else ("", 1)
        )
        first = Parting(
            module, "error", f"{type(error).__name__}: {error}".splitlines()[0], call
        )
        line = raising_line(error)
        notes: tuple[str, ...] = (f"it was raised at {line}",) if line else ()
        if parted is not None:
            notes += (f"before that they part already: {parted[1]}",)
        found = tuple(one for one in self._initial() if not one.is_rounding)
        return Report(
            self._mesh_text(),
            math.nan,
            self._true_loss(),
            found,
            first,
            told,
            notes,
            is_consequence=is_consequence(error),
            ledger=ledger,
        )

    def _everyones(self, found: Any) -> list[Any]:
        """What every rank of the mesh has found."""
        ranks = self.mesh.rank_list
        everyone: list[Any] = [found] * len(ranks)
        if len(ranks) > 1:
            platform.all_gather_object(everyone, found, platform.create_group(ranks))
        return everyone

    def _mesh_text(self) -> str:
        names = self.mesh.mesh_dim_names or tuple(
            f"axis {i}" for i in range(self.mesh.ndim)
        )
        return f"mesh {', '.join(f'{name}={size}' for name, size in zip(names, self.mesh.mesh_shape, strict=True))}"

    def _loss(self) -> float:
        value = self.mine.loss
        assert value is not None
        with platform.no_grad():
            array = (
                value.array
                if value.pending is None
                else platform.tensor_to_numpy(value.pending.full_tensor())
            )
        return float(array.reshape(-1)[0])

    def _true_loss(self) -> float:
        assert self.truth.loss is not None
        return float(self.truth.loss.array.reshape(-1)[0])

    # --- what differs

    def _differences(self) -> Iterator[Difference]:
        assert self.mine.loss is not None
        assert self.truth.loss is not None
        yield from (
            one for one in self._initial() if not one.is_rounding
        )  # said only where it is the cause
        yield self.compare.difference(
            "loss", "loss", self.truth.loss, self.mine.loss, scale=1.0
        )
        size = max(
            (largest(one.array) for one in self.truth.gradients.values()), default=0.0
        )
        yield from self._paired(
            "gradient", self.truth.gradients, self.mine.gradients, size
        )
        yield from self._paired("buffer", self.truth.buffers, self.mine.buffers, 1.0)

    def _initial(self) -> Iterator[Difference]:
        yield from self._paired(
            "parameter", self.truth.parameters, self.mine.parameters, 1.0
        )

    def _paired(
        self,
        kind: str,
        truth: Mapping[str, Value],
        mine: Mapping[str, Value],
        scale: float,
    ) -> Iterator[Difference]:
        # Other stages have the rest of the whole model.
        names = dict.fromkeys((*truth, *mine) if self.mine.part is None else mine)
        for name in names:
            if name in truth and name in mine:
                yield self.compare.difference(
                    kind, name, truth[name], mine[name], scale
                )
            else:
                where = "the mesh" if name in truth else "one process"
                yield self.compare.missing(
                    kind,
                    name,
                    truth.get(name) or mine[name],
                    scale,
                    f"there is none on {where}",
                )

    # --- where they part

    def _first_event(self, *, reduce_pending: bool) -> tuple[int, Parting] | None:
        true = {
            event.key: number for number, event in enumerate(self.truth.trace.events)
        }
        found = None
        for event in self.mine.trace.events:
            number = true.get(event.key)
            if number is None:  # the plan has put a module of its own there
                continue
            twin = self.truth.trace.events[number]
            wrong = self._parted(
                twin, event, reduce_pending
            )  # on every rank for every event: it may communicate
            if wrong is not None and (found is None or number < found[0]):
                found = number, self._parting(event, wrong)
        return found

    def _parting(self, event: Event, wrong: str) -> Parting:
        part = self.mine.part
        where = "" if part is None else part.place_of(event.module, event.call)
        if event.place == "output":
            return Parting(event.module, "output", wrong, event.call, where=where)
        callee = event.module or "the model"
        within = event.within or ""
        return Parting(within, "input", wrong, event.call, callee, where=where)

    def _parted(self, true: Event, mine: Event, reduce_pending: bool) -> str | None:
        if len(true.values) != len(mine.values):
            return f"it has {len(mine.values)} tensors, expected {len(true.values)}"
        parted = None
        for number, (one, other) in enumerate(
            zip(true.values, mine.values, strict=True)
        ):
            if other.pending is not None and not reduce_pending:
                continue
            difference = self.compare.difference(
                mine.place, mine.module, one, other, scale=1.0
            )
            if not difference.is_rounding and parted is None:
                which = f"tensor {number} " if len(true.values) > 1 else ""
                parted = f"{which}{difference}"
        return parted

    def _without_event(self, found: Sequence[Difference]) -> Parting | None:
        """Where they part if every module gives what it should."""
        wrong = {(one.kind, one.name): one for one in found if not one.is_rounding}
        if ("loss", "loss") in wrong:
            return Parting("", "loss", str(wrong["loss", "loss"]))
        for name in self._backward_order():
            if ("gradient", name) in wrong:
                return Parting(
                    _owner(name),
                    "gradient",
                    str(wrong["gradient", name]),
                    parameter=name,
                )
        for (_, name), one in wrong.items():
            return Parting(_owner(name), "output", f"buffer {name!r} {one}")
        return None

    def _backward_order(self) -> list[str]:
        """The parameters, that of the module which ended last first."""
        ends = {
            event.module: n
            for n, event in enumerate(self.truth.trace.events)
            if event.place == "output"
        }
        order = list(self.truth.parameters)
        return sorted(
            order, key=lambda name: (-ends.get(_owner(name), -1), -order.index(name))
        )

    def _about_random_numbers(self) -> Iterator[str]:
        if self.truth.drew and self.mine.random != self.truth.random:
            yield (
                "the model draws random numbers, and did not draw those of one device on the mesh; make it draw none "
                "(dropout of 0), or draw on distributed tensors (use_local_output=False)"
            )

    def _about_float32(self, found: Sequence[Difference]) -> Iterator[str]:
        """A hint where all that is wrong is float64 by its dtype and float32 by its size."""
        wrong = [one for one in found if not one.is_rounding]
        if (
            not wrong
            or self.tolerance is not None
            or any(self._dtype(one) != "float64" for one in wrong)
        ):
            return
        worst = (
            max(one.largest / one.allowed if one.allowed else math.inf for one in wrong)
            * TOLERANCES["float64"]
        )
        if worst <= FLOAT32_SIZE:
            tolerance = next(size for size in (1e-6, FLOAT32_SIZE) if worst <= size)
            yield (
                f"the tensors are float64, but every difference is of float32's rounding (at most {worst:.1g} "
                f"of the largest element); if the model computes in float32 inside, give tolerance={tolerance:g}"
            )

    def _dtype(self, one: Difference) -> str:
        kinds = {
            "parameter": self.truth.parameters,
            "gradient": self.truth.gradients,
            "buffer": self.truth.buffers,
        }
        value = self.truth.loss if one.kind == "loss" else kinds[one.kind].get(one.name)
        return "" if value is None else value.dtype.rpartition(".")[2].lower()


def _before_the_step(found: Iterable[Difference]) -> Parting | None:
    wrong = next(
        (one for one in found if one.kind == "parameter" and not one.is_rounding), None
    )
    return (
        None
        if wrong is None
        else Parting(_owner(wrong.name), "parameter", str(wrong), parameter=wrong.name)
    )


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _worst(everyones: Sequence[Iterable[Difference]]) -> tuple[Difference, ...]:
    """Of every tensor the rank where it differs most."""
    found: dict[tuple[str, str], Difference] = {}
    for differences in everyones:
        for one in differences:
            known = found.setdefault((one.kind, one.name), one)
            if one.largest > known.largest or (one.note and not known.note):
                found[one.kind, one.name] = one
    return tuple(found.values())
