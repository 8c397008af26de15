# SPDX-License-Identifier: Apache-2.0
"""Errors of communication: who waited where, for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hyper_parallel.platform.error_codes import coded


class CommunicationError(RuntimeError):
    """A collective did not complete: a peer never came, died, or called another collective.

    ``collective``, ``number`` (its 1-based index within the group; 0 between two ranks), ``axis`` (of the mesh),
    ``ranks`` (the group's) and ``missing`` (None where it could not be found out) say in data what the message says
    in words.
    """

    def __init__(
        self,
        message: str,
        *,
        collective: str = "",
        ranks: tuple[int, ...] = (),
        missing: tuple[int, ...] | None = None,
        number: int = 0,
        axis: str = "",
    ) -> None:
        super().__init__(message)
        self.collective = collective
        self.ranks = ranks
        self.missing = missing
        self.number = number
        self.axis = axis

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword arguments are not part of BaseException's own pickling; a rank's error travels to the parent.
        return (type(self), self.args, vars(self))


def unfinished(
    rank: int,
    collective: str,
    group: str | None,
    ranks: Sequence[int],
    missing: tuple[int, ...] | None,
    elsewhere: Mapping[int, str],
    error: BaseException | None = None,
    *,
    number: int = 0,
    axis: str = "",
) -> CommunicationError:
    """The error of a rank that waited in ``collective`` in vain.

    ``missing``: those that never came, None if unknown. ``elsewhere``: what others waited in.
    ``number``: its 1-based index within the group; 0 where collectives are not counted. ``axis``: what the mesh calls
    the group.
    """
    name = (
        f"group {group!r} of ranks {list(ranks)}"
        if group is not None
        else f"ranks {list(ranks)}"
    )
    others = {r: note for r, note in elsewhere.items() if note != collective}
    if missing is None:
        code = "HP112"
        what = "which ranks are missing cannot be known, because the job's store does not answer (did its host end?)"
    elif missing:
        code, what = "HP111", f"ranks that never came: {list(missing)}"
    elif others:
        code = "HP113"
        what = "the ranks called different collectives: " + ", ".join(
            f"rank {r} {n}" for r, n in others.items()
        )
    else:
        code, what = (
            "HP114",
            "every rank came, but not all in time, or with data that does not fit together",
        )
    said = (
        f" The backend said: {(str(error).splitlines() or [type(error).__name__])[0]}"
        if error is not None
        else ""
    )
    return coded(
        CommunicationError,
        code,
        f"rank {rank}: {collective} on {name} did not complete; {_place(number, axis)}{what}. Check that every "
        "rank of the group makes this call, in the same order; the time allowed is init_process_group(timeout=...)."
        f" The group cannot be used again.{said}",
        collective=collective,
        ranks=tuple(ranks),
        missing=missing,
        number=number,
        axis=axis,
    )


def stuck(rank: int, collective: str, seconds: float) -> CommunicationError:
    """The error of a rank that was asked to stop and waits for others in vain."""
    return coded(
        CommunicationError,
        "HP141",
        f"rank {rank}: it was asked to stop, but has waited in {collective} for {seconds:.0f} s and could not "
        "save; communication.grace says how long it may",
        collective=collective,
    )


def _place(number: int, axis: str) -> str:
    """Which collective it was: of which axis of the mesh, and how many were before it."""
    if not number:
        return f"it is on axis {axis!r}; " if axis else ""
    return (
        f"it is collective {number} of axis {axis!r}; "
        if axis
        else f"it is collective {number} of this group; "
    )
