# SPDX-License-Identifier: Apache-2.0
"""``hyper-parallel explain HP203``: what an error code means, and what to do.

It exits with 2 where there is no such code.
"""

from __future__ import annotations

from typing import Annotated

import typer

from hyper_parallel.cli.checkpoints import application
from hyper_parallel.cli.explanations import Explanation, explanations, families

_EPILOG = "Example: hyper-parallel explain HP203"


@application.command("explain", epilog=_EPILOG)
def explain(
    code: Annotated[
        str, typer.Argument(help="As it stands at the end of an error: HP203.")
    ] = "",
) -> None:
    """Say what an error code means and what to do about it; without one, list all."""
    if not code:
        typer.echo("\n".join(_contents()))
        return
    wanted = code.strip("[]: ").upper()
    wanted = wanted if wanted.startswith("HP") else f"HP{wanted}"
    if wanted not in explanations():
        typer.echo(f"error: there is no code {code!r}; {_hint(wanted)}", err=True)
        raise typer.Exit(2)
    typer.echo(_told(explanations()[wanted]))


def _hint(wanted: str) -> str:
    number = wanted.removeprefix("HP")
    if not number.isdecimal():
        return "codes are like HP203; explain without one lists all"
    near = sorted(
        explanations(), key=lambda code: abs(int(code.removeprefix("HP")) - int(number))
    )[:3]
    return f"near are {', '.join(near)}"


def _told(one: Explanation) -> str:
    return f"{one.code}: {one.name}\n\n    {one.example}\n\n{one.cause}\n\nWhat to do: {one.remedy}"


def _contents() -> list[str]:
    lines = []
    for family in families():
        lines += [
            "",
            family.name,
            *(f"  {one.code}  {one.name}" for one in family.explanations),
        ]
    return lines[1:]
