# SPDX-License-Identifier: Apache-2.0
"""What every error code means: its name, an example, the cause and the remedy, read from ``explanations.txt``.

docs/errors.md is made from it by ``tools/errors_page.py``, and ``hyper-parallel explain HP203`` prints one of them.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

TEXT = Path(__file__).with_suffix(".txt")
_FIRST_LINE = re.compile(r"(HP\d{3}) (.+)")


@dataclass(frozen=True)
class Explanation:
    """One code. ``example`` is as Python prints it: the type, a colon and the message."""

    code: str
    name: str
    example: str
    cause: str
    remedy: str


@dataclass(frozen=True)
class Family:
    """The codes of one layer, which begin with one digit."""

    digit: str
    name: str
    explanations: tuple[Explanation, ...]


@functools.cache
def families() -> tuple[Family, ...]:
    """All codes, by layer."""
    found = re.split(
        r"^\[(\d)\] (.+)$", TEXT.read_text(encoding="utf-8"), flags=re.MULTILINE
    )[1:]
    return tuple(
        Family(
            digit,
            name,
            tuple(_explanation(block) for block in body.strip().split("\n\n")),
        )
        for digit, name, body in zip(found[::3], found[1::3], found[2::3], strict=True)
    )


@functools.cache
def explanations() -> dict[str, Explanation]:
    """All codes."""
    return {one.code: one for family in families() for one in family.explanations}


def _explanation(block: str) -> Explanation:
    first, example, *rest = block.split("\n")
    named = _FIRST_LINE.fullmatch(first)
    remedies = [line[2:] for line in rest if line.startswith("= ")]
    causes = [line for line in rest if not line.startswith("= ")]
    if not named or not example.startswith("> ") or not causes or not remedies:
        raise AssertionError(
            f"{TEXT.name}: expected a code and a name, '> example', a cause, '= remedy'; got {block!r}"
        )
    return Explanation(
        named[1], named[2], example[2:], " ".join(causes), " ".join(remedies)
    )
