# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002, A006 - operands have the names that the rules give them
"""Fourier transforms.

Those of MindSpore for a signal that is real on the other side (``hfft`` and its like) give another result at every
second call: they are done by the ones for real signals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.platform.mindspore.functions.shared import ops

# The scale of a transform is that of its inverse with the other name.
_OF_INVERSE = {None: "forward", "backward": "forward", "forward": "backward", "ortho": "ortho"}


def _of_one(name: str) -> Callable[..., Any]:
    transform = getattr(ops, name)
    return lambda input, n=None, dim=-1, norm=None: transform(input, n, dim, norm)


def _of_many(name: str, dims: Any) -> Callable[..., Any]:
    transform = getattr(ops, name)
    return lambda input, s=None, dim=dims, norm=None: transform(input, s, dim, norm)


def _inverted(transform: Callable[..., Any], dims: Any, *, to_real: bool) -> Callable[..., Any]:
    """``to_real``: of a spectrum that stands for its other half too; else of a real signal."""

    def run(input: Any, size: Any, dim: Any, norm: str | None) -> Any:
        if to_real:
            return transform(ops.conj(input), size, dim, _OF_INVERSE[norm])
        return ops.conj(transform(input, size, dim, _OF_INVERSE[norm]))

    if dims == -1:
        return lambda input, n=None, dim=-1, norm=None: run(input, n, dim, norm)
    return lambda input, s=None, dim=dims, norm=None: run(input, s, dim, norm)


FUNCTIONS: dict[str, Callable[..., Any]] = {}
for _suffix, _dims in (("", -1), ("2", (-2, -1)), ("n", None)):
    for _kind in ("fft", "ifft", "rfft", "irfft"):
        _name = f"{_kind}{_suffix}"
        FUNCTIONS[f"fft_{_name}"] = _of_one(_name) if _suffix == "" else _of_many(_name, _dims)
    for _kind, _real in (("hfft", "irfft"), ("ihfft", "rfft")):
        FUNCTIONS[f"fft_{_kind}{_suffix}"] = _inverted(
            FUNCTIONS[f"fft_{_real}{_suffix}"], _dims, to_real=_kind == "hfft"
        )
