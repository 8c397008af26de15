# SPDX-License-Identifier: Apache-2.0
"""Errors of communication: who waited where, for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class CommunicationError(RuntimeError):
    """A collective did not complete: a peer never came, died, or called another collective.

    ``collective``, ``ranks`` (the group's) and ``missing`` (None where it could not be found out) say so in data
    what the message says in words.
    """

    def __init__(
        self,
        message: str,
        *,
        collective: str = "",
        ranks: tuple[int, ...] = (),
        missing: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(message)
        self.collective = collective
        self.ranks = ranks
        self.missing = missing

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword arguments are not part of BaseException's own pickling; a rank's error travels to the parent.
        state = {"collective": self.collective, "ranks": self.ranks, "missing": self.missing}
        return (type(self), self.args, state)


def unfinished(
    rank: int,
    collective: str,
    group: str | None,
    ranks: Sequence[int],
    missing: tuple[int, ...] | None,
    elsewhere: Mapping[int, str],
    error: BaseException | None = None,
) -> CommunicationError:
    """The error of a rank that waited in ``collective`` in vain.

    ``missing``: those that never came, None where that cannot be known. ``elsewhere``: what others waited in.
    """
    name = f"group {group!r} of ranks {list(ranks)}" if group is not None else f"ranks {list(ranks)}"
    others = {r: note for r, note in elsewhere.items() if note != collective}
    if missing is None:
        what = "which ranks are missing cannot be known, because the job's store does not answer (did its host end?)"
    elif missing:
        what = f"ranks that never came: {list(missing)}"
    elif others:
        what = "the ranks called different collectives: " + ", ".join(f"rank {r} {n}" for r, n in others.items())
    else:
        what = "every rank came, but not all in time, or with data that does not fit together"
    said = f" The backend said: {(str(error).splitlines() or [type(error).__name__])[0]}" if error is not None else ""
    return CommunicationError(
        f"rank {rank}: {collective} on {name} did not complete; {what}. Check that every rank of the group makes this "
        "call, in the same order; the time allowed is init_process_group(timeout=...). The group cannot be used again."
        + said,
        collective=collective,
        ranks=tuple(ranks),
        missing=missing,
    )
