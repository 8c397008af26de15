# SPDX-License-Identifier: Apache-2.0
"""JSON from outside: parsed within limits, then read field by field, with errors that say where.

root = parse(b'{"mesh": [2, true]}', "checkpoint.json")
root["mesh"].integers(1)        CheckpointError: checkpoint.json: mesh[1]: expected an int from 1 to ..., got true
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.platform.error_codes import coded

MOST_NESTED = 64  # brackets that may be open at once
MOST_DIGITS = 1000  # of an int; reading one takes time that grows with the square
END = 2**63  # what a number that counts elements, bytes or positions stays below

_PIECE = (
    1 << 16
)  # bytes that are looked at together; the arrays for them are 26 times as large
_QUOTE = ord('"')
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


def nesting(data: bytes) -> int:
    """How many brackets are open at once, at most, before a parser would end or refuse to go on."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(
            b'\\"', b""
        )  # now every quote begins or ends a string
    codes = np.frombuffer(data, np.uint8)
    deepest = depth = quotes = 0
    for start in range(0, len(codes), _PIECE):
        piece = codes[start : start + _PIECE]
        seen = np.cumsum(piece == _QUOTE) + quotes
        depths = np.cumsum(np.where(seen & 1, 0, _STEPS[piece])) + depth
        deepest, depth, quotes = (
            max(deepest, int(depths.max())),
            int(depths[-1]),
            int(seen[-1]),
        )
    return deepest


def parse(data: bytes, file: str | Path) -> Field:
    """One JSON value; no key twice in an object, no numbers that are not finite."""
    if (deepest := nesting(data)) > MOST_NESTED:
        raise coded(
            CheckpointError,
            "HP503",
            f"nested {deepest} levels deep, expected at most {MOST_NESTED}",
            file=file,
        )
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=_object,
            parse_int=_int,
            parse_float=_float,
            parse_constant=_float,
        )
    except ValueError as error:
        raise coded(
            CheckpointError,
            "HP503",
            f"cannot be read as JSON: {shortened(str(error), 200)}",
            file=file,
        ) from None
    return Field(value, file)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {quoted(twice)} twice")
    return made


def _int(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(
            f"an int of {len(text)} digits, expected at most {MOST_DIGITS}"
        )
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {shortened(text)} is not finite")
    return value


def is_text(value: Any) -> bool:
    """Whether a value is a str that UTF-8 can hold: one without lone surrogates."""
    if type(value) is not str or value.isascii():
        return type(value) is str
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def shortened(text: str, limit: int = 80) -> str:
    """A text that may be long, for an error."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def quoted(text: str) -> str:
    """A text as JSON writes it in ASCII, so that any terminal can show it."""
    return json.dumps(shortened(text))


def shown(value: Any) -> str:
    """What a JSON value is, or what was made of it, for an error."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if type(value) is int and abs(value) >= 2**100:
        return "a very large int"  # whose digits Python may refuse to write
    return (
        json.dumps(value)
        if value is None or type(value) in (bool, int, float)
        else type(value).__name__
    )


@dataclass(slots=True)  # not frozen: that would take most of the time of reading a file
class Field:
    """A value, and the keys that lead to it in its file."""

    value: Any
    file: str | Path | None = None
    keys: tuple[str | int, ...] = ()

    def __getitem__(self, key: str | int) -> Field:
        return self.at(key, self.value[key])

    def at(self, key: str | int, value: Any) -> Field:
        """Something that stands, or would stand, under a key."""
        return Field(value, self.file, (*self.keys, key))

    @property
    def name(self) -> str:
        """Like ``tensors."model.w".shape[0]``."""
        text = "".join(
            f"[{key}]" if isinstance(key, int) else f".{_plain(key)}"
            for key in self.keys
        )
        return text.removeprefix(".")

    def fail(self, message: str) -> NoReturn:
        """Says what is wrong with this field."""
        raise coded(
            CheckpointError, "HP503", message, file=self.file, field=self.name or None
        )

    def expected(self, what: str) -> NoReturn:
        """Says what should have been here."""
        self.fail(f"expected {what}, got {shown(self.value)}")

    def integer(self, low: int, end: int = END) -> int:
        """An int, at least ``low`` and below ``end``; a bool is none."""
        value = self.value
        if type(value) is not int or not low <= value < end:
            self.expected(f"an int from {low} to {end - 1}")
        return value

    def integers(self, low: int, end: int = END) -> tuple[int, ...]:
        """A list of them."""
        values = self.list()
        if not all(type(value) is int and low <= value < end for value in values):
            for field in self.elements():
                field.integer(low, end)
        return tuple(values)

    def text(self) -> str:
        """A str that can be written."""
        value = self.value
        if not is_text(value):
            self.expected("a text without lone surrogates")
        return str(value)

    def list(self) -> list[Any]:
        """A list."""
        if type(self.value) is not list:
            self.expected("a list")
        return self.value

    def object(self) -> dict[str, Any]:
        """An object, whatever its keys."""
        if type(self.value) is not dict:
            self.expected("an object")
        return self.value

    def record(self, *needed: str, optional: tuple[str, ...] = ()) -> None:
        """Checks for an object with these keys and no others."""
        found = self.object().keys()
        if missing := [key for key in needed if key not in found]:
            self.fail(f"the field {quoted(missing[0])} is missing")
        if (
            unknown := next(
                (key for key in found if key not in needed and key not in optional),
                None,
            )
        ) is not None:
            self.fail(f"the field {quoted(unknown)} is unknown")

    def elements(self) -> Iterator[Field]:
        """What is in a list."""
        return (self.at(number, value) for number, value in enumerate(self.list()))

    def values(self) -> Iterator[Field]:
        """What is in an object, whatever its keys."""
        return (self.at(key, value) for key, value in self.object().items())


def _plain(key: str) -> str:
    return (
        key if key.isascii() and key.isidentifier() and len(key) <= 80 else quoted(key)
    )
