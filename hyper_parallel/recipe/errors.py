# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a recipe: all of it at once, each with its key and its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hyper_parallel.platform.error_codes import hint


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. ``key`` is dotted; ``place`` is a line of the file or an override."""

    key: str
    message: str
    place: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, self.key, self.message) if part)


class RecipeError(ValueError):
    """A recipe that cannot be trained from."""

    code = "HP701"

    def __init__(self, path: str | Path, problems: Sequence[Problem]) -> None:
        self.path, self.problems = Path(path), tuple(problems)
        count = (
            "one problem"
            if len(self.problems) == 1
            else f"{len(self.problems)} problems"
        )
        headline = self._headline(count) + hint(self.code)
        lines = [headline, *(f"  {problem}" for problem in self.problems)]
        super().__init__("\n".join(lines))

    def _headline(self, count: str) -> str:
        return f"{self.path}: {count}"

    def __reduce__(self) -> tuple[type[RecipeError], tuple[Path, tuple[Problem, ...]]]:
        return type(self), (self.path, self.problems)


class ResumeError(RecipeError):
    """A checkpoint that a recipe cannot go on from."""

    code = "HP702"

    def _headline(self, count: str) -> str:
        return f"{self.path}: --resume: {count}"
