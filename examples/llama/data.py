"""The text of Python's own documentation and sources, byte by byte: what every installation has."""

import torch
from torch import Tensor

from hyper_parallel.recipe import data


class Corpus:
    """Batches for training and evaluation, each given by the seed and its number alone, so that resuming is exact."""

    def __init__(
        self, batch: int, length: int, seed: int, part: int = 0, parts: int = 1
    ):
        """``length``: of a sequence. ``part`` of ``parts``: which rows of each batch are this process's."""
        tokens = data.as_bytes([data.python_text()])
        self._arrays = data.Corpus(tokens, batch, length, seed, part=part, parts=parts)
        self.digest = self._arrays.digest

    def training(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and the tokens that follow them, for a step."""
        ids, targets = self._arrays.training(step)
        return torch.from_numpy(ids), torch.from_numpy(targets)

    def held_out(self, number: int) -> tuple[Tensor, Tensor]:
        """The same, of text that is never trained on."""
        ids, targets = self._arrays.held_out(number)
        return torch.from_numpy(ids), torch.from_numpy(targets)
