# SPDX-License-Identifier: Apache-2.0
"""Where the command ``hyper-parallel`` begins."""

from __future__ import annotations

import sys

_NEEDED = ("typer", "rich", "click", "shellingham", "pydantic", "yaml")


def main() -> None:
    """Runs the command with the arguments of the process."""
    try:
        from hyper_parallel.cli import (  # noqa: F401 - they add their commands
            doctor,
            explain,
            ops,
            plan,
            schedule,
            train,
            verify,
        )
        from hyper_parallel.cli.checkpoints import application

        application()
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        told = f"hyper-parallel needs {error.name}, which is not installed: pip install 'hyper_parallel[cli]'"
        print(told, file=sys.stderr)  # noqa: T201 - what would print it nicely is missing
        raise SystemExit(1) from None
