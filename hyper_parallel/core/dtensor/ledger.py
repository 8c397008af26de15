# SPDX-License-Identifier: Apache-2.0
"""A record of every collective with its ranks, bytes, direction, cause and the user's line.

with CommunicationLedger(mesh) as ledger:
    loss = model(x)
    loss.backward()
print(ledger.table())
assert ledger.counts(backward=True) == {"all_reduce": 1}

With ``CommunicationLedger(mesh, model)`` an entry of forward knows its module: ``ledger.counts_by_module()``. With
``decisions=True`` the ledger also keeps what was decided for every call: ``print(ledger.explain())``.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.collectives import is_implicit
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.operators import dispatcher
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.caller import users_line
from hyper_parallel.platform.platform import Traffic

_EXCHANGE = "differentiable_all_to_all_single"
_SAME = dict.fromkeys(
    (_EXCHANGE, f"{_EXCHANGE}_async"), "all_to_all_single"
)  # one collective has one name


@dataclass(frozen=True)
class Entry:
    """One collective."""

    collective: str
    axis: str  # the mesh's name for these ranks, or the ranks
    nbytes: int
    backward: bool
    implicit: bool  # an operator needed it; nobody called redistribute() or its like
    line: str  # file:line of the user's code; in backward often the call of backward()
    module: str = ""  # the innermost module of the model that runs forward, by its name; "" for the model and outside


class CommunicationLedger:
    """Records this rank's collectives while the context is active; ``mesh`` gives their ranks a name.

    ``model``: attributes forward collectives to its modules, including those that styles run on their inputs and
    outputs. In backward no module runs.
    ``decisions``: keeps what is decided for every operator, once per layouts and shapes of its operands.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None = None,
        model: Any = None,
        *,
        decisions: bool = False,
    ) -> None:
        self.entries: list[Entry] = []
        self.decisions: list[Any] = []
        self._keeps_decisions = decisions
        self._model = model
        self._running: list[str] = []
        self._names = _names_of(mesh) if mesh is not None else {}
        self._stack = ExitStack()

    def __enter__(self) -> CommunicationLedger:
        self._stack.enter_context(get_platform().listen_to_collectives(self._record))
        if self._keeps_decisions:
            operators = dispatcher()
            operators.forget()  # what is known is not decided again
            self._stack.callback(
                setattr, operators, "on_decision", operators.on_decision
            )
            operators.on_decision = self.decisions.append
        if self._model is not None:
            for name, module in get_platform().get_cells_and_names(self._model):
                self._watch(name, module)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def counts(
        self, *, backward: bool | None = None, implicit: bool | None = None
    ) -> dict[str, int]:
        """The number of calls of each collective: in forward, in backward or both; explicit, implicit or both."""
        wanted = (
            e
            for e in self.entries
            if backward in (None, e.backward) and implicit in (None, e.implicit)
        )
        return dict(Counter(entry.collective for entry in wanted))

    def counts_by_module(self) -> dict[str, dict[str, int]]:
        """The number of calls of each collective in the forward of each module, without its submodules."""
        found: dict[str, Counter[str]] = {}
        for entry in self.entries:
            if not entry.backward:
                found.setdefault(entry.module, Counter())[entry.collective] += 1
        return {name: dict(counts) for name, counts in found.items()}

    def nbytes(self, *, backward: bool | None = None) -> int:
        """The bytes that this rank received."""
        return sum(
            entry.nbytes for entry in self.entries if backward in (None, entry.backward)
        )

    def table(self) -> str:
        """A readable table of all entries."""
        lines = [
            f"{'collective':<42}{'axis':<12}{'bytes':>12}  {'pass':<9} {'cause':<9}line"
        ]
        for entry in self.entries:
            way = "backward" if entry.backward else "forward"
            why = "implicit" if entry.implicit else "asked"
            lines.append(
                f"{entry.collective:<42}{entry.axis:<12}{entry.nbytes:>12}  {way:<9} {why:<9}{entry.line}"
            )
        return "\n".join(
            [*lines, f"{len(self.entries)} collectives, {self.nbytes()} bytes"]
        )

    def explain(self) -> str:
        """What was decided for every operator, one after the other."""
        return "\n".join(map(str, self.decisions))

    def _watch(self, name: str, module: Any) -> None:
        platform = get_platform()

        def enter(*_: Any) -> None:
            self._running.append(name)

        def leave(*_: Any) -> None:
            if (
                name in self._running
            ):  # with those in it that raised what their caller caught
                del self._running[
                    len(self._running) - 1 - self._running[::-1].index(name) :
                ]

        # Around what styles do to inputs and outputs, which is the module's.
        handles = (
            platform.register_forward_pre_hook(module, enter, prepend=True),
            platform.register_forward_hook(module, leave),
        )
        for handle in handles:
            self._stack.callback(handle.remove)

    def _record(self, traffic: Traffic) -> None:
        axis = self._names.get(frozenset(traffic.ranks), str(list(traffic.ranks)))
        collective = _SAME.get(traffic.collective, traffic.collective)
        module = self._running[-1] if self._running and not traffic.backward else ""
        line = users_line()
        entry = Entry(
            collective,
            axis,
            traffic.nbytes,
            traffic.backward,
            is_implicit(),
            line,
            module,
        )
        self.entries.append(entry)


def _names_of(mesh: DeviceMesh) -> dict[frozenset[int], str]:
    """The ranks of this rank's lines, and of the whole mesh, by name."""
    names = {frozenset(mesh.rank_list): "all axes"}
    for axis in range(mesh.ndim):
        name = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else str(axis)
        names[frozenset(mesh.get_rank_list_along_axis(axis))] = name
    return names
