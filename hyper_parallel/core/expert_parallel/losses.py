# SPDX-License-Identifier: Apache-2.0
"""Losses that keep routers balanced and their logits small; returned, and collected only where that is asked.

with collect_aux_losses() as aux:
    loss = F.mse_loss(model(x), y)
(loss + aux.total()).backward()
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.expert_parallel.router import detach
from hyper_parallel.core.expert_parallel.telemetry import is_recomputing
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


class AuxLosses:
    """The losses of all modules that ran within ``collect_aux_losses``, each with its coefficient."""

    def __init__(self) -> None:
        self.losses: list[tuple[str, Any]] = []

    def total(self) -> Any:
        """Their sum; 0.0 if there are none."""
        found = [loss for _, loss in self.losses]
        return sum(found[1:], found[0]) if found else 0.0


class _Collecting(threading.local):
    def __init__(self) -> None:
        self.stack: list[AuxLosses] = []


_COLLECTING = _Collecting()


@contextmanager
def collect_aux_losses() -> Iterator[AuxLosses]:
    """Collects the losses of modules that run in this thread within the context, each once."""
    collected = AuxLosses()
    _COLLECTING.stack.append(collected)
    try:
        yield collected
    finally:
        _COLLECTING.stack.remove(collected)


def is_collecting() -> bool:
    """Whether a loss would be collected now; recomputation within backward adds none."""
    return bool(_COLLECTING.stack) and not is_recomputing()


def note_loss(name: str, loss: Any) -> None:
    """Adds a loss to the innermost collection."""
    if is_collecting():
        _COLLECTING.stack[-1].losses.append((name, loss))


def load_balance_loss(
    probabilities: Any,
    index: Any,
    *,
    kind: str = "switch",
    sequences: int = 1,
    mask: Any = None,
    mesh: DeviceMesh | None = None,
) -> Any:
    """``experts * sum(f * p)``: 1 for balanced routing; f: the share of choices that an expert has, p: its mean score.

    ``probabilities``: [tokens, experts], ``index``: [tokens, k]. "switch" takes all these tokens together, "sequence"
    each of ``sequences`` equally long runs of tokens by itself and returns the mean, and "global" takes the tokens of
    all ranks of ``mesh`` together, on each of which the loss is the same. Distributed tensors are taken whole.
    ``mask``: [tokens], False for padding, which counts nowhere. Without any token it is zero.
    """
    if kind not in ("switch", "sequence", "global"):
        raise coded(
            ValueError,
            "HP453",
            f"load_balance_loss: kind must be 'switch', 'sequence' or 'global', got {kind!r}",
        )
    tokens, experts = (int(size) for size in probabilities.shape)
    runs = sequences if kind == "sequence" else 1
    if tokens % runs:
        raise coded(
            ValueError,
            "HP453",
            f"load_balance_loss: {tokens} tokens are not {runs} sequences of one length",
        )
    chosen = _mark_chosen(index, probabilities)
    if mask is None:
        weights = platform.full_like(detach(probabilities)[:, :1], 1)
    else:
        weights = mask.reshape((-1, 1)).to(probabilities.dtype)
    shape = (runs, tokens // runs)
    counts = (chosen * weights).reshape((*shape, experts)).sum(1)
    scores = (probabilities * weights).reshape((*shape, experts)).sum(1)
    valid = weights.reshape((*shape, 1)).sum(1)
    if kind == "global" and mesh is not None and mesh.size() > 1:
        group = platform.create_group(list(mesh.rank_list))
        counts, valid = (platform.all_reduce(one * 1, group) for one in (counts, valid))
        scores = platform.differentiable_all_reduce(scores, "sum", group)
    if mask is not None or not tokens:
        valid = _at_least_one(valid)
    choices = int(index.shape[1])
    shares = counts / (valid * choices)
    return experts * (shares * (scores / valid)).sum(-1).mean()


def z_loss(logits: Any, mask: Any = None) -> Any:
    """The mean of the squares of the tokens' logsumexp, zero of none; ``mask``: [tokens], False for padding."""
    squares = platform.operator("logsumexp")(logits, -1) ** 2
    if mask is None:
        return squares.mean() if logits.shape[0] else squares.sum()
    weights = mask.to(squares.dtype)
    return (squares * weights).sum() / _at_least_one(weights.sum())


def _at_least_one(counts: Any) -> Any:
    """Numbers of tokens that something is divided by."""
    return platform.operator("masked_fill")(counts, counts == 0, 1.0)


def _mark_chosen(index: Any, like: Any) -> Any:
    """One for each expert that a token has chosen, [tokens, experts]."""
    zeros = platform.full_like(detach(like), 0)
    return platform.operator("scatter")(zeros, 1, index, 1)
