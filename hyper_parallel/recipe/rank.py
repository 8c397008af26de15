# SPDX-License-Identifier: Apache-2.0
"""One rank of a job that `launch` has started: python -m hyper_parallel.recipe.rank FOLDER."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from hyper_parallel.ranks.logs import show_stack_on_request
from hyper_parallel.ranks.parent import end_with_parent
from hyper_parallel.ranks.processes import leave_note, wait_for_launcher

JOB, FINISHED, FAILED, BAD_RECIPE, STOPPED = "job.json", 0, 1, 2, 3


def main() -> None:
    """Trains, and leaves a note of how it ended where it failed."""
    folder = Path(sys.argv[1])
    job = json.loads((folder / JOB).read_text())
    end_with_parent(job["launcher"], wait_for_launcher)
    show_stack_on_request(all_threads=True)
    if os.environ["RANK"] == "0":
        warnings.showwarning = _shown
    code = FAILED
    try:
        code = run(job, folder)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the launcher tells it
        code = report_error(folder, error)
    sys.stdout.flush()
    sys.stderr.flush()
    if code == FAILED:
        # At once: the others wait for this one, and its threads may wait for them.
        os._exit(code)
    raise SystemExit(code)


def run(job: dict[str, Any], folder: Path) -> int:
    """Trains; the exit code."""
    from hyper_parallel.platform import get_platform
    from hyper_parallel.recipe import read_recipe
    from hyper_parallel.recipe.training import train

    def end(error: BaseException) -> None:
        os._exit(report_error(folder, error))

    outcome = train(
        read_recipe(job["path"], job["overrides"], job["nproc"]), job["resume"], end
    )
    get_platform().destroy_process_group()
    return STOPPED if outcome.stopped else FINISHED


def report_error(folder: Path, error: BaseException) -> int:
    """Leaves a note of an error for the launcher; the exit code."""
    from hyper_parallel.recipe import RecipeError

    if isinstance(error, RecipeError):
        leave_note(folder, error, recipe=str(error))
        return BAD_RECIPE
    leave_note(folder, error, recipe=None)
    return FAILED


def _shown(
    message: Any,
    category: Any,
    filename: str,
    lineno: int,
    file: Any = None,
    line: Any = None,
) -> None:
    """Warnings of the first rank are for people; they are in its log too."""
    text = warnings.formatwarning(message, category, filename, lineno, line)
    (file or sys.stderr).write(text)
    print(f"warning: {message}", flush=True)  # noqa: T201 - to the terminal


if __name__ == "__main__":
    main()
