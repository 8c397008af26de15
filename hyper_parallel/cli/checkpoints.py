# SPDX-License-Identifier: Apache-2.0
"""``hyper-parallel ckpt``: lists, verifies, compares and converts checkpoints.

It exits with 1 where something is damaged or differs, with 2 where a command cannot do what it is asked for.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from hyper_parallel.cli.describe import described, printable, size_text
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.platform.error_codes import coded

P = ParamSpec("P")
_WIDE = 240  # columns of what goes into a file or another program

application = typer.Typer(no_args_is_help=True, help="Tools of hyper_parallel.")
ckpt = typer.Typer(
    no_args_is_help=True, help="Look at checkpoints, verify, compare and convert them."
)
application.add_typer(ckpt, name="ckpt")


@application.callback()
def _application() -> None:
    """Tools of hyper_parallel."""


class Kind(str, Enum):
    """What checkpoints come as."""

    checkpoint = "checkpoint"
    huggingface = "huggingface"
    file = "file"


Source = Annotated[
    Path,
    typer.Argument(
        help="A checkpoint, a folder of Hugging Face, or a .safetensors file."
    ),
]
FollowLinks = Annotated[
    bool,
    typer.Option("--follow-links", help="Open links, as in the cache of Hugging Face."),
]
Prefix = Annotated[
    str,
    typer.Option(
        help="What names of a checkpoint begin with and those of Hugging Face do not."
    ),
]


def _one_line(command: Callable[P, None]) -> Callable[P, None]:
    """A command whose errors are one line each."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (CheckpointError, OSError, ValueError) as error:
            typer.echo(f"error: {_on_one_line(error)}", err=True)
            raise typer.Exit(2) from None

    return run


def _on_one_line(error: Exception) -> str:
    return "".join(mark if mark.isprintable() else " " for mark in str(error))


def _console() -> Console:
    return Console(
        highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _WIDE
    )


