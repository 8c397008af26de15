"""The text of Python's own documentation and sources, byte by byte: what every installation has."""

import hashlib
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor

LENGTH = 2_000_000  # bytes


class Corpus:
    """Batches for training and evaluation, each given by the seed and its number alone, so that resuming is exact."""

    def __init__(self, batch: int, length: int, seed: int, part: int = 0, parts: int = 1):
        """``length``: of a sequence. ``part`` of ``parts``: which rows of each batch are this process's."""
        if batch % parts:
            raise ValueError(f"a batch of {batch} sequences cannot be shared evenly by {parts} data-parallel ranks")
        text = read_text()
        self.digest = hashlib.sha256(text).hexdigest()
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._training, self._held_out = tokens.split([len(tokens) * 19 // 20, -(-len(tokens) // 20)])
        self._batch, self._length, self._seed = batch, length, seed
        self._rows = slice(part * batch // parts, (part + 1) * batch // parts)

    def training(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and the tokens that follow them, for a step."""
        return self._draw(self._training, 2 * step)

    def held_out(self, number: int) -> tuple[Tensor, Tensor]:
        """The same, of text that is never trained on."""
        return self._draw(self._held_out, 2 * number + 1)

    def _draw(self, tokens: Tensor, number: int) -> tuple[Tensor, Tensor]:
        # The whole batch is drawn everywhere and cut: the rows do not depend on who takes part.
        starts = np.random.default_rng([self._seed, number]).integers(len(tokens) - self._length, size=self._batch)
        places = torch.from_numpy(starts)[self._rows, None] + torch.arange(self._length + 1)
        rows = tokens[places].long()
        return rows[:, :-1], rows[:, 1:]


def read_text() -> bytes:
    """What ``help()`` says on the language, and then the standard library's sources in the order of their names."""
    text = bytearray("\n\n".join(topics[name] for name in sorted(topics)), "utf-8")
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(text) < LENGTH:
            text += source.read_bytes()
    return bytes(text[:LENGTH])
