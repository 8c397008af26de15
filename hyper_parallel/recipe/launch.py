# SPDX-License-Identifier: Apache-2.0
"""Trains a recipe on ranks of this machine, and reports whose failure came first.

A rank that fails ends the job. What each rank writes to stderr is kept in the run's folder. SIGTERM and SIGINT go on to
the ranks, which save and leave.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hyper_parallel.platform.error_codes import hint
from hyper_parallel.ranks.failures import Failure, order_failures, shorten
from hyper_parallel.ranks.processes import RankProcesses, read_notes
from hyper_parallel.recipe.rank import BAD_RECIPE, FAILED, FINISHED, JOB, STOPPED
from hyper_parallel.recipe.schema import Recipe

GRACE = 5.0  # seconds in which ranks that lost another one may say so themselves


class JobError(Exception):
    """Ranks that failed, the first to fail in front; ``exit_code`` is the command's."""

    def __init__(self, failures: Sequence[Failure], recipe: str | None = None) -> None:
        self.failures, self.recipe = tuple(failures), recipe
        self.code = "HP701" if recipe is not None else "HP706"
        self.exit_code = BAD_RECIPE if recipe is not None else FAILED
        text = "\n".join(describe_failures(failures)) if recipe is None else recipe
        super().__init__(text)


def describe_failures(
    failures: Sequence[Failure], *, with_all_tracebacks: bool = False
) -> list[str]:
    """The first failure in full, the others in a line each, or all of them in full."""
    first, *others = failures
    lines = [
        f"rank {first.rank} failed:{hint('HP706')}",
        first.details.rstrip() or first.headline,
    ]
    for other in others:
        lines += [f"rank {other.rank}: {shorten(other.headline).splitlines()[0]}"]
        if with_all_tracebacks and other.details:
            lines += [other.details.rstrip()]
    if first.log is not None:
        lines += [f"what the ranks wrote is in {first.log.parent}"]
    return lines


def launch(recipe: Recipe, overrides: Sequence[str], resume: str | None) -> int:
    """Trains on as many processes as the mesh has; the exit code, or a JobError."""
    logs = _log_folder(recipe)
    with tempfile.TemporaryDirectory(prefix="hyper_parallel_") as notes:
        job = {
            "path": str(recipe.path),
            "overrides": list(overrides),
            "nproc": recipe.ranks,
            "resume": resume,
            "launcher": os.getpid(),
        }
        (Path(notes) / JOB).write_text(json.dumps(job))
        with RankProcesses(
            "hyper_parallel.recipe.rank",
            [notes],
            recipe.framework,
            recipe.ranks,
            logs,
            successes=(FINISHED, STOPPED),
        ) as ranks:
            ranks.watch(GRACE)
        return _conclude(ranks, Path(notes))


def _conclude(ranks: RankProcesses, folder: Path) -> int:
    """The exit code of a job whose ranks have ended, or its JobError."""
    codes = ranks.codes
    notes = read_notes(folder, len(codes))
    if all(code == FINISHED for code in codes):
        return FINISHED
    if all(code in (FINISHED, STOPPED) for code in codes):
        return STOPPED
    if ranks.was_asked and not notes:
        return STOPPED
    recipes = [note["recipe"] for note in notes.values() if note["recipe"] is not None]
    if recipes:
        raise JobError((), recipes[0])
    ends = [ranks.find_failure(rank, notes.get(rank)) for rank in range(len(codes))]
    raise JobError(order_failures(failure for failure in ends if failure is not None))


def _log_folder(recipe: Recipe) -> Path:
    folder = (
        recipe.folder / "ranks"
        if recipe.folder is not None
        else Path(tempfile.mkdtemp(prefix="hyper_parallel_logs_"))
    )
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()