@contextmanager
def _progress(
    what: str, total: int, *, quiet: bool = False
) -> Iterator[Callable[[int], None]]:
    """A bar that is told how many more bytes are done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def _reader(path: Path, *, follow_links: bool) -> tuple[Any, Kind]:
    from hyper_parallel.core.distributed_checkpoint.hugging_face import (
        HuggingFaceReader,
        reader_for,
    )

    if not path.exists():
        raise coded(
            CheckpointError, "HP501", "there is no such file or folder", file=path
        )
    reader = reader_for(path, follow_links=follow_links, allow_pickle=None)
    if not isinstance(reader, HuggingFaceReader):
        return reader, Kind.checkpoint
    return reader, Kind.huggingface if path.is_dir() else Kind.file


@ckpt.command("ls")
@_one_line
def show(
    path: Source,
    tensors: Annotated[
        bool, typer.Option("--tensors", "-t", help="List the tensors.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Everything, for other programs.")
    ] = False,
    follow_links: FollowLinks = False,
) -> None:
    """Shows what is in a checkpoint."""
    reader, kind = _reader(path, follow_links=follow_links)
    facts = described(path, kind.value, reader.load_metadata())
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    console = _console()
    for line in _summary(facts):
        console.print(line, markup=False)
    if tensors:
        console.print(_table(facts["tensors"]))


def _summary(facts: dict[str, Any]) -> Iterator[str]:
    stored = [tensor for tensor in facts["tensors"] if "stored_as" not in tensor]
    tied = len(facts["tensors"]) - len(stored)
    files = {file for tensor in stored for file in tensor["files"]}
    yield f"{printable(facts['path'])}: {facts['kind']}, {size_text(facts['bytes'])} in {len(files)} files"
    yield f"tensors  {len(stored)}" + (f", and {tied} tied to others" if tied else "")
    yield f"saved    by {facts['ranks']} ranks, {printable(facts['library'])}"
    for mesh in facts["meshes"]:
        names = mesh["names"] or [f"axis {axis}" for axis in range(len(mesh["shape"]))]
        told = ", ".join(
            f"{printable(name)}={size}"
            for name, size in zip(names, mesh["shape"], strict=True)
        )
        yield f"mesh     {told}"
    for name, value in facts["objects"].items():
        text = json.dumps(value)
        yield f"object   {printable(name)} = {text if len(text) <= 100 else text[:97] + '...'}"


def _table(tensors: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("name", "shape", "dtype", "size", "layout", "files"):
        table.add_column(
            column, justify="right" if column == "size" else "left", overflow="fold"
        )
    for tensor in tensors:
        files = tensor["files"]
        where = (
            printable(files[0])
            if len(files) == 1
            else f"{len(files)} files"
            if files
            else "none"
        )
        if "stored_as" in tensor:
            where = f"stored as {printable(tensor['stored_as'])}"
        shape = ", ".join(map(str, tensor["shape"]))
        row = (
            printable(tensor["name"]),
            f"({shape})",
            tensor["dtype"],
            size_text(tensor["bytes"]),
            tensor["layout"],
            where,
        )
        table.add_row(*map(escape, row))
    return table


@ckpt.command()
@_one_line
def verify(
    path: Source,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Say only what is wrong.")
    ] = False,
    follow_links: FollowLinks = False,
) -> None:
    """Reads every byte and compares it with its checksum."""
    from hyper_parallel.core.distributed_checkpoint.inspection import verify_checkpoint

    _, kind = _reader(path, follow_links=follow_links)
    total = (
        sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        if path.is_dir()
        else 0
    )
    with _progress("verifying", total, quiet=quiet) as progress:
        problems = verify_checkpoint(path, progress, follow_links=follow_links)
    for problem in problems:
        typer.echo(_on_one_line(problem), err=True)
    if problems:
        raise typer.Exit(1)
    if not quiet:
        checked = (
            "every checksum is right"
            if kind is Kind.checkpoint
            else "headers and sizes are; there are no checksums"
        )
        typer.echo(f"{printable(str(path))}: in order, {checked}")


@ckpt.command()
@_one_line
def diff(
    first: Source,
    second: Source,
    prefix: Prefix = "model.",
    follow_links: FollowLinks = False,
) -> None:
    """Compares two checkpoints; how tensors were cut does not matter."""
    from hyper_parallel.core.distributed_checkpoint.inspection import (
        compare_checkpoints,
    )

    (one, kind), (_, other_kind) = (
        _reader(path, follow_links=follow_links) for path in (first, second)
    )
    foreign = [each is Kind.huggingface for each in (kind, other_kind)]
    prefixes = (
        prefix if foreign == [False, True] else "",
        prefix if foreign == [True, False] else "",
    )
    total = described(first, kind.value, one.load_metadata())["bytes"]
    with _progress("comparing", total) as progress:
        found = compare_checkpoints(
            first,
            second,
            prefixes=prefixes,
            follow_links=follow_links,
            progress=progress,
        )
    for line in _differences(found, first, second):
        typer.echo(line)
    if not found.is_equal:
        raise typer.Exit(1)
    typer.echo(f"equal: {found.compared} names")


def _differences(found: Any, first: Path, second: Path) -> Iterator[str]:
    for names, path in ((found.only_in_first, first), (found.only_in_second, second)):
        yield from (
            f"only in {printable(str(path))}: {printable(name)}" for name in names
        )
    for name, (one, other) in found.kinds.items():
        yield f"{printable(name)}: {one} and {other}"
    for name, told in found.values.items():
        yield f"{printable(name)}: {told.count} of {told.elements} elements differ, by at most {told.largest:g}"
    for name, (one, other) in found.objects.items():
        yield f"{printable(name)}: {one!a:.80} and {other!a:.80}"


@ckpt.command()
@_one_line
def convert(
    source: Source,
    target: Annotated[Path, typer.Argument(help="Where it goes.")],
    to: Annotated[
        Kind | None, typer.Option(help="What to make; else what the names suggest.")
    ] = None,
    prefix: Prefix = "model.",
    dtype: Annotated[
        str | None, typer.Option(help="Cast floating-point numbers, for Hugging Face.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write over what is there.")
    ] = False,
    follow_links: FollowLinks = False,
) -> None:
    """Makes a checkpoint, a folder of Hugging Face or a single file out of any of them."""
    reader, kind = _reader(source, follow_links=follow_links)
    wanted = to if to is not None else _suggested(kind, target)
    facts = described(source, kind.value, reader.load_metadata())
    if dtype is not None and wanted is not Kind.huggingface:
        raise coded(CheckpointError, "HP513", "--dtype is for --to huggingface")
    if target.exists() and target.resolve() == source.resolve():
        raise coded(
            CheckpointError, "HP513", "source and target are the same", file=target
        )
    if (
        not force
        and os.path.lexists(target)
        and (not target.is_dir() or any(target.iterdir()))
    ):
        raise coded(
            CheckpointError,
            "HP506",
            "is there already; choose another name, or pass --force",
            file=target,
        )
    with _progress("converting", facts["bytes"]) as progress:
        options = {"follow_links": follow_links, "progress": progress}
        _converted(
            source, kind, target, wanted, prefix, dtype, overwrite=force, **options
        )
    typer.echo(f"{printable(str(target))}: {wanted.value}, {size_text(facts['bytes'])}")


def _suggested(kind: Kind, target: Path) -> Kind:
    if target.suffix == ".safetensors":
        return Kind.file
    return Kind.huggingface if kind is Kind.checkpoint else Kind.checkpoint


def _converted(
    source: Path,
    kind: Kind,
    target: Path,
    wanted: Kind,
    prefix: str,
    dtype: str | None,
    *,
    overwrite: bool,
    **options: Any,
) -> None:
    from hyper_parallel.core.distributed_checkpoint import convert as offline

    if wanted is Kind.file:
        offline.checkpoint_to_file(source, target, overwrite=overwrite, **options)
    elif wanted is Kind.huggingface:
        cut = "" if kind is Kind.huggingface else prefix
        offline.checkpoint_to_hugging_face(
            source, target, prefix=cut, dtype=dtype, overwrite=overwrite, **options
        )
    else:
        put = prefix if kind is Kind.huggingface else ""
        offline.hugging_face_to_checkpoint(source, target, prefix=put, **options)
