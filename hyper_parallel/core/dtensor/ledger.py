# SPDX-License-Identifier: Apache-2.0
"""What was communicated: every collective with its ranks, bytes, direction, cause and the user's line.

with CommunicationLedger(mesh) as ledger:
    loss = model(x)
    loss.backward()
print(ledger.table())
assert ledger.counts(backward=True) == {"all_reduce": 1}
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass

from hyper_parallel.core.dtensor.collectives import is_implicit
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.caller import users_line
from hyper_parallel.platform.platform import Traffic


@dataclass(frozen=True)
class Entry:
    """One collective."""

    collective: str
    axis: str  # the mesh's name for these ranks, or the ranks
    nbytes: int
    backward: bool
    implicit: bool  # an operator needed it; nobody called redistribute() or its like
    line: str  # file:line of the user's code; in backward often the call of backward()


class CommunicationLedger:
    """Records this rank's collectives while it is entered; ``mesh`` gives their ranks a name."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.entries: list[Entry] = []
        self._names = _names_of(mesh) if mesh is not None else {}
        self._stack = ExitStack()

    def __enter__(self) -> CommunicationLedger:
        self._stack.enter_context(get_platform().listen_to_collectives(self._record))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def counts(self, *, backward: bool | None = None, implicit: bool | None = None) -> dict[str, int]:
        """How often each collective ran: in forward, in backward or both; asked for, implicit or both."""
        wanted = (e for e in self.entries if backward in (None, e.backward) and implicit in (None, e.implicit))
        return dict(Counter(entry.collective for entry in wanted))

    def nbytes(self, *, backward: bool | None = None) -> int:
        """The bytes that this rank received."""
        return sum(entry.nbytes for entry in self.entries if backward in (None, entry.backward))

    def table(self) -> str:
        """All of it for people."""
        lines = [f"{'collective':<42}{'axis':<12}{'bytes':>12}  {'pass':<9} {'cause':<9}line"]
        for entry in self.entries:
            way = "backward" if entry.backward else "forward"
            why = "implicit" if entry.implicit else "asked"
            lines.append(f"{entry.collective:<42}{entry.axis:<12}{entry.nbytes:>12}  {way:<9} {why:<9}{entry.line}")
        return "\n".join([*lines, f"{len(self.entries)} collectives, {self.nbytes()} bytes"])

    def _record(self, traffic: Traffic) -> None:
        axis = self._names.get(frozenset(traffic.ranks), str(list(traffic.ranks)))
        line = users_line()
        self.entries.append(Entry(traffic.collective, axis, traffic.nbytes, traffic.backward, is_implicit(), line))


def _names_of(mesh: DeviceMesh) -> dict[frozenset[int], str]:
    """The ranks of this rank's lines, and of the whole mesh, by name."""
    names = {frozenset(mesh.rank_list): "all axes"}
    for axis in range(mesh.ndim):
        name = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else str(axis)
        names[frozenset(mesh.get_rank_list_along_axis(axis))] = name
    return names
