# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002, A006 - operands have the names that the rules give them
"""Fourier transforms.

Those of MindSpore for a signal that is real on the other side (``hfft`` and its like) give another result at every
second call: they are done by the ones for real signals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.platform.mindspore.cpu.functions.moves import pad, unfold
from hyper_parallel.platform.mindspore.cpu.functions.shared import mint, ops, refuse

# The scale of a transform is that of its inverse with the other name.
_OF_INVERSE = {
    None: "forward",
    "backward": "forward",
    "forward": "backward",
    "ortho": "ortho",
}


def _of_one(name: str) -> Callable[..., Any]:
    transform = getattr(ops, name)
    return lambda input, n=None, dim=-1, norm=None: transform(input, n, dim, norm)


def _of_many(name: str, dims: Any) -> Callable[..., Any]:
    transform = getattr(ops, name)
    return lambda input, s=None, dim=dims, norm=None: transform(input, s, dim, norm)


def _inverted(
    transform: Callable[..., Any], dims: Any, *, to_real: bool
) -> Callable[..., Any]:
    """``to_real``: of a spectrum that stands for its other half too; else of a real signal."""

    def run(input: Any, size: Any, dim: Any, norm: str | None) -> Any:
        if to_real:
            return transform(ops.conj(input), size, dim, _OF_INVERSE[norm])
        return ops.conj(transform(input, size, dim, _OF_INVERSE[norm]))

    if dims == -1:
        return lambda input, n=None, dim=-1, norm=None: run(input, n, dim, norm)
    return lambda input, s=None, dim=dims, norm=None: run(input, s, dim, norm)


def _stft(
    input: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Any:
    """The transforms of windows; ops.stft has no gradient."""
    refuse("stft", align_to_window=align_to_window)
    width = n_fft if win_length is None else win_length
    shape, hop = (
        window if window is not None else ops.ones((width,), input.dtype),
        hop_length or n_fft // 4,
    )
    shape = pad(shape, ((n_fft - width) // 2, n_fft - width - (n_fft - width) // 2))
    signal = pad(input, (n_fft // 2, n_fft // 2), pad_mode) if center else input
    frames = unfold(signal, -1, n_fft, hop) * shape
    is_half = onesided is not False and not input.is_complex()
    found = FUNCTIONS["fft_rfft" if is_half else "fft_fft"](
        frames, norm="ortho" if normalized else None
    )
    found = mint.transpose(found, -1, -2)
    return (
        found if return_complex else ops.stack((mint.real(found), mint.imag(found)), -1)
    )


FUNCTIONS: dict[str, Callable[..., Any]] = {"stft": _stft}
for _suffix, _dims in (("", -1), ("2", (-2, -1)), ("n", None)):
    for _kind in ("fft", "ifft", "rfft", "irfft"):
        _name = f"{_kind}{_suffix}"
        FUNCTIONS[f"fft_{_name}"] = (
            _of_one(_name) if _suffix == "" else _of_many(_name, _dims)
        )
    for _kind, _real in (("hfft", "irfft"), ("ihfft", "rfft")):
        FUNCTIONS[f"fft_{_kind}{_suffix}"] = _inverted(
            FUNCTIONS[f"fft_{_real}{_suffix}"], _dims, to_real=_kind == "hfft"
        )
