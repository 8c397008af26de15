# SPDX-License-Identifier: Apache-2.0
"""How commands end when something is wrong: one line on stderr and an exit code, a traceback only with ``--debug``.

0  done, and what was asked about is right
1  done, and something is wrong with what was asked about; or it failed on the way
2  what was asked cannot be done: an argument, a file, a recipe
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Annotated, ParamSpec

import typer

from hyper_parallel.platform.error_codes import hint

WRONG = 1
BAD_INPUT = 2

P = ParamSpec("P")
Debug = Annotated[
    bool, typer.Option("--debug", help="Tell errors with their tracebacks.")
]


class BadInputError(Exception):
    """What was asked cannot be done."""

    def __init__(self, message: str, code: str | None = "HP720") -> None:
        """``code``: None where the message has one."""
        super().__init__(message if code is None else message + hint(code))
        self.code = code


def told(command: Callable[P, None]) -> Callable[P, None]:
    """A command with an option ``debug`` whose errors are told and become exit codes."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(WRONG) from None
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            is_bad_input = isinstance(error, BadInputError)
            if kwargs.get("debug"):
                traceback.print_exception(error)
            typer.echo(
                f"error: {error if is_bad_input else _with_type(error)}", err=True
            )
            if not is_bad_input and not kwargs.get("debug"):
                typer.echo("--debug shows where it was raised", err=True)
            raise typer.Exit(BAD_INPUT if is_bad_input else WRONG) from None

    return run


def _with_type(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
