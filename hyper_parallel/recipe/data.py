# SPDX-License-Identifier: Apache-2.0
"""Text as batches of tokens, each given by the seed and its number alone, so that resuming is exact, on any mesh."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.platform.error_codes import coded

LENGTH = 2_000_000  # bytes of Python's own text

Rows = NDArray[np.int64]


class Corpus:
    """Batches for training and evaluation: tokens, and the tokens that follow them."""

    def __init__(
        self,
        tokens: NDArray[Any],
        batch: int,
        length: int,
        seed: int,
        *,
        held_out: float = 0.05,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        """``length``: of a sequence. ``part`` of ``parts``: which rows of each batch are this process's."""
        if batch % parts:
            raise coded(
                ValueError,
                "HP705",
                f"a batch of {batch} sequences cannot be shared evenly by {parts} data-parallel ranks",
            )
        count = len(tokens) - int(np.ceil(len(tokens) * held_out))
        self._training, self._held_out = tokens[:count], tokens[count:]
        for name, found in (("training", self._training), ("held-out", self._held_out)):
            if len(found) <= length and (held_out or name == "training"):
                raise coded(
                    ValueError,
                    "HP705",
                    f"a sequence has {length} tokens, but the {name} part of the text has {len(found)}; take more "
                    "text, or shorter sequences",
                )
        self.digest = hashlib.sha256(tokens.tobytes()).hexdigest()
        self._batch, self._length, self._seed = batch, length, seed
        self._rows = slice(part * batch // parts, (part + 1) * batch // parts)

    def training(self, step: int, *, whole: bool = False) -> tuple[Rows, Rows]:
        """This process's rows for a step, or those of all processes."""
        return self._draw(self._training, 2 * step, whole)

    def held_out(self, number: int, *, whole: bool = False) -> tuple[Rows, Rows]:
        """The same, of text that is never trained on."""
        return self._draw(self._held_out, 2 * number + 1, whole)

    def _draw(
        self, tokens: NDArray[Any], number: int, whole: bool
    ) -> tuple[Rows, Rows]:
        # The whole batch is drawn everywhere and cut: the rows do not depend on who takes part.
        starts = np.random.default_rng([self._seed, number]).integers(
            len(tokens) - self._length, size=self._batch
        )
        places = starts[slice(None) if whole else self._rows, None] + np.arange(
            self._length + 1
        )
        rows = tokens[places].astype(np.int64)
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


def python_text() -> bytes:
    """What ``help()`` says on the language, and then the standard library's sources in the order of their names."""
    text = bytearray("\n\n".join(topics[name] for name in sorted(topics)), "utf-8")
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(text) < LENGTH:
            text += source.read_bytes()
    return bytes(text[:LENGTH])


def texts(path: Path, pattern: str) -> Iterator[bytes]:
    """The contents of a file, or of the files of a folder in the order of their names."""
    files = (
        [path]
        if path.is_file()
        else sorted(file for file in path.glob(pattern) if file.is_file())
    )
    return (file.read_bytes() for file in files)


def as_bytes(contents: Iterable[bytes]) -> NDArray[np.uint8]:
    """Each byte a token; between two files, an empty line."""
    return np.frombuffer(b"\n\n".join(contents), np.uint8)
