# SPDX-License-Identifier: Apache-2.0
"""What a comparison found, as values and as text.

report = verify(make_model, plan, {"dp": 2, "tp": 2}, batch, loss=loss)
print(report)                   the verdict, the losses, the first module that parts, the collectives
print(report.table())           every gradient with its largest difference
print(report.ledger.table())    every collective of the step
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.platform.error_codes import coded


@dataclass(frozen=True)
class Difference:
    """How far a tensor of the step on the mesh is from the one on one process.

    ``kind`` is "loss", "gradient", "buffer" (after the step) or "parameter" (before it).
    """

    kind: str
    name: str
    largest: float  # of all elements and ranks; infinite where they cannot be compared
    scale: float  # the largest magnitude of the true one
    allowed: float
    rank: int
    note: str = ""

    @property
    def is_rounding(self) -> bool:
        """Whether it is no more than rounding may make it."""
        return self.largest <= self.allowed

    def __str__(self) -> str:
        if self.note:
            return f"{self.note} on rank {self.rank}"
        return f"differs by {self.largest:.2g}, allowed is {self.allowed:.2g}, on rank {self.rank}"


@dataclass(frozen=True)
class Parting:
    """The first place where the two steps part.

    ``place``: "parameter" (before the step), "input" (what ``module`` hands to ``callee``), "output", "error", "loss"
    or "gradient" (of ``parameter``).
    """

    module: str  # dotted name; "" is the model itself
    place: str
    detail: str
    call: int = 1  # the 1-based index of the call of the module
    callee: str = ""
    parameter: str = ""
    where: str = ""  # of a pipeline: the stage and the micro batch

    def __str__(self) -> str:
        module = f"module {self.module!r}" if self.module else "the model itself"
        call = f" (call {self.call})" if self.call > 1 else ""
        call = f" ({self.where})" if self.where else call
        what = {
            "parameter": f"{module}: {self.parameter!r} is another one before the step",
            "input": f"{module}: what its own code hands to {self.callee!r}{call}",
            "output": f"{module}{call}: its output, while what went into it is right",
            "error": f"{module}{call} raised an error",
            "loss": "the loss function: all modules agree",
            "gradient": f"{module}: the gradient of {self.parameter!r}, the first in backward; all outputs agree",
        }
        return f"{what[self.place]}: {self.detail}"


@dataclass(frozen=True)
class Report:
    """One step on one process and on a mesh, compared."""

    mesh: str
    loss: float  # on the mesh; nan where the step did not get so far
    true_loss: float
    differences: tuple[Difference, ...]
    first: Parting | None = None
    error: str = ""
    notes: tuple[str, ...] = ()
    gaps: tuple[
        str, ...
    ] = ()  # why it says nothing about the plan, or not about all of it
    is_consequence: bool = False  # whether the error only says that another rank failed
    ledger: Any = field(
        default=None, compare=False
    )  # the CommunicationLedger of this rank's step

    @property
    def ok(self) -> bool:
        """Whether the step on the mesh is that of one process, but for rounding; False where that was not tested."""
        return not self.differs and not self.gaps

    @property
    def differs(self) -> bool:
        """Whether the two steps part, or the one on the mesh raised an error."""
        return bool(self.error or self.wrong or self.first is not None)

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """What differs by more than rounding."""
        return tuple(one for one in self.differences if not one.is_rounding)

    @property
    def first_module(self) -> str | None:
        """The name of the first module that parts; None where none does."""
        return None if self.first is None else self.first.module

    def check(self) -> Report:
        """The report itself; an AssertionError with its text where the two steps part or could not be compared."""
        if not self.ok:
            told = "the steps part" if self.differs else "the plan was not tested"
            raise coded(AssertionError, "HP713", f"verify: {told}\n{self}")
        return self

    def table(self) -> str:
        """Everything that was compared, the largest differences first."""
        rows: list[tuple[str, ...]] = [
            ("what", "name", "largest difference", "largest value", "allowed", "")
        ]
        for one in sorted(self.differences, key=_by_size):
            numbers = (
                f"{value:.3g}" for value in (one.largest, one.scale, one.allowed)
            )
            rows.append(
                (
                    one.kind,
                    one.name,
                    *numbers,
                    "" if one.is_rounding else one.note or "WRONG",
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return "\n".join(
            "  ".join(map(str.ljust, row, (*widths, 0))).rstrip() for row in rows
        )

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        verdict = (
            "is NOT" if self.differs else "was NOT SHOWN to be" if self.gaps else "is"
        )
        yield f"one step on {self.mesh} {verdict} that of one process"
        yield from (f"not tested  {gap}" for gap in self.gaps)
        if self.error:
            yield f"error       {self.error}"
        if not self.error:
            yield f"loss        {self.loss:.7g} on the mesh, {self.true_loss:.7g} on one process"
        yield from self._counted()
        if self.first is not None:
            yield f"first       {self.first}"
        yield from (f"note        {note}" for note in self.notes)
        if self.ledger is not None:
            yield f"collectives {self._collectives()}"

    def _counted(self) -> Iterator[str]:
        for kind in ("parameter", "gradient", "buffer"):
            found = [one for one in self.differences if one.kind == kind]
            wrong = sorted((one for one in found if not one.is_rounding), key=_by_size)
            if found and (wrong or kind == "gradient"):
                worst = min(found, key=_by_size)
                yield f"{kind + 's':<11} {len(found)} compared, {len(wrong)} wrong; worst: {worst.name} {worst}"

    def _collectives(self) -> str:
        both = []
        for way, backward in (("forward", False), ("backward", True)):
            counts = self.ledger.counts(backward=backward)
            told = (
                ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
            )
            both.append(f"{way}: {told}")
        return f"{'; '.join(both)}; {self.ledger.nbytes()} bytes a rank"


def _by_size(one: Difference) -> float:
    """Sorts the worst first: by how much of what is allowed is used."""
    return -(
        one.largest / one.allowed if one.allowed else math.inf if one.largest else 0.0
    )
