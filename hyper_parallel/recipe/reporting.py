# SPDX-License-Identifier: Apache-2.0
"""What the first rank tells of a training: a bar, or lines where there is no terminal, and the logs in its folder."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from hyper_parallel.recipe.schema import Recipe

LOG = "log.jsonl"
_TOLD = TextColumn("loss {task.fields[loss]:.4f}{task.fields[more]}")


class Reporter:
    """Told of every step on the first rank; on the others it does nothing."""

    def __init__(self, recipe: Recipe, done: int, *, is_first: bool) -> None:
        self._recipe, self._done, self._is_first = recipe, done, is_first
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _TOLD, TimeRemainingColumn(),
            console=self._console, disable=not (is_first and self._console.is_terminal),
        )  # fmt: skip
        shape = "x".join(map(str, recipe.mesh_shape))
        what = f"mesh {shape}" if recipe.ranks > 1 else "one process"
        self._task = self._bar.add_task(
            what, total=recipe.steps, completed=done, loss=math.nan, more=""
        )
        self._log: IO[str] | None = None
        self._board: Any = None

    def __enter__(self) -> Reporter:
        if self._is_first and self._recipe.folder is not None:
            self._recipe.folder.mkdir(parents=True, exist_ok=True)
            self._log = _opened(self._recipe.folder / LOG, self._done)
            if self._recipe.logging.tensorboard:
                from tensorboard.summary import Writer  # type: ignore[import-untyped]

                self._board = Writer(str(self._recipe.folder / "tensorboard"))
        self._bar.start()
        self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        for log in (self._log, self._board):
            if log is not None:
                log.close()

    def tell(self, text: str) -> None:
        """A line for people."""
        if self._is_first:
            self._console.print(text, markup=False)

    def step(self, facts: Mapping[str, Any]) -> None:
        """What came of a step: ``step``, ``loss`` and other numbers."""
        if not self._is_first:
            return
        if self._log is not None:
            self._log.write(json.dumps(facts) + "\n")
        if self._board is not None:
            for name, value in facts.items():
                if name != "step" and not isinstance(value, list):
                    self._board.add_scalar(name, value, facts["step"])
        more = _format_facts(facts)
        self._bar.update(
            self._task, completed=facts["step"], loss=facts["loss"], more=more
        )
        step, last = facts["step"], self._recipe.steps
        if self._bar.disable and (
            "held_out" in facts
            or step % self._recipe.logging.every == 0
            or step == last
        ):
            pace = (time.monotonic() - self._began) / (step - self._done)
            left = time.strftime("%H:%M:%S", time.gmtime(pace * (last - step)))
            self.tell(
                f"step {step}/{last}: loss {facts['loss']:.4f}{more}, {left} left"
            )


def _format_facts(facts: Mapping[str, Any]) -> str:
    """What a line for people has of a step behind its loss."""
    told = [
        f", {name} {format(facts[key], how)}"
        for key, name, how in (
            ("held_out", "held out", ".4f"),
            ("expert_imbalance", "imbalance", ".2f"),
            ("bubble", "bubble", ".0%"),
        )
        if key in facts
    ]
    pace = f", {facts['tokens_per_second']:,.0f} tokens/s, {facts['memory'] / 2**20:,.0f} MiB"
    return "".join([*told, pace])


def _opened(path: Path, done: int) -> IO[str]:
    """The log to go on with: steps after the one that the training goes on from were lost, and are not in it."""
    kept = []
    if done and path.exists():
        for line in path.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= done:
                    kept.append(f"{line}\n")
            except (ValueError, KeyError):  # the last line of a run that was killed
                continue
    path.write_text("".join(kept))
    return path.open("a", buffering=1)
