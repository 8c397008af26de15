# SPDX-License-Identifier: Apache-2.0
"""One rank of a job that `launch` has started: python -m hyper_parallel.recipe.rank FOLDER."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from hyper_parallel.testing.parent import end_with_parent

JOB, FINISHED, FAILED, BAD_RECIPE, STOPPED = "job.json", 0, 1, 2, 3


def main() -> None:
    """Trains, and leaves a note of how it ended where it failed."""
    folder = Path(sys.argv[1])
    job = json.loads((folder / JOB).read_text())
    end_with_parent(job["launcher"])
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):  # for people who wonder where a rank hangs
        faulthandler.register(signal.SIGUSR1)
    if os.environ["RANK"] == "0":
        warnings.showwarning = _shown
    code = FAILED
    try:
        code = run(job, folder)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the launcher tells it
        code = leave_note(folder, error)
    sys.stdout.flush()
    sys.stderr.flush()
    if code == FAILED:
        os._exit(
            code
        )  # at once: the others wait for this one, and its threads may wait for them
    raise SystemExit(code)


def run(job: dict[str, Any], folder: Path) -> int:
    """Trains; the exit code."""
    from hyper_parallel.platform import get_platform
    from hyper_parallel.recipe import read_recipe
    from hyper_parallel.recipe.training import train

    def end(error: BaseException) -> None:
        os._exit(leave_note(folder, error))

    outcome = train(
        read_recipe(job["path"], job["overrides"], job["nproc"]), job["resume"], end
    )
    get_platform().destroy_process_group()
    return STOPPED if outcome.stopped else FINISHED


def leave_note(folder: Path, error: BaseException) -> int:
    """Tells the launcher of an error; the exit code."""
    note = noted(error)
    traceback.print_exception(error)
    sys.stderr.flush()
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(note))
    code: int = note["code"]
    return code


def noted(error: BaseException) -> dict[str, Any]:
    """What the launcher has to know of an error."""
    from hyper_parallel.platform import CommunicationError
    from hyper_parallel.recipe import RecipeError

    return {
        "when": time.monotonic(),
        "headline": "".join(traceback.format_exception_only(error)).strip(),
        "traceback": "".join(traceback.format_exception(error)),
        "is_echo": isinstance(
            error, CommunicationError
        ),  # most likely of another rank's failure
        "code": BAD_RECIPE if isinstance(error, RecipeError) else FAILED,
        "recipe": str(error) if isinstance(error, RecipeError) else None,
    }


def _end_with_launcher() -> None:
    while os.read(0, 1024):  # not sys.stdin, which would be in use while Python ends
        pass
    os._exit(FAILED)


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
