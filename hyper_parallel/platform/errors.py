# SPDX-License-Identifier: Apache-2.0
"""Errors of communication: who waited where, for whom."""

from __future__ import annotations


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
